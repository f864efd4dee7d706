"""Runs contenders in processes of their own, and reads the report that each one writes."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import Any

from hvtrain.config.compose import override
from hvtrain.errors import LostRankError

# Variables that a process gets: the path of its report, to which it appends its rank; when it was
# started, in seconds since the epoch; and the number of steps before the timed ones.
REPORT = "HVTRAIN_BENCH_FILE"
BEGAN = "HVTRAIN_BENCH_BEGAN"
WARMUP = "HVTRAIN_BENCH_WARMUP"

CLOCK = "benchmarks.clock.Clock"
SECONDS_FOR_A_RUN = 900.0


@dataclass(frozen=True)
class Command:
    """A process to start: its command line, and variables of its own."""

    line: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)


def python_line(module: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def timed_run(overrides: Sequence[str], num_steps: int, run_dir: Path) -> list[str]:
    """Arguments of a run of hvtrain that reports the time of its steps."""
    return [
        *overrides,
        f"+callbacks.bench._target_={CLOCK}",
        f"+callbacks.bench.num_steps={num_steps}",
        override("run.dir", str(run_dir)),
    ]


def horovod_line(transport: str, num_ranks: int, line: Sequence[str]) -> list[str]:
    """The command that starts the line on each rank of this host. transport: mpi or gloo."""
    return [f"{sys.prefix}/bin/horovodrun", f"--{transport}", "-np", str(num_ranks), *line]


def thread_variables(num_threads: int) -> dict[str, str]:
    """Variables that limit a process to so many threads for computing."""
    names = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
    return dict.fromkeys(names, str(num_threads))


def run_and_report(
    name: str,
    commands: Sequence[Command],
    num_reports: int,
    folder: Path,
    variables: Mapping[str, str],
    num_awaited: int | None = None,
) -> list[dict[str, Any]]:
    """Starts all commands at once, waits for them, and returns the reports of their ranks.

    Args:
        name: What is run, for the error message.
        commands: The processes to start.
        num_reports: How many ranks report.
        folder: A new folder for the output and the reports.
        variables: Added to the environment of all processes.
        num_awaited: Wait for the first ones only and end the others then; None: wait for all.

    Raises:
        LostRankError: A process failed or did not report. The message names the file with its
            output.
    """
    folder.mkdir(parents=True)
    log = folder / "output.txt"

    environment = {
        **os.environ,
        **variables,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        REPORT: str(folder / "report"),
    }

    processes = []
    with log.open("wb") as output:
        for command in commands:
            process = Popen(
                command.line,
                env={**environment, **command.variables, BEGAN: repr(time.time())},
                stdin=DEVNULL,
                stdout=output,
                stderr=STDOUT,
                # A session of its own, so that _wait ends its children too.
                start_new_session=True,
            )
            processes.append(process)

        codes = _wait(processes, processes[:num_awaited])

    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("report.*"))]
    if any(codes) or len(reports) != num_reports:
        last_line = log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise LostRankError(
            f"{name} ended with {codes} and {len(reports)} of {num_reports} reports; "
            f"its output is in {log} and ends: {last_line}"
        )

    return reports


def _wait(processes: Sequence[Popen[bytes]], awaited: Sequence[Popen[bytes]]) -> list[int]:
    """Returns the exit codes of the awaited processes.

    Ends all of them when one fails, on Ctrl-C, and when time is up.
    """
    deadline = time.monotonic() + SECONDS_FOR_A_RUN

    try:
        # A rank that waits for a failed one would wait until the time is up.
        while any(process.poll() is None for process in awaited) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)

        for process in processes:
            try:
                process.wait(20)
            except TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)

    return [process.wait() for process in awaited]
