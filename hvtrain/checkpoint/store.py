"""What a checkpoint holds, and how it comes back: arrays and JSON under checksums, never code. Knows no ranks.

A checkpoint is a folder step-NNNNNNNN with state.safetensors (arrays), meta.json (everything else) and
SHA256SUMS over both, as the command sha256sum writes it; writer.py writes it. Whoever made the folder may
have meant harm: nothing in it is executed or instantiated, no link is followed, no name in it is used as a path.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load

from hvtrain.checkpoint.notes import checked_run_id
from hvtrain.errors import CheckpointError, StorageError

if TYPE_CHECKING:  # What writes and reads files needs no Keras, and starts without it.
    import keras

ARRAYS, META, SUMS = "state.safetensors", "meta.json", "SHA256SUMS"
_NAME = re.compile(r"step-([0-9]{8,})")
_DAMAGED = "damaged-"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint as read. arrays are keyed "model/0000/PATH", "optimizer/0000/PATH", "rank/0/NAME"."""

    path: Path
    step: int
    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def rank_state(self, rank: int) -> dict[str, np.ndarray]:
        """What snapshot was given for this rank: seeds of dropout, metrics of the epoch begun."""
        prefix = f"rank/{rank}/"
        return {key.removeprefix(prefix): array for key, array in self.arrays.items() if key.startswith(prefix)}


def snapshot(
    model: keras.Model, rank_states: list[dict[str, np.ndarray]], more: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint: copies, which training cannot change any more."""
    arrays = {key: variable.numpy() for key, variable in _variables(model).items()}
    arrays.update({key: np.array(array) for key, array in (more or {}).items()})
    for rank, state in enumerate(rank_states):
        arrays.update({f"rank/{rank}/{name}": array for name, array in state.items()})
    return arrays


def name_of(step: int) -> str:
    """The folder of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder, by its name."""
    return int(path.name.removeprefix("step-"))


def listed(folder: Path) -> list[Path]:
    """Checkpoints by step, the oldest first. Raises CheckpointError where the folder cannot be read."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}; mend that, then start again") from error
    steps = {int(match[1]) for match in map(_NAME.fullmatch, names) if match}
    return [path for step in sorted(steps) if (path := folder / name_of(step)).is_dir()]


def read(path: Path) -> Checkpoint:
    """Reads one checkpoint after its checksums were found right.

    Raises:
        CheckpointError: it is damaged.
        StorageError: nobody knows, for it cannot be read.
    """
    try:
        if path.is_symlink():
            raise ValueError("it is a symbolic link, and may lead out of the run folder")
        lines = _regular(path / SUMS).decode().splitlines()
        sums = {name: found for found, _, name in (line.partition("  ") for line in lines)}
        files = {name: _regular(path / name) for name in (ARRAYS, META)}
        for name, data in files.items():
            found = hashlib.sha256(data).hexdigest()
            if found != sums.get(name):
                said = f"{sums[name][:12]}..." if name in sums else "nothing"
                raise ValueError(f"{name} has SHA-256 {found[:12]}..., its list says {said}")
        return _parsed(path, files)
    except MemoryError:
        raise
    except Exception as error:  # Where the sums are right over garbage, parsers raise whatever they like.
        missing = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        if isinstance(error, OSError) and not missing:
            # A disk that does not answer, or that may not be read, says nothing about what lies on it.
            raise StorageError(
                f"checkpoint {path.name} cannot be read: {error.strerror} ({path}); "
                "mend that, and start again with the same run.dir"
            ) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"checkpoint {path.name} is damaged: {reason}") from error


def _parsed(path: Path, files: dict[str, bytes]) -> Checkpoint:
    meta = json.loads(files[META])
    arrays = load(files[ARRAYS])
    for key in meta.pop("bfloat16"):
        arrays[key] = arrays[key].view(ml_dtypes.bfloat16)
    if path.name != name_of(meta["step"]):
        raise ValueError(f"it is of step {meta['step']}")
    return Checkpoint(path, meta["step"], meta, arrays)


def _regular(path: Path) -> bytes:
    """Of a plain file: a link may lead anywhere, and a pipe never ends."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"{path.name} is no regular file")
    return path.read_bytes()


def run_id(path: Path) -> str | None:
    """Of which run a checkpoint says it is, unchecked; None where it does not, or cannot be read."""
    try:
        found = json.loads(_regular(path / META)) if not path.is_symlink() else {}
        return checked_run_id(found.get("run_id"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def read_newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, or None, and one line for each damaged one that was passed over.

    Those are renamed to damaged-step-NNNNNNNN, so that the run goes on as if they were not there and none is lost.
    Raises CheckpointError when there are checkpoints and all of them are damaged.
    """
    damaged: dict[Path, str] = {}
    for path in reversed(listed(folder)):
        try:
            found = read(path)
        except CheckpointError as error:
            damaged[path] = str(error)
            continue
        return found, [passed_over(other, line, found.step) for other, line in damaged.items()]
    if damaged:
        raise CheckpointError(
            f"{next(iter(damaged.values()))}; no other checkpoint in {folder} is whole; "
            "choose another run.dir to start anew"
        )
    return None, []


def passed_over(path: Path, line: str, taken_step: int) -> str:
    """Renames a damaged checkpoint, and completes the line about it."""
    lost = step_of(path) - taken_step
    aside = path.with_name(f"{_DAMAGED}{path.name}")
    try:
        remove(aside)
        path.rename(aside)
        kept = f" (kept as {aside.name})"
    except OSError:
        kept = ""
    return f"{line}{kept}; {name_of(taken_step)} is taken, {lost:,} step{' is' if lost == 1 else 's are'} lost"


def remove(path: Path) -> None:
    """Removes a file, a link but not what it leads to, or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
    variables = {f"seed/{index:04d}": variable for index, variable in enumerate(_seeds(model))}
    for name, variable in {**variables, "rate/factor": rate_factor(model)}.items():
        if variable is not None and name in state:
            if tuple(variable.shape) != state[name].shape:
                raise CheckpointError(
                    f"the checkpoint holds {_described(name, state[name])} where this run has "
                    f"{_described(name, variable)}; use the settings it was made with, or another run.dir"
                )
            variable.assign(state[name])


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
