"""The launcher's options: their help, and which of them exclude each other."""

import argparse
from collections.abc import Mapping
from typing import Any

from hvtrain.config.compose import setting_lines
from hvtrain.errors import ConfigError
from hvtrain.launch.clusters.choice import KINDS, Cluster
from hvtrain.launch.roles import Roles
from hvtrain.system.command import Parser, at_least, positive

EXAMPLES = """\
examples:
  python -m hvtrain launch -np 16 -H s1:4,s2:4,s3:4,s4:4 -- model=resnet50 dataset=image_folder dataset.dir=/data
  python -m hvtrain launch -np 16 cluster=slurm cluster.time=11:50:00 -- model=resnet50 ...
  python -m hvtrain launch -np 4 -H s1:2,s2:2 --num-ps 1 -- strategy=parameter_server model=cnn
  python -m hvtrain launch -np 2 -H s1,s2 -- python my_script.py"""
BY_HAND = """\
Without ssh: run the same command for every process, on its host, each with its own --job-name and --task-index."""
CLUSTERS = """
CLUSTERS (settings with their defaults; for one of your own: --config-dir DIR after --, with DIR/cluster/NAME.yaml;
a changed copy of a template of conf/cluster/ in DIR/cluster/ is used instead of it)
  cluster=ssh        hosts that are reached over ssh"""


def parser() -> Parser:
    """The options before --."""
    found = Parser(
        "python -m hvtrain launch",
        usage="%(prog)s [OPTION ...] [cluster=KIND] [cluster.SETTING=VALUE ...] -- GROUP=CHOICE SETTING=VALUE ...",
        description="""\
Starts a training on many hosts. The words after -- are settings of python -m hvtrain, which are checked before any rank
starts, or a command of your own, which begins with `python`.

Over ssh (cluster=ssh, the default) it finds the interface that joins the hosts, gives every rank the environment that
it needs, shows what rank 0 prints and keeps a log of each rank. For other kinds it writes files and submits them.""",
        epilog=EXAMPLES,
        more_help=_clusters_help,
    )
    found.add_argument("settings", nargs="*", metavar="cluster=KIND, cluster.SETTING=VALUE", help="listed below")
    ranks = found.add_argument_group("ranks and hosts")
    trains = "ranks, workers or replicas that train; default: all slots of -H, or 1"
    ranks.add_argument("-np", type=at_least(1), metavar="N", help=trains)
    servers = "parameter servers, for a strategy that has some; they and a coordinator are extra and need no slots"
    ranks.add_argument("--num-ps", type=at_least(1), metavar="P", help=servers)
    hosts = ranks.add_mutually_exclusive_group()
    hosts.add_argument("-H", dest="hosts", metavar="s1:4,s2:4", help="hosts and their slots")
    hosts.add_argument("--hostfile", metavar="FILE", help="the same from a file with lines such as: s1 slots=4")
    script = "script that prints the current hosts of an elastic job"
    hosts.add_argument("--host-discovery-script", metavar="FILE", help=script)
    fewest = "fewest ranks of an elastic job (Gloo); with --max-restarts: fewest to restart on if hosts fail"
    ranks.add_argument("--min-np", type=at_least(1), metavar="N", help=fewest)
    ranks.add_argument("--max-np", type=at_least(1), metavar="N", help="most ranks of an elastic job")
    restarts = "restarts from the newest checkpoint, after a lost host or a killed or hanging rank; default: 0"
    ranks.add_argument("--max-restarts", type=at_least(0), default=0, metavar="N", help=restarts)
    how = found.add_argument_group("how ranks are started")
    kinds = how.add_mutually_exclusive_group()
    for name, about in {"mpi": "Horovod's launcher on MPI (default)", "gloo": "Horovod's launcher on Gloo"}.items():
        kinds.add_argument(f"--{name}", dest="how", action="store_const", const=name, help=about)
    kinds.add_argument("--mpirun", dest="how", action="store_const", const="mpirun", help="MPI's own launcher")
    how.add_argument("-p", dest="port", type=int, metavar="PORT", help="ssh port; users go in ~/.ssh/config")
    how.add_argument("-i", dest="identity_file", metavar="KEY", help="ssh key")
    how.add_argument("--network-interfaces", metavar="NAMES", help="use these instead of the ones found")
    limit = "how long to wait for ranks to begin; default: 300, and for processes by hand 120"
    how.add_argument("--start-timeout", type=positive, metavar="SECONDS", help=limit)
    more = "another variable for the ranks; repeatable. Ranks get those of Python, TensorFlow, MPI, Horovod, NCCL "
    more += "and CUDA, but none whose name suggests a secret"
    how.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help=more)
    hand = found.add_argument_group("one process by hand", BY_HAND)
    jobs = "worker; with parameter servers also ps, and coordinator or chief"
    hand.add_argument("--job-name", metavar="JOB", help=jobs)
    hand.add_argument("--task-index", type=at_least(0), metavar="N", help="number of this process in its job, from 0")
    meet = "where all processes meet: the host of rank 0 (coordinator 0, or else worker 0) and a free port there"
    hand.add_argument("--coordinator", metavar="HOST:PORT", help=meet)
    files = found.add_argument_group("files")
    files.add_argument("--logs", metavar="DIR", help="the ranks' logs; default: launch/ in the run folder")
    files.add_argument("--output", metavar="DIR", help="a cluster's files; default: launch/KIND")
    files.add_argument("--dry-run", action="store_true", help="write the files, print what would run, start nothing")
    return found


def _clusters_help() -> str:
    lines = [CLUSTERS]
    for name, kind in KINDS.items():
        lines.append(f"  cluster={name:<10} {kind.about}")
        lines += [f"  {line}" for line in setting_lines(kind.settings, "cluster.")]
    return "\n".join([*lines, ""])


def check(options: argparse.Namespace, cluster: Cluster, roles: Roles) -> None:
    """Raises ConfigError for options that exclude each other, and for processes that the cluster cannot start."""
    elastic = {"--min-np": options.min_np, "--max-np": options.max_np}
    elastic["--host-discovery-script"] = options.host_discovery_script
    by_ssh = {"-p": options.port, "-i": options.identity_file, "--logs": options.logs}
    by_ssh |= {"--mpirun": options.how == "mpirun", "--max-restarts": options.max_restarts}
    if options.job_name:
        _check_by_hand(options)
        more = {"--mpi": options.how == "mpi", "--dry-run": options.dry_run, "--output": options.output}
        more[f"cluster={cluster.kind}"] = cluster.kind != "ssh"
        _refuse({**by_ssh, **elastic, **more}, "--job-name, which starts one process here")
        return
    by_hand = {"--task-index": options.task_index is not None, "--coordinator": options.coordinator}
    for name, given in by_hand.items():
        if given:
            raise ConfigError(f"{name} came without --job-name; give the job of this process too, or leave it out")
    if roles.reason:
        _refuse(elastic, f"a strategy that {roles.reason}: their number is fixed")
    if cluster.kind == "ssh":
        return
    # A cluster's files cannot hold these.
    by_ssh |= {
        "--start-timeout": options.start_timeout,
        "--network-interfaces": options.network_interfaces,
        "--host-discovery-script": options.host_discovery_script,
    }
    _refuse(by_ssh, f"cluster={cluster.kind}, which cannot use it")
    if roles.reason and not KINDS[cluster.kind].starts_roles:
        fix = "use cluster=slurm or hosts with ssh, or start each process by hand (--job-name)"
        raise ConfigError(f"cluster={cluster.kind} starts equal ranks, and this strategy {roles.reason}; {fix}")


def _check_by_hand(options: argparse.Namespace) -> None:
    needed = {"--task-index": (options.task_index, "its number in that job, from 0 on")}
    needed["--coordinator"] = (options.coordinator, "HOST:PORT, the same for all processes")
    for name, (value, fix) in needed.items():
        if value is None:
            raise ConfigError(f"--job-name {options.job_name} came without {name}; give {fix}")


def _refuse(given: Mapping[str, Any], by: str) -> None:
    """Raises ConfigError for the first option that was given."""
    if wrong := next((name for name, value in given.items() if value), None):
        raise ConfigError(f"{wrong} came with {by}; leave it out")
