"""Starts one training in processes of its own, watches and ends it, and reads its results."""

import json
import os
import resource
import shutil
import subprocess
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
from hvtrain.config.words import word
from hvtrain.core.records import RESULT_FILE, EpochRecord, read_history
from hvtrain.errors import LostRankError
from hvtrain.launch.child import ends_within, failure, started

SECONDS_BETWEEN_SAMPLES = 1.0  # A sample takes several milliseconds, also from the run.


@dataclass(frozen=True)
class Training:
    """One finished run: its record (result.json), its epochs, and what its processes on this host used.

    seconds: from the start of the command to its end. cpu_seconds: of all its processes. peak_bytes: the largest sum of
    their resident memory. gpu_bytes: the largest growth of the used memory of all GPUs together. None: not known.
    """

    result: dict[str, Any]
    epochs: list[EpochRecord]
    seconds: float
    cpu_seconds: float
    peak_bytes: int | None
    gpu_bytes: int | None


@dataclass(frozen=True)
class Starting:
    """How runs are started. more: options of python -m hvtrain launch."""

    num_ranks: int
    more: tuple[str, ...] = ()
    num_ps: int | None = None
    single_cores: int | None = None

    def command(self, one: Contestant, words: Sequence[str], folder: Path) -> list[str]:
        """The command line of a run that leaves its results in this folder."""
        run = [*words, word("run.dir", str(folder)), "notify=[]"]
        if one.is_single:
            return [sys.executable, "-m", "hvtrain", *run]
        servers = ["--num-ps", str(self.num_ps)] if self.num_ps and one.has_servers else []
        return [sys.executable, "-m", "hvtrain", "launch", "-np", str(self.num_ranks), *self.more, *servers, "--", *run]

    def cores(self, one: Contestant) -> set[int]:
        """The cores that the run may use; a launcher divides them among its ranks."""
        cores = sorted(os.sched_getaffinity(0))
        return set(cores[: self.single_cores] if one.is_single and self.single_cores else cores)


def train(command: Sequence[str], cores: set[int], folder: Path) -> Training:
    """Runs the command, whose run folder is folder/run. Raises LostRankError with its last line if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    log, before, began = folder / "output.txt", _children_seconds(), time.monotonic()
    gpu_before, peaks = gpu_bytes(), [0, 0]
    with started(command, log, cores) as process:
        while not ends_within(process, SECONDS_BETWEEN_SAMPLES):
            peaks = [max(peaks[0], resident_bytes(process.pid)), max(peaks[1], gpu_bytes() or 0)]
    if process.returncode:
        raise LostRankError(failure(log.read_text(errors="replace"), process.returncode))
    return Training(
        result=read_result(folder / "run"),
        epochs=read_history(folder / "run"),
        seconds=time.monotonic() - began,
        cpu_seconds=_children_seconds() - before,
        peak_bytes=peaks[0] or None,
        gpu_bytes=None if gpu_before is None else max(0, peaks[1] - gpu_before),
    )


def read_result(run: Path) -> dict[str, Any]:
    """The record of a run. Raises LostRankError if there is none."""
    try:
        return json.loads((run / RESULT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LostRankError(f"the run ended well, but {run / RESULT_FILE} cannot be read: {error}") from error


def resident_bytes(pid: int) -> int:
    """Resident memory of the training processes at or below a process; pages that they share count in each."""
    total = 0
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                words = process.cmdline()
                if ("-m", "hvtrain") in pairwise(words):
                    total += process.memory_info().rss
    return total


def gpu_bytes() -> int | None:
    """Used memory of all GPUs of this host; None without nvidia-smi."""
    if not (program := shutil.which("nvidia-smi")):
        return None
    query = [program, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    numbers = [int(line) for line in done.stdout.split() if line.isdigit()]
    return sum(numbers) << 20 if numbers else None


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
