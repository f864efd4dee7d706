"""Run folders as runs leave them, with few and known numbers, written without a run."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from hvtrain.core.figures import Figure, Matrix, Pictures, Scatter, Table, Texts
from hvtrain.system.run_files import (
    REVIEW_FILE,
    STARTS_FILE,
    EpochRecord,
    RunRecord,
    history_table,
    ranks_table,
    write_result,
)

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
CONFIG: dict[str, Any] = {
    "model": {"_target_": "hvtrain.models.mlp", "hidden": [32]},
    "train": {"epochs": 4, "steps": None, "batch_size": 32},
    "seed": 1,
}
SPLIT = {
    "data_seconds": 0.001,
    "compute_seconds": 0.006,
    "communication_seconds": 0.003,
    "efficiency": 0.7,
    "slowest_rank": 1,
    "slowest_host": "s2",
    "slowest_seconds": 0.008,
    "median_seconds": 0.0075,
}
START: dict[str, Any] = {
    "began": "2026-11-24T10:00:00+01:00",
    "command": "horovodrun -np 2 python -m hvtrain model=mlp " + "model.hidden=[32] " * 20,
    "folder": "/home/someone/" + "a_long_name_without_spaces/" * 6,
    "num_ranks": 2,
    "hosts": {"s1": 1, "s2": 1},
    "first_step": 0,
    "num_steps": 40,
    "steps_per_epoch": 10,
    "best": "val_accuracy",
    "sign": 1,
    "described": {
        "ranks": "2 (Horovod on MPI)",
        "model": "hvtrain.models.mlp, 1,234 parameters, float32",
    },
    "versions": {"hvtrain": "0.1.0", "keras": "3.15.1"},
    "system": {"system": "Linux", "processor": "some processor", "cores": 2},
    "git": {
        "commit": "0" * 40,
        "branch": "main",
        "changed": [" M train.py"],
        "diff": "-a\n+" + "b" * 300,
    },
}
COUNTS = [[true * (true == predicted) for predicted in range(10)] for true in range(10)]
FIGURES: list[Figure] = [
    Matrix("Confusion matrix", "97% are right.", [str(label) for label in range(10)], COUNTS),
    Pictures("Worst examples", "Wrong.", [(PIXEL, "8, taken for 1 (96%)")] * 8),
    Pictures("Masks", "Image and masks.", [(PIXEL, "example 3: mean IoU 0.41")] * 3, [("circle", "#e07b39")]),
    Table("Labels", "On all.", ["label", "precision"], [[0, "97.1%"], [1, "88.0%"]]),
    Table("Worst rows", "Wrong.", ["row", *(f"a_long_name_{n}" for n in range(12))], [[0, *("a value",) * 12]]),
    Texts("Samples", "Beginnings.", [("Once upon a time " * 20, "there was " + "a" * 300)], is_continuation=True),
    Scatter("Residuals", "Half within 1.", "prediction", "prediction - target", [(0.0, 0.1), (1.0, -0.2)], "zero"),
    Scatter("Predictions", "All.", "target", "prediction", [(0.0, 0.1), (1.0, 0.8)], "diagonal"),
]  # fmt: skip


def history(num_epochs: int) -> list[EpochRecord]:
    return [
        EpochRecord(
            epoch,
            10 * epoch,
            0.01 / epoch,
            1.5,
            1000.0 + 100 * epoch,
            {
                "loss": 1 / epoch,
                "accuracy": 1 - 0.5 / epoch,
                "val_loss": 1.2 / epoch,
                "val_accuracy": 0.1 * epoch,
            },
        )
        for epoch in range(1, num_epochs + 1)
    ]


def record(**changes: Any) -> RunRecord:
    values: dict[str, Any] = {
        "test_accuracy": 0.97,
        "test_loss": 0.1,
        "examples_per_second": 2000.0,
        "step_seconds": 0.01,
        "num_ranks": 2,
        "num_parameters": 1234,
        "num_steps": 40,
        "global_batch": 64,
        "seconds": 75.0,
        "reductions": 40,
        "first_step": 0,
        "proof": {
            **{"reductions": 40, "steps": 40, "ranks": 2, "weight_checks": 5},
            **{"examples_each_epoch": [640] * 4, "examples": 650},
        },
        "metrics": {"test_loss": 0.1, "test_accuracy": 0.97},
        "versions": START["versions"],
        "config": CONFIG,
        "split": SPLIT,
        "best": {"step": 30, "metric": "val_accuracy", "value": 0.4, "metrics": {}},
        "skipped_examples": 0,
        "per_second": {},
        "changes": [{"step": 20, "changed": {"train.epochs": [2, 4]}}],
        "differences": [],
        "num_replicas": None,
        "goodput": {},
        "data": {},
    }
    return RunRecord(**{**values, **changes})


def write_run(
    folder: Path, *, finished: bool = True, num_epochs: int = 4, log: str = "", **changes: Any
) -> Path:
    """A run folder of four epochs on two ranks; changes are those of its record."""
    (folder / "checkpoints" / f"step-{10 * num_epochs:08d}").mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "config.yaml").write_text("defaults: [_self_]\nseed: 1\ntrain: {epochs: 4}\n")
    (folder / "logs/rank-0000.log").write_text(
        f"2026-11-24 10:00:00,123 INFO hvtrain.runner: it began\n{log}"
    )
    history_table(folder).save(history(num_epochs))
    ranks_table(folder).save(
        [(epoch, [0.005, 0.006 + epoch / 1000]) for epoch in range(1, num_epochs + 1)]
    )
    (folder / STARTS_FILE).write_text(json.dumps([{**START, "num_ranks": 3}, START]))
    (folder / REVIEW_FILE).write_text(json.dumps([asdict(figure) for figure in FIGURES]))
    if finished:
        write_result(folder, record(**changes))
    return folder


def saved(run_dir, step=None):
    """Step and arrays of a checkpoint, the newest one if none is named."""
    paths = sorted((run_dir / "checkpoints").glob("step-*"))
    path = paths[-1] if step is None else run_dir / "checkpoints" / f"step-{step:08d}"
    return int(path.name[5:]), load_file(path / "state.safetensors")


def cut_off(source, target, step):
    """A copy of a run folder as an interruption would leave it after that checkpoint."""
    shutil.copytree(source, target)
    for path in (target / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    for name in ("result.json", "model.json", "model.keras"):
        (target / name).unlink(missing_ok=True)


def distance(ours, others):
    """Largest relative difference of weights, slots and iterations."""
    names = [name for name in others if name.startswith(("model/", "optimizer/"))]
    assert names == [name for name in ours if name.startswith(("model/", "optimizer/"))]
    return max(
        np.max(np.abs(ours[n] - others[n].astype("float64"))) / (np.max(np.abs(others[n])) or 1)
        for n in names
    )
