"""`python -m hvtrain.launch`: starts a run on many hosts by ssh, or makes the files that a cluster takes."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from datetime import datetime
from pathlib import Path

from hvtrain.cli import Parser, enter
from hvtrain.config.compose import compose, own_folders
from hvtrain.config.schema import default_run_dir, from_dict
from hvtrain.errors import ConfigError
from hvtrain.launch import environment, reach, restart
from hvtrain.launch.clusters.choice import KINDS, Cluster, choose, settings_help, submit
from hvtrain.launch.job import Job, parse_hostfile, parse_hosts, rank_places
from hvtrain.launch.line import Way, start_line
from hvtrain.launch.restart import Restarts
from hvtrain.launch.ssh import Ssh

USAGE = """\
python -m hvtrain.launch [OPTION ...] [cluster=KIND] [cluster.SETTING=VALUE ...] -- WORDS

Starts a training on many hosts. WORDS are those of python -m hvtrain, checked here before any rank starts; or a
command of your own, which begins with `python`:
  python -m hvtrain.launch -np 16 -H s1:4,s2:4,s3:4,s4:4 -- model=resnet50 dataset=image_folder dataset.dir=/data
  python -m hvtrain.launch -np 16 cluster=slurm cluster.time=11:50:00 -- model=resnet50 ...
  python -m hvtrain.launch -np 2 -H s1,s2 -- python my_script.py

Over ssh (cluster=ssh, the default) it finds the interface that joins the hosts, gives every rank what it needs
there, shows what rank 0 prints and keeps a log of each rank. The other kinds make a file and hand it in.

OPTIONS
  -np N                       ranks; default: all slots of -H, or 1
  -H s1:4,s2:4                hosts and their slots; or --hostfile FILE, with lines `s1 slots=4`
  -p PORT, -i KEY             of ssh; users and the rest belong into ~/.ssh/config
  --mpi, --gloo, --mpirun     Horovod's launcher on MPI (default) or Gloo, or MPI's own launcher
  --network-interfaces NAMES  instead of the ones found
  --env NAME[=VALUE]          one more variable for the ranks; repeatable. They get those of Python, TensorFlow, MPI,
                              Horovod, NCCL and CUDA, and none whose name speaks of a secret
  --max-restarts N            starts again from the newest checkpoint after a lost host, a killed or a hanging rank
  --min-np N                  with --max-restarts: goes on with so many ranks when hosts are lost or keep failing
  --min-np N, --max-np N, --host-discovery-script FILE    an elastic job (Gloo)
  --logs DIR                  the ranks' logs; default: launch/ in the run folder
  --dry-run                   print what would run, and write it
  --output DIR                where files go; default: launch/KIND

CLUSTERS (settings with their defaults; one of your own: --config-dir DIR after --, with DIR/cluster/NAME.yaml)
"""


def main() -> None:
    """Runs the command line and exits."""
    enter(launch, help_text)


def help_text() -> str:
    """What --help prints."""
    lines = [USAGE.rstrip(), "  cluster=ssh"]
    for kind, module in KINDS.items():
        lines += [f"  cluster={kind:<10} {str(module.__doc__).splitlines()[0]}", *settings_help(kind)]
    return "\n".join(lines)


def launch() -> int:
    """Makes the job of the command line, then starts it, or writes and submits its files."""
    mine, words = _split(sys.argv[1:])
    options = _parse(mine)
    cluster = choose(options.words, own_folders(words))
    found = _command(words, cluster)
    if found is None:
        return 0
    command, run_dir = found
    job = _job(options, cluster, command)
    if cluster.kind == "ssh":
        return _by_ssh(options, job, run_dir)
    _refuse_options_of_ssh(options, cluster.kind)
    folder = Path(options.output or f"launch/{cluster.kind}")
    paths = cluster.write(job, folder)
    commands = cluster.commands(job, folder)
    for path in paths if options.dry_run else []:
        print(f"# ---- {path}\n{path.read_text(encoding='utf-8')}")
    for line in commands:
        print(f"{'would run' if options.dry_run else 'running'}: {shlex.join(line)}", flush=True)
    return 0 if options.dry_run else submit(commands)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in words:
        raise ConfigError("the words of the run are missing; write them after --, for example: -- model=cnn")
    place = words.index("--")
    return words[:place], words[place + 1 :]


def _parse(words: list[str]) -> argparse.Namespace:
    parser = Parser("python -m hvtrain.launch", add_help=False, allow_abbrev=False)
    parser.add_argument("-np", type=int)
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("-H", dest="hosts")
    hosts.add_argument("--hostfile")
    hosts.add_argument("--host-discovery-script")
    parser.add_argument("-p", dest="port", type=int)
    parser.add_argument("-i", dest="identity_file")
    how = parser.add_mutually_exclusive_group()
    for name in ("mpi", "gloo", "mpirun"):
        how.add_argument(f"--{name}", dest="how", action="store_const", const=name)
    parser.add_argument("--network-interfaces")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--min-np", type=int)
    parser.add_argument("--max-np", type=int)
    parser.add_argument("--logs")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--output")
    parser.add_argument("words", nargs="*")
    return parser.parse_intermixed_args(words)


def _refuse_options_of_ssh(options: argparse.Namespace, kind: str) -> None:
    """What a file has no place for is not dropped without a word."""
    given = {"-p": options.port, "-i": options.identity_file, "--network-interfaces": options.network_interfaces}
    given |= {"--logs": options.logs, "--host-discovery-script": options.host_discovery_script}
    given |= {"--mpirun": options.how == "mpirun", "--max-restarts": options.max_restarts}
    wrong = next((name for name, value in given.items() if value), None)
    if wrong:
        raise ConfigError(f"{wrong} came with cluster={kind}, which has no place for it; leave it out")


def _command(words: list[str], cluster: Cluster) -> tuple[tuple[str, ...], str | None] | None:
    """What each rank runs, and its run folder; None when the words only asked to see the composed run."""
    if words and Path(words[0]).name.startswith("python"):
        return tuple(words), None
    if words and "=" not in words[0] and not words[0].startswith("-"):
        raise ConfigError(f"{words[0]!r} is no word of a run; a command of your own begins with python")
    trees = compose(words)
    if not trees:
        return None
    config = from_dict(trees[0])
    # A restart must find the folder again. Slurm has a name for the job that lasts.
    if config.run.dir or cluster.kind == "slurm":
        return ("python", "-m", "hvtrain", *words), config.run.dir
    run_dir = default_run_dir(config)
    return ("python", "-m", "hvtrain", *words, f"run.dir={run_dir}"), run_dir


def _job(options: argparse.Namespace, cluster: Cluster, command: tuple[str, ...]) -> Job:
    hosts = parse_hosts(options.hosts) if options.hosts else ()
    if options.hostfile:
        hosts = parse_hostfile(Path(options.hostfile))
    num_ranks = (sum(host.slots for host in hosts) or 1) if options.np is None else options.np
    if num_ranks < 1:
        raise ConfigError(f"-np {num_ranks} is no number of ranks; it must be at least 1")
    if options.max_restarts < 0:
        raise ConfigError(f"--max-restarts {options.max_restarts} is no number of restarts; it must be at least 0")
    if cluster.kind == "ssh" and not hosts and not options.host_discovery_script:
        hosts = parse_hosts(f"localhost:{num_ranks}")
    elastic = (options.min_np and not options.max_restarts) or options.max_np or options.host_discovery_script
    if elastic and options.how in ("mpi", "mpirun"):
        raise ConfigError(f"an elastic job needs Gloo and --{options.how} was given; leave it out")
    return Job(
        command=command,
        num_ranks=num_ranks,
        hosts=hosts,
        controller="gloo" if elastic or options.how == "gloo" else "mpi",
        # A file is for another place, with an environment of its own: only what was asked for goes in.
        environment=(environment.for_ranks if cluster.kind == "ssh" else environment.asked_for)(
            os.environ, options.env
        ),
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
        line = start_line(job, way, paths)
        path = Path(options.output or "launch/ssh") / "launch.sh"
        _write_script(path, job, line)
        print(f"would run: {shlex.join(line)}\nwritten to {path}")
        return 0
    default = Path(run_dir) / "launch" if run_dir else Path("launch") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    restarts = Restarts(options.max_restarts, options.min_np)
    return restart.run(job, way, Path(options.logs or default), run_dir, restarts)


def _write_script(path: Path, job: Job, line: list[str]) -> None:
    """The line with the very environment that it would have here; for its owner alone, for it holds values."""
    own = " ".join(f'{name}="${{{name}-}}"' for name in ("HOME", "USER", "TERM", "SSH_AUTH_SOCK"))
    values = shlex.join(f"{name}={value}" for name, value in job.environment.items())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\nexec env -i {own} {values} \\\n  {shlex.join(line)}\n", encoding="utf-8")
        path.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another place with --output") from error


if __name__ == "__main__":
    main()
