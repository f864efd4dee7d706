"""What guards, watchdog and checkpoints cost: step times with the defaults and without any of them, in turns.

    python -m benchmarks.guard_cost --pairs 5

Two ranks train the CNN on Fashion-MNIST. Each run takes a step's time as wall time over whole
epochs, the checkpoint at each epoch's end included, the first epoch left out. The figure is the
median over pairs of the ratio with / without.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from launching import ROOT, environment

RUN = [
    "dataset=fashion_mnist",
    "train.batch_size=64",
    "train.validate_every_epochs=null",
    "train.epochs=3",
    "+callbacks.clock._target_=benchmarks.guard_cost.clock",
]
WITHOUT = [
    "guard.every=0",
    "guard.finite=false",
    "guard.batches=false",
    "guard.data=false",
    "watchdog.abort_seconds=0",
    "checkpoint.every_epochs=null",
]


def clock() -> Any:
    """A callback that writes the seconds a step to the file HVTRAIN_COST_FILE (rank 0)."""
    import keras

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.begins: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begins.append(time.perf_counter())

        def on_train_end(self, logs: Any = None) -> None:
            # The first epoch has the trace of the graph; the last has no end here.
            whole_epochs = len(self.begins) - 2
            seconds = (self.begins[-1] - self.begins[1]) / (self.params["steps"] * whole_epochs)
            if os.environ.get("HOROVOD_RANK", "0") == os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
                Path(os.environ["HVTRAIN_COST_FILE"]).write_text(json.dumps(seconds))

    return Clock()


def step_seconds(overrides: list[str], folder: Path, name: str) -> float:
    """Trains once and returns the seconds a step."""
    file = folder / f"{name}.json"
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    launcher = ["horovodrun", "--mpi", "-np", "2", sys.executable, "-m", "hvtrain"]

    done = subprocess.run(
        [*launcher, *RUN, *overrides, f"run.dir={folder / name}"],
        env=environment(HVTRAIN_COST_FILE=str(file), PYTHONPATH=path),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return float(json.loads(file.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="more settings for both runs")
    options = parser.parse_args()

    ratios = []
    with tempfile.TemporaryDirectory(prefix="hvtrain-cost-") as folder:
        for pair in range(options.pairs):
            seconds_of = {}
            # The order changes, so that a machine that slows down favors neither.
            for kind in ("with", "without") if pair % 2 else ("without", "with"):
                overrides = [*options.overrides, *(WITHOUT if kind == "without" else [])]
                seconds_of[kind] = step_seconds(overrides, Path(folder), f"{pair}-{kind}")

            # Of the same pair, because a shared machine can be slower for minutes at a time.
            ratios.append(seconds_of["with"] / seconds_of["without"])
            shown = ", ".join(f"{kind} {1000 * seconds:.2f} ms" for kind, seconds in sorted(seconds_of.items()))
            print(f"pair {pair + 1}: {shown}, ratio {ratios[-1]:.4f}", flush=True)

    print(f"median of {len(ratios)} pairs: {statistics.median(ratios):.4f}")


if __name__ == "__main__":
    main()
