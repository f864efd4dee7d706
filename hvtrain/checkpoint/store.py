"""Reads checkpoints: arrays and JSON, verified by checksums; never code.

Does not communicate. A checkpoint is a folder step-NNNNNNNN, written by writer.py, with
state.safetensors (arrays), meta.json (everything else), tables.safetensors (sharded tables, if any)
and SHA256SUMS, their checksums in the format of the command sha256sum. The folder is not trusted:
nothing in it is executed or instantiated, no link is followed, and no name in it is used as a path.

A ShardedTable is a whole embedding table as the ranks hold it: rank k of N has the rows k, k + N, k + 2N, ...
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load

from hvtrain.errors import CheckpointError, StorageError
from hvtrain.system.checkpoint_notes import folder_name
from hvtrain.system.files import read_json, remove

# A table is read, written and exchanged in pieces of this size, however large it is.
PIECE_BYTES = 64 << 20


def whole_shape(value: Any) -> tuple[int, ...]:
    """Returns the shape of an array or variable; for one rank's rows of a sharded table, that of the whole table."""
    num_rows = getattr(getattr(value, "rank_part", None), "num_rows", None)
    return (num_rows, *value.shape[1:]) if num_rows else tuple(value.shape)


class ShardedTable:
    """A table whose row r is row r // N of shard r mod N; reads like an array of its rows in order.

    The shards may be mapped from a file. Indexing then reads only the requested rows.

    Args:
        shards: One array for each rank, by rank, of shape [rows of that rank, ...].

    Raises:
        ValueError: A shard has the wrong number of rows for its rank.

    >>> table = ShardedTable([np.array([0, 2, 4]), np.array([1, 3])])
    >>> table[1:4], table[np.array([4, 0])], table.shape
    (array([1, 2, 3]), array([4, 0]), (5,))
    """

    def __init__(self, shards: Sequence[np.ndarray]) -> None:
        self.shards = shards
        self.dtype = shards[0].dtype
        num_rows = sum(map(len, shards))
        self.shape = (num_rows, *shards[0].shape[1:])
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        for rank, shard in enumerate(shards):
            expected = len(range(rank, num_rows, len(shards)))
            if len(shard) != expected:
                raise ValueError(f"rank {rank} has {len(shard)} rows instead of {expected}")

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Returns a copy of the rows of a slice, or of an array of row numbers [n]."""
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(self.shape[0]))
        copy = np.empty((len(rows), *self.shape[1:]), self.dtype)
        owners = rows % len(self.shards)
        for rank, shard in enumerate(self.shards):
            is_own = owners == rank
            copy[is_own] = shard[rows[is_own] // len(self.shards)]
        return copy

    def pieces(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields the rows in order, a piece at a time, each with its slice of the table."""
        step = max(1, PIECE_BYTES * self.shape[0] // max(1, self.nbytes))
        for begin in range(0, self.shape[0], step):
            rows = slice(begin, begin + step)
            yield rows, self[rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)


# NumPy arrays by key. A sharded table is a ShardedTable, which can be read like an array.
Arrays = dict[str, Any]
Meta = dict[str, Any]

ARRAYS = "state.safetensors"
META = "meta.json"
# Embedding tables and their optimizer slots, if they are sharded over the ranks: "rank/0/KEY"
# holds the rows of rank 0.
TABLES = "tables.safetensors"
SUMS = "SHA256SUMS"
# A longer header of tables.safetensors is refused. The file itself states the header's length, and a
# damaged file may state any number.
MAX_HEADER_BYTES = 16 << 20
# The types that a table may have, by their names in safetensors.
_TYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
_FOLDER_NAME = re.compile(r"step-([0-9]{8,})")

# Attributes in which EarlyStopping, ReduceLROnPlateau and similar Keras callbacks keep their state.
# Each fit() resets them, so a checkpoint has to hold them.
NUMBERS = ("wait", "best", "best_epoch", "cooldown_counter")


def callback_numbers(callback: Any) -> dict[str, Any]:
    """Returns the callback's NUMBERS, and the name of the metric that they are about, `monitor`, if it has one."""
    values = vars(callback)
    numbers: dict[str, Any] = {}
    for key in NUMBERS:
        # A user's own callback may use the name for something else.
        if not isinstance(values.get(key), str | bytes):
            with suppress(TypeError, ValueError):
                numbers[key] = float(values.get(key))
    if isinstance(values.get("monitor"), str):
        numbers["monitor"] = values["monitor"]
    return numbers


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory."""

    step: int
    meta: Meta
    # Keyed "model/0000/PATH", "optimizer/0000/PATH", "rank/0/NAME", "callback/NAME/0000".
    arrays: Arrays

    def rank_state(self, rank: int) -> Arrays:
        """Returns the arrays that model_state.rank_state() and rank_memory() returned on a rank."""
        prefix = f"rank/{rank}/"
        return {
            key.removeprefix(prefix): array
            for key, array in self.arrays.items()
            if key.startswith(prefix)
        }

    def callbacks(self) -> dict[str, dict[str, Any]]:
        """Returns the state that CallbackState saved: numbers and best weights by callback name.

        Raises:
            CheckpointError: the saved values are not numbers.
        """
        with _require_numbers("callback state"):
            # Known names only, so that a checkpoint cannot set any other attribute of a callback.
            saved: dict[str, dict[str, Any]] = {}
            for name, numbers in self.meta.get("callbacks", {}).items():
                saved[name] = {key: float(numbers[key]) for key in NUMBERS if key in numbers}
                if "monitor" in numbers:
                    saved[name]["monitor"] = str(numbers["monitor"])
        for name, values in saved.items():
            weights = [
                self.arrays[key]
                for key in sorted(self.arrays)
                if key.startswith(f"callback/{name}/")
            ]
            if weights:
                values["best_weights"] = weights
        return saved

    def unlogged_results(self) -> dict[str, float]:
        """Returns validation results that are not yet in any epoch's logs.

        Raises:
            CheckpointError: the results are not numbers.
        """
        with _require_numbers("record of a validation"):
            return {name: float(value) for name, value in self.meta.get("unlogged", {}).items()}


@contextmanager
def _require_numbers(content: str) -> Iterator[None]:
    """Turns errors of the block, which converts content of a checkpoint to numbers, into CheckpointError."""
    try:
        yield
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"the checkpoint's {content} is not made of numbers ({error}); choose another run.dir"
        ) from error


def step_of(path: Path) -> int:
    """Returns the step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, oldest first; none if there is no such folder.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error.strerror}; fix that, then start again"
        ) from error
    # Temporary folders, and damaged checkpoints that were set aside, have other names.
    matches = map(_FOLDER_NAME.fullmatch, names)
    steps = {int(match[1]) for match in matches if match}
    paths = [folder / folder_name(step) for step in sorted(steps)]
    return [path for path in paths if path.is_dir()]


def read(path: Path) -> Checkpoint:
    """Reads a checkpoint and verifies its checksums.

    Raises:
        CheckpointError: it is damaged.
        StorageError: it may be intact, but the disk cannot be read.
    """
    try:
        return _read(path)
    except MemoryError:  # Not evidence of damage.
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
    listed_digests = {}
    for line in _require_regular(path / SUMS).read_text(encoding="utf-8").splitlines():
        # The format of the command sha256sum: digest, two spaces, name.
        digest, _, name = line.partition("  ")
        listed_digests[name] = digest

    # Read once, so that the bytes that are parsed are the bytes that were checked.
    files = {name: _require_regular(path / name).read_bytes() for name in (ARRAYS, META)}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    if TABLES in listed_digests:
        # Tables may not fit into memory, so they are hashed here and memory-mapped later.
        digests[TABLES] = digest_of(_require_regular(path / TABLES))
    for name, digest in digests.items():
        expected = listed_digests.get(name, "nothing")
        if digest != expected:
            raise ValueError(f"{name} has SHA-256 {digest[:12]}, and {SUMS} lists {expected[:12]}")

    meta = json.loads(files[META])
    arrays: Arrays = load(files[ARRAYS])
    # safetensors has no bfloat16 for NumPy, so writer.py stores the bits as uint16.
    for key in meta.pop("bfloat16"):
        arrays[key] = arrays[key].view(ml_dtypes.bfloat16)
    if TABLES in listed_digests:
        arrays |= _map_tables(path / TABLES)
    if path.name != folder_name(meta["step"]):
        raise ValueError(f"it holds step {meta['step']}")
    return Checkpoint(meta["step"], meta, arrays)


def _require_regular(path: Path) -> Path:
    """Returns the path unchanged. Raises ValueError unless it is a regular file or missing.

    A link may lead anywhere, and a pipe may never end.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"{path.name} is not a regular file")
    return path


def unchecked_meta(path: Path) -> Meta:
    """Returns a checkpoint's meta without verifying checksums; empty if it cannot be read."""
    with suppress(OSError, ValueError):
        if not path.is_symlink():
            return read_json(_require_regular(path / META), dict)
    return {}


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file, reading it in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _map_tables(path: Path) -> dict[str, ShardedTable]:
    """Memory-maps the tables of a safetensors file, which may not fit into memory.

    The file holds the length of its header (8 bytes, little-endian), the header (JSON) and the
    arrays.
    """
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(
                f"{path.name} has a header of {header_bytes} bytes, more than {MAX_HEADER_BYTES}"
            )
        header = json.loads(file.read(header_bytes))
    content = np.memmap(path, np.uint8, "r", 8 + header_bytes)
    shards: dict[str, dict[int, np.ndarray]] = {}
    for name, entry in header.items():
        _, rank, key = name.split("/", 2)
        byte_range = slice(*entry["data_offsets"])
        values = content[byte_range].view(_TYPES[entry["dtype"]])
        shards.setdefault(key, {})[int(rank)] = values.reshape(entry["shape"])
    return {
        key: ShardedTable([by_rank[rank] for rank in range(len(by_rank))])
        for key, by_rank in shards.items()
    }


def set_aside(path: Path, reason: str, used_step: int) -> str:
    """Renames a damaged checkpoint to damaged-step-NNNNNNNN if possible, so that it is not deleted.

    Args:
        path: folder of the damaged checkpoint.
        reason: the text of the error that reading it raised.
        used_step: step of the older checkpoint that is used instead.

    Returns:
        A line for the log.
    """
    aside = path.with_name(f"damaged-{path.name}")
    line = reason
    with suppress(OSError):
        # Another rank of this host may have set it aside already.
        if path.is_dir():
            remove(aside)
        path.rename(aside)
        line += f" (kept as {aside.name})"
    num_lost = step_of(path) - used_step
    return f"{line}; {folder_name(used_step)} is used instead (steps lost: {num_lost:,})"
