"""Checkpoints on disk: atomic, checksummed, and never code. Knows no ranks; the chief alone calls it.

A checkpoint is a folder step-NNNNNNNN with state.safetensors (arrays), meta.json (everything else) and
SHA256SUMS over both, as the command sha256sum writes it. It is written under a temporary name, flushed to
the disk and then renamed, so a folder of that name is whole or it is damaged and its checksum says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
from safetensors.numpy import load, save

from hvtrain.errors import CheckpointError
from hvtrain.records import write_atomic

_ARRAYS, _META, _SUMS, _BEST = "state.safetensors", "meta.json", "SHA256SUMS", "best.json"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint as read. arrays are keyed "model/0000/PATH", "optimizer/0000/PATH", "rank/0/NAME"."""

    path: Path
    step: int
    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def rank_state(self, rank: int) -> dict[str, np.ndarray]:
        """What write was given for this rank: seeds of dropout, metrics of the epoch begun."""
        prefix = f"rank/{rank}/"
        return {key.removeprefix(prefix): array for key, array in self.arrays.items() if key.startswith(prefix)}


def write(
    folder: Path,
    step: int,
    model: keras.Model,
    meta: dict[str, Any],
    rank_states: list[dict[str, np.ndarray]],
    more: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes folder/step-NNNNNNNN and returns it. Raises CheckpointError; older checkpoints stay as they are."""
    arrays = {key: variable.numpy() for key, variable in _variables(model).items()}
    arrays.update(more or {})
    for rank, state in enumerate(rank_states):
        arrays.update({f"rank/{rank}/{name}": array for name, array in state.items()})
    # safetensors knows no bfloat16 in NumPy: such arrays go as their bits, and meta says which they are.
    halves = [key for key, array in arrays.items() if array.dtype == ml_dtypes.bfloat16]
    arrays.update({key: arrays[key].view(np.uint16) for key in halves})
    files = {
        _ARRAYS: save({key: np.asarray(array, order="C") for key, array in arrays.items()}),
        _META: json.dumps({**meta, "step": step, "bfloat16": halves}, indent=1).encode(),
    }
    files[_SUMS] = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()).encode()
    target = folder / f"step-{step:08d}"
    temporary = folder / f".tmp-{target.name}"
    try:
        _write_folder(temporary, files)
        _replace(temporary, target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        needed = sum(map(len, files.values()))
        free = shutil.disk_usage(_existing(folder)).free
        raise CheckpointError(
            f"checkpoint {target.name} was not written: {error.strerror} ({needed:,} bytes needed, {free:,} free "
            f"at {folder}); make room there, then start again with the same run.dir to go on from the one before"
        ) from error
    return target


def read(path: Path) -> Checkpoint:
    """Reads one checkpoint after its checksums were found right. Raises CheckpointError otherwise."""
    try:
        lines = (path / _SUMS).read_text().splitlines()
        sums = {name: found for found, name in (line.split("  ", 1) for line in lines)}
        files = {name: (path / name).read_bytes() for name in (_ARRAYS, _META)}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path.name} is damaged: {error}") from error
    for name, data in files.items():
        found = hashlib.sha256(data).hexdigest()
        if found != sums.get(name):
            raise CheckpointError(
                f"checkpoint {path.name} is damaged: {name} has SHA-256 {found[:12]}..., "
                f"its list says {str(sums.get(name))[:12]}..."
            )
    meta = json.loads(files[_META])
    arrays = load(files[_ARRAYS])
    for key in meta.pop("bfloat16"):
        arrays[key] = arrays[key].view(ml_dtypes.bfloat16)
    return Checkpoint(path, int(meta["step"]), meta, arrays)


def read_newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, or None, and one line for each damaged one that was passed over.

    Raises CheckpointError when there are checkpoints and all of them are damaged.
    """
    damaged: list[str] = []
    for path in reversed(_listed(folder)):
        try:
            return read(path), damaged
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(
            f"{damaged[0]}; no other checkpoint in {folder} is whole; choose another run.dir to start anew"
        )
    return None, []


def restore(checkpoint: Checkpoint, model: keras.Model) -> None:
    """Sets weights and optimizer, which must be built. Raises CheckpointError naming the first difference."""
    saved = sorted(item for item in checkpoint.arrays.items() if item[0].startswith(("model/", "optimizer/")))
    wanted = sorted(_variables(model).items())
    for (ours, variable), (theirs, array) in zip_longest(wanted, saved, fillvalue=(None, None)):
        if ours != theirs or tuple(variable.shape) != tuple(array.shape):  # type: ignore[union-attr]
            raise CheckpointError(
                f"checkpoint {checkpoint.path.name} is of another model or optimizer: it holds "
                f"{_described(theirs, array)} where this run has {_described(ours, variable)}; "
                "use the settings it was made with, or another run.dir"
            )
    for (_, variable), (_, array) in zip(wanted, saved):
        variable.assign(array)


def rank_state(model: keras.Model) -> dict[str, np.ndarray]:
    """What differs from rank to rank: seeds of dropout and the like, and the metrics of the epoch begun.

    And the factor on the learning rate, which is no variable of the optimizer.
    """
    state = {f"seed/{index:04d}": variable.numpy() for index, variable in enumerate(_seeds(model))}
    state.update({f"metric/{index:04d}": v.numpy() for index, v in enumerate(model.metrics_variables)})
    factor = rate_factor(model)
    if factor is not None:
        state["rate/factor"] = factor.numpy()
    return state


def restore_rank(state: dict[str, np.ndarray], model: keras.Model) -> None:
    """Sets the seeds and the factor on the learning rate that rank_state saved; seeds that it does not know stay."""
    factor = rate_factor(model)
    if factor is not None and "rate/factor" in state:
        factor.assign(state["rate/factor"])
    for index, variable in enumerate(_seeds(model)):
        if f"seed/{index:04d}" in state:
            variable.assign(state[f"seed/{index:04d}"])


def mark_best(folder: Path, step: int, metric: str, value: float) -> None:
    """Names the best checkpoint so far; prune keeps it."""
    write_atomic(folder / _BEST, json.dumps({"step": step, "metric": metric, "value": value}) + "\n")


def read_best(folder: Path) -> dict[str, Any] | None:
    """What mark_best wrote last: step, metric and value."""
    path = folder / _BEST
    return json.loads(path.read_text()) if path.exists() else None


def prune(folder: Path, keep: int) -> None:
    """Deletes all but the `keep` newest checkpoints and the best one, and what an interrupted write left."""
    best = read_best(folder)
    kept = {path.name for path in _listed(folder)[-keep:]} | {f"step-{best['step']:08d}" if best else ""}
    for path in [*_listed(folder), *folder.glob(".tmp-*")]:
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _listed(folder: Path) -> list[Path]:
    """Checkpoints by step, the oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _variables(model: keras.Model) -> dict[str, Any]:
    groups = {"model": model.weights, "optimizer": model.optimizer.variables}
    return {f"{name}/{i:04d}/{v.path}": v for name, group in groups.items() for i, v in enumerate(group)}


def _seeds(model: keras.Model) -> list[Any]:
    weights = {id(variable) for variable in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


def rate_factor(model: keras.Model) -> Any:
    """The variable by which callbacks change the scheduled rate, if the optimizer's rate has one."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return getattr(optimizer._learning_rate, "factor", None)


def _described(key: str | None, value: Any) -> str:
    return "nothing" if key is None else f"{key} of shape {tuple(value.shape)}"


def _write_folder(folder: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in files.items():
        with (folder / name).open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    _sync(folder)


def _replace(temporary: Path, target: Path) -> None:
    """Puts the new folder in the place of an old one of the same step, which is damaged or about to be redone."""
    if target.exists():
        old = target.with_name(f".tmp-old-{target.name}")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(target)
    _sync(target.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)
