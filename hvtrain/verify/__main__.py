"""`python -m hvtrain.verify`: do the ranks of this cluster train together? And those of one's own run?"""

from __future__ import annotations

import os
import sys

from hvtrain.cli import enter
from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.system import console
from hvtrain.system.imports import without

HELP = """\
python -m hvtrain.verify [GROUP=CHOICE ...] [SETTING=VALUE ...]

Shows in about half a minute whether ranks train together, one line a check, PASS or FAIL with what to look at:
  python -m hvtrain.verify                                         this host, with two ranks
  horovodrun -np 16 -H s1:4,s2:4,... python -m hvtrain.verify      a cluster
  horovodrun -np 2 python -m hvtrain.verify model=... dataset=...  with a model and a data set of yours too

Words are those of python -m hvtrain, which it lists with --help. Exits with 1 when a check fails.
"""


def main() -> None:
    """Runs the command line and exits."""
    enter(compose_and_verify, lambda: HELP)


def compose_and_verify() -> int:
    """Library checks always; those of the user's run where the line says anything about one."""
    if not console.is_launched():
        # One rank has nobody to train together with.
        launcher = [sys.executable, "-m", "hvtrain.horovodrun", "-np", "2"]
        os.execv(sys.executable, [*launcher, sys.executable, "-m", "hvtrain.verify", *sys.argv[1:]])
    for tree in compose():
        config = from_dict(tree)
        if not config.verbose:
            console.quiet_tensorflow()
        with console.native_notes_held(not config.verbose), without("sklearn"):
            from hvtrain.verify.run_checks import verify
        own_run = any("=" in word and not word.startswith("--") for word in sys.argv[1:])
        return 0 if verify(config, own_run) else 1
    return 0


if __name__ == "__main__":
    main()
