"""Steps of two hosts whose link is narrow, by what is set against it: the table of docs/networks.md.

    python -m benchmarks.slow_networks wide 1gbit           25 minutes; root, on a quiet machine
    python -m benchmarks.slow_networks cnn 100mbit          15 minutes

Two hosts of scripts/lab (network namespaces), a rank each with a thread of its own. The contenders
take turns; a figure is the median over the rounds of the slower rank's time. Bytes are computed, as
the proof of a run has them (tests/keras/test_compression.py holds them against an interface). `alone`
are two ranks that exchange nothing but at the end: the ceiling.

With --predict, the link is measured first, some minutes for each transport, and `hvtrain plan` then
predicts each step from that link and the step `alone`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.contenders import WORKLOADS, Workload
from benchmarks.plan_here import link_seconds, ranks_in_the_lab
from benchmarks.processes import python_line, timed_run
from hvtrain.launch.child import exit_at_signals, in_turns
from hvtrain.system.files import write_json

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))


@dataclass(frozen=True)
class Setting:
    """What is set.

    Attributes:
        name: In the table.
        overrides: Settings of the run.
        transport: mpi or gloo.
        warmup_steps: Steps before the timed ones.
        steps: Timed steps: whole rounds of local steps.
    """

    name: str
    overrides: tuple[str, ...] = ()
    transport: str = "gloo"
    warmup_steps: int = 4
    steps: int = 16


EVERY = (32, 64)
SETTINGS = (
    Setting("float32, MPI", transport="mpi"),
    Setting("float32, Gloo"),
    Setting("fp16, Gloo", ("strategy.compression=fp16",)),
    Setting("bf16, Gloo", ("strategy.compression=bf16",)),
    Setting("bf16, MPI", ("strategy.compression=bf16",), "mpi"),
    Setting("int8, MPI", ("strategy.compression=int8",), "mpi"),
    Setting("int8, Gloo", ("strategy.compression=int8",)),
    Setting("powersgd, rank 4, Gloo", ("strategy.compression=powersgd", "strategy.whole_steps=0")),
    *(
        Setting(
            f"local_sgd, every {every}, Gloo",
            ("strategy=local_sgd", f"strategy.every={every}"),
            "gloo",
            every,
            every,
        )
        for every in EVERY
    ),
    Setting("alone", ("strategy=local_sgd", "strategy.every=1000000"), "gloo", 8, 32),
)


def measured_link(lab: Any, transport: str, largest: int, folder: Path) -> Path:
    """Times all-reduces of up to `largest` MiB between the hosts; returns a file for plan --calibrate."""
    measured = link_seconds(lab, folder, 1, largest, transport)
    seconds = {size: [slowest] for size, slowest in measured.items()}
    file = folder / "allreduce.json"
    write_json(file, {"num_ranks": 2, "transport": transport, "seconds": {"hvtrain": seconds}})
    return file


def predicted(setting: Setting, work: Workload, alone: float, link: Path, folder: Path) -> float:
    """Returns the seconds of a step that `hvtrain plan` predicts.

    Args:
        setting: What is set.
        work: The training.
        alone: Seconds of a step that exchanges nothing.
        link: The file of measured_link.
        folder: Where the plan goes.
    """
    machine = ["-np", "2", "--ranks-per-host", "1", "--calibrate", str(link)]
    settings = [*work.overrides("synthetic", 2, setting.steps), *setting.overrides]

    def start(core: int) -> subprocess.Popen[bytes]:
        step = ["--step-seconds", repr(alone), "--output", str(folder / f"core-{core}")]
        return subprocess.Popen(
            [sys.executable, "-m", "hvtrain", "plan", *machine, *step, *settings],
            stdout=subprocess.DEVNULL,
            # A rank has one thread, so compression is measured on one core.
            preexec_fn=partial(os.sched_setaffinity, 0, {core}),
        )

    # Both hosts of the lab are this machine: their ranks compress at the same time, and share its memory.
    plans = [start(core) for core in sorted(os.sched_getaffinity(0))[:2]]
    codes = [plan.wait() for plan in plans]
    if any(codes):
        raise SystemExit(f"{setting.name}: no plan; see above")
    files = folder.glob("core-*/plan.json")
    return mean(json.loads(file.read_text())["costs"][-1]["step_seconds"] for file in files)


def main() -> None:
    """Measures all settings in turns, and prints the table."""
    exit_at_signals()  # The lab would outlive this process.
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("rate", help="of the link, as in `scripts/lab net s2 rate`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--predict", action="store_true", help="compare with `hvtrain plan`")
    parser.add_argument(
        "--largest",
        type=int,
        default=16,
        help="MiB, of the all-reduces for --predict (default: 16)",
    )
    arguments = sys.argv[1:]
    options = parser.parse_args()
    sys.argv[1:] = []  # Hydra looks there.

    from lab import Lab  # It needs root.

    folder = Path(tempfile.mkdtemp(prefix="hvtrain-networks-"))
    work = WORKLOADS[options.workload]
    links: dict[str, Path] = {}
    seconds: dict[str, list[float]] = {setting.name: [] for setting in SETTINGS}
    sent: dict[str, float] = {}
    with Lab(2) as lab:
        lab("net", "s2", "rate", options.rate)
        for transport in ("mpi", "gloo") if options.predict else ():
            print(f"measuring the link, {transport} ...", flush=True)
            links[transport] = measured_link(
                lab, transport, options.largest, folder / f"link-{transport}"
            )
        for number, order in in_turns(SETTINGS, options.rounds):
            for setting in order:
                run = folder / f"{number}-{setting.name.replace(' ', '').replace(',', '-')}"
                total = setting.warmup_steps + setting.steps
                overrides = [
                    *work.overrides("synthetic", 2, total - work.warmup_steps),
                    *setting.overrides,
                    "run.report=false",
                ]
                line = python_line("hvtrain", timed_run(overrides, total, run / "run"))
                reports = ranks_in_the_lab(
                    lab, run, 1, line, setting.warmup_steps, setting.transport
                )
                seconds[setting.name].append(max(report["step_seconds"] for report in reports))
                proof = json.loads((run / "run" / "result.json").read_text())["proof"]
                sent[setting.name] = proof["sent_bytes"] * proof["reductions"] / proof["steps"]
                print(
                    f"{number} {setting.name}: {1000 * seconds[setting.name][-1]:.1f} ms",
                    flush=True,
                )

    base = min(median(seconds[setting.name]) for setting in SETTINGS[:2])
    command = shlex.join(["python", "-m", "benchmarks.slow_networks", *arguments])
    print(f"\n{command}, {datetime.now():%Y-%m-%d}\n")
    header = "| | ms per step | against the faster float32 | MB a rank sends in a step |"
    if options.predict:
        header += " predicted ms | predicted / measured |"
    print(header)
    print("|---" * (header.count("|") - 1) + "|")
    for setting in SETTINGS:
        name = setting.name
        step = median(seconds[name])
        row = f"| {name} | {1000 * step:.0f} | {step / base:.2f} | {sent[name] / 1e6:.2f} |"
        if options.predict:
            expected = predicted(
                setting,
                work,
                median(seconds["alone"]),
                links[setting.transport],
                folder / f"plan-{name.replace(' ', '').replace(',', '-')}",
            )
            row += f" {1000 * expected:.0f} | {expected / step:.2f} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
