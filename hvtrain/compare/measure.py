"""Measures trainings: one in its own processes, several in alternating rounds, and the ratios between them.

A shared machine can be slower for minutes at a time. So contenders take turns, and only runs of the
same round are compared.
"""

import resource
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

from hvtrain.core.run_files import EpochRecord, read_history
from hvtrain.launch.child import ends_within, read_result, started
from hvtrain.report.charts import INK

T = TypeVar("T")

# A sample takes several milliseconds of processor time from the run.
SECONDS_BETWEEN_SAMPLES = 1.0
# Required probability that an interval contains the true median.
COVERAGE = 0.95


@dataclass(frozen=True)
class Training:
    """One finished run, and what its processes on this host used.

    Attributes:
        result: its record, result.json.
        epochs: its history.csv.
        seconds: from the start of the command to its end.
        cpu_seconds: processor time of all its processes.
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
    """Runs and measures the command, whose run folder is folder/run.

    Raises:
        LostRankError: the run failed; the message has the line of its output that says why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Beside the run folder, which the run creates itself.
    log = folder / "output.txt"
    began = time.monotonic()
    # getrusage counts children that have been waited for, so this run is the difference.
    cpu_before = _children_seconds()
    # GPU memory held by other processes does not count.
    gpu_before = gpu_bytes()
    peak_bytes = 0
    peak_gpu_bytes = 0
    with started(command, log, cores) as process:
        while not ends_within(process, SECONDS_BETWEEN_SAMPLES):
            peak_bytes = max(peak_bytes, resident_bytes(process.pid))
            peak_gpu_bytes = max(peak_gpu_bytes, gpu_bytes() or 0)

    result = read_result(folder / "run", process.returncode, log)
    # Never negative, though other processes may have freed memory meanwhile.
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
    """Resident memory of the training processes at or below a process.

    Shared pages are counted in each of them.
    """
    total = 0
    # Processes may end while they are counted.
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

    The interval is the narrowest with a coverage of at least 0.95; below 6 rounds even the widest has less.
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
        numerators: one measurement by round.
        denominators: the other measurement, of the same rounds.

    >>> ratio([3.0, 5.0, 4.0], [2.0, 2.0, 2.0])
    Ratio(median=2.0, low=1.5, high=2.5, coverage=0.75)
    """
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    # From here on only the order of the ratios counts.
    count = len(ratios)
    # Drop equally many values at both ends, as long as the coverage suffices.
    cut = 0
    while cut + 1 < count / 2 and _coverage(count, cut + 1) >= COVERAGE:
        cut += 1

    return Ratio(median(ratios), ratios[cut], ratios[count - 1 - cut], _coverage(count, cut))


def _coverage(count: int, cut: int) -> float:
    """Probability that the true median lies between the sorted values `cut` and `count - 1 - cut` (from 0)."""
    return 1 - 2 * sum(comb(count, k) for k in range(cut + 1)) / 2**count


def in_turns(items: Sequence[T], num_rounds: int) -> Iterator[tuple[int, list[T]]]:
    """Yields each round's number, from 1, and its order; every second round is reversed.

    A machine that slows down during a round thus favors each of two contenders equally often.

    >>> list(in_turns("ab", 3))
    [(1, ['a', 'b']), (2, ['b', 'a']), (3, ['a', 'b'])]
    """
    for number in range(1, num_rounds + 1):
        order = list(items)
        if number % 2 == 0:
            order.reverse()
        yield number, order


def draw_rounds(axes: Any, values: Mapping[str, Sequence[float]], colors: Sequence[str]) -> None:
    """Draws a bar with the median of each contender, the first at the top.

    Those without values keep their row.

    Args:
        axes: Matplotlib axes.
        values: each contender's values, by round.
        colors: one for each bar.
    """
    for row, (runs, color) in enumerate(zip(values.values(), colors)):
        if runs:
            axes.barh(row, median(runs), color=color, height=0.6)
        # The dots show the spread of the rounds, which the median hides.
        axes.plot(runs, [row] * len(runs), "o", color=INK, markersize=3, alpha=0.7)

    axes.set_yticks(range(len(values)), list(values))
    # The first row is at the top, as in the table.
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    # Labels such as 1,250,000 would run into each other.
    axes.locator_params("x", nbins=4)
    axes.set_axisbelow(True)
