"""What the cost model predicts for this machine, against what is measured: 2 and 4 ranks, and a narrow link.

    python -m benchmarks.plan_here              about an hour; the machine must be quiet
    python -m benchmarks.plan_here --ranks 2 --workloads cnn --rounds 1 --largest 4 --rate ""     a look

One number of ranks after the other: `hvtrain allreduce` gives the link (a least-squares fit),
`benchmarks steps` the rest. One rank's step is taken under the conditions of n ranks, which share
cores with each other and with Horovod's threads: n ranks that have joined Horovod and reduce
nothing (`joined`, plain Keras; `independent`, which has not, stands beside it), times what the
runner takes over Keras alone (`hvtrain-1` / `keras`). Then `hvtrain-mpi` is predicted and measured.
With --rate the same on two hosts of scripts/lab (root), one rank each, whose link is as narrow as
that: the link is measured there too, and computing is that of two ranks here. Expected: every ratio
between 0.9 and 1.1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import processes
from benchmarks.contenders import MPI, WORKLOADS, Contender, Workload, named
from benchmarks.processes import horovod_line, python_line, thread_variables, timed_run
from benchmarks.steps import Steps
from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.launch.child import exit_at_signals
from hvtrain.plan.algorithms import Link, Machine
from hvtrain.plan.allreduce import MIB, SIZES, WORKER, Collectives
from hvtrain.plan.machine import Measured, fit, with_corrections
from hvtrain.plan.step_cost import Cost, Gradient, Rules, Work, step_cost
from hvtrain.report.ratios import ratio

# Its losses are its own: a contender with data of its own is not compared.
JOINED = Contender(
    "joined", "ranks that reduce nothing", "benchmarks.by_hand.joined_ranks", MPI, data="synthetic"
)
CONTENDERS = (
    JOINED,
    *(named(name) for name in ("independent", "keras", "hvtrain-1", "hvtrain-mpi")),
)
HOSTS = "s1:1,s2:1"
# The times of `hvtrain allreduce` hold Horovod's cycle and all latencies already.
RULES = Rules(cycle_seconds=0.0, algorithms=("ring",), fusion_bytes=0)


def main() -> None:
    """Measures, predicts, and prints the table for docs/plan.md."""
    exit_at_signals()  # The lab would outlive this process.
    options = _parse()
    folder = Path(options.output or tempfile.mkdtemp(prefix="hvtrain-here-")).absolute()
    workloads = [WORKLOADS[name] for name in options.workloads.split(",")]
    messages = {work.name: _messages(work) for work in workloads}
    rows = []
    # Seconds of one rank's step beside the others, by number of ranks and workload.

    alone: dict[tuple[int, str], float] = {}
    for num_ranks in map(int, options.ranks.split(",")):
        threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
        collectives = Collectives(
            num_ranks, "mpi", threads, folder / f"allreduce-{num_ranks}", _sizes(options.largest)
        )
        collectives.run(options.rounds)

        for work in workloads:
            steps = Steps(
                folder / f"{work.name}-{num_ranks}",
                threads,
                work,
                "synthetic",
                num_ranks,
                CONTENDERS,
                options.steps or work.steps,
            )
            steps.run(options.rounds)
            # What the runner takes over Keras alone, on one rank.
            runner_share = ratio(steps.of("hvtrain-1"), steps.of("keras")).median
            one_rank = runner_share * median(steps.of("joined"))
            alone[num_ranks, work.name] = one_rank
            cost = predict(collectives.seconds["hvtrain"], num_ranks, messages[work.name], one_rank)
            rows.append(row("one host", work, one_rank, cost, steps.of("hvtrain-mpi")))

    if options.rate:
        rows += in_the_lab(options, folder, workloads, messages, alone)

    command = shlex.join(["python", "-m", "benchmarks.plan_here", *options.arguments])
    num_cores = len(os.sched_getaffinity(0))
    print(f"\n{command}, {datetime.now():%Y-%m-%d}, {num_cores} cores, {options.rounds} rounds\n")
    print(
        "| where | ranks | workload | one rank ms | reducing ms | predicted ms | measured ms | predicted / measured |"
    )
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    print(f"\nall files in {folder}")


def predict(
    seconds: dict[str, list[float]], num_ranks: int, messages: list[Gradient], one_rank: float
) -> Cost:
    """Predicts the step of num_ranks ranks.

    Args:
        seconds: Their measured all-reduces: the time in each round, by bytes.
        num_ranks: Ranks of the step.
        messages: Gradients as the run reduces them.
        one_rank: Measured seconds of one rank's step.
    """
    measured = [
        Measured(num_ranks, int(size), median(rounds))
        for size, rounds in seconds.items()
        if size.isdigit()
    ]
    best = fit(measured)
    # The latency is in the start: both were measured on so many ranks.
    link = Link(0.0, best.bytes_per_second)
    machine = with_corrections(
        Machine(link, link, num_ranks, best.start_seconds), measured, RULES.algorithms
    )
    return step_cost(Work(one_rank, messages), num_ranks, machine, RULES)


def row(where: str, work: Workload, one_rank: float, cost: Cost, measured: list[float]) -> str:
    figures = [one_rank, cost.communication_seconds, cost.step_seconds, median(measured)]
    shown = " | ".join(f"{1000 * value:.1f}" for value in figures)
    against_measured = ratio([cost.step_seconds] * len(measured), measured)
    return f"| {where} | {cost.num_ranks} | {work.name} | {shown} | {against_measured} |"


def in_the_lab(
    options: argparse.Namespace,
    folder: Path,
    workloads: list[Workload],
    messages: dict[str, list[Gradient]],
    alone: dict[tuple[int, str], float],
) -> list[str]:
    """Measures and predicts two hosts with a rank each and a narrow link between them."""
    # It needs root, so it is imported only with --rate.
    from lab import Lab

    if not any(num_ranks == 2 for num_ranks, _ in alone):
        raise SystemExit("--rate needs 2 among --ranks: computing is measured there")

    threads = max(1, len(os.sched_getaffinity(0)) // 2)

    rows = []
    with Lab(2) as lab:
        lab("net", "s2", "rate", options.rate)

        seconds: dict[str, list[float]] = {}
        for number in range(options.rounds):
            report_folder = folder / f"lab-allreduce-{number}"
            measured = link_seconds(lab, report_folder, threads, options.largest)
            for size, slowest in measured.items():
                seconds.setdefault(size, []).append(slowest)

        for work in workloads:
            steps = options.steps or work.steps

            step_seconds = []
            for number in range(options.rounds):
                run_folder = folder / f"lab-{work.name}-{number}"
                overrides = work.overrides("synthetic", 2, steps)
                arguments = timed_run(overrides, work.warmup_steps + steps, run_folder / "run")
                line = python_line("hvtrain", arguments)
                reports = ranks_in_the_lab(lab, run_folder, threads, line, work.warmup_steps)
                step_seconds.append(max(report["step_seconds"] for report in reports))

            one_rank = alone[2, work.name]
            cost = predict(seconds, 2, messages[work.name], one_rank)
            rows.append(row(f"two hosts, {options.rate}", work, one_rank, cost, step_seconds))

    return rows


def link_seconds(
    lab: Any, folder: Path, threads: int, largest: int, transport: str = "mpi"
) -> dict[str, float]:
    """Times all-reduces of up to `largest` MiB between the hosts; returns the slower rank's seconds by size."""
    line = python_line(WORKER, ["hvtrain", f"{folder}/report", *map(str, _sizes(largest))])
    reports = ranks_in_the_lab(lab, folder, threads, line, transport=transport)
    return {size: max(report[size] for report in reports) for size in reports[0]}


def ranks_in_the_lab(
    lab: Any, folder: Path, threads: int, line: list[str], warmup: int = 0, transport: str = "mpi"
) -> list[dict[str, Any]]:
    """Runs the line on a rank of each host and returns their reports."""
    folder.mkdir(parents=True)

    variables = {
        processes.REPORT: f"{folder}/report",
        processes.BEGAN: repr(time.time()),
        processes.WARMUP: str(warmup),
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **thread_variables(threads),
    }
    # The launcher needs the variables on its host, the ranks on theirs.
    with_variables = ["env", *(f"{name}={value}" for name, value in variables.items())]
    rank_line = ["-H", HOSTS, *with_variables, *line]
    code, output = lab.run(
        "s1", *with_variables, *horovod_line(transport, 2, rank_line), timeout=900
    )
    (folder / "output.txt").write_text(output)
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("report.*"))]
    if code or len(reports) != 2:
        raise SystemExit(
            f"{line[2]} ended with {code} and {len(reports)} of 2 reports; see {folder}/output.txt"
        )
    return reports


def _messages(work: Workload) -> list[Gradient]:
    from hvtrain.plan.forecast import forecast

    config = from_dict(compose(work.overrides("synthetic", 1)))
    return list(forecast(config, 1, 1, None, 10).messages)


def _sizes(largest: int) -> tuple[int, ...]:
    return tuple(size for size in SIZES if size <= largest * MIB)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--workloads", default="cnn,wide")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="timed steps; default: what the workload says")
    parser.add_argument("--largest", type=int, default=128, help="MiB of the largest allreduce")
    parser.add_argument(
        "--rate", default="1gbit", help='of the link in the lab; "" leaves the lab out'
    )
    parser.add_argument("--output")
    options = parser.parse_args()
    options.arguments = sys.argv[1:]
    sys.argv[1:] = []  # Hydra looks there.
    return options


if __name__ == "__main__":
    main()
