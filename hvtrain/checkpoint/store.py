"""Content of a checkpoint, and how it is read: arrays and JSON under checksums, never code. Knows no ranks.

A checkpoint is a folder step-NNNNNNNN with state.safetensors (arrays), meta.json (everything else) and
SHA256SUMS over both, as the command sha256sum writes it; writer.py writes it. The folder is not trusted: nothing in it
is executed or instantiated, no link is followed, no name in it is used as a path.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load

from hvtrain.checkpoint.notes import checked_run_id, folder_name
from hvtrain.core.records import remove
from hvtrain.errors import CheckpointError, StorageError

if TYPE_CHECKING:  # Reading and writing files works without Keras, which takes seconds to import.
    import keras

ARRAYS, META, SUMS = "state.safetensors", "meta.json", "SHA256SUMS"
_NAME = re.compile(r"step-([0-9]{8,})")
# Attributes that Keras's EarlyStopping, ReduceLROnPlateau and the like count with, and reset whenever a fit begins.
NUMBERS = ("wait", "best", "best_epoch", "cooldown_counter")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory. arrays are keyed "model/0000/PATH", "optimizer/0000/PATH", "rank/0/NAME"."""

    path: Path
    step: int
    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def rank_state(self, rank: int) -> dict[str, np.ndarray]:
        """The arrays that rank_state() gave for this rank."""
        prefix = f"rank/{rank}/"
        return {key.removeprefix(prefix): array for key, array in self.arrays.items() if key.startswith(prefix)}

    def callbacks(self) -> dict[str, dict[str, Any]]:
        """Numbers and best weights of callbacks, as CallbackState wrote them. Raises CheckpointError."""
        # Only numbers of known names, so that a checkpoint cannot set any other attribute of a callback.
        try:
            saved: dict[str, dict[str, Any]] = {
                name: {key: float(numbers[key]) for key in NUMBERS if key in numbers}
                for name, numbers in self.meta.get("callbacks", {}).items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's callback state is not made of numbers ({error}); choose another run.dir"
            ) from error
        for name, values in saved.items():
            weights = [self.arrays[key] for key in sorted(self.arrays) if key.startswith(f"callback/{name}/")]
            if weights:
                values["best_weights"] = weights
        return saved

    def unlogged(self) -> dict[str, float]:
        """Results of a validation that no epoch's logs had yet. Raises CheckpointError."""
        try:
            return {str(name): float(value) for name, value in self.meta.get("unlogged", {}).items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's results of a validation are not numbers ({error}); choose another run.dir"
            ) from error


def snapshot(
    model: "keras.Model", rank_states: list[dict[str, np.ndarray]], more: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Copies of the arrays of a checkpoint, which further training does not change."""
    arrays = {key: variable.numpy() for key, variable in _variables(model).items()}
    arrays.update({key: np.array(array) for key, array in (more or {}).items()})
    for rank, state in enumerate(rank_states):
        arrays.update({f"rank/{rank}/{name}": array for name, array in state.items()})
    return arrays


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints by step, the oldest first. Raises CheckpointError if the folder cannot be read."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}; fix that, then start again") from error
    steps = {int(match[1]) for match in map(_NAME.fullmatch, names) if match}
    return [path for step in sorted(steps) if (path := folder / folder_name(step)).is_dir()]


def read(path: Path) -> Checkpoint:
    """Checks the checksums of a checkpoint, and reads it.

    Raises:
        CheckpointError: it is damaged.
        StorageError: it may be intact, but the disk cannot be read.
    """
    try:
        if path.is_symlink():
            raise ValueError("it is a symbolic link, and may lead out of the run folder")
        lines = _read_regular(path / SUMS).decode().splitlines()
        sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        files = {name: _read_regular(path / name) for name in (ARRAYS, META)}
        for name, data in files.items():
            found, listed = hashlib.sha256(data).hexdigest(), sums.get(name)
            if found != listed:
                said = f"{listed[:12]}..." if listed else "nothing"
                raise ValueError(f"{name} has SHA-256 {found[:12]}..., and {SUMS} lists {said}")
        meta, arrays = json.loads(files[META]), load(files[ARRAYS])
        for key in meta.pop("bfloat16"):
            arrays[key] = arrays[key].view(ml_dtypes.bfloat16)
        if path.name != folder_name(meta["step"]):
            raise ValueError(f"it is of step {meta['step']}")
        return Checkpoint(path, meta["step"], meta, arrays)
    except MemoryError:
        raise
    except Exception as error:  # Parsers may raise anything on garbage with matching checksums.
        missing = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        if isinstance(error, OSError) and not missing:
            # An input/output error or a missing permission does not mean that the checkpoint is damaged.
            raise StorageError(
                f"checkpoint {path.name} cannot be read: {error.strerror} ({path}); "
                "fix that, and start again with the same run.dir"
            ) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"checkpoint {path.name} is damaged: {reason}") from error


def _read_regular(path: Path) -> bytes:
    """The content of a regular file; a link may lead anywhere, and a pipe never ends."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"{path.name} is not a regular file")
    return path.read_bytes()


def run_id(path: Path) -> str | None:
    """The run identifier in a checkpoint, without a look at the checksums; None if it has none or cannot be read."""
    try:
        found = json.loads(_read_regular(path / META)) if not path.is_symlink() else {}
        return checked_run_id(found.get("run_id"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def set_aside(path: Path, reason: str, taken_step: int) -> str:
    """Renames a damaged checkpoint to damaged-step-NNNNNNNN, so that none is lost; returns the line that says so."""
    lost = step_of(path) - taken_step
    aside = path.with_name(f"damaged-{path.name}")
    try:
        remove(aside)
        path.rename(aside)
        kept = f" (kept as {aside.name})"
    except OSError:
        kept = ""
    return f"{reason}{kept}; {folder_name(taken_step)} is taken, {lost:,} step{' is' if lost == 1 else 's are'} lost"


def restore(checkpoint: Checkpoint, model: "keras.Model", parts: tuple[str, ...] = ("model", "optimizer")) -> None:
    """Sets weights and optimizer, which must be built. Raises CheckpointError that names the first difference."""
    prefixes = tuple(f"{part}/" for part in parts)
    saved = sorted(item for item in checkpoint.arrays.items() if item[0].startswith(prefixes))
    wanted = sorted(item for item in _variables(model).items() if item[0].startswith(prefixes))
    for (ours, variable), (theirs, array) in zip_longest(wanted, saved, fillvalue=(None, None)):
        if ours != theirs or tuple(variable.shape) != tuple(array.shape):  # type: ignore[union-attr]
            what = f"checkpoint {checkpoint.path.name} is of another model or optimizer: it"
            raise CheckpointError(_difference(what, (theirs, array), (ours, variable)))
    for (_, variable), (_, array) in zip(wanted, saved):
        variable.assign(array)


def rank_state(model: "keras.Model") -> dict[str, np.ndarray]:
    """State of one rank: seeds of dropout and the like, metrics of the current epoch, the learning rate's factor."""
    metrics = {f"metric/{index:04d}": variable for index, variable in enumerate(model.metrics_variables)}
    return {name: variable.numpy() for name, variable in {**_rank_variables(model), **metrics}.items()}


def restore_rank(state: dict[str, np.ndarray], model: "keras.Model") -> None:
    """Sets the seeds and the learning rate's factor that rank_state saved; seeds that were not saved stay."""
    for name, variable in _rank_variables(model).items():
        if name in state:
            if tuple(variable.shape) != state[name].shape:
                raise CheckpointError(_difference("the checkpoint", (name, state[name]), (name, variable)))
            variable.assign(state[name])


def _variables(model: "keras.Model") -> dict[str, Any]:
    groups = {"model": model.weights, "optimizer": model.optimizer.variables}
    return {f"{name}/{i:04d}/{v.path}": v for name, group in groups.items() for i, v in enumerate(group)}


def _rank_variables(model: "keras.Model") -> dict[str, Any]:
    weights, factor = {id(variable) for variable in model.weights}, rate_factor(model)
    seeds = [variable for variable in model.variables if id(variable) not in weights]
    found = {f"seed/{index:04d}": variable for index, variable in enumerate(seeds)}
    return found if factor is None else {**found, "rate/factor": factor}  # It is no variable of the optimizer.


def rate_factor(model: "keras.Model") -> Any:
    """The variable with which callbacks scale the scheduled rate, if the optimizer's rate has one."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return getattr(optimizer._learning_rate, "factor", None)


def _difference(subject: str, saved: tuple[str | None, Any], wanted: tuple[str | None, Any]) -> str:
    """An error message about two named arrays, of which one may be missing."""
    theirs, ours = (f"{key} of shape {tuple(a.shape)}" if key else "nothing" for key, a in (saved, wanted))
    return f"{subject} holds {theirs} where this run has {ours}; use the settings it was made with, or another run.dir"
