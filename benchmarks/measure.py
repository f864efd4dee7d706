"""Runs one contender once, in processes of its own, and returns its speed."""

import contextlib
import fcntl
import json
import os
import pty
import socket
import struct
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.contenders import GLOO, MPI, RUNNER, Contender
from benchmarks.processes import (
    LAUNCHER,
    WARMUP,
    Command,
    horovod_line,
    python_line,
    run_and_report,
    thread_variables,
    timed_run,
)

# The variable that tells an independent job which one it is: "1 of 2", counted from 0.
JOB = "HVTRAIN_BENCH_JOB"
TERMINAL_VARIABLES = {"TERM": "xterm-256color", "CI": ""}


@dataclass(frozen=True)
class Measured:
    """One run of a contender.

    Attributes:
        step_seconds: Time of a joint step.
        examples_per_second: Of all processes.
        first_step_seconds: From the start to the end of the slowest process's first step.
        peak_bytes: Memory of the largest process.
        loss: Mean over the processes.
    """

    step_seconds: float
    examples_per_second: float
    first_step_seconds: float
    peak_bytes: int
    loss: float


def measure(
    contender: Contender,
    overrides: Sequence[str],
    num_ranks: int,
    batch_size: int,
    steps: tuple[int, int],
    folder: Path,
    threads: int,
) -> Measured:
    """Runs the contender once.

    Args:
        contender: What to run.
        overrides: Settings of the training.
        num_ranks: Processes that train; a contender that runs alone takes one.
        batch_size: Examples of one rank's batch.
        steps: Warm-up steps and timed steps.
        folder: Keeps the output.
        threads: TensorFlow's threads of a process.

    Raises:
        LostRankError: It fails. The message names the file with its output.
    """
    num_processes = 1 if contender.way == "alone" else num_ranks
    arguments = [*overrides, *contender.overrides]
    if contender.module == RUNNER:
        arguments = timed_run(arguments, sum(steps), folder / "run")

    line = python_line(contender.module, arguments)

    variables = {**dict(contender.variables), WARMUP: str(steps[0]), **thread_variables(threads)}
    num_awaited = None
    if contender.way == "servers":
        # With one thread, coordinator and servers deadlock.
        del variables["TF_NUM_INTEROP_THREADS"]
        # Only the coordinator, which comes first, ends by itself.
        num_awaited = 1

    if contender.on_terminal:
        variables |= TERMINAL_VARIABLES

    reports = run_and_report(
        contender.module,
        _commands(contender, line, num_processes),
        num_processes,
        folder,
        variables,
        num_awaited,
        _terminal if contender.on_terminal else nullcontext,
    )
    # Each process has its own batches, so their rates add up.
    examples_per_second = sum(batch_size / report["step_seconds"] for report in reports)

    return Measured(
        # The joint rate in steps: contenders that run apart take no common step.
        step_seconds=batch_size * num_processes / examples_per_second,
        examples_per_second=examples_per_second,
        first_step_seconds=max(report["first_step_seconds"] for report in reports),
        peak_bytes=max(report["peak_bytes"] for report in reports),
        loss=mean(report["loss"] for report in reports),
    )


def _commands(contender: Contender, line: Sequence[str], num_processes: int) -> list[Command]:
    """The commands to start at once."""
    if contender.way in (MPI, GLOO):
        # On a terminal horovodrun draws what rank 0 sends.
        launcher = (f"{sys.prefix}/bin/horovodrun",) if contender.on_terminal else LAUNCHER
        transport = contender.way.removeprefix("horovodrun-")
        return [Command(horovod_line(transport, num_processes, line, launcher))]

    if contender.way == "workers":
        return _cluster(line, [("worker", index) for index in range(num_processes)])
    if contender.way == "servers":
        workers = [("worker", index) for index in range(num_processes)]
        return _cluster(line, [("chief", 0), ("ps", 0), *workers])
    # alone or independent: the jobs do not know of each other.
    return [Command(line, {JOB: f"{job} of {num_processes}"}) for job in range(num_processes)]


def _cluster(line: Sequence[str], tasks: Sequence[tuple[str, int]]) -> list[Command]:
    """A command for each (type, index) of a TensorFlow cluster on this host, in the order of the tasks."""
    cluster: dict[str, list[str]] = {}
    with contextlib.ExitStack() as stack:  # All are open at once, so no port comes twice.
        for task_type, _ in tasks:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            cluster.setdefault(task_type, []).append(f"127.0.0.1:{server.getsockname()[1]}")

    return [
        Command(
            line,
            {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}})},
        )
        for task_type, index in tasks
    ]


@contextlib.contextmanager
def _terminal(log: int) -> Iterator[int]:
    """Yields a terminal of 80 columns, whose output goes to the log."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

    def copy() -> None:
        with contextlib.suppress(OSError):  # The end, once nobody holds the terminal any more.
            while data := os.read(controller, 65536):
                os.write(log, data)

    reader = threading.Thread(target=copy, daemon=True)
    reader.start()

    try:
        yield terminal
    finally:
        os.close(terminal)
        reader.join(5)
        os.close(controller)
