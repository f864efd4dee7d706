"""`horovodrun` in the environment that scripts/run makes: Horovod's own launcher under a supervisor.

The launcher itself is a child, `python -m hvtrain.horovodrun` (its __main__ lists what differs from Horovod's). This
parent shows its output, asks the ranks to save on SIGTERM, names the rank that failed first, ends whatever is left on
any host, and its exit code tells whether the same command can succeed if it is run again.
"""

import os
import sys
import tempfile
from pathlib import Path

from hvtrain.launch.output import Relay
from hvtrain.launch.start import Launch, Signals
from hvtrain.system import console


def main() -> None:
    """Runs horovodrun with this process's arguments and exits: 0, 75 where a restart can help, or another code."""
    line = [sys.executable, "-m", "hvtrain.horovodrun", *sys.argv[1:]]
    with tempfile.TemporaryDirectory(prefix="hvtrain-") as folder:
        ending = Launch(line, os.environ, Relay(), Path(folder)).run(Signals())
    if ending.failure and not ending.failure.is_shown:
        console.say_error(str(ending.failure), 0)
    sys.exit(ending.code)
