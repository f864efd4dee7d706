"""Writes checkpoints, completely or not at all, while training continues. Knows no ranks; only the chief calls it.

Files are flushed to the disk under a temporary name and appear by a rename; old ones are renamed before they are
deleted. So step-NNNNNNNN is complete at any moment, and `sweep` finds what a killed process left by its name.
"""

import hashlib
import json
import logging
import math
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from hvtrain.checkpoint.store import ARRAYS, META, SUMS, folder_name, list_checkpoints, step_of
from hvtrain.config.schema import CheckpointConfig
from hvtrain.core.records import TEMPORARY, flush, read_file, remove, write_atomic, writing
from hvtrain.errors import CheckpointError, UserError

if TYPE_CHECKING:
    import keras

log = logging.getLogger(__name__)

SECONDS_TO_FINISH = 30.0
_BUFFER_BYTES = 1 << 20  # Groups small arrays: each system call may delay the training.
_BEST = "best.json"
_REPLACED, _GONE = f"{TEMPORARY}old-", f"{TEMPORARY}gone-"
# safetensors's names of NumPy's types.
_TYPES = {
    "bool": "BOOL",
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("float", "int", "uint") for bits in (8, 16, 32, 64)},
}


def write(folder: Path, step: int, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> Path:
    """Writes folder/step-NNNNNNNN and returns it. Raises CheckpointError; older checkpoints stay as they are."""
    # safetensors has no bfloat16 for NumPy: such arrays are stored as their bits, and meta lists them.
    halves = [key for key, array in arrays.items() if array.dtype == ml_dtypes.bfloat16]
    plain = {**arrays, **{key: arrays[key].view(np.uint16) for key in halves}}
    text = json.dumps({**meta, "step": step, "bfloat16": halves}, indent=1).encode()
    target = folder / folder_name(step)
    temporary = folder / f"{TEMPORARY}{target.name}"
    needed_bytes = sum(array.nbytes for array in arrays.values()) + len(text)
    with writing(target, temporary, needed_bytes, CheckpointError, f"checkpoint {target.name}"):
        temporary.mkdir(parents=True)
        sums = [_write_file(temporary / ARRAYS, pieces(plain)), _write_file(temporary / META, [text])]
        _write_file(temporary / SUMS, ["".join(sums).encode()])
        flush(temporary)
        # If the replacement of an older checkpoint of this step is cut short, sweep restores that one.
        old = target.with_name(f"{_REPLACED}{target.name}")
        remove(old)
        if os.path.lexists(target):
            target.rename(old)
        temporary.rename(target)
        flush(folder)
        remove(old)
    return target


def pieces(arrays: dict[str, np.ndarray]) -> Iterator[Any]:
    """Yields a safetensors file in pieces: its header, then the bytes of each array without a copy.

    safetensors.numpy.save copies all arrays at once, which stops the training meanwhile.
    """
    # In the order of safetensors itself: by alignment, then by name.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header, end = {}, 0
    for key, array in ordered:
        begin, end = end, end + array.nbytes
        header[key] = {"dtype": _TYPES[array.dtype.name], "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, array in ordered:
        yield np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C").reshape(-1).view(np.uint8)


def mark_best(folder: Path, step: int, metric: str, value: float, **host: str) -> None:
    """Records the best checkpoint so far, and its host if it is another; prune keeps that checkpoint."""
    write_atomic(folder / _BEST, json.dumps({"step": step, "metric": metric, "value": value, **host}) + "\n")


def read_best(folder: Path) -> dict[str, Any] | None:
    """The record of mark_best: step, metric, value and, if on another host, host; None if the checkpoint is gone."""
    path = folder / _BEST
    if not path.exists():
        return None
    try:
        best = json.loads(read_file(path))
        name = folder_name(best["step"])
        if not isinstance(best["metric"], str) or not math.isfinite(best["value"]):
            raise ValueError("no metric and value")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        log.warning("%s is damaged (%s); the next checkpoint becomes the best", path, error)
        with suppress(OSError):
            remove(path)
        return None
    return best if "host" in best or (folder / name).is_dir() else None


def prune(folder: Path, keep: int, written_step: int) -> None:
    """Deletes all but the `keep` newest checkpoints and the best one.

    Those after written_step are left alone and do not count: they were damaged and could not be set aside.
    """
    best, paths = read_best(folder), [path for path in list_checkpoints(folder) if step_of(path) <= written_step]
    kept = {path.name for path in paths[-keep:]} | {folder_name(best["step"]) if best else ""}
    for path in paths:
        if path.name not in kept:
            gone = path.with_name(f"{_GONE}{path.name}")
            with suppress(OSError):
                remove(gone)
                path.rename(gone)
                remove(gone)


def sweep(folder: Path) -> None:
    """Removes what killed processes left in this run's folder, and undoes a replacement that was cut short."""
    for path in folder.glob(f"{TEMPORARY}*"):
        name = path.name.removeprefix(_REPLACED)
        with suppress(OSError):
            if name != path.name and not os.path.lexists(folder / name):
                path.rename(folder / name)
            else:
                remove(path)


def save_model(model: "keras.Model", path: Path) -> None:
    """Saves the model as a Keras file, or its weights as .weights.h5, completely or not at all. Raises StorageError."""
    temporary = path.with_name(f"{TEMPORARY}model")  # A folder: Keras may put temporary files beside the model.
    with writing(path, temporary, sum(weight.numpy().nbytes for weight in model.weights)):
        temporary.mkdir()
        (model.save_weights if path.suffix == ".h5" else model.save)(temporary / path.name)
        flush(temporary / path.name)
        (temporary / path.name).replace(path)
        remove(temporary)


class Writer:
    """Writes checkpoints in a background thread, one at a time; records the best, deletes old ones (chief only).

    As a context manager it finishes a write even if training fails, within SECONDS_TO_FINISH.

    best: the metric whose best checkpoint is kept. sign: 1 if more of it is better, otherwise -1.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, best: str = "val_accuracy", sign: int = 1) -> None:
        self._best, self._sign = best, sign
        self._folder = folder
        self._config = config
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._unsaved = ""
        self.whole_step = 0
        """The last step that was written."""

    @property
    def failed(self) -> bool:
        """True if training must stop because a write failed; `outcome` says why. Does not wait."""
        return self._error is not None

    def submit(self, step: int, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        """Starts a write, after the previous one is done. The arrays must not change afterwards."""
        self.outcome()
        self._thread = threading.Thread(target=self._work, args=(step, arrays, meta), name="checkpoints", daemon=True)
        self._thread.start()

    def outcome(self) -> UserError | None:
        """Waits for the current write; returns the error that stops training, or None. Raises any other exception."""
        if self._thread:
            self._thread.join()
        if self._error is None or isinstance(self._error, UserError):
            return self._error
        raise self._error

    def finish(self) -> None:
        """Waits for the last write; raises its error, or warns that the last state is not saved."""
        if error := self.outcome():
            raise error
        if self._unsaved:
            log.warning("the last state is not saved: %s", self._unsaved)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread:
            self._thread.join(SECONDS_TO_FINISH)

    def _work(self, step: int, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        try:
            write(self._folder, step, arrays, meta)
            name, sign, best = self._best, self._sign, read_best(self._folder)
            value = meta["metrics"].get(name, math.nan)
            is_best = best is None or best["metric"] != name or sign * value > sign * best["value"]
            if math.isfinite(value) and is_best:
                mark_best(self._folder, step, name, value)
            prune(self._folder, self._config.keep, step)
            self._unsaved, self.whole_step = "", step
        except UserError as error:
            if self._config.on_error == "stop":
                self._error = CheckpointError(f"{error}, then start again with the same run.dir to continue")
            else:
                self._unsaved = str(error)
                log.warning("%s; training continues (checkpoint.on_error=warn), the next save tries again", error)
        except BaseException as error:  # A bug; outcome() raises it in the training thread.
            self._error = error


def _write_file(path: Path, data: Any) -> str:
    """Writes pieces and flushes them to the disk; returns the file's line for SHA256SUMS."""
    digest = hashlib.sha256()
    with path.open("xb", buffering=_BUFFER_BYTES) as stream:
        for piece in data:
            digest.update(piece)
            stream.write(piece)
    flush(path)
    return f"{digest.hexdigest()}  {path.name}\n"
