"""Runs a training as a child process: starts it so that it ends with its parent, stops it, explains its failure."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hvtrain.errors import LostRankError
from hvtrain.system.console import signals_held
from hvtrain.system.run_files import RESULT_FILE

# Longer than a launcher takes to kill its ranks: 30 s after the first signal, or at once after the
# second (supervisor.py).
SECONDS_TO_SAVE = 40.0
SECONDS_TO_STOP = 20.0
_LOGS_LINE = "hvtrain: what each rank said"  # The launcher's last line after a failure.
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


@contextmanager
def started(
    command: Sequence[str],
    log: Path,
    cores: set[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the process of a run, which is ended if the block raises or this process ends.

    Args:
        command: the words of the run's command line.
        log: the file for its stdout and stderr.
        cores: the CPU cores that it may use; None: those of this process.
        environment: its environment variables; None: those of this process.
    """
    set_parent = die_with_parent()

    def prepare():
        set_parent()
        # Set in the child before it starts threads, which inherit the affinity.
        if cores:
            os.sched_setaffinity(0, cores)

    with log.open("wb") as output, signals_held() as release:
        # Signals are held back: Python drops what a handler raises during a fork, even for Ctrl-C.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C goes to the whole process group of a terminal or
            # notebook; `end` signals the child once.
            start_new_session=True,
            preexec_fn=prepare,
        )
        try:
            release()
            yield process
        except BaseException:
            end(process)
            raise


def end(process: subprocess.Popen[Any]) -> None:
    """Asks a run to stop, as Ctrl-C would, and kills it and its launcher if it does not.

    Another Ctrl-C cuts the current wait short.
    """
    for number, seconds in (
        (signal.SIGINT, SECONDS_TO_SAVE),
        (signal.SIGTERM, SECONDS_TO_STOP),
        (signal.SIGKILL, 5),
    ):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(seconds)
            return


def ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits up to `seconds`; returns True once the process has exited."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def failure(output: str, code: int) -> str:
    """Returns the line of the output that says why a run failed, and the exit code.

    >>> failure("Epoch 1/2\\nhvtrain: rank 1 was killed\\nhvtrain: what each rank said is in a/launch", 75)
    'rank 1 was killed (exit code 75)'
    >>> failure("", -9)
    'it printed nothing (exit code -9)'
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # hvtrain's own message says what to do; a library's line after it does not.
    messages = [
        line for line in lines if line.startswith("hvtrain: ") and not line.startswith(_LOGS_LINE)
    ]
    last = (messages or lines or ["it printed nothing"])[-1]
    return f"{last.removeprefix('hvtrain: ')} (exit code {code})"


def die_with_parent() -> Callable[[], None]:
    """Returns a preexec_fn with which the child gets SIGTERM when its parent, this process, ends.

    Without it, `kill -9` of the parent would leave the ranks running.
    """
    parent = os.getpid()

    def prepare():
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # The parent may have ended before the call to prctl.
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def handle_signals(
    handler: Callable[..., None],
    numbers: Sequence[int] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1),
) -> None:
    """Installs a handler for signals; by default, for those that a launcher passes on to its child."""
    for number in numbers:
        # Under nohup SIGHUP is ignored, and must stay ignored.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def exit_at_signals() -> None:
    """Makes SIGTERM and SIGHUP raise SystemExit, so that the run in progress ends with this process."""
    handle_signals(lambda number, _: sys.exit(128 + number), (signal.SIGTERM, signal.SIGHUP))


def read_result(run: Path, code: int, log: Path) -> dict[str, Any]:
    """Returns the result record of a run that ended with this exit code.

    Raises LostRankError if the run failed or left no record.
    """
    if code:
        raise LostRankError(failure(log.read_text(errors="replace"), code))
    try:
        return json.loads((run / RESULT_FILE).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise LostRankError(
            f"the run succeeded, but {run / RESULT_FILE} cannot be read: {error}"
        ) from error
