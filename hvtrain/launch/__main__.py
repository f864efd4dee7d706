"""`python -m hvtrain.launch`: starts a run on many hosts over ssh, or writes a cluster's files and submits them."""

import argparse
import os
import shlex
import sys
from datetime import datetime
from pathlib import Path

from hvtrain.cli import Parser, at_least, enter
from hvtrain.config.compose import compose, own_folders, settings
from hvtrain.config.schema import default_run_dir, from_dict
from hvtrain.core.records import refuse_link
from hvtrain.errors import ConfigError
from hvtrain.launch import environment, reach, restart
from hvtrain.launch.clusters.choice import KINDS, Cluster, choose
from hvtrain.launch.job import Job, parse_hostfile, parse_hosts, rank_places
from hvtrain.launch.line import Way, start_line
from hvtrain.launch.ssh import Ssh

EXAMPLES = """\
examples:
  python -m hvtrain.launch -np 16 -H s1:4,s2:4,s3:4,s4:4 -- model=resnet50 dataset=image_folder dataset.dir=/data
  python -m hvtrain.launch -np 16 cluster=slurm cluster.time=11:50:00 -- model=resnet50 ...
  python -m hvtrain.launch -np 2 -H s1,s2 -- python my_script.py"""
CLUSTERS = """
CLUSTERS (settings with their defaults; for one of your own: --config-dir DIR after --, with DIR/cluster/NAME.yaml;
a changed copy of a template of conf/cluster/ in DIR/cluster/ is used instead of it)
  cluster=ssh        hosts that are reached by ssh"""


def launch() -> int:
    """Makes the job of the command line, then starts it, or writes and submits its files."""
    line = sys.argv[1:]
    end = line.index("--") if "--" in line else len(line)
    words = line[end + 1 :]
    options = _parser().parse_intermixed_args(line[:end])
    if end == len(line):
        raise ConfigError("the settings of the run are missing; write them after --, for example: -- model=cnn")
    cluster = choose(options.settings, own_folders(words))
    command, run_dir = _command(words, cluster)
    if not command:
        return 0
    job = _job(options, cluster, command)
    if cluster.kind == "ssh":
        return _by_ssh(options, job, run_dir)
    # A cluster's files cannot hold these.
    given = {"-p": options.port, "-i": options.identity_file, "--network-interfaces": options.network_interfaces}
    given |= {"--logs": options.logs, "--host-discovery-script": options.host_discovery_script}
    given |= {"--mpirun": options.how == "mpirun", "--max-restarts": options.max_restarts}
    if wrong := next((name for name, value in given.items() if value), None):
        raise ConfigError(f"{wrong} came with cluster={cluster.kind}, which cannot use it; leave it out")
    folder = Path(options.output or f"launch/{cluster.kind}")
    paths = cluster.write(job, folder)
    for path in paths if options.dry_run else []:
        print(f"# ---- {path}\n{path.read_text(encoding='utf-8')}")
    print(f"{'would run' if options.dry_run else 'running'}: {shlex.join(cluster.command(folder))}", flush=True)
    return 0 if options.dry_run else cluster.submit(folder)


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain.launch",
        usage="%(prog)s [OPTION ...] [cluster=KIND] [cluster.SETTING=VALUE ...] -- GROUP=CHOICE SETTING=VALUE ...",
        description="""\
Starts a training on many hosts. What stands after -- is for python -m hvtrain and is checked here before any rank
starts; or it is a command of your own, which begins with `python`.

Over ssh (cluster=ssh, the default) it finds the interface that joins the hosts, gives every rank the environment that
it needs, shows what rank 0 prints and keeps a log of each rank. For other kinds it writes files and submits them.""",
        epilog=EXAMPLES,
        more_help=_clusters_help,
    )
    parser.add_argument("settings", nargs="*", metavar="cluster=KIND, cluster.SETTING=VALUE", help="listed below")
    ranks = parser.add_argument_group("ranks and hosts")
    ranks.add_argument("-np", type=at_least(1), metavar="N", help="ranks; default: all slots of -H, or 1")
    hosts = ranks.add_mutually_exclusive_group()
    hosts.add_argument("-H", dest="hosts", metavar="s1:4,s2:4", help="hosts and their slots")
    hosts.add_argument("--hostfile", metavar="FILE", help="the same from a file with lines such as: s1 slots=4")
    script = "prints the hosts of an elastic job whenever it is asked"
    hosts.add_argument("--host-discovery-script", metavar="FILE", help=script)
    fewest = "fewest ranks of an elastic job (Gloo); with --max-restarts: fewest to restart on if hosts fail"
    ranks.add_argument("--min-np", type=at_least(1), metavar="N", help=fewest)
    ranks.add_argument("--max-np", type=at_least(1), metavar="N", help="most ranks of an elastic job")
    restarts = "restarts from the newest checkpoint, after a lost host or a killed or hanging rank; default: 0"
    ranks.add_argument("--max-restarts", type=at_least(0), default=0, metavar="N", help=restarts)
    how = parser.add_argument_group("how ranks are started")
    kinds = how.add_mutually_exclusive_group()
    for name, about in {"mpi": "Horovod's launcher on MPI (default)", "gloo": "Horovod's launcher on Gloo"}.items():
        kinds.add_argument(f"--{name}", dest="how", action="store_const", const=name, help=about)
    kinds.add_argument("--mpirun", dest="how", action="store_const", const="mpirun", help="MPI's own launcher")
    how.add_argument("-p", dest="port", type=int, metavar="PORT", help="ssh's; users and the rest go in ~/.ssh/config")
    how.add_argument("-i", dest="identity_file", metavar="KEY", help="ssh's key")
    how.add_argument("--network-interfaces", metavar="NAMES", help="use these instead of the ones found")
    more = "one more variable for the ranks; repeatable. They get those of Python, TensorFlow, MPI, Horovod, NCCL "
    more += "and CUDA, and none whose name suggests a secret"
    how.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help=more)
    files = parser.add_argument_group("files")
    files.add_argument("--logs", metavar="DIR", help="the ranks' logs; default: launch/ in the run folder")
    files.add_argument("--output", metavar="DIR", help="a cluster's files; default: launch/KIND")
    files.add_argument("--dry-run", action="store_true", help="write the files, print what would run, start nothing")
    return parser


def _clusters_help() -> str:
    lines = [CLUSTERS]
    for name, kind in KINDS.items():
        lines += [f"  cluster={name:<10} {kind.about}", *(f"  {line}" for line in settings(kind.settings, "cluster."))]
    return "\n".join([*lines, ""])


def _command(words: list[str], cluster: Cluster) -> tuple[tuple[str, ...], str | None]:
    """The command of each rank, and its run folder; no command when the words only asked to see the composed run."""
    if words and Path(words[0]).name.startswith("python"):
        return tuple(words), None
    if words and "=" not in words[0] and not words[0].startswith("-"):
        raise ConfigError(f"{words[0]!r} is not a run setting; a command of your own begins with python")
    if not (trees := compose(words)):
        return (), None
    config = from_dict(trees[0])
    run_dir = config.run.dir
    # A restart must find the folder again. On Slurm the job's number, which a requeue keeps, names it.
    if not run_dir and cluster.kind != "slurm":
        run_dir = default_run_dir(config)
        words = [*words, f"run.dir={run_dir}"]
    return ("python", "-m", "hvtrain", *words), run_dir


def _job(options: argparse.Namespace, cluster: Cluster, command: tuple[str, ...]) -> Job:
    hosts = parse_hostfile(Path(options.hostfile)) if options.hostfile else ()
    hosts = parse_hosts(options.hosts) if options.hosts else hosts
    num_ranks = (sum(host.slots for host in hosts) or 1) if options.np is None else options.np
    if cluster.kind == "ssh" and not hosts and not options.host_discovery_script:
        hosts = parse_hosts(f"localhost:{num_ranks}")
    elastic = (options.min_np and not options.max_restarts) or options.max_np or options.host_discovery_script
    if elastic and options.how in ("mpi", "mpirun"):
        raise ConfigError(f"an elastic job needs Gloo, and --{options.how} was given; leave it out")
    # A cluster's file runs elsewhere, in an environment of its own: it gets only the variables of --env.
    variables = environment.for_ranks if cluster.kind == "ssh" else environment.asked_for
    return Job(
        command=command,
        num_ranks=num_ranks,
        hosts=hosts,
        controller="gloo" if elastic or options.how == "gloo" else "mpi",
        environment=variables(os.environ, options.env),
        min_ranks=(options.min_np or num_ranks) if elastic else None,
        max_ranks=options.max_np,
    )


def _by_ssh(options: argparse.Namespace, job: Job, run_dir: str | None) -> int:
    if not options.host_discovery_script:
        rank_places(job)
    ssh = Ssh(options.port, options.identity_file)
    way = Way(ssh, options.how == "mpirun", options.network_interfaces, options.host_discovery_script)
    if options.dry_run:
        paths = reach.check([host.name for host in job.hosts], ssh) if way.mpirun else None
        line, path = start_line(job, way, paths), Path(options.output or "launch/ssh") / "launch.sh"
        _write_script(path, job, line)
        print(f"would run: {shlex.join(line)}\nwritten to {path}")
        return 0
    default = Path(run_dir) / "launch" if run_dir else Path("launch") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    if not options.logs:
        refuse_link(default, ConfigError, "give a place with --logs")
    return restart.run(job, way, Path(options.logs or default), run_dir, options.max_restarts, options.min_np)


def _write_script(path: Path, job: Job, line: list[str]) -> None:
    """Writes the command with the environment that it would have here; readable by its owner only, for its values."""
    own = " ".join(f'{name}="${{{name}-}}"' for name in ("HOME", "USER", "TERM", "SSH_AUTH_SOCK"))
    values = shlex.join(f"{name}={value}" for name, value in job.environment.items())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        # Nobody else can read it at any moment.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "w", encoding="utf-8") as file:
            file.write(f"#!/usr/bin/env bash\nexec env -i {own} {values} \\\n  {shlex.join(line)}\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another place with --output") from error


if __name__ == "__main__":
    enter(launch)
