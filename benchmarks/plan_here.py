"""What the cost model predicts for this machine, against what is measured: 2 and 4 ranks, and a narrow link.

    python -m benchmarks.plan_here              about an hour; the machine must be quiet
    python -m benchmarks.plan_here --ranks 2 --workloads cnn --rounds 1 --largest 4 --rate ""     a look

One number of ranks after the other: `bench allreduce` gives the link (a least-squares fit), `bench steps` the rest. One
rank's step is taken under the conditions of n ranks, which share cores with each other and with Horovod's threads: n
ranks that have joined Horovod and reduce nothing (`joined`, plain Keras; `independent`, which has not joined, stands
beside it), times what the runner takes over Keras alone (`hvtrain-1` / `keras`). Then `hvtrain-mpi` is predicted and
measured. With --rate the same on two hosts of scripts/lab (root), one rank each, whose link is as narrow as that: the
link is measured there too, and computing is that of two ranks here. Expected: every ratio between 0.9 and 1.1.
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

from benchmarks.contenders import named
from benchmarks.steps import Session
from benchmarks.workloads import WORKLOADS, Workload
from hvtrain.compare.rounds import ratio
from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.plan import process_report
from hvtrain.plan.allreduce import MIB, SIZES, WORKER, Collectives
from hvtrain.plan.costs.algorithms import Link, Machine
from hvtrain.plan.costs.step import Cost, Gradient, Rules, Work, step_cost
from hvtrain.plan.machine import Measured, corrected, fit
from hvtrain.plan.measurement import Contender
from hvtrain.plan.processes import HOROVOD

# Its losses are its own: a contender with data of its own is not compared.
JOINED = Contender("joined", "ranks that reduce nothing", "benchmarks.joined_ranks", HOROVOD[0], data="synthetic")
CONTENDERS = (JOINED, *(named(name) for name in ("independent", "keras", "hvtrain-1", "hvtrain-mpi")))
HOSTS = "s1:1,s2:1"
# What a fit starts with already: the bench's time holds the cycle and all latencies.
RULES = Rules(cycle_seconds=0.0, algorithms=("ring",), fusion_bytes=0)


def main() -> None:
    """Measures, predicts, and prints the table for docs/plan.md."""
    options = _parse()
    folder = Path(options.output or tempfile.mkdtemp(prefix="hvtrain-here-")).absolute()
    workloads = [WORKLOADS[name] for name in options.workloads.split(",")]
    messages = {work.name: _messages(work) for work in workloads}
    rows, alone = [], {}
    for num_ranks in map(int, options.ranks.split(",")):
        threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
        link = Collectives(num_ranks, "mpi", threads, folder / f"allreduce-{num_ranks}", _sizes(options))
        link.run(options.rounds)
        for work in workloads:
            session = Session(
                work, "synthetic", num_ranks, threads, CONTENDERS,
                folder / f"{work.name}-{num_ranks}", options.steps or work.steps,
            )  # fmt: skip
            session.run(options.rounds)
            seconds = {name: session.values(runs) for name, runs in session.runs.items()}
            of_runner = ratio(seconds["hvtrain-1"], seconds["keras"]).median
            alone[num_ranks, work.name] = of_runner * median(seconds["joined"])
            cost = predict(link.found["hvtrain"], num_ranks, messages[work.name], alone[num_ranks, work.name])
            rows.append(row("one host", work, alone[num_ranks, work.name], cost, seconds["hvtrain-mpi"]))
    if options.rate:
        rows += in_the_lab(options, folder, workloads, messages, alone)
    told = shlex.join(["python", "-m", "benchmarks.plan_here", *options.told])
    print(f"\n{told}, {datetime.now():%Y-%m-%d}, {len(os.sched_getaffinity(0))} cores, {options.rounds} rounds\n")
    print(
        "| where | ranks | workload | one rank ms | reducing ms | predicted ms | measured ms | predicted / measured |"
    )
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    print(f"\nall files in {folder}")


def predict(seconds: dict[str, list[float]], num_ranks: int, messages: list[Gradient], one_rank: float) -> Cost:
    """The step of num_ranks ranks whose allreduce was measured, by its rounds and bytes, and so was one rank's step."""
    measured = [Measured(num_ranks, int(size), median(rounds)) for size, rounds in seconds.items() if size.isdigit()]
    work = Work(one_rank, messages)
    found = fit(measured)
    link = Link(0.0, found.bytes_per_second)  # Its latency is in the start: both were measured on so many ranks.
    machine = corrected(Machine(link, link, num_ranks, found.start_seconds), measured, RULES.algorithms)
    return step_cost(work, num_ranks, machine, RULES)


def row(where: str, work: Workload, one_rank: float, cost: Cost, measured: list[float]) -> str:
    found = ratio([cost.step_seconds] * len(measured), measured)
    figures = [one_rank, cost.communication_seconds, cost.step_seconds, median(measured)]
    shown = " | ".join(f"{1000 * value:.1f}" for value in figures)
    return f"| {where} | {cost.num_ranks} | {work.name} | {shown} | {found} |"


def in_the_lab(
    options: argparse.Namespace,
    folder: Path,
    workloads: list[Workload],
    messages: dict[str, list[Gradient]],
    alone: dict[tuple[int, str], float],
) -> list[str]:
    """Two hosts with a rank each and a narrow link between them."""
    from lab import Lab

    if not any(num_ranks == 2 for num_ranks, _ in alone):
        raise SystemExit("--rate needs 2 among --ranks: computing is measured there")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    rows = []
    with Lab(2) as lab:
        lab("net", "s2", "rate", options.rate)
        link: dict[str, list[float]] = {}
        for number in range(options.rounds):
            sizes = [str(size) for size in _sizes(options)]
            found = _on_hosts(lab, folder / f"lab-allreduce-{number}", threads, WORKER, ["hvtrain", *sizes])
            for size in found[0]:
                link.setdefault(size, []).append(max(one[size] for one in found))
        for work in workloads:
            steps = options.steps or work.steps
            measured = []
            for number in range(options.rounds):
                place = folder / f"lab-{work.name}-{number}"
                words = [*work.words("synthetic", 2, steps), f"run.dir={place}/run"]
                words.append("+callbacks.bench._target_=hvtrain.plan.clock.Clock")
                words.append(f"+callbacks.bench.num_steps={work.warmup_steps + steps}")
                found = _on_hosts(lab, place, threads, "hvtrain", words, work.warmup_steps)
                measured.append(max(one["step_seconds"] for one in found))
            cost = predict(link, 2, messages[work.name], alone[2, work.name])
            rows.append(row(f"two hosts, {options.rate}", work, alone[2, work.name], cost, measured))
    return rows


def _on_hosts(lab, place: Path, threads: int, module: str, words: list[str], warmup: int = 0) -> list[dict]:
    """What the two ranks reported."""
    place.mkdir(parents=True)
    variables = {
        process_report.FILE: f"{place}/report",
        process_report.BEGAN: repr(time.time()),
        process_report.WARMUP: str(warmup),
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **{name: str(threads) for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")},
    }
    told = ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable, "-m", module, *words]
    launcher = [sys.executable, "-m", "hvtrain.launch.horovod_launcher", "--mpi", "-np", "2", "-H", HOSTS]
    code, output = lab.run("s1", *told[: len(variables) + 1], *launcher, *told, timeout=900)
    (place / "output.txt").write_text(output)
    reports = [json.loads(path.read_text()) for path in sorted(place.glob("report.*"))]
    if code or len(reports) != 2:
        raise SystemExit(f"{module} ended with {code} and {len(reports)} of 2 reports; see {place}/output.txt")
    return reports


def _messages(work: Workload) -> list[Gradient]:
    from hvtrain.plan.forecast import forecast

    config = from_dict(compose(work.words("synthetic", 1))[0])
    return list(forecast(config, 1, 1, None, 10).messages)


def _sizes(options: argparse.Namespace) -> tuple[int, ...]:
    return tuple(size for size in SIZES if size <= options.largest * MIB)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--workloads", default="cnn,wide")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="timed steps; default: what the workload says")
    parser.add_argument("--largest", type=int, default=128, help="MiB of the largest allreduce")
    parser.add_argument("--rate", default="1gbit", help='of the link in the lab; "" leaves the lab out')
    parser.add_argument("--output")
    options = parser.parse_args()
    sys.argv[1:], options.told = [], sys.argv[1:]  # Hydra looks there.
    return options


if __name__ == "__main__":
    main()
