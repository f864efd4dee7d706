"""Content of a checkpoint, and how it is read: arrays and JSON under checksums, never code.

Knows no ranks. A checkpoint is a folder step-NNNNNNNN with state.safetensors (arrays), meta.json
(everything else) and SHA256SUMS over both, as the command sha256sum writes it; writer.py writes it.
The folder is not trusted: nothing in it is executed or instantiated, no link is followed, no name
in it is used as a path.
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

from hvtrain.core.checkpoint_notes import checked_run_id, folder_name
from hvtrain.core.files import remove
from hvtrain.errors import CheckpointError, StorageError

if TYPE_CHECKING:  # Reading and writing files works without Keras, which takes seconds to import.
    import keras

ARRAYS = "state.safetensors"
META = "meta.json"
MEMORY = "memory/"
"""Begins the names of a rank's arrays that rank_memory returned."""
SAME = f"{MEMORY}same/"
"""Begins the names of those that are equal on all ranks."""
TABLES = "tables.safetensors"
"""Embedding tables and their slots, if they are sharded over the ranks."""
SUMS = "SHA256SUMS"
MAX_HEADER_BYTES = 16 << 20
# Of tables, as safetensors calls them.
_TYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
_NAME = re.compile(r"step-([0-9]{8,})")

# Attributes that Keras's EarlyStopping, ReduceLROnPlateau and the like count with, and reset
# whenever a fit begins.
NUMBERS = ("wait", "best", "best_epoch", "cooldown_counter")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory."""

    path: Path
    step: int
    meta: dict[str, Any]
    # Keyed "model/0000/PATH", "optimizer/0000/PATH", "rank/0/NAME", "callback/NAME/0000".
    arrays: dict[str, np.ndarray]

    def rank_state(self, rank: int) -> dict[str, np.ndarray]:
        """Returns the arrays that rank_state() gave for this rank."""
        prefix = f"rank/{rank}/"
        return {key.removeprefix(prefix): array for key, array in self.arrays.items() if key.startswith(prefix)}

    def callbacks(self) -> dict[str, dict[str, Any]]:
        """Returns numbers and best weights of callbacks, as CallbackState wrote them.

        Raises:
            CheckpointError: if they are not numbers.
        """
        # Known names only, so that a checkpoint cannot set any other attribute of a callback.
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
        """Returns results of a validation that no epoch's logs had yet.

        Raises:
            CheckpointError: if they are not numbers.
        """
        try:
            return {str(name): float(value) for name, value in self.meta.get("unlogged", {}).items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's results of a validation are not numbers ({error}); choose another run.dir"
            ) from error


def snapshot(
    model: "keras.Model",
    rank_states: list[dict[str, np.ndarray]],
    callback_arrays: dict[str, np.ndarray] | None = None,
    parts: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Returns copies of the arrays of a checkpoint, which further training does not change.

    Args:
        model: the model whose weights and optimizer are saved.
        rank_states: results of rank_state(), by rank.
        callback_arrays: best weights of callbacks, by key.
        parts: the values of sharded_variables, whole.
    """
    variables = _variables(model)
    # In one order, whatever is sharded.
    arrays = {
        key: (parts or {})[key] if hasattr(variable, "rank_part") else variable.numpy()
        for key, variable in variables.items()
    }
    arrays.update({key: np.array(array) for key, array in (callback_arrays or {}).items()})
    for rank, state in enumerate(rank_states):
        arrays.update({f"rank/{rank}/{name}": array for name, array in state.items()})
    return arrays


def step_of(path: Path) -> int:
    """Returns the step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns checkpoints by step, the oldest first.

    Raises:
        CheckpointError: if the folder cannot be read.
    """
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}; fix that, then start again") from error
    # Damaged checkpoints that were set aside, and temporary folders, have other names.
    steps = {int(match[1]) for match in map(_NAME.fullmatch, names) if match}
    paths = [folder / folder_name(step) for step in sorted(steps)]
    return [path for path in paths if path.is_dir()]


def read(path: Path) -> Checkpoint:
    """Checks the checksums of a checkpoint, and reads it.

    Raises:
        CheckpointError: it is damaged.
        StorageError: it may be intact, but the disk cannot be read.
    """
    try:
        return _read(path)
    except MemoryError:  # It says nothing about the checkpoint.
        raise
    except Exception as error:  # Parsers may raise anything on garbage with matching checksums.
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        if isinstance(error, OSError) and not is_missing:
            # An input/output error or a missing permission does not mean damage.
            raise StorageError(
                f"checkpoint {path.name} cannot be read: {error.strerror} ({path}); "
                "fix that, and start again with the same run.dir"
            ) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"checkpoint {path.name} is damaged: {reason}") from error


def _read(path: Path) -> Checkpoint:
    if path.is_symlink():
        raise ValueError("it is a symbolic link, and may lead out of the run folder")
    # As the command sha256sum writes it: digest, two spaces, name.
    lines = _regular(path / SUMS).read_text(encoding="utf-8").splitlines()
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    # All at once: what is parsed are the bytes that were checked.
    files = {name: _regular(path / name).read_bytes() for name in (ARRAYS, META)}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    if TABLES in listed:
        digests[TABLES] = digest_of(_regular(path / TABLES))
    for name, digest in digests.items():
        if digest != listed.get(name):
            expected = f"{listed[name][:12]}..." if listed.get(name) else "nothing"
            raise ValueError(f"{name} has SHA-256 {digest[:12]}..., and {SUMS} lists {expected}")

    meta = json.loads(files[META])
    arrays = load(files[ARRAYS])
    for key in meta.pop("bfloat16"):
        arrays[key] = arrays[key].view(ml_dtypes.bfloat16)
    if TABLES in listed:
        arrays.update(_map_tables(path / TABLES))
    if path.name != folder_name(meta["step"]):
        raise ValueError(f"it is of step {meta['step']}")
    return Checkpoint(path, meta["step"], meta, arrays)


def _regular(path: Path) -> Path:
    """Returns the path of a regular file; a link may lead anywhere, and a pipe never ends."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"{path.name} is not a regular file")
    return path


def unchecked_meta(path: Path) -> dict[str, Any]:
    """Returns the meta of a checkpoint without checking the checksums; empty if it cannot be read."""
    try:
        meta = {} if path.is_symlink() else json.loads(_regular(path / META).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return meta if isinstance(meta, dict) else {}


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file, which is read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _map_tables(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a safetensors file, which may be larger than the memory, where they are."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} has a header of {header_bytes} bytes")
        header = json.loads(file.read(header_bytes))
    begin = 8 + header_bytes
    return {
        key: np.memmap(path, _TYPES[entry["dtype"]], "r", begin + entry["data_offsets"][0], tuple(entry["shape"]))
        for key, entry in header.items()
        if key != "__metadata__"
    }


def run_id(path: Path) -> str | None:
    """Returns the run identifier in a checkpoint; None if it cannot be read.

    Does not check the checksums.
    """
    return checked_run_id(unchecked_meta(path).get("run_id"))


def set_aside(path: Path, reason: str, taken_step: int) -> str:
    """Renames a damaged checkpoint to damaged-step-NNNNNNNN, so that none is lost.

    Args:
        path: folder of the damaged checkpoint.
        reason: the error that names the damage.
        taken_step: step of the checkpoint that is taken instead.

    Returns:
        A line for the log.
    """
    aside = path.with_name(f"damaged-{path.name}")
    try:
        remove(aside)
        path.rename(aside)
        kept = f" (kept as {aside.name})"
    except OSError:
        kept = ""
    num_lost = step_of(path) - taken_step
    lost = "1 step is" if num_lost == 1 else f"{num_lost:,} steps are"
    return f"{reason}{kept}; {folder_name(taken_step)} is taken, {lost} lost"


def restore(checkpoint: Checkpoint, model: "keras.Model", parts: tuple[str, ...] = ("model", "optimizer")) -> None:
    """Sets weights and optimizer, which must be built. What is sharded over the ranks is set by a broadcast.

    Raises:
        CheckpointError: names the first difference, if it is of another model or optimizer. Nothing
            is set then.
    """
    prefixes = tuple(f"{part}/" for part in parts)
    saved = sorted(item for item in checkpoint.arrays.items() if item[0].startswith(prefixes))
    sharded = sharded_variables(model)
    # This process may know the shape of its part alone, so the checkpoint's stands in for the whole.
    variables = {
        key: checkpoint.arrays.get(key, variable) if key in sharded else variable
        for key, variable in _variables(model).items()
    }
    own = sorted(item for item in variables.items() if item[0].startswith(prefixes))
    # Everything is compared before anything is set.
    for own_item, saved_item in zip_longest(own, saved, fillvalue=(None, None)):
        _compare(
            f"checkpoint {checkpoint.path.name} is of another model or optimizer: it",
            saved_item,
            own_item,
        )
    for (key, variable), (_, array) in zip(own, saved):
        if key in sharded:
            # broadcast_model gives each rank its part.
            sharded[key].whole = array
        else:
            variable.assign(array)


def sharded_variables(model: "keras.Model") -> dict[str, Any]:
    """Returns weights and slots of which each rank has a part, by key."""
    return {key: variable for key, variable in _variables(model).items() if hasattr(variable, "rank_part")}


def rank_state(model: "keras.Model") -> dict[str, np.ndarray]:
    """Returns the state of one rank.

    Seeds of dropout and the like, metrics of the current epoch, and the learning rate's factor.
    """
    variables = _rank_variables(model)
    for index, variable in enumerate(model.metrics_variables):
        variables[f"metric/{index:04d}"] = variable
    return {name: variable.numpy() for name, variable in variables.items()}


def restore_rank(state: dict[str, np.ndarray], model: "keras.Model") -> None:
    """Sets the seeds and the learning rate's factor that rank_state saved; other seeds stay.

    Raises:
        CheckpointError: if they are of another shape.
    """
    for name, variable in _rank_variables(model).items():
        if name in state:
            _compare("the checkpoint", (name, state[name]), (name, variable))
            variable.assign(state[name])


def keeps_memory(model: "keras.Model") -> bool:
    """Returns True if rank_memory has something to save, on all ranks or on none."""
    return bool(_memory_variables(model))


def rank_memory(model: "keras.Model", is_chief: bool) -> dict[str, np.ndarray]:
    """Returns what the ranks' exchange keeps on this rank, as large as the weights; mostly nothing.

    Of what is equal on all ranks only the chief's is returned.
    """
    variables = _memory_variables(model)
    return {name: variable.numpy() for name, variable in variables.items() if is_chief or not name.startswith(SAME)}


def restore_memory(memory: dict[str, np.ndarray], model: "keras.Model") -> None:
    """Sets what rank_memory returned. What another strategy kept is left out."""
    for name, variable in _memory_variables(model).items():
        if name in memory and memory[name].shape == tuple(variable.shape):
            variable.assign(memory[name])


def _memory_variables(model: "keras.Model") -> dict[str, Any]:
    variables = getattr(model.optimizer, "rank_variables", {})
    return {f"{MEMORY}{name}": variable for name, variable in variables.items()}


def _variables(model: "keras.Model") -> dict[str, Any]:
    """Returns what a checkpoint holds of all ranks: variables that are equal on them, by key."""
    groups = {"model": model.weights, "optimizer": model.optimizer.variables}
    return {
        f"{group}/{index:04d}/{variable.path}": variable
        for group, variables in groups.items()
        for index, variable in enumerate(variables)
    }


def _rank_variables(model: "keras.Model") -> dict[str, Any]:
    """Returns variables that are each rank's own, by key."""
    # model.variables also holds the seeds of dropout and the like, which model.weights does not.
    weights = {id(variable) for variable in model.weights}
    seeds = [variable for variable in model.variables if id(variable) not in weights]
    variables = {f"seed/{index:04d}": variable for index, variable in enumerate(seeds)}
    factor = rate_factor(model)
    if factor is not None:  # It is not a variable of the optimizer.
        variables["rate/factor"] = factor
    return variables


def rate_factor(model: "keras.Model") -> Any:
    """Returns the variable with which callbacks scale the scheduled rate; None without one."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return getattr(optimizer._learning_rate, "factor", None)


def _compare(subject: str, saved: tuple[str | None, Any], own: tuple[str | None, Any]) -> None:
    """Raises CheckpointError unless two arrays, of which one may be missing, match.

    Args:
        subject: begins the message.
        saved: name and array in the checkpoint; (None, None): missing.
        own: those of this run.
    """

    def describe(name: str | None, array: Any) -> str:
        return f"{name} of shape {tuple(array.shape)}" if name else "nothing"

    if describe(*saved) != describe(*own):
        raise CheckpointError(
            f"{subject} holds {describe(*saved)} where this run has {describe(*own)}; "
            "use the settings it was made with, or another run.dir"
        )
