"""What each method for slow networks does to the result: the second table of docs/networks.md.

    python -m benchmarks.method_quality fashion          35 minutes on 2 ranks of this machine
    python -m benchmarks.method_quality text             35 minutes

Trains the same network with each method and with five seeds, for equally many steps, and prints the
mean and the standard deviation of the test metric. Results do not depend on what else the machine
does. With --output FILE a run that was interrupted goes on.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.processes import horovod_line, python_line

NUM_RANKS = 2
METHODS = {
    "float32": [],
    "fp16": ["strategy.compression=fp16"],
    "bf16": ["strategy.compression=bf16"],
    "int8": ["strategy.compression=int8"],
    "powersgd, rank 4": ["strategy.compression=powersgd"],
    "local_sgd, every 16": [
        "strategy=local_sgd",
        "strategy.every=16",
        "train.learning_rate_scale=none",
    ],
    "diloco, every 50": ["strategy=diloco", "strategy.every=50", "train.learning_rate_scale=none"],
}
TRAININGS = {
    "fashion": (
        ["model=cnn", "dataset=fashion_mnist", "train.batch_size=64", "train.epochs=2"],
        "test_accuracy",
    ),
    "text": (["experiment=text_transformer", "train.epochs=4"], "test_perplexity"),
}


def trained(overrides: list[str]) -> tuple[dict[str, Any], str]:
    """Trains on both ranks; returns the run's result and its output."""
    with tempfile.TemporaryDirectory(prefix="hvtrain-quality-") as folder:
        run = Path(folder) / "run"
        settings = [*overrides, f"run.dir={run}", "run.report=false"]
        line = horovod_line("gloo", NUM_RANKS, python_line("hvtrain", settings))
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(
                f"{shlex.join(settings)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr}"
            )
        return json.loads((run / "result.json").read_text()), done.stdout


def measure_missing(
    what: str,
    methods: Mapping[str, Sequence[str]],
    num_seeds: int,
    output: Path | None,
    measure: Callable[[list[str]], float],
) -> dict[str, dict[str, float]]:
    """Measures each method with the seeds 1 to num_seeds; returns the values by method and seed.

    Args:
        what: What is measured.
        methods: Settings by the name of the method.
        num_seeds: Number of seeds.
        output: Where values are kept; those that it has already are not measured again.
        measure: Takes a method's settings with a seed.

    Raises:
        SystemExit: The output file has values of something else.
    """
    values: dict[str, dict[str, float]] = {name: {} for name in methods}
    if output and output.exists():
        stored = json.loads(output.read_text())
        if stored["what"] != what:
            raise SystemExit(f"{output} has {stored['what']}, not {what}; give another file")
        values.update(stored["values"])
    for seed in map(str, range(1, num_seeds + 1)):
        for name, method in methods.items():
            if seed in values[name]:
                continue
            values[name][seed] = measure([*method, f"seed={seed}"])
            print(f"seed {seed}, {name}: {values[name][seed]:.6g}", flush=True)
            if output:
                output.write_text(json.dumps({"what": what, "values": values}))
    return values


def main() -> None:
    """Trains what is missing in the output file, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("training", choices=sorted(TRAININGS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="values by method and seed, in JSON")
    arguments = sys.argv[1:]
    options = parser.parse_args()
    common, metric = TRAININGS[options.training]

    def test_metric(method: list[str]) -> float:
        result, _ = trained([*common, *method])
        return result["metrics"][metric]

    what = f"{metric} of {options.training}"
    values = measure_missing(what, METHODS, options.seeds, options.output, test_metric)
    command = shlex.join(["python", "-m", "benchmarks.method_quality", *arguments])
    print(f"\n{command}, {datetime.now():%Y-%m-%d}\n")
    print(f"| | {metric}, mean | standard deviation |\n|---|---|---|")
    for name, by_seed in values.items():
        means = list(by_seed.values())
        # One seed has no deviation.
        deviation = statistics.stdev(means) if len(means) > 1 else float("nan")
        print(f"| {name} | {statistics.mean(means):.4f} | {deviation:.4f} |")


if __name__ == "__main__":
    main()
