"""Writes checkpoints, completely or not at all, while training continues.

Does not communicate; only the chief calls it. A checkpoint is flushed to disk under a temporary
name before it gets its own, and is renamed again before it is deleted. So a folder step-NNNNNNNN
is always complete, and `sweep` recognizes by name what a killed process left behind.
"""

import json
import logging
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from hvtrain.checkpoint.store import (
    ARRAYS,
    META,
    SUMS,
    TABLES,
    Arrays,
    Meta,
    ShardedTable,
    digest_of,
    folder_name,
    list_checkpoints,
    step_of,
    unchecked_meta,
)
from hvtrain.config.schema import CheckpointConfig
from hvtrain.errors import CheckpointError, StorageError, TakenOverError, UserError
from hvtrain.system.files import TEMPORARY, flush, read_file, remove, write_json, writing

if TYPE_CHECKING:
    import keras

log = logging.getLogger(__name__)

# The longest that a process waits at its end for the current write, since a disk may hang forever.
SECONDS_TO_FINISH = 30.0
BEST = "best.json"
# Prefixes of a checkpoint's name while another checkpoint replaces it, and while it is deleted.
_REPLACED = f"{TEMPORARY}old-"
_DELETED = f"{TEMPORARY}gone-"


def write(folder: Path, step: int, arrays: Arrays, meta: Meta) -> Path:
    """Writes a checkpoint to folder/step-NNNNNNNN, and returns its path.

    Args:
        folder: folder of the run's checkpoints.
        step: number of steps that the run has completed.
        arrays: arrays by key; see model_state.snapshot.
        meta: everything else; must be serializable as JSON.

    Raises:
        CheckpointError: the checkpoint was not written; older ones are unchanged.
    """
    # safetensors for NumPy lacks bfloat16: such arrays are stored as their bits and listed in meta.
    bfloat16_keys = [key for key, array in arrays.items() if array.dtype == ml_dtypes.bfloat16]
    content = {"unix_seconds": time.time(), **meta, "step": step, "bfloat16": bfloat16_keys}
    meta_bytes = json.dumps(content, indent=1).encode()
    needed_bytes = sum(array.nbytes for array in arrays.values()) + len(meta_bytes)

    target = folder / folder_name(step)
    temporary = folder / f"{TEMPORARY}{target.name}"
    with writing(target, temporary, needed_bytes, CheckpointError, f"checkpoint {target.name}"):
        temporary.mkdir(parents=True)
        (temporary / META).write_bytes(meta_bytes)
        files: dict[str, Arrays] = {ARRAYS: {}}
        for key, array in arrays.items():
            if key in bfloat16_keys:
                files[ARRAYS][key] = array.view(np.uint16)
            elif isinstance(array, ShardedTable):
                # Tables may not fit into memory, so they get their own file, which is memory-mapped
                # for reading.
                tables = files.setdefault(TABLES, {})
                tables |= {f"rank/{rank}/{key}": shard for rank, shard in enumerate(array.shards)}
            else:
                files[ARRAYS][key] = array
        for name, file_arrays in files.items():
            _write_arrays(temporary / name, file_arrays)
            # safetensors creates files that only their owner can read.
            shutil.copymode(temporary / META, temporary / name)
        checksums = ""
        for path in [temporary / name for name in (*files, META)]:
            flush(path)
            checksums += f"{digest_of(path)}  {path.name}\n"
        (temporary / SUMS).write_text(checksums, encoding="utf-8")
        flush(temporary / SUMS)
        publish(temporary, target)
    return target


def publish(temporary: Path, target: Path) -> None:
    """Renames a checkpoint to its final name; its files must be flushed already. Raises OSError."""
    # The folder is flushed too, since a power cut might otherwise lose the names of its files.
    flush(temporary)
    # If the replacement of an older checkpoint of this step is interrupted, sweep restores it.
    old = target.with_name(f"{_REPLACED}{target.name}")
    remove(old)
    with suppress(FileNotFoundError):
        target.rename(old)
    temporary.rename(target)
    flush(target.parent)
    _delete(old, target.name)


def _delete(path: Path, name: str) -> None:
    """Deletes the folder of the checkpoint `name` as far as possible; sweep deletes the rest."""
    # Renamed first, so that no partly deleted folder has the name of a checkpoint.
    renamed = path.with_name(f"{_DELETED}{name}")
    # NFS keeps a file that is open for reading, and with it the folder.
    with suppress(OSError):
        remove(renamed)
        path.rename(renamed)
        remove(renamed)


def _write_arrays(path: Path, arrays: Arrays) -> None:
    """Writes a safetensors file without copying contiguous arrays. Raises OSError."""
    try:
        save_file({key: np.asarray(array, order="C") for key, array in arrays.items()}, path)
    except SafetensorError as error:
        # safetensors reports a disk error's number only in its text.
        match = re.search(r"I/O error: (.*) \(os error (\d+)\)", str(error))
        if not match:
            raise
        raise OSError(int(match[2]), match[1]) from error


def mark_best(folder: Path, step: int, metric: str, value: float, host: str | None = None) -> None:
    """Records the best checkpoint so far, which prune keeps.

    If the checkpoint is on another host, the record names that host.
    """
    elsewhere = {"host": host} if host else {}
    write_json(folder / BEST, {"step": step, "metric": metric, "value": value, **elsewhere})


def read_best(folder: Path) -> Meta | None:
    """Returns the record that mark_best wrote; None if it or the checkpoint is missing.

    Its keys are step, metric, value and, if the checkpoint is on another host, host. A damaged
    record is deleted, and counts as missing.

    Raises:
        StorageError: the record cannot be read, but may be intact.
    """
    path = folder / BEST
    try:
        best = json.loads(read_file(path))
        name = folder_name(best["step"])
        if not isinstance(best["metric"], str) or not math.isfinite(best["value"]):
            raise ValueError("it has no metric name or no finite value")
    except FileNotFoundError:
        return None
    except OSError as error:
        # An input/output error does not mean damage.
        raise StorageError(
            f"{path} cannot be read: {error.strerror}; fix that, and start again"
        ) from error
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        log.warning("%s is damaged (%s); the next checkpoint becomes the best", path, error)
        with suppress(OSError):
            remove(path)
        return None
    if (folder / name).is_dir():
        # This host may have a copy of another host's checkpoint.
        best.pop("host", None)
        return best
    # A checkpoint on another host cannot be checked from here.
    return best if "host" in best else None


def prune(folder: Path, config: CheckpointConfig, written_step: int) -> None:
    """Deletes all but the `keep` newest checkpoints, the best one, and those that are kept for good.

    The last checkpoint of each span of keep_every_epochs epochs of training, or of keep_every_hours
    clock hours (UTC), is kept for good.

    Args:
        folder: folder of the run's checkpoints.
        config: keep, keep_every_epochs and keep_every_hours.
        written_step: the step of the checkpoint just written. Checkpoints after it are ignored:
            they are damaged and could not be set aside.
    """
    paths = [path for path in list_checkpoints(folder) if step_of(path) <= written_step]
    kept = {path.name for path in paths[-config.keep :]}
    try:
        best = read_best(folder)
    except StorageError as error:
        log.warning("%s; no checkpoint is deleted this time", error)
        return
    if best:
        kept.add(folder_name(best["step"]))
    if config.keep_every_epochs or config.keep_every_hours:
        kept |= _last_of_spans(paths, config)
    for path in paths:
        if path.name not in kept:
            _delete(path, path.name)


def _last_of_spans(paths: list[Path], config: CheckpointConfig) -> set[str]:
    """Returns the names of the checkpoints after which a new span of epochs or of hours began.

    Depends only on the checkpoints' own meta, so the same ones are kept after a restart. A checkpoint
    that was kept stays the last of its span, even if later ones are deleted.
    """
    every_epochs = config.keep_every_epochs or math.inf
    every_hours = config.keep_every_hours or math.inf
    spans = {}
    for path in paths:
        meta = unchecked_meta(path)
        # A damaged checkpoint has no readable meta, and is not kept for good.
        with suppress(LookupError, TypeError, ValueError, OverflowError):
            # An unfinished epoch counts: the middle of epoch 10 belongs to the first span of ten, as
            # its end does.
            epochs_begun = meta["epoch"] + (meta["step_in_epoch"] > 0)
            epoch_span = math.ceil(epochs_begun / every_epochs)
            hour_span = meta["unix_seconds"] / 3600 // every_hours
            spans[path.name] = (epoch_span, hour_span)
    pairs = pairwise(spans.items())
    return {name for (name, span), (_, next_span) in pairs if span != next_span}


def sweep(folder: Path) -> None:
    """Removes what killed processes left behind, and undoes an interrupted replacement."""
    for path in folder.glob(f"{TEMPORARY}*"):
        original = folder / path.name.removeprefix(_REPLACED)
        with suppress(OSError):
            if path.name.startswith(_REPLACED) and not os.path.lexists(original):
                path.rename(original)
            else:
                remove(path)


def save_model(model: "keras.Model", path: Path) -> None:
    """Saves the model as a Keras file, or its weights as .weights.h5, completely or not at all.

    Raises:
        StorageError: it was not saved.
    """
    # Saved in a temporary folder, since Keras may put temporary files beside the model.
    temporary = path.with_name(f"{TEMPORARY}model")
    save = model.save_weights if path.suffix == ".h5" else model.save
    needed_bytes = sum(weight.numpy().nbytes for weight in model.weights)
    with writing(path, temporary, needed_bytes):
        temporary.mkdir()
        save(temporary / path.name)
        flush(temporary / path.name)
        (temporary / path.name).replace(path)
        remove(temporary)


@dataclass
class Writer:
    """Writes checkpoints in a background thread, one at a time (chief only).

    Records which checkpoint is the best, and deletes old ones. As a context manager, it waits on
    exit for the current write, for up to SECONDS_TO_FINISH, even if training fails.

    Args:
        folder: folder of the run's checkpoints.
        config: which checkpoints to keep, and what to do if one cannot be written.
        best: the metric whose best checkpoint is kept.
        sign: 1 if higher values of that metric are better, otherwise -1.
        send: sends another host the checkpoints that it lacks; called after each write, in the
            background thread.

    Attributes:
        whole_step: the step of the last complete checkpoint; 0 before the first one of this start.
        whole_at: the time.time() at which that checkpoint was complete; before the first one, that of this start.
    """

    folder: Path
    config: CheckpointConfig
    best: str = "val_accuracy"
    sign: int = 1
    send: Callable[[], None] = lambda: None
    whole_step: int = 0
    whole_at: float = field(default_factory=time.time)
    _thread: threading.Thread | None = None
    _error: BaseException | None = None
    _unsaved: str = ""

    @property
    def failed(self) -> bool:
        """True if training must stop because a write failed. Does not wait; `outcome` returns or raises the error."""
        return self._error is not None

    def submit(self, step: int, arrays: Arrays, meta: Meta) -> None:
        """Waits for the previous write, then starts this one. The arrays must not change later."""
        self.outcome()
        self._begin(step, arrays, meta)

    def send_missing(self) -> None:
        """Starts sending another host the checkpoints that it lacks; call before any submit."""
        self._begin()

    def _begin(self, *checkpoint: Any) -> None:
        # A daemon thread, since __exit__ must not wait forever for the disk.
        self._thread = threading.Thread(
            target=self._run, args=checkpoint, name="checkpoints", daemon=True
        )
        self._thread.start()

    def _run(self, *checkpoint: Any) -> None:
        """Writes the checkpoint, if one is given, then sends another host what it lacks (in the thread)."""
        try:
            if checkpoint:
                self._write(*checkpoint)
            self.send()
        except UserError as error:
            self.fail(error)
        except BaseException as error:  # A bug; outcome() raises it in the training thread.
            self._error = error

    def fail(self, error: UserError) -> None:
        """Handles an error that kept a checkpoint from being written: stores it if it stops training, else warns."""
        if self.config.on_error == "stop" or isinstance(error, TakenOverError):
            self._error = CheckpointError(
                f"{error}, then start again with the same run.dir to continue"
            )
        else:
            self._unsaved = str(error)
            log.warning(
                "%s; training continues (checkpoint.on_error=warn), and the next save tries again",
                error,
            )

    def outcome(self) -> UserError | None:
        """Waits for the current write; returns the error that stops training, or None.

        Raises any other exception, which is a bug.
        """
        if self._thread:
            self._thread.join()
        if self._error is None or isinstance(self._error, UserError):
            return self._error
        raise self._error

    def finish(self) -> int:
        """Waits for the last write; returns the step of the last complete checkpoint.

        Raises the error of a failed write if it stops training. Otherwise only warns that the last
        state is not saved.
        """
        error = self.outcome()
        if error:
            raise error
        if self._unsaved:
            log.warning("the last state is not saved: %s", self._unsaved)
        return self.whole_step

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread:
            self._thread.join(SECONDS_TO_FINISH)

    def _write(self, step: int, arrays: Arrays, meta: Meta) -> None:
        """Writes a checkpoint, updates the record of the best, and deletes old ones (in the thread)."""
        write(self.folder, step, arrays, meta)
        value = meta["metrics"].get(self.best, math.nan)
        # After the write, so that the record of the best names a complete checkpoint.
        if math.isfinite(value) and self._is_best(value):
            mark_best(self.folder, step, self.best, value)
        prune(self.folder, self.config, step)
        self._unsaved = ""
        self.whole_step = step
        self.whole_at = time.time()

    def _is_best(self, value: float) -> bool:
        try:
            best = read_best(self.folder)
        except StorageError as error:
            log.warning("%s; this checkpoint is not compared with the best", error)
            return False
        if best is None or best["metric"] != self.best:
            return True
        return self.sign * value > self.sign * best["value"]
