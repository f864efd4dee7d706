"""Runs a training command as a child process, and measures it.

A child ends with its parent. This module also stops a child early, and explains its failure. A shared
machine can be slower for minutes at a time. So contenders that are measured take turns, and only runs
of the same round are compared.
"""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import psutil

from hvtrain.errors import LostRankError
from hvtrain.system.console import hold_signals
from hvtrain.system.run_files import RESULT_FILE, EpochRecord, read_history, restore_nan

# Longer than a launcher takes to kill its ranks: 30 s after the first signal, or immediately after
# the second (supervisor.py).
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
    end_with_parent = die_with_parent()

    def prepare():
        end_with_parent()
        # Set in the child before it starts threads, which inherit the affinity.
        if cores:
            os.sched_setaffinity(0, cores)

    with log.open("wb") as output, hold_signals() as release:
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
    for signum, seconds in (
        (signal.SIGINT, SECONDS_TO_SAVE),
        (signal.SIGTERM, SECONDS_TO_STOP),
        (signal.SIGKILL, 5),
    ):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(seconds)
            return


def ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits up to `seconds`; returns True once the process has exited."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def failure(output: str, code: int) -> str:
    """Returns the line of the output that says why a run failed, followed by the exit code.

    >>> failure("Epoch 1/2\\nhvtrain: rank 1 was killed\\nhvtrain: what each rank said is in a/launch", 75)
    'rank 1 was killed (exit code 75)'
    >>> failure("", -9)
    'no output (exit code -9)'
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # hvtrain's own message says what to do; a library's line after it does not.
    messages = [
        line for line in lines if line.startswith("hvtrain: ") and not line.startswith(_LOGS_LINE)
    ]
    last = (messages or lines or ["no output"])[-1]
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
    signums: Sequence[int] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1),
) -> None:
    """Installs a handler for signals; by default, for those that a launcher passes on to its child."""
    for signum in signums:
        # Under nohup SIGHUP is ignored, and must stay ignored.
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, handler)


def exit_at_signals() -> None:
    """Makes SIGTERM and SIGHUP raise SystemExit, so that the run in progress ends with this process."""
    handle_signals(lambda signum, _: sys.exit(128 + signum), (signal.SIGTERM, signal.SIGHUP))


def read_result(run: Path, code: int, log: Path) -> dict[str, Any]:
    """Returns the result record of a run that ended with this exit code.

    Raises LostRankError if the run failed or left no record.
    """
    if code:
        raise LostRankError(failure(log.read_text(errors="replace"), code))
    try:
        return restore_nan(json.loads((run / RESULT_FILE).read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise LostRankError(
            f"the run succeeded, but {run / RESULT_FILE} cannot be read: {error}"
        ) from error


T = TypeVar("T")

# A sample takes several milliseconds of processor time from the run.
SECONDS_BETWEEN_SAMPLES = 1.0
# Settings of a run that is timed: validation and checkpoints would be timed too.
ONLY_STEPS = (
    "train.divide_steps_by_size=false",
    "train.validate_every_epochs=null",
    "train.validate_every_steps=null",
    "checkpoint.every_epochs=null",
    "checkpoint.every_steps=null",
    "checkpoint.every_minutes=null",
)


@dataclass(frozen=True)
class Training:
    """The records of a finished run, and the time and memory that its processes on this host used.

    Attributes:
        result: the run's result record, from result.json.
        epochs: the records of its epochs, from history.csv.
        seconds: from the start of the command to its end.
        cpu_seconds: processor time of all its processes.
        peak_bytes: the largest sum of their resident memory; None if unknown.
        gpu_bytes: the largest growth of the used memory of all GPUs together; None if unknown.

    Memory is sampled every SECONDS_BETWEEN_SAMPLES, so a shorter peak may be missed.
    """

    result: dict[str, Any]
    epochs: list[EpochRecord]
    seconds: float
    cpu_seconds: float
    peak_bytes: int | None
    gpu_bytes: int | None


def train(command: Sequence[str], cores: set[int], folder: Path) -> Training:
    """Runs and measures the command, whose run folder is folder/run.

    Raises:
        LostRankError: the run failed; the message has the line of its output that says why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Next to the run folder, since the run creates its folder itself.
    log = folder / "output.txt"
    began = time.monotonic()
    # getrusage adds up all children that have been waited for; the difference is this run's time.
    cpu_before = _children_seconds()
    # GPU memory that other processes hold already does not count.
    gpu_before = gpu_bytes()
    peak_bytes = 0
    peak_gpu_bytes = 0
    with started(command, log, cores) as process:
        while not ends_within(process, SECONDS_BETWEEN_SAMPLES):
            peak_bytes = max(peak_bytes, resident_bytes(process.pid))
            peak_gpu_bytes = max(peak_gpu_bytes, gpu_bytes() or 0)

    result = read_result(folder / "run", process.returncode, log)
    # At least 0, even if other processes have freed memory meanwhile.
    grown_bytes = None
    if gpu_before is not None:
        grown_bytes = max(0, peak_gpu_bytes - gpu_before)

    return Training(
        result=result,
        epochs=read_history(folder / "run"),
        seconds=time.monotonic() - began,
        cpu_seconds=_children_seconds() - cpu_before,
        peak_bytes=peak_bytes or None,
        gpu_bytes=grown_bytes,
    )


def resident_bytes(pid: int) -> int:
    """Returns the resident memory, in bytes, of the `-m hvtrain` processes at or below a process.

    Pages that several of them share are counted for each.
    """
    total = 0
    # A process may end while its memory is read.
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            # Skips the launcher's shells and ssh clients, which get the ranks' command as one word.
            with suppress(psutil.Error):
                if ("-m", "hvtrain") in pairwise(process.cmdline()):
                    total += process.memory_info().rss

    return total


def gpu_bytes() -> int | None:
    """Returns the bytes used on all GPUs of this host by all processes; None without NVIDIA's driver."""
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return sum(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles)
    return None


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def in_turns(items: Sequence[T], num_rounds: int) -> Iterator[tuple[int, list[T]]]:
    """Yields each round's number, from 1, and its order of the items, reversed in every second round.

    A machine that slows down during a round thus favors each of two contenders equally often.

    >>> list(in_turns("ab", 3))
    [(1, ['a', 'b']), (2, ['b', 'a']), (3, ['a', 'b'])]
    """
    for number in range(1, num_rounds + 1):
        order = list(items)
        if number % 2 == 0:
            order.reverse()
        yield number, order
