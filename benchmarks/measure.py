"""Runs one contender once, in processes of its own, and returns its speed."""

import contextlib
import json
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from benchmarks.contenders import GLOO, MPI, RUNNER, Contender, Workload
from benchmarks.processes import (
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
TERMINAL_VARIABLES = {"TERM": "xterm-256color", "COLUMNS": "80", "CI": ""}


def measure(
    contender: Contender,
    workload: Workload,
    data: str,
    num_ranks: int,
    steps: int,
    folder: Path,
    threads: int,
    epochs: int = 1,
) -> dict[str, float]:
    """Runs the contender once.

    Args:
        contender: What to run.
        workload: What it trains.
        data: synthetic or fashion_mnist; a contender may have data of its own.
        num_ranks: Processes that train; a contender that runs alone takes one.
        steps: Timed steps.
        folder: Keeps the output.
        threads: TensorFlow's threads of a process.
        epochs: Of all steps.

    Returns:
        step_seconds of a joint step; examples_per_second of all processes; first_step_seconds from the start to the
        end of the slowest process's first step; peak_bytes of the largest process; loss, the mean over the processes.

    Raises:
        LostRankError: It fails. The message names the file with its output.
    """
    num_processes = 1 if contender.way == "alone" else num_ranks
    # A job that is unaware of the others has the data set of one rank.
    num_sharing = 1 if contender.is_one_rank else num_ranks
    arguments = [
        *workload.overrides(contender.data or data, num_sharing, steps, epochs),
        *contender.overrides,
    ]
    if contender.module == RUNNER:
        arguments = timed_run(arguments, workload.warmup_steps + steps, folder / "run")

    line = python_line(contender.module, arguments)

    variables = {
        **dict(contender.variables),
        WARMUP: str(workload.warmup_steps),
        **thread_variables(threads),
    }
    num_awaited = None
    if contender.way == "servers":
        # With one thread, coordinator and servers deadlock.
        del variables["TF_NUM_INTEROP_THREADS"]
        # Only the coordinator, which comes first, ends by itself.
        num_awaited = 1

    commands = _commands(contender, line, num_processes)
    if contender.on_terminal:
        variables |= TERMINAL_VARIABLES
        # It gives a program a terminal, and copies what that shows.
        commands = [
            Command(["script", "-qec", shlex.join(command.line), "/dev/null"], command.variables)
            for command in commands
        ]

    reports = run_and_report(
        contender.module,
        commands,
        num_processes,
        folder,
        variables,
        num_awaited,
    )
    # Each process has its own batches, so their rates add up.
    examples_per_second = sum(workload.batch_size / report["step_seconds"] for report in reports)

    return {
        # The joint rate in steps: contenders that run apart take no common step.
        "step_seconds": workload.batch_size * num_processes / examples_per_second,
        "examples_per_second": examples_per_second,
        "first_step_seconds": max(report["first_step_seconds"] for report in reports),
        "peak_bytes": max(report["peak_bytes"] for report in reports),
        "loss": mean(report["loss"] for report in reports),
    }


def _commands(contender: Contender, line: Sequence[str], num_processes: int) -> list[Command]:
    """The commands to start at once."""
    if contender.way in (MPI, GLOO):
        transport = contender.way.removeprefix("horovodrun-")
        return [Command(horovod_line(transport, num_processes, line))]

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
            {
                "TF_CONFIG": json.dumps(
                    {"cluster": cluster, "task": {"type": task_type, "index": index}}
                )
            },
        )
        for task_type, index in tasks
    ]
