"""Reads what runs left: the record or error that each rank saw (launching.many_runs), checkpoints and histories."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

Ranks = list[dict[str, Any]]


def record(ranks: Ranks, name: str) -> dict[str, Any]:
    """The record of a run that ended well, as rank 0 saw it."""
    result = ranks[0][name]
    return result.get("record") or pytest.fail(f"{name}: {result['error']}")


def error(ranks: Ranks, name: str) -> str:
    """The error of a run, which is the same on all ranks."""
    messages = {rank[name].get("error") for rank in ranks}
    assert len(messages) == 1 and None not in messages, messages
    return messages.pop()


def steps(run: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def state(run: Path, step: int) -> dict[str, np.ndarray]:
    """All arrays of the checkpoint of a step: weights, slots, metrics, and each rank's seeds."""
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "state.safetensors")


def different(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> list[str]:
    """The names of arrays that differ in any bit. Both must hold the same names."""
    assert first.keys() == second.keys()
    return [name for name in first if not np.array_equal(first[name], second[name], equal_nan=True)]


def history(run: Path) -> list[dict[str, str]]:
    """The rows of history.csv."""
    with (run / "history.csv").open() as stream:
        return list(csv.DictReader(stream))
