"""How long a training over a narrow link takes to reach an accuracy, by method: a table of docs/networks.md.

    python -m benchmarks.time_to_accuracy           45 minutes for three seeds; root, on a quiet machine

Trains model=cnn on Fashion-MNIST on two hosts of scripts/lab (network namespaces), a rank each with a
thread of its own. The methods take turns. A training is validated every 32 steps. Its time is the
steps until the first validation that reaches the accuracy, times the measured seconds of its step:
validation itself does not count.
"""

import argparse
import json
import re
import shlex
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from statistics import mean

from benchmarks.method_quality import METHODS, TRAININGS
from benchmarks.plan_here import ranks_in_the_lab
from benchmarks.processes import python_line, timed_run

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


def main() -> None:
    """Trains with all methods in turns, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accuracy", type=float, default=0.88)
    parser.add_argument("--rate", default="100mbit", help="of the link (default: 100mbit)")
    parser.add_argument("--steps", type=int, default=640, help="of each training (default: 640)")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = sys.argv[1:]
    options = parser.parse_args()
    sys.argv[1:] = []  # Hydra looks there.

    from lab import Lab  # It needs root.

    folder = Path(tempfile.mkdtemp(prefix="hvtrain-accuracy-"))
    training, _ = TRAININGS["fashion"]
    results: dict[str, list[tuple[int, float]]] = {name: [] for name in CONTENDERS}
    with Lab(2) as lab:
        lab("net", "s2", "rate", options.rate)
        for seed in range(1, options.seeds + 1):
            for name, method in CONTENDERS.items():
                run = folder / f"{seed}-{name.replace(' ', '').replace(',', '-')}"
                overrides = [
                    *training,
                    *method,
                    f"seed={seed}",
                    f"train.validate_every_steps={EVERY}",
                    f"train.steps={options.steps}",
                    "train.epochs=null",
                    "train.divide_steps_by_size=false",
                    "run.report=false",
                ]
                line = python_line("hvtrain", timed_run(overrides, options.steps, run / "run"))
                ranks_in_the_lab(lab, run, 1, line, WARMUP_STEPS, "gloo")
                step_seconds = json.loads((run / "run" / "result.json").read_text())["step_seconds"]
                steps = steps_until(options.accuracy, (run / "output.txt").read_text())
                if steps is None:
                    raise SystemExit(
                        f"{name}, seed {seed}: not {options.accuracy} in {options.steps} steps"
                    )
                results[name].append((steps, step_seconds))
                print(
                    f"seed {seed}, {name}: {steps} steps of {1000 * step_seconds:.0f} ms",
                    flush=True,
                )

    means = {
        name: mean(steps * seconds for steps, seconds in runs) for name, runs in results.items()
    }
    command = shlex.join(["python", "-m", "benchmarks.time_to_accuracy", *arguments])
    print(f"\n{command}, {datetime.now():%Y-%m-%d}\n")
    print("| | steps, by seed | seconds, mean | against float32 | against fp16 |")
    print("|---|---|---|---|---|")
    for name, runs in results.items():
        steps_by_seed = ", ".join(str(steps) for steps, _ in runs)
        ratios = " | ".join(f"{means[name] / means[base]:.2f}" for base in ("float32", "fp16"))
        print(f"| {name} | {steps_by_seed} | {means[name]:.0f} | {ratios} |")


if __name__ == "__main__":
    main()
