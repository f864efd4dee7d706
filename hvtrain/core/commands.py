"""The table of commands for `python -m hvtrain COMMAND ...`: what each does, and the function that does it.

Only the module of the requested command is imported.
"""

import difflib
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import NamedTuple

from hvtrain.errors import ConfigError


class Command(NamedTuple):
    """A command: its function under hvtrain, as "module:name", and its line in the help text.

    takes_settings: True if its command line may contain the settings of a run.
    """

    function: str
    about: str
    takes_settings: bool

    def load(self) -> Callable[[], int]:
        """Imports and returns the command's function, which does the work and returns the exit code."""
        return resolve_name(f"hvtrain.{self.function}")


# By group: a command's name, its function under hvtrain, and its line in the help text.
TABLE = """\
look at a run
  runs        report.commands:list_runs    the runs in a folder
  report      report.commands:report_runs  the page of a run, or several runs compared
look at data
  inspect     checks.inspect:main          what a data set holds, and what training would refuse
use a run
  evaluate    finished.commands:evaluate   metrics of a finished run
  predict     finished.commands:predict    predictions for each example
  replay      checks.replay:replay         whether part of a run gives the same bits again
  bisect      checks.replay:bisect         the first step at which two runs diverge, and why
  export      finished.commands:export     the model in another format, compared with the run's
  generate    finished.commands:generate   a text, continued by a language model
search
  sweep       search.sweep:main            the settings with which a run learns best
  find_lr     search.commands:find_lr      a learning-rate range test
  find_batch  search.commands:find_batch   the largest batch, and the fastest
  compare     search.compare.command:main  the same training under several strategies
  plan        plan.command:main            batch, steps, memory and speed on many ranks, without them
clusters
  launch      launch.command:main          ranks over ssh, one process by hand, or files for a cluster
  spark       spark:main                   a run on the executors of a Spark cluster
  doctor      checks.doctor:main           what is wrong with these hosts
  verify      checks.verify:main           whether the ranks train together
  allreduce   plan.allreduce:main          seconds of an all-reduce by size, for plan --calibrate
  info        checks.info:main             versions, build and devices, to paste into an issue
develop
  migrate     migrate.command:main         a script for Horovod on Keras 2, rewritten for hvtrain.keras
  completion  launch.completion:main       Tab completion of groups, choices and settings
"""
# Commands whose command lines never contain settings of a run.
WITHOUT_SETTINGS = ("runs", "report", "allreduce", "info", "migrate", "completion")
_ROWS = re.findall(r"(?m)^  (\S+) +(\S+) +(.+)$", TABLE)
COMMANDS = {
    name: Command(function, about, name not in WITHOUT_SETTINGS) for name, function, about in _ROWS
}


def run_command(name: str) -> int:
    """Runs a command with the arguments that follow its name in sys.argv; returns its exit code.

    Raises ConfigError for an unknown command.
    """
    command = COMMANDS.get(name)
    if command is None:
        matches = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f" (the commands are {', '.join(COMMANDS)})"
        if matches:
            advice = f" (did you mean {matches[0]}?)"
        raise ConfigError(f"{name} is not a command{advice}; settings have the form SETTING=VALUE")
    del sys.argv[1]
    return command.load()()


def first_word(arguments: Sequence[str]) -> str | None:
    """Returns the first argument if it can be a command, and not an option or a setting; else None.

    >>> first_word(["evaluate", "run=runs/a"]), first_word(["model=cnn"]), first_word(["~callbacks"]), first_word([])
    ('evaluate', None, None, None)
    """
    return arguments[0] if arguments and re.fullmatch(r"[A-Za-z]\w*", arguments[0]) else None


def help_text() -> str:
    """Returns the list of commands for the help text: TABLE without the functions, indented."""
    text = re.sub(r"(?m)^(\S.*)$", r"\1:", TABLE)
    text = re.sub(r"(?m)^(  \S+ +)\S+ +", r"\1", text)
    return textwrap.indent(text.rstrip(), "  ")


def refuse_old_form() -> None:
    """Ends `python -m hvtrain.COMMAND` with an error that gives the new command line.

    Called while the package is imported, when Python is still looking for the module, so sys.argv[0] is "-m".
    """
    arguments = sys.orig_argv
    if sys.argv[:1] != ["-m"] or "-m" not in arguments[:-1]:
        return
    # The user's own package may have a command's name and import hvtrain,
    # so the package is checked too.
    package, _, name = arguments[arguments.index("-m") + 1].partition(".")
    if package == "hvtrain" and name in COMMANDS:
        print(f"hvtrain: python -m hvtrain.{name} is now python -m hvtrain {name}", file=sys.stderr)
        sys.exit(ConfigError.exit_code)
