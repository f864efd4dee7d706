"""`python -m hvtrain.doctor`: what is wrong with these hosts, before a run finds out?"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hvtrain.cli import Parser, enter
from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.doctor.diagnose import Checkup, diagnose
from hvtrain.launch.job import parse_hosts
from hvtrain.launch.ssh import Ssh

HELP = """\
python -m hvtrain.doctor [-H s1:4,s2:4] [OPTION ...] [WORDS]

Looks at every host over ssh, one line a check: PASS, FAIL with what to do, or SKIP with the reason.
  python -m hvtrain.doctor                                 this host
  python -m hvtrain.doctor -H s1:4,s2:4,s3:4               a cluster, in about half a minute
  python -m hvtrain.doctor -H s1:4,s2:4 dataset=image_folder dataset.dir=/data run.dir=/runs/a
                                                           and that run's data set and run folder

OPTIONS
  -H s1:4,s2:4                hosts and their slots
  -p PORT, -i KEY             of ssh; users and the rest belong into ~/.ssh/config
  --network-interfaces NAMES  instead of the ones found
  --no-links                  do not measure how fast the hosts reduce together: seconds instead of half a minute
  --json                      one JSON object: passed, rows, facts

WORDS are those of python -m hvtrain. Exits with 1 when a check fails.

Checks: ssh, folder, python, packages, code, horovod, data set (the same on all hosts); clock, shared memory,
open files, run folder, gpus (enough of each); names, interface, ports (hosts find and reach each other); allreduce
(64 MiB over all hosts: bytes / seconds, and that times 2 (n - 1) / n, which compares with the speed of a link) and
links (8 MiB between each two hosts, with more than 16 hosts between neighbours; slow is under a third of the usual).
"""


def main() -> None:
    """Runs the command line and exits."""
    enter(look, lambda: HELP)


def look() -> int:
    """0 when no check failed, 1 otherwise. Raises ConfigError."""
    options = _parse(sys.argv[1:])
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


def _parse(words: list[str]) -> argparse.Namespace:
    parser = Parser("python -m hvtrain.doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("-H", dest="hosts")
    parser.add_argument("-p", dest="port", type=int)
    parser.add_argument("-i", dest="identity_file")
    parser.add_argument("--network-interfaces")
    parser.add_argument("--no-links", dest="links", action="store_false")
    parser.add_argument("--json", action="store_true")
    return parser.parse_with_words(words)


def _places(tree: dict[str, Any]) -> dict[str, str]:
    """Where the composed run reads and writes. A data set of one's own may call its place path."""
    config = from_dict(tree)
    dataset = next((place for name in ("dir", "path") if isinstance(place := config.dataset.get(name), str)), None)
    found = {"dataset": dataset, "run_dir": config.run.dir}
    return {name: place for name, place in found.items() if place}


if __name__ == "__main__":
    main()
