"""`horovodrun` in the environment that scripts/run makes: Horovod's own launcher under a supervisor.

The launcher itself is a child, hvtrain.launch.horovod_launcher, which lists what differs from Horovod's. This parent
shows its output (rank 0's without prefixes unless --prefix is given, and as a live display on a terminal), asks
the ranks to save on SIGTERM, names the rank that failed first, ends whatever is left on any host, and its exit code
tells whether the same command can succeed if it is run again.
"""

import os
import sys
import tempfile
from pathlib import Path

from hvtrain.launch.output import Relay
from hvtrain.launch.start import Launch, Signals
from hvtrain.launch.unmarked import Unmarked
from hvtrain.system import console, drawing


def main() -> None:
    """Runs horovodrun with this process's arguments and exits: 0, 75 where a restart can help, or another code."""
    words, keeps_marks = _own_words(sys.argv[1:])
    output = Relay() if keeps_marks else Unmarked()
    variables = {**os.environ, **drawing.request(not keeps_marks and drawing.can_draw(sys.stdout))}
    with tempfile.TemporaryDirectory(prefix="hvtrain-") as folder:
        line = [sys.executable, "-m", "hvtrain.launch.horovod_launcher", *words]
        ending = Launch(line, variables, output, Path(folder)).run(Signals())
    if ending.failure and not ending.failure.is_shown:
        console.say_error(str(ending.failure), 0)
    sys.exit(ending.code)


def _own_words(words: list[str]) -> tuple[list[str], bool]:
    """The words for Horovod's launcher, which does not know --prefix, and whether rank 0's marks are to stay."""
    if not any(word.startswith(("--prefix", "-prefix")) for word in words):
        return words, False
    from horovod.runner import launch  # It alone can tell the program's words from its own.

    args = launch.parse_args()  # --prefix-output-with-timestamp, which it takes --prefix for, keeps the marks as well.
    number = len(words) - len(args.command)
    own = [word for word in words[:number] if word != "--prefix"]
    return [*own, *words[number:]], args.prefix_output_with_timestamp
