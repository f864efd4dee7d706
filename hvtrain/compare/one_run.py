"""Starts one training in processes of its own, measures what they use, and reads its results."""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from hvtrain.compare.contestants import Contestant
from hvtrain.config.compose import override
from hvtrain.core.run_files import RESULT_FILE, EpochRecord, read_history
from hvtrain.errors import LostRankError
from hvtrain.launch.child import ends_within, failure, started

# A sample takes several milliseconds, which the run lacks too.
SECONDS_BETWEEN_SAMPLES = 1.0


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


@dataclass(frozen=True)
class Launcher:
    """Makes the command lines of runs.

    Attributes:
        num_ranks: of all strategies but `single`.
        host_options: -H or --hostfile, for `hvtrain launch`.
        num_ps: parameter servers, for strategies that have some.
        single_cores: cores that `single` may use; None: all.
    """

    num_ranks: int
    host_options: tuple[str, ...] = ()
    num_ps: int | None = None
    single_cores: int | None = None

    def command(self, contestant: Contestant, overrides: Sequence[str], folder: Path) -> list[str]:
        """Returns the command of a run that leaves its results in this folder."""
        python = [sys.executable, "-m", "hvtrain"]
        # The comparison is one piece of work for the user, so its runs send no notices.
        settings = [*overrides, override("run.dir", str(folder)), "notify=[]"]
        if contestant.is_single:
            return [*python, *settings]
        options = ["-np", str(self.num_ranks), *self.host_options]
        if self.num_ps and contestant.has_servers:
            options += ["--num-ps", str(self.num_ps)]

        return [*python, "launch", *options, "--", *settings]

    def cores(self, contestant: Contestant) -> set[int]:
        """Returns the cores that the run may use; a launcher divides them among its ranks."""
        cores = sorted(os.sched_getaffinity(0))
        if contestant.is_single and self.single_cores:
            cores = cores[: self.single_cores]

        return set(cores)


def train(command: Sequence[str], cores: set[int], folder: Path) -> Training:
    """Runs the command, whose run folder is folder/run.

    Raises:
        LostRankError: the run failed; the message has the line of its output that says why.
    """
    folder.mkdir(parents=True, exist_ok=True)
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

    return Training(
        result=read_result(folder / "run"),
        epochs=read_history(folder / "run"),
        seconds=time.monotonic() - began,
        cpu_seconds=_children_seconds() - cpu_before,
        peak_bytes=peak_bytes or None,
        gpu_bytes=None if gpu_before is None else max(0, peak_gpu_bytes - gpu_before),
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
