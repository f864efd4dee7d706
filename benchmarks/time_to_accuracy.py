"""How long a training over a narrow link takes to reach an accuracy, by method: a table of docs/networks.md.

    python -m benchmarks.time_to_accuracy --output FILE         30 minutes for three seeds; root

A method's time is the number of its steps times the time of a step. Both are measured for model=cnn on
Fashion-MNIST, on two ranks. The steps are those until the first validation, one every 32 steps, that
reaches the accuracy; they do not depend on the network or on what else this machine does. The time of
a step is measured on two hosts of scripts/lab (network namespaces), a rank each with a thread of its
own, and needs a quiet machine. The methods take turns. With --output FILE a run that was interrupted
goes on.
"""

import argparse
import re
import shlex
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from statistics import mean, median

from benchmarks.method_quality import METHODS, TRAININGS, measure_missing, trained
from benchmarks.plan_here import ranks_in_the_lab
from benchmarks.processes import python_line, timed_run
from hvtrain.launch.child import exit_at_signals

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

EVERY = 32
LOCAL = ["train.learning_rate_scale=none", f"strategy.every={EVERY}"]
CONTENDERS = {
    "float32": METHODS["float32"],
    "fp16": METHODS["fp16"],
    "int8": METHODS["int8"],
    f"local_sgd, every {EVERY}": ["strategy=local_sgd", *LOCAL],
    f"diloco, every {EVERY}": ["strategy=diloco", *LOCAL],
}
# As a run logs a validation between epochs.
_VALIDATION = re.compile(r"step ([\d,]+): .*val_accuracy ([\d.]+)")
WARMUP_STEPS = EVERY


def steps_until(accuracy: float, output: str) -> int | None:
    """Returns the first validated step with the accuracy, in a run's output; None if there is none.

    >>> steps_until(0.88, "step 32: val_loss 0.4, val_accuracy 0.8700\\nstep 1,064: val_accuracy 0.8810")
    1064
    """
    for step, value in _VALIDATION.findall(output):
        if float(value) >= accuracy:
            return int(step.replace(",", ""))
    return None


def seconds_of_a_step(rate: str, rounds: int) -> dict[str, float]:
    """Measures each method's step on two hosts with a link of this rate; returns the medians over the rounds."""
    from lab import Lab  # It needs root.

    folder = Path(tempfile.mkdtemp(prefix="hvtrain-accuracy-"))
    training, _ = TRAININGS["fashion"]
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    num_steps = WARMUP_STEPS + 2 * EVERY
    with Lab(2) as lab:
        lab("net", "s2", "rate", rate)
        for number in range(rounds):
            for name, method in CONTENDERS.items():
                run = folder / f"{number}-{name.replace(' ', '').replace(',', '-')}"
                overrides = [*training, *method, f"train.steps={num_steps}", "run.report=false"]
                line = python_line("hvtrain", timed_run(overrides, num_steps, run / "run"))
                reports = ranks_in_the_lab(lab, run, 1, line, WARMUP_STEPS, "gloo")
                seconds[name].append(max(report["step_seconds"] for report in reports))
                print(f"{name}: {1000 * seconds[name][-1]:.0f} ms a step", flush=True)
    return {name: median(values) for name, values in seconds.items()}


def main() -> None:
    """Measures what is missing in the output file, and prints the table."""
    exit_at_signals()  # The lab would outlive this process.
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accuracy", type=float, default=0.88)
    parser.add_argument("--rate", default="100mbit", help="of the link (default: 100mbit)")
    parser.add_argument("--rounds", type=int, default=1, help="of the steps' times (default: 1)")
    parser.add_argument("--steps", type=int, default=640, help="of each training (default: 640)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="steps by method and seed, in JSON")
    arguments = sys.argv[1:]
    options = parser.parse_args()
    sys.argv[1:] = []  # Hydra looks there.

    training, _ = TRAININGS["fashion"]
    validated = [f"train.validate_every_steps={EVERY}", f"train.steps={options.steps}"]

    def num_steps(method: list[str]) -> int:
        _, output = trained([*training, *validated, *method])
        reached = steps_until(options.accuracy, output)
        if reached is None:
            raise SystemExit(f"{method}: not {options.accuracy} in {options.steps} steps")
        return reached

    what = f"steps until {options.accuracy} of {options.steps}"
    steps = measure_missing(what, CONTENDERS, options.seeds, options.output, num_steps)
    seconds = seconds_of_a_step(options.rate, options.rounds)
    times = {name: mean(steps[name].values()) * seconds[name] for name in CONTENDERS}
    command = shlex.join(["python", "-m", "benchmarks.time_to_accuracy", *arguments])
    print(f"\n{command}, {datetime.now():%Y-%m-%d}\n")
    print("| | steps, by seed | ms per step | seconds | against float32 | against fp16 |")
    print("|---|---|---|---|---|---|")
    for name in CONTENDERS:
        by_seed = ", ".join(str(number) for number in steps[name].values())
        ratios = " | ".join(f"{times[name] / times[base]:.2f}" for base in ("float32", "fp16"))
        print(f"| {name} | {by_seed} | {1000 * seconds[name]:.0f} | {times[name]:.0f} | {ratios} |")


if __name__ == "__main__":
    main()
