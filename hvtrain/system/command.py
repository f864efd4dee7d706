"""The framework of every command: options and help, one-line error messages, and exit codes."""

import argparse
import atexit
import functools
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from hvtrain.errors import (
    INTERRUPTED,
    ConfigError,
    FailedRankError,
    StorageError,
    UserError,
    cause_of,
    message_of,
)
from hvtrain.system import console

# A process that takes longer to exit is ended. Horovod may be waiting for ranks that wait for this
# one, and TensorFlow for its threads; the launcher would wait for such a process forever, even
# after a success.
SECONDS_TO_EXIT = 2.0
SECONDS_TO_EXIT_AFTER_SUCCESS = 60.0
RUN_SETTINGS = (
    "GROUP=CHOICE and SETTING=VALUE are those of python -m hvtrain; its --help lists them."
)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors take one line.

    prog is the command line up to the options, such as "python -m hvtrain COMMAND".
    more_help returns further text for the end of --help, and is called only for that.
    """

    def __init__(
        self, prog: str, *, more_help: Callable[[], str] = lambda: "", **options: Any
    ) -> None:
        # Raw, to keep the line breaks of descriptions and examples.
        formatter = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=32)
        super().__init__(prog, formatter_class=formatter, allow_abbrev=False, **options)
        self._more_help = more_help

    def format_help(self) -> str:
        return super().format_help() + self._more_help()

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def add_hosts(self, group: Any = None) -> Any:
        """Adds -H and --hostfile to the parser or to one of its groups; only one may be given.

        The parsed `hosts` is that option with its value, as arguments of hvtrain launch. Returns the
        group of the two options, to which others may be added.
        """
        hosts = (group or self).add_mutually_exclusive_group()
        hosts.add_argument(
            "-H",
            dest="hosts",
            type=lambda text: ["-H", text],
            default=[],
            metavar="s1:4,s2:4",
            help="hosts and their slots",
        )
        hosts.add_argument(
            "--hostfile",
            dest="hosts",
            type=lambda path: ["--hostfile", path],
            metavar="FILE",
            help="the hosts, from a file with lines such as: s1 slots=4",
        )
        return hosts

    def add_ssh(self) -> None:
        """Adds -H, -p and -i, for commands that connect to the hosts themselves."""
        self.add_argument(
            "-H",
            dest="hosts",
            default="localhost",
            metavar="s1:4,s2:4",
            help="hosts; default: this one",
        )
        add_ssh_options(self)

    def parse_with_overrides(self, arguments: list[str] | None = None) -> argparse.Namespace:
        """Parses the arguments, by default those of the command line.

        `overrides` of the result holds the settings of a run and Hydra's options.
        """
        # Settings have no dashes, so argparse cannot parse them.
        options, others = self.parse_known_args(arguments)
        for argument in others:
            # Only Hydra's own options are passed on to it.
            if argument.startswith("-") and not argument.startswith(("--config-", "-c")):
                self.error(f"unknown option {argument}")
        options.overrides = others
        return options


def take_values(arguments: Iterable[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """Separates NAME=VALUE with one of these names from the other arguments.

    If a name occurs several times, its last value counts.

    >>> take_values(["trials=9", "model=mlp", "trials=20"], "sweep", "trials")
    ({'trials': '20'}, ['model=mlp'])
    """
    values = {}
    others = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name in names:
            values[name] = value
        else:
            others.append(argument)
    return values, others


def add_ssh_options(options: Any) -> None:
    """Adds -p and -i to a parser, or to an argument group of one."""
    options.add_argument(
        "-p", dest="port", type=int, metavar="PORT", help="ssh port; set users in ~/.ssh/config"
    )
    options.add_argument("-i", dest="identity_file", metavar="KEY", help="ssh key")


def add_number(
    options: Any,
    name: str,
    parse: Callable[[str], float],
    help_text: str,
    default: float | None = None,
    metavar: str = "N",
) -> None:
    """Adds an option that takes a number; its help ends with the default, if there is one.

    Args:
        options: a parser, or an argument group of one.
        name: the option, with its dashes.
        parse: parses the number: at_least(low), not_negative or positive.
        help_text: the description of the option in --help.
        default: the number if the option is not given.
        metavar: the placeholder for the number in the help.
    """
    if default is not None:
        help_text = f"{help_text}; default: {default:g}"
    options.add_argument(name, type=parse, default=default, metavar=metavar, help=help_text)


def at_least(low: int) -> Callable[[str], int]:
    """Returns the type of an option that takes a whole number of at least `low`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {low}")
        return int(text)

    return parse


def not_negative(text: str) -> float:
    """Parses a finite number of 0 or more, for an option."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of 0 or more")
    return number


def positive(text: str) -> float:
    """Parses a finite number above 0, for an option."""
    number = not_negative(text)
    if number == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def make_output(folder: Path, may_hold_files: bool = False) -> None:
    """Makes the folder of --output.

    Raises ConfigError if that is impossible, or if it already holds files (unless may_hold_files).
    """
    try:
        # The user may already have made an empty folder for this output.
        folder.mkdir(parents=True, exist_ok=True)
        is_used = any(folder.iterdir())
    except OSError as error:
        raise ConfigError(
            f"--output {folder} cannot be written: {error.strerror}; choose another folder"
        ) from error
    if is_used and not may_hold_files:
        raise ConfigError(f"--output {folder} is not empty; choose another folder")


def enter(work: Callable[[], int]) -> None:
    """Runs a command, and exits unless its code is 0.

    Other codes: 2 bad input, 75 start again, 130 interrupted, 1 any other error.
    """
    # Known from the launcher's variables, since Horovod may not have started yet.
    rank = console.launched_rank()
    try:
        _check_arguments()
        code = work()
        _flush_output()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            console.say_error(error.code, rank)
    except BaseException as error:
        # This rank has nothing left to save: from now on a signal only ends its wait for other
        # ranks' reports.
        console.take_signals(console.note_signal)
        code = _report(error, rank)
    for stream in (sys.stdout, sys.stderr):
        console.write(stream, "")
    if code:
        console.call_later(SECONDS_TO_EXIT, os._exit, code)
        atexit.register(_end_without_python, code)  # Registered last, so called first.
        sys.exit(code)
    # Registered last, so called first when Python exits. The timer starts only then, since the
    # caller's process may continue.
    atexit.register(console.call_later, SECONDS_TO_EXIT_AFTER_SUCCESS, os._exit, 0)
    # Python drops its signal handlers at exit, and a signal would then turn success into a failing
    # exit code.
    atexit.register(console.take_signals, signal.SIG_IGN)


def _flush_output() -> None:
    """Writes what is left of the output. Raises StorageError: a result that was not written is no success."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # The reader needs no more, as with `| head`.
    except OSError as error:
        raise StorageError(
            f"the output cannot be written: {error.strerror}; make room for it, and run the command again"
        ) from error


def _check_arguments() -> None:
    """Raises ConfigError for an argument that is not UTF-8, since records could not hold it."""
    for argument in sys.argv[1:]:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{os.fsencode(argument)!r} is not UTF-8; rename the file that it names"
            ) from None


def _end_without_python(code: int) -> None:
    """Calls the other exit functions, then ends the process before Python finalizes.

    After a failure the input pipeline may still be reading ahead. If one of its threads returns from
    TensorFlow into a finalizing Python, the process aborts with the exit code of a crash.
    """
    atexit.unregister(_end_without_python)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        console.write(stream, "")
    os._exit(code)


def _report(error: BaseException, rank: int) -> int:
    """Reports the error to the user and returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        # Rank 0 reports first, since its output is what users see.
        wait_seconds = console.SECONDS_FOR_ANOTHER_RANK if rank else 0.0
        console.say_error(
            "interrupted; nothing new was saved", rank, wait_seconds, is_repeated=True
        )
        return INTERRUPTED
    if isinstance(error, UserError):
        _report_user_error(error, rank)
        return error.exit_code
    if "Horovod has been shut down" in str(error) or "HorovodInternalError" in type(error).__name__:
        # This rank only lost its connection to others, which report first.
        text = "stopped because another rank did; see its message above"
        console.say_error(text, rank, console.SECONDS_FOR_ANOTHER_RANK, culprit=None)
        return 1

    traceback.print_exc()
    host = socket.gethostname()
    text = f"rank {rank} on {host} failed: {cause_of(error)}; see its traceback above"
    console.say_error(text, rank)
    return 1


def _report_user_error(error: UserError, rank: int) -> None:
    # Hydra may have rejected the command line before the config was composed.
    if console.shows_tracebacks or "tracebacks=true" in map(str.lower, sys.argv):
        traceback.print_exc()
    # The rank that failed reports first.
    failed_elsewhere = isinstance(error, FailedRankError)
    is_repeated = rank != error.reporting_rank
    console.say_error(
        message_of(error),
        rank,
        wait_seconds=console.SECONDS_FOR_ANOTHER_RANK if failed_elsewhere or is_repeated else 0.0,
        is_repeated=is_repeated and not failed_elsewhere,
        culprit=error.culprit,
    )
