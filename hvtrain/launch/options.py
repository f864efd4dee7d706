"""The launcher's options: their help, and which of them exclude each other."""

from collections.abc import Iterable

from hvtrain.config.choices import setting_lines
from hvtrain.core.topology import Roles
from hvtrain.errors import ConfigError
from hvtrain.launch.cluster_kinds import KINDS
from hvtrain.launch.job import ClusterKind
from hvtrain.system.command import Parser, add_number, add_ssh_options, at_least, positive

CLUSTERS = """
CLUSTERS (settings with their defaults; for your own cluster: --config-dir DIR after --, with DIR/cluster/NAME.yaml;
a changed copy in DIR/cluster/ takes the place of a template of conf/cluster/)
  cluster=ssh        hosts that are reached over ssh"""
# Options that let the number of ranks change while the job runs, which some launchers cannot do.
ELASTIC = ("--min-np", "--max-np", "--host-discovery-script")
# The options that start one process by hand.
ONE_PROCESS = ("--job-name", "--task-index", "--coordinator")
# Options that apply only if this launcher starts the ranks over ssh.
OVER_SSH = ("-p", "-i", "--logs", "--mpirun", "--max-restarts")


def parser() -> Parser:
    """Returns the parser of the options before --."""
    options = Parser(
        "python -m hvtrain launch",
        usage="%(prog)s [OPTION ...] [cluster=KIND] [cluster.SETTING=VALUE ...] -- GROUP=CHOICE SETTING=VALUE ...",
        description="""\
Starts training on many hosts. The words after -- are settings of python -m hvtrain, which are checked before any rank
starts, or a command of your own, which begins with `python`.

Over ssh (cluster=ssh, the default) it finds the interface that joins the hosts, gives every rank the environment that
it needs, shows what rank 0 prints and keeps a log of each rank. For other clusters it writes and submits files.""",
        epilog="""\
examples:
  python -m hvtrain launch -np 16 -H s1:4,s2:4,s3:4,s4:4 -- model=resnet50 dataset=image_folder dataset.dir=/data
  python -m hvtrain launch -np 16 cluster=slurm cluster.time=11:50:00 -- model=resnet50 ...
  python -m hvtrain launch -np 4 -H s1:2,s2:2 --num-ps 1 -- strategy=parameter_server model=cnn
  python -m hvtrain launch -np 2 -H s1,s2 -- python my_script.py""",
        more_help=_clusters_help,
    )
    # cluster_files.py parses these.
    options.add_argument(
        "settings", nargs="*", metavar="cluster=KIND, cluster.SETTING=VALUE", help="listed below"
    )

    group = options.add_argument_group("ranks and hosts")
    add_number(
        group,
        "-np",
        at_least(1),
        "ranks, workers or replicas that train; default: all slots of -H, or --min-np, or 1",
    )
    add_number(
        group,
        "--num-ps",
        at_least(1),
        "parameter servers, for a strategy that uses them; they and a coordinator are extra and need no slots",
        metavar="P",
    )

    # A job takes its hosts from only one of these three.
    hosts = options.add_hosts(group)
    hosts.add_argument(
        "--host-discovery-script",
        metavar="FILE",
        help="script that prints the current hosts of an elastic job",
    )

    add_number(
        group,
        "--min-np",
        at_least(1),
        "minimum number of ranks of an elastic job (Gloo), or, with --max-restarts, of a restart after hosts fail",
    )
    add_number(group, "--max-np", at_least(1), "maximum number of ranks of an elastic job")
    add_number(
        group,
        "--max-restarts",
        at_least(0),
        "how often to restart from the newest checkpoint after a host is lost or a rank is killed or hangs",
        0,
    )

    group = options.add_argument_group("how ranks are started")
    # Each of these sets `how`, which otherwise stays None and means MPI.
    launchers = group.add_mutually_exclusive_group()
    for name, about in {
        "mpi": "Horovod's launcher on MPI (default)",
        "gloo": "Horovod's launcher on Gloo",
        "mpirun": "MPI's own launcher",
    }.items():
        launchers.add_argument(
            f"--{name}", dest="how", action="store_const", const=name, help=about
        )

    # -p and -i are named as in ssh, -np and -H as in horovodrun and mpirun.
    add_ssh_options(group)
    group.add_argument(
        "--network-interfaces", metavar="NAMES", help="use these instead of the ones found"
    )
    add_number(
        group,
        "--start-timeout",
        positive,
        "how long to wait for ranks to begin; default: 300, or 120 for a process started by hand",
        metavar="SECONDS",
    )
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="an additional environment variable for the ranks; repeatable. Ranks get those of Python, TensorFlow, "
        "MPI, Horovod, NCCL and CUDA, but none whose name suggests a secret",
    )

    # TensorFlow users know these names from TF_CONFIG.
    group = options.add_argument_group(
        "one process by hand",
        "Without ssh: run the same command for every process, on its host, each with its own --job-name and "
        "--task-index.",
    )
    group.add_argument(
        "--job-name",
        metavar="JOB",
        help="worker; with parameter servers also ps, and coordinator or chief",
    )
    add_number(group, "--task-index", at_least(0), "number of this process in its job, from 0")
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="where all processes meet: the host of rank 0 (coordinator 0, or else worker 0) and a free port there",
    )

    group = options.add_argument_group("files")
    group.add_argument(
        "--logs", metavar="DIR", help="folder for ranks' logs; default: launch/ in the run folder"
    )
    group.add_argument(
        "--output", metavar="DIR", help="folder for a cluster's files; default: launch/KIND"
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="write the files and print what would run, but start nothing",
    )
    return options


def _clusters_help() -> str:
    lines = [CLUSTERS]
    for name, kind in KINDS.items():
        lines.append(f"  cluster={name:<10} {kind.about}")
        lines += [f"  {line}" for line in setting_lines(kind, "cluster.")]
    return "\n".join(lines) + "\n"


def check(names: set[str], cluster: ClusterKind | None, roles: Roles) -> None:
    """Raises ConfigError for options that exclude each other, and for roles that the cluster cannot start."""
    missing = [name for name in ONE_PROCESS if name not in names]
    if 0 < len(missing) < len(ONE_PROCESS):
        raise ConfigError(
            f"{', '.join(ONE_PROCESS)} start one process together; give {' and '.join(missing)} too, or none of them"
        )
    if not missing:
        # Options for starting several ranks or writing files do not apply to a single process.
        conflict = "--job-name, which starts one process here"
        _refuse(names, (*OVER_SSH, *ELASTIC, "--mpi", "--dry-run", "--output"), conflict)
        if cluster:
            raise ConfigError(
                f"cluster={cluster.kind} cannot be combined with {conflict}; leave it out"
            )
        return

    # The roles are assigned when the processes start, and no process can join later.
    if roles.reason:
        _refuse(names, ELASTIC, f"a strategy that {roles.reason}: its job has a fixed size")
    if not cluster:
        return

    # A scheduler starts these ranks, on hosts that this launcher does not know yet.
    _refuse(
        names,
        (*OVER_SSH, "--start-timeout", "--network-interfaces", "--host-discovery-script"),
        f"cluster={cluster.kind}, which cannot use it",
    )
    starts_roles = cluster.starts_servers if roles.num_ps else cluster.starts_replicas
    if roles.reason and not starts_roles:
        raise ConfigError(
            f"cluster={cluster.kind} starts equal ranks, and this strategy {roles.reason}; use cluster=slurm (for "
            "parameter servers also jobset or spark) or hosts with ssh, or start each process by hand (--job-name)"
        )


def _refuse(names: set[str], refused: Iterable[str], conflict: str) -> None:
    """Raises ConfigError for the first of the refused options that was given."""
    for name in refused:
        if name in names:
            raise ConfigError(f"{name} cannot be combined with {conflict}; leave it out")
