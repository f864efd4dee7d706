"""A child process that trains: started so that it ends with its parent, ended as Ctrl-C would, and why it failed."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hvtrain.system.console import signals_held

SECONDS_TO_SAVE = 40.0
SECONDS_TO_STOP = 20.0
_PLACE_OF_LOGS = "hvtrain: what each rank said"  # The launcher's last line after a failure.
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


@contextmanager
def started(command: Sequence[str], log: Path, cores: set[int] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A run whose output goes to the log. It ends if the block raises, and with this process."""
    go_with_this_process = going_with(os.getpid())

    def prepare() -> None:
        go_with_this_process()
        os.sched_setaffinity(0, cores or os.sched_getaffinity(0))

    with log.open("wb") as output, signals_held() as release:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # A Ctrl-C in the terminal is passed on below, once.
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

    Another Ctrl-C does not wait.
    """
    for number, seconds in ((signal.SIGINT, SECONDS_TO_SAVE), (signal.SIGTERM, SECONDS_TO_STOP), (signal.SIGKILL, 5)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(seconds)
            return


def ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits so long for its end at most."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def failure(output: str, code: int) -> str:
    """The line of the output that says why the run failed.

    >>> failure("Epoch 1/2\\nhvtrain: rank 1 was killed\\nhvtrain: what each rank said is in a/launch", 75)
    'rank 1 was killed (exit code 75)'
    >>> failure("", -9)
    'it printed nothing (exit code -9)'
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["it printed nothing"]
    told = [line for line in lines if line.startswith("hvtrain: ") and not line.startswith(_PLACE_OF_LOGS)]
    said = (told or lines)[-1]
    return f"{said.removeprefix('hvtrain: ')} (exit code {code})"


def going_with(parent: int) -> Callable[[], None]:
    """A preexec_fn that ends the child with its parent. Else `kill -9` of the parent would leave the ranks behind."""

    def go() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return go
