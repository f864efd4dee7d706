"""Measures trainings: runs one in its own processes, and orders several in alternating rounds.

A shared machine can be slower for minutes at a time. So contenders take turns, and only runs of the
same round are compared.
"""

import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import psutil

from hvtrain.launch.child import ends_within, read_result, started
from hvtrain.system.run_files import EpochRecord, read_history

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
        result: its record, result.json.
        epochs: its history.csv.
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
    # Next to the run folder, since the run creates that itself.
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
            # Not the launcher's shells and ssh clients, which get the ranks' command as one word.
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
