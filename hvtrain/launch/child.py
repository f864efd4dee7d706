"""A child process that trains: started so that it ends with its parent, ended as Ctrl-C would, and why it failed."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hvtrain.system.console import signals_held

# Longer than a launcher takes to end its ranks by force: 30 s after the first signal, and at once
# after the second (supervisor.py).
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
    """Starts a run that ends if the block raises, and with this process.

    Args:
        command: the words of its command line.
        log: the file for both of its outputs.
        cores: the CPU cores that it may use; None: this process's.
        environment: its variables; None: this process's.
    """
    set_parent = die_with_parent(os.getpid())

    def prepare() -> None:
        set_parent()
        # In the child, before it starts threads: they inherit it.
        os.sched_setaffinity(0, cores or os.sched_getaffinity(0))

    with log.open("wb") as output, signals_held() as release:
        # Signals are held: Python drops what a handler raises while it forks, a Ctrl-C too.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A Ctrl-C goes to a terminal's or a notebook's whole group; `end` tells the child once.
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

    Another Ctrl-C does not wait.
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
    """The line of the output that says why the run failed.

    >>> failure("Epoch 1/2\\nhvtrain: rank 1 was killed\\nhvtrain: what each rank said is in a/launch", 75)
    'rank 1 was killed (exit code 75)'
    >>> failure("", -9)
    'it printed nothing (exit code -9)'
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # Our own message says what to do; a line of a library behind it does not.
    messages = [line for line in lines if line.startswith("hvtrain: ") and not line.startswith(_LOGS_LINE)]
    last = (messages or lines or ["it printed nothing"])[-1]
    return f"{last.removeprefix('hvtrain: ')} (exit code {code})"


def die_with_parent(parent: int) -> Callable[[], None]:
    """A preexec_fn that ends the child with its parent.

    Else `kill -9` of the parent would leave the ranks behind.
    """

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # The parent may have ended before prctl was called.
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def handle_signals(handler: Callable[..., None]) -> None:
    """Calls the handler for every signal that a launcher passes on to its child."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        # Under nohup SIGHUP is ignored, and stays so.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)
