"""`horovodrun` in the environment that scripts/run makes: Horovod's own launcher under a supervisor.

The launcher itself is a child, hvtrain.launch.horovod_launcher, which lists how it differs from
Horovod's. This parent shows its output (rank 0's without prefixes unless --prefix is given, and as
a live display on a terminal), asks the ranks to save on SIGTERM, names the rank that failed first,
and ends whatever is left on any host. Its exit code tells whether the same command can succeed if
it is run again.
"""

import io
import os
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

from hvtrain.launch.output import PlainOutput
from hvtrain.launch.supervisor import Launch, Signals
from hvtrain.system import console, drawing


def main() -> None:
    """Runs horovodrun with this process's arguments, and exits with 0, 75 if a restart can help, or another code."""
    # Before the launcher starts: without a handler, a signal would end this process alone.
    signals = Signals()
    arguments, keeps_marks = _launcher_arguments(sys.argv[1:])
    variables = os.environ | drawing.request(not keeps_marks and drawing.can_draw())
    with tempfile.TemporaryDirectory(prefix="hvtrain-") as folder:
        # This interpreter, since the environment may not be activated.
        command = [sys.executable, "-m", "hvtrain.launch.horovod_launcher", *arguments]
        ending = Launch(command, variables, PlainOutput(keeps_marks), Path(folder)).run(signals)

    if ending.message and not ending.is_shown:
        console.say_error(ending.message)
    sys.exit(ending.code)


def _launcher_arguments(arguments: list[str]) -> tuple[list[str], bool]:
    """Returns the arguments without --prefix, which Horovod does not know, and whether rank 0 keeps its prefixes."""
    if not any(argument.startswith(("--prefix", "-prefix")) for argument in arguments):
        return arguments, False

    # Only Horovod's parser can tell the program's arguments from its own. It takes --prefix for an
    # abbreviation of --prefix-output-with-timestamp, which also keeps the prefixes.
    from horovod.runner import launch

    try:
        with redirect_stderr(io.StringIO()):
            args = launch.parse_args()
    except SystemExit as ended:
        if not ended.code:  # --help, for example.
            raise
        # The launcher itself refuses these arguments, in one line.
        return arguments, False
    end = len(arguments) - len(args.command)
    options = [argument for argument in arguments[:end] if argument != "--prefix"]
    return [*options, *args.command], args.prefix_output_with_timestamp
