"""Runs a command in this process, where its libraries are loaded already: for what it says, writes and refuses.

What the command imports, and that libraries add nothing to its error output, only a process of its own shows.
"""

from __future__ import annotations

import io
import os
import runpy
import signal
import sys
import warnings
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from hvtrain.system import command as cli
from hvtrain.system import console

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Ended(NamedTuple):
    """A command's exit code and what it printed."""

    code: int
    output: str
    errors: str


def run_command(module: str, *arguments: str, cwd: Path) -> Ended:
    """`python -m MODULE WORDS` in the folder cwd. What it changes for its process is as before afterwards."""
    output, errors, code = io.StringIO(), io.StringIO(), 0
    with ExitStack() as stack:
        stack.callback(os.chdir, Path.cwd())
        os.chdir(cwd)
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(mock.patch.object(sys, "argv", [module, *map(str, arguments)]))
        stack.enter_context(mock.patch.object(console, "shows_tracebacks", False))
        for number in SIGNALS:
            stack.callback(signal.signal, number, signal.getsignal(number))
        # A command that fails starts a timer that ends its process.
        stack.enter_context(mock.patch.object(console, "call_later"))
        stack.enter_context(mock.patch.object(cli, "atexit"))
        # runpy warns of a module that a test has imported too.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RuntimeWarning)
        stack.enter_context(redirect_stdout(output))
        stack.enter_context(redirect_stderr(errors))
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    return Ended(code, output.getvalue(), errors.getvalue())
