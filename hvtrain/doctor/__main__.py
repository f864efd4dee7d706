"""`python -m hvtrain.doctor`: finds what is wrong with these hosts before a run does."""

import sys
from typing import Any

from hvtrain.cli import RUN_SETTINGS, Parser, enter
from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.doctor.diagnose import Checkup, diagnose
from hvtrain.launch.job import parse_hosts
from hvtrain.launch.ssh import Ssh

EPILOG = f"""\
{RUN_SETTINGS}

examples:
  python -m hvtrain.doctor                                 this host
  python -m hvtrain.doctor -H s1:4,s2:4,s3:4               a cluster, in about half a minute
  python -m hvtrain.doctor -H s1:4,s2:4 dataset=image_folder dataset.dir=/data run.dir=/runs/a
                                                           and that run's data set and run folder

checks:
  ssh, folder, python, packages, code, horovod, data set   the same on all hosts
  clock, shared memory, open files, run folder, gpus       enough of each
  names, interface, ports                                  hosts find and reach each other
  allreduce    64 MiB over all hosts: bytes / seconds, and that times 2 (n - 1) / n, which compares with a link's speed
  links        8 MiB between each two hosts (with more than 16 hosts between neighbours); slow is under a third of the
               usual
"""


def main() -> None:
    """Runs the command line and exits."""
    enter(look)


def look() -> int:
    """0 when no check failed, 1 otherwise. Raises ConfigError."""
    options = _parser().parse_with_words(sys.argv[1:])
    hosts = parse_hosts(options.hosts or "localhost")
    words, places = options.words, {}
    if words:
        trees = compose(words)
        if not trees:
            return 0
        places = _places(trees[0])
    checkup = Checkup(
        hosts, Ssh(options.port, options.identity_file), options.network_interfaces, links=options.links, **places
    )
    return 0 if diagnose(checkup, options.json) else 1


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain.doctor",
        usage="%(prog)s [OPTION ...] [GROUP=CHOICE ...] [SETTING=VALUE ...]",
        description="""\
Looks at every host over ssh and prints one line for each check: PASS, FAIL with what to do, or SKIP with the reason.
Exits with 1 when a check fails.""",
        epilog=EPILOG,
    )
    parser.add_argument("-H", dest="hosts", metavar="s1:4,s2:4", help="hosts and their slots; default: this host")
    parser.add_argument(
        "-p", dest="port", type=int, metavar="PORT", help="ssh's; users and the rest go in ~/.ssh/config"
    )
    parser.add_argument("-i", dest="identity_file", metavar="KEY", help="ssh's key")
    parser.add_argument("--network-interfaces", metavar="NAMES", help="use these instead of the ones found")
    parser.add_argument(
        "--no-links",
        dest="links",
        action="store_false",
        help="do not measure how fast the hosts reduce together: seconds instead of half a minute",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: passed, rows, facts")
    return parser


def _places(tree: dict[str, Any]) -> dict[str, str]:
    """The paths that the composed run reads and writes. A user's own data set may call its path `path`."""
    config = from_dict(tree)
    dataset = next((place for name in ("dir", "path") if isinstance(place := config.dataset.get(name), str)), None)
    found = {"dataset": dataset, "run_dir": config.run.dir}
    return {name: place for name, place in found.items() if place}


if __name__ == "__main__":
    main()
