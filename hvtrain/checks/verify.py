"""`python -m hvtrain verify`: checks that the ranks of this cluster train together, and those of a run of your own."""

import os
import sys

from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.system import console
from hvtrain.system.command import RUN_SETTINGS, Parser

EPILOG = f"""\
{RUN_SETTINGS}

examples:
  python -m hvtrain verify                                         this host, with two ranks
  horovodrun -np 16 -H s1:4,s2:4,... python -m hvtrain verify      a cluster
  horovodrun -np 2 python -m hvtrain verify model=... dataset=...  with a model and a data set of yours too
"""


def main() -> int:
    """Runs the checks of the library, and those of the user's run if the line has settings of one."""
    Parser(
        "python -m hvtrain verify",
        usage="%(prog)s [GROUP=CHOICE ...] [SETTING=VALUE ...]",
        description="""\
Shows in about half a minute whether ranks train together, one line for each check: PASS, or FAIL with what to look at.
Exits with 1 when a check fails.""",
        epilog=EPILOG,
    ).parse_known_args()
    if not console.is_launched():
        # One rank has no other to train with.
        launcher = [f"{sys.prefix}/bin/horovodrun", "-np", "2"]
        os.execv(launcher[0], [*launcher, sys.executable, "-m", "hvtrain", "verify", *sys.argv[1:]])
    for tree in compose():
        config = from_dict(tree)
        with console.quiet_import(config.verbose):
            from hvtrain.checks.own_run import verify
        own_run = any("=" in word and not word.startswith("--") for word in sys.argv[1:])
        return 0 if verify(config, own_run) else 1
    return 0
