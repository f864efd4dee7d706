"""Measures trainings: one in processes of its own, many in rounds by turns, and the ratios between them.

A shared machine can be slower for minutes at a time. So contenders take turns, and only runs of the
same round are compared.
"""

import json
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import comb
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import psutil

from hvtrain.core.run_files import RESULT_FILE, EpochRecord, read_history
from hvtrain.errors import LostRankError
from hvtrain.launch.child import ends_within, failure, started
from hvtrain.report.charts import INK

T = TypeVar("T")

# A sample takes several milliseconds, which the run lacks too.
SECONDS_BETWEEN_SAMPLES = 1.0
# Probability that an interval should contain the true median.
COVERAGE = 0.95


@dataclass(frozen=True)
class Training:
    """One finished run, and what its processes on this host used.

    Attributes:
        result: its record, result.json.
        epochs: its history.csv.
        seconds: from the start of the command to its end.
        cpu_seconds: of all its processes.
        peak_bytes: the largest sum of their resident memory; None if unknown.
        gpu_bytes: the largest growth of the used memory of all GPUs together; None if unknown.
    """

    result: dict[str, Any]
    epochs: list[EpochRecord]
    seconds: float
    cpu_seconds: float
    peak_bytes: int | None
    gpu_bytes: int | None


def train(command: Sequence[str], cores: set[int], folder: Path) -> Training:
    """Runs the command, whose run folder is folder/run.

    Raises:
        LostRankError: the run failed; the message has the line of its output that says why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Beside the run folder, which the run makes itself.
    log = folder / "output.txt"
    began = time.monotonic()
    # getrusage counts children that have been waited for, so this run is the difference.
    cpu_before = _children_seconds()
    # Other processes may hold memory of the GPUs, which does not count.
    gpu_before = gpu_bytes()
    peak_bytes = 0

    peak_gpu_bytes = 0
    with started(command, log, cores) as process:
        while not ends_within(process, SECONDS_BETWEEN_SAMPLES):
            peak_bytes = max(peak_bytes, resident_bytes(process.pid))
            peak_gpu_bytes = max(peak_gpu_bytes, gpu_bytes() or 0)

    if process.returncode:
        raise LostRankError(failure(log.read_text(errors="replace"), process.returncode))

    # The others' share may have shrunk meanwhile.
    grown_bytes = None
    if gpu_before is not None:
        grown_bytes = max(0, peak_gpu_bytes - gpu_before)

    return Training(
        result=read_result(folder / "run"),
        epochs=read_history(folder / "run"),
        seconds=time.monotonic() - began,
        cpu_seconds=_children_seconds() - cpu_before,
        peak_bytes=peak_bytes or None,
        gpu_bytes=grown_bytes,
    )


def exit_at_signals() -> None:
    """Makes SIGTERM and SIGHUP raise SystemExit, so that the run in progress ends with this process."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def read_result(run: Path) -> dict[str, Any]:
    """Reads the record of a run. Raises LostRankError if there is none."""
    try:
        return json.loads((run / RESULT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LostRankError(f"the run ended well, but {run / RESULT_FILE} cannot be read: {error}") from error


def resident_bytes(pid: int) -> int:
    """Resident memory of the training processes at or below a process; shared pages count in each."""
    total = 0
    # Processes end while they are counted.
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            # The launcher's shells and ssh clients train nothing. They are not counted.
            with suppress(psutil.Error):
                if ("-m", "hvtrain") in pairwise(process.cmdline()):
                    total += process.memory_info().rss

    return total


def gpu_bytes() -> int | None:
    """Used memory of all GPUs of this host, by all processes; None without NVIDIA's driver."""
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return sum(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles)
    return None


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True)
class Ratio:
    """Median ratio over the rounds, and an interval that contains the true median with probability `coverage`.

    The interval is the narrowest with a coverage of at least 0.95; below 6 rounds even the widest
    has less.
    """

    median: float
    low: float
    high: float
    coverage: float

    def __str__(self) -> str:
        """The median and its interval, with its coverage if that is below 95 percent.

        >>> str(Ratio(0.9, 0.8, 1.0, 0.75))
        '0.900 [0.800, 1.000, 75% sure]'
        """
        note = "" if self.coverage >= COVERAGE else f", {self.coverage:.0%} sure"
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}{note}]"


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Returns the ratio of two measurements by round, with the interval of order statistics.

    No distribution is assumed: the true median lies below the k-th smallest of n ratios as often as
    fewer than k of n tosses of a coin show heads, and above the k-th largest as often.

    Args:
        numerators: of each round.
        denominators: of the same rounds.

    >>> ratio([3.0, 5.0, 4.0], [2.0, 2.0, 2.0])
    Ratio(median=2.0, low=1.5, high=2.5, coverage=0.75)
    """
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    # From here on only the order of the ratios counts.
    count = len(ratios)
    # Leaves out as many values at one end as at the other, while what is left is sure enough.
    cut = 0
    while cut + 1 < count / 2 and _coverage(count, cut + 1) >= COVERAGE:
        cut += 1

    return Ratio(median(ratios), ratios[cut], ratios[count - 1 - cut], _coverage(count, cut))


def _coverage(count: int, cut: int) -> float:
    """Probability that the true median lies between the sorted values `cut` and `count - 1 - cut` (from 0)."""
    return 1 - 2 * sum(comb(count, k) for k in range(cut + 1)) / 2**count


def in_turns(items: Sequence[T], num_rounds: int) -> Iterator[tuple[int, list[T]]]:
    """Yields each round's number, from 1, and its order; every second round goes backwards.

    A machine that becomes slower during a round thus favors each of two contenders as often as the
    other.

    >>> list(in_turns("ab", 3))
    [(1, ['a', 'b']), (2, ['b', 'a']), (3, ['a', 'b'])]
    """
    for number in range(1, num_rounds + 1):
        order = list(items)
        if number % 2 == 0:
            order.reverse()
        yield number, order


def progress(text: str) -> None:
    """Shows what is running, on a terminal only, until the next call; "" clears the line."""
    if sys.stderr.isatty():
        # A line that wraps could not be cleared.
        columns = shutil.get_terminal_size().columns
        sys.stderr.write(f"\r\033[K{text[: columns - 1]}")
        sys.stderr.flush()


def draw_rounds(axes: Any, values: Mapping[str, Sequence[float]], colors: Sequence[str]) -> None:
    """Draws a bar with the median of each contender, the first at the top; those without values keep their row.

    Args:
        axes: Matplotlib's.
        values: of each contender, by round.
        colors: of the bars.
    """
    for row, (runs, color) in enumerate(zip(values.values(), colors)):
        if runs:
            axes.barh(row, median(runs), color=color, height=0.6)
        # The dots show how much a round differs from the others, which a median hides.
        axes.plot(runs, [row] * len(runs), "o", color=INK, markersize=3, alpha=0.7)

    axes.set_yticks(range(len(values)), list(values))
    # The first row is at the top, as in the table.
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    # Labels such as 1,250,000 would run into each other.
    axes.locator_params("x", nbins=4)
    axes.set_axisbelow(True)
