"""What every command of hvtrain does around its work: help, one line for an error, and an exit code."""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from hvtrain.errors import ConfigError, FailedRankError, UserError
from hvtrain.system import console

SECONDS_TO_EXIT = 4.0


class Parser(argparse.ArgumentParser):
    """Of a command's options; what is wrong is one line. prog begins with "python -m MODULE", for subcommands too."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {' '.join(self.prog.split()[:3])} --help")

    def parse_with_words(self, words: list[str]) -> argparse.Namespace:
        """Its options, and as `words` those of the runner and of Hydra, which it does not know."""
        options, rest = self.parse_known_args(words)
        unknown = next((w for w in rest if w.startswith("-") and not w.startswith(("--config-", "-c"))), None)
        if unknown:
            self.error(f"unknown option {unknown}")
        options.words = rest
        return options


def enter(work: Callable[[], int], help_text: Callable[[], str]) -> None:
    """Does the work and exits with its code: 0 done, 2 bad input, 75 start again, 130 interrupted, 1 other."""
    # What stands after -- is another command's.
    if {"--help", "-h"} & set(itertools.takewhile(lambda word: word != "--", sys.argv[1:])):
        print(help_text())
        return
    rank = console.launched_rank()
    try:
        code = work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        # This rank has nothing to save any more; a signal only ends its wait for others to speak.
        console.take_signals(console.note_signal)
        code = _say(error, rank)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # At exit Horovod may wait for ranks that wait for this one; not for longer than this.
        last_resort = threading.Timer(SECONDS_TO_EXIT, os._exit, [code])
        last_resort.daemon = True
        last_resort.start()
        sys.exit(code)


def _say(error: BaseException, rank: int) -> int:
    """What went wrong, for the user; the exit code."""
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted; the same line with the same run.dir goes on from the newest checkpoint"
        console.say_error(text, rank, is_repeated=True)
        return 130
    if not isinstance(error, UserError):
        _say_failure(error, rank)
        return 1
    if any(word == "debug=true" for word in map(str.lower, sys.argv)):
        traceback.print_exc()
    # The rank that failed speaks first.
    is_told_why, is_repeated = isinstance(error, FailedRankError), rank != error.spokesman
    wait_seconds = console.SECONDS_FOR_ANOTHER_RANK if is_told_why or is_repeated else 0.0
    console.say_error(
        " ".join(str(error).split()), rank, wait_seconds, is_repeated and not is_told_why, culprit=error.culprit
    )
    return error.exit_code


def _say_failure(error: BaseException, rank: int) -> None:
    """A defect: its traceback. On ranks that only lost the others, one line, after those had time to speak."""
    if "Horovod has been shut down" in str(error) or "HorovodInternalError" in type(error).__name__:
        text = "stopped because another rank did; its message stands above"
        console.say_error(text, rank, console.SECONDS_FOR_ANOTHER_RANK, culprit=None)
        return
    traceback.print_exc()
    summary = str(error).strip().partition("\n")[0]
    what = f"{type(error).__name__}: {summary}; its traceback stands above"
    console.say_error(f"rank {rank} on {socket.gethostname()} failed: {what}", rank, 0.0)
