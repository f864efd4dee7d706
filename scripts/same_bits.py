"""Records what ten trainings come to, bit by bit, and compares two such records: the rule for every refactoring.

    ./scripts/run python scripts/same_bits.py record before.json
    ./scripts/run python scripts/same_bits.py record after.json       # on the changed code
    ./scripts/run python scripts/same_bits.py compare before.json after.json

A record holds, for each training, the SHA-256 of every array in the last checkpoint (weights, optimizer slots,
counters), the losses and metrics of every epoch, the test metrics and the number of reductions. Takes about four
minutes on two cores. The trainings start two ranks at most; train.deterministic=true makes them repeatable.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

TREE = Path(__file__).resolve().parents[1]
BASE = [
    "model=mlp",
    "dataset=digits",
    "train.epochs=2",
    "data.uneven=trim",
    "train.deterministic=true",
    "checkpoint.every_steps=17",
]
ONE: list[str] = []
GLOO = ["horovodrun", "--gloo", "-np", "2"]
MPI = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
# Name: the launcher, and the settings of the run. "->" starts the run again from its first checkpoint, which is in the
# middle of an epoch, with the launcher that follows.
RUNS: dict[str, list[Any]] = {
    "one rank": [ONE, ["optimizer=momentum"]],
    "two ranks, Gloo": [GLOO, ["optimizer=momentum", "dataset.shift_pixels=1"]],
    "two ranks, MPI": [MPI, ["optimizer=momentum", "dataset.shift_pixels=1"]],
    "accumulation": [MPI, ["optimizer=adam", "train.accumulate=3", "checkpoint.every_steps=18"]],
    "padded": [MPI, ["optimizer=momentum", "data.uneven=pad"]],
    "mixed precision": [MPI, ["optimizer=adam", "train.precision=mixed_float16"]],
    "cosine and clipping": [
        MPI,
        ["optimizer=adamw", "+optimizer.global_clipnorm=0.5", "schedule=cosine", "model=cnn"],
    ],
    "unlike batches": [MPI, ["optimizer=momentum", "train.batch_size=[24,8]"]],
    "resumed": [MPI, ["optimizer=adam", "dataset.shift_pixels=1"], MPI],
    "resumed on one rank": [MPI, ["optimizer=momentum"], ONE],
}
MEASURED = ("seconds", "examples_per_second", "flops_per_second", "share_of_peak")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Records what ten trainings come to, bit by bit; compares two records."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    record_command = commands.add_parser(
        "record", help="run the trainings on this checkout, and write what they came to"
    )
    record_command.add_argument("file", type=Path)
    compare_command = commands.add_parser(
        "compare", help="exit 1 if two records differ, and say where"
    )
    compare_command.add_argument("before", type=Path)
    compare_command.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        record(given.file)
    else:
        compare(given.before, given.after)


def record(file: Path) -> None:
    """Runs the trainings one after the other, and writes the record."""
    results = {}
    for name, (launcher, settings, *then) in RUNS.items():
        with tempfile.TemporaryDirectory(prefix="same-bits-") as place:
            folder = Path(place) / "run"
            start(launcher, settings, folder)
            for next_launcher in then:
                keep_first_checkpoint(folder)
                start(next_launcher, settings, folder)
            results[name] = outcome(folder)
        print(f"{name}: {results[name]['weights'][:12]}", flush=True)
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def start(launcher: list[str], settings: list[str], folder: Path) -> None:
    """One start of the run; ends this program where it fails."""
    command = [*launcher, sys.executable, "-m", "hvtrain", *BASE, *settings, f"run.dir={folder}"]
    environment = {**os.environ, "PYTHONPATH": str(TREE), "HYDRA_FULL_ERROR": "0"}
    done = subprocess.run(
        command, cwd=TREE, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(
            f"exit {done.returncode} of: {' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )


def keep_first_checkpoint(folder: Path) -> None:
    """Leaves the run as if it had ended right after its first checkpoint."""
    _, *later = sorted(path for path in (folder / "checkpoints").iterdir() if path.is_dir())
    for path in later:
        shutil.rmtree(path)
    for name in ("result.json", "newest-checkpoint.json"):
        (folder / name).unlink(missing_ok=True)


def outcome(folder: Path) -> dict[str, Any]:
    """What must not change of a finished run."""
    last = max(path for path in (folder / "checkpoints").iterdir() if path.is_dir())
    arrays = {
        name: array
        for path in sorted(last.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }
    digests = {
        name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in sorted(arrays.items())
    }
    with (folder / "history.csv").open(encoding="utf-8", newline="") as stream:
        epochs = [
            {k: v for k, v in row.items() if k not in MEASURED} for row in csv.DictReader(stream)
        ]
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return {
        "weights": hashlib.sha256(json.dumps(digests).encode()).hexdigest(),
        "checkpoint": last.name,
        "arrays": digests,
        "epochs": epochs,
        "test": result["metrics"],
        "reductions": result["proof"]["reductions"],
        "examples": result["proof"]["examples_each_epoch"],
    }


def compare(before: Path, after: Path) -> None:
    """Prints what differs; exits 1 where anything does."""
    first, second = (json.loads(path.read_text(encoding="utf-8")) for path in (before, after))
    differing = 0
    for name in {**first, **second}:
        old, new = first.get(name, {}), second.get(name, {})
        parts = [part for part in {**old, **new} if old.get(part) != new.get(part)]
        differing += bool(parts)
        print(f"{name}: {'the same' if not parts else 'DIFFERENT: ' + ', '.join(parts)}")
    sys.exit(f"{differing} of {len(first)} trainings differ" if differing else 0)


if __name__ == "__main__":
    main()
