"""Computes a finished run's metrics and predictions, the same on any number of ranks, and writes the predictions.

Predictions are written batch by batch: as a table, which is a CSV or Parquet file that appears once it
is complete, or as masks, which are PNG files.
"""

import csv
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import tensorflow as tf
from PIL import Image

from hvtrain.errors import ConfigError, StorageError
from hvtrain.finished.finished_run import FinishedRun
from hvtrain.finished.inputs import Batch, Examples
from hvtrain.strategies.loop import add_batch_axis, blank_batch, forward_of
from hvtrain.system.files import TEMPORARY, page_path, remove
from hvtrain.tasks.examples import as_numpy
from hvtrain.training.run import evaluation_batches

SECONDS_BETWEEN_LINES = 10.0

# Columns of equal length by name.
Rows = dict[str, np.ndarray]


@dataclass
class ProgressLines:
    """Prints how many of `total` examples are done, at most every 10 seconds.

    Work that takes less than that prints nothing.

    Args:
        verb: what has been done to the examples, such as "predicted" or "evaluated".
        total: number of examples.
        is_chief: only the chief prints.
        clock: returns the time in seconds; a test injects its own.
    """

    verb: str
    total: int
    is_chief: bool
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._printed_at = self._began

    def update(self, num_done: int) -> None:
        """Prints a line if one is due, given the number of examples that all ranks have done."""
        now = self.clock()
        if not self.is_chief or now - self._printed_at < SECONDS_BETWEEN_LINES or not num_done:
            return
        self._printed_at = now
        # Assumes the mean speed so far, which includes the tracing of the graph. So early estimates
        # are too long.
        seconds_left = (now - self._began) * max(self.total - num_done, 0) / num_done
        progress = f"{self.verb} {num_done:,} of {self.total:,} examples"
        print(f"{progress}, {seconds_left:,.0f} s left", flush=True)


def evaluate_split(run: FinishedRun, split: str) -> dict[str, Any]:
    """Evaluates a split (every rank).

    Metrics are computed from sums over the examples of all ranks, not as means of the ranks' means.

    Returns:
        A dict with checkpoint, dataset, split, examples (their number), skipped (a line for each item
        that could not be read) and metrics (values by name).

    Raises:
        ConfigError: the split is empty.
    """
    topology = run.strategy.topology
    source = run.source
    batch_size = run.config.train.evaluation_batch_size
    data = run.strategy.comm.all_or_raise(
        lambda: evaluation_batches(source, split, topology, batch_size)
    )
    total = source.num_examples(split)
    if data is None:
        sizes = [f"{name} ({size:,})" for name, size in source.split_sizes().items()]
        raise ConfigError(
            f"split={split} of {source.name} has no examples; choose one of {', '.join(sizes)}"
        )

    def check_data():
        """Checks the kind of this rank's first batch."""
        try:
            for inputs, *_ in data.take(1).as_numpy_iterator():
                run.check_kind(source.name, inputs)
        except tf.errors.OpError as error:
            raise source.explain(error) from error

    # Clears what was skipped while counting, since `total` excludes it. The check below already reads
    # examples that are evaluated.
    source.unreadable()
    if run.training_kinds:
        run.strategy.comm.all_or_raise(check_data)
    progress = ProgressLines("evaluated", total, topology.is_chief)

    def on_test_batch_end(batch, logs):
        # Shards are of nearly equal size, so the chief's progress stands for that of all ranks.
        progress.update(min(total, (batch + 1) * batch_size * topology.size))

    callbacks = [keras.callbacks.LambdaCallback(on_test_batch_end=on_test_batch_end)]
    # Sums over ranks do not depend on the shards, so any number of ranks gives the same metrics.
    try:
        results = run.strategy.evaluate(run.model, data, callbacks)
    except tf.errors.OpError as error:
        raise source.explain(error) from error

    skipped = run.skipped_items()

    return {
        "checkpoint": run.checkpoint,
        "dataset": source.name,
        "split": split,
        "examples": total - sum(item.num_examples or 0 for item in skipped),
        "skipped": [f"{item.location}: {item.problem}" for item in skipped],
        "metrics": run.task.results(results),
    }


def predictions(run: FinishedRun, examples: Examples) -> Iterator[Rows]:
    """Yields the predictions of all ranks as rows, in the order of the examples (every rank).

    Each rank gets all rows, and holds at most one batch of each rank in memory.
    """
    comm = run.strategy.comm
    batches = examples.batches()
    forward = forward_of(run.model)
    calls_together = run.strategy.calls_together(run.model)
    blank = blank_batch(add_batch_axis(run.source.element_spec[0]), 0)
    progress = ProgressLines("predicted", examples.total, run.is_chief)

    num_done = 0

    def next_batch() -> Batch | None:
        try:
            batch = next(batches, None)
        except tf.errors.OpError as error:
            raise run.source.explain(error) from error
        if batch and not num_done:
            run.check_kind(examples.name, keras.tree.map_structure(np.asarray, batch[0]))
        return batch

    while True:
        # A rank that has no batches left takes part until all ranks are done. If calls of the model
        # contain collectives, it makes them too, with a blank batch.
        batch = comm.all_or_raise(next_batch)
        if batch is None and calls_together:
            forward(blank)
        # The lambda is called before `batch` changes.
        rows = comm.all_or_raise(lambda: batch and predict_rows(run, batch, forward))  # noqa: B023
        blocks = [block for block in comm.gather(rows) if block]
        if not blocks:
            return
        rows = join_blocks(blocks, examples.is_interleaved)
        count = _num_rows(rows)
        yield {"example": np.arange(num_done, num_done + count), **rows}
        num_done += count
        progress.update(num_done)


def predict_rows(run: FinishedRun, batch: Batch, forward: Callable[[Any], Any]) -> Rows:
    """Predicts a batch; returns the input's columns, then the task's columns of the outputs."""
    inputs, input_columns = batch
    outputs = keras.tree.map_structure(as_numpy, forward(inputs))
    columns = split_columns(run.task.columns(outputs, run.source), run.task.targets_are_masks)
    rows = dict(input_columns)
    for name, array in columns.items():
        # A label or an output may have the name of another column.
        is_taken = name == "example" or name in input_columns
        rows[f"prediction.{name}" if is_taken else name] = array

    return rows


def split_columns(columns: dict[str, np.ndarray], has_masks: bool = False) -> Rows:
    """Splits arrays [examples, n] into n columns; masks [examples, height, width] stay whole.

    Raises:
        ConfigError: an array that is not a mask has more than two dimensions.

    >>> list(split_columns({"class": np.zeros(3), "prediction": np.zeros((3, 2))}))
    ['class', 'prediction.0', 'prediction.1']
    """
    rows = {}
    for name, array in columns.items():
        if array.ndim == 1 or has_masks:
            rows[name] = array
        elif array.ndim == 2 and array.shape[1] == 1:
            rows[name] = array[:, 0]
        elif array.ndim == 2:
            rows |= {f"{name}.{index}": column for index, column in enumerate(array.T)}
        else:
            raise ConfigError(
                f"the predictions of an example have the shape {list(array.shape[1:])}, which does not fit a row of a "
                "table; use hvtrain.load(run).model, or python -m hvtrain generate for text"
            )

    return rows


def join_blocks(blocks: Sequence[Rows], is_interleaved: bool) -> Rows:
    """Joins one block of rows from each rank in the order of the examples.

    >>> join_blocks([{"x": np.array([0, 2, 4])}, {"x": np.array([1, 3])}], is_interleaved=True)["x"].tolist()
    [0, 1, 2, 3, 4]
    """
    rows = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    if not is_interleaved:
        return rows
    positions = np.concatenate([np.arange(_num_rows(block)) for block in blocks])
    order = np.argsort(positions, kind="stable")  # By the position in a block, then by rank.

    return {name: array[order] for name, array in rows.items()}


def _num_rows(rows: Rows) -> int:
    return len(next(iter(rows.values())))


# Size of a Parquet row group in memory. A row group for each batch would make the file many times
# larger.
ROW_GROUP_BYTES = 2**24


class Writer:
    """Writes rows to a path (chief only).

    A table's file gets its name only when it is complete. Table writers open `self._file` on the
    first `add`, since they need the rows' columns.
    """

    _file: Any = None

    def __init__(self, path: Path) -> None:
        self.path = path
        # In the same folder, since a rename works only within one file system.
        self._temporary = path.with_name(f"{TEMPORARY}{path.name}")

    def add(self, rows: Rows) -> None:
        """Writes rows. Raises StorageError if that fails."""
        raise NotImplementedError

    def close(self) -> None:
        """Completes a table's file. Raises StorageError if that fails.

        Masks are complete after each `add`.
        """
        if self._file is not None:
            with _storage_errors(self.path):
                self._file.close()
                self._temporary.replace(self.path)

    def discard(self) -> None:
        """Removes an unfinished output."""
        remove(self._temporary)


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Turns an OSError into a StorageError that names the path."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} was not written: {error.strerror or error}; make room on its disk, or choose another path"
        ) from error


class CsvWriter(Writer):
    """Writes a .csv file."""

    def add(self, rows: Rows) -> None:
        with _storage_errors(self.path):
            if self._file is None:
                self._file = self._temporary.open("w", newline="", encoding="utf-8")
                csv.writer(self._file).writerow(rows)
            # tolist() would turn times in nanoseconds into integers.
            columns = [
                (array.astype("M8[us]") if array.dtype == "M8[ns]" else array).tolist()
                for array in rows.values()
            ]
            csv.writer(self._file).writerows(zip(*columns))


class ParquetWriter(Writer):
    """Writes a .parquet file, gathering many batches into each row group."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._group: list[pa.Table] = []

    def add(self, rows: Rows) -> None:
        self._group.append(pa.table(rows))
        if sum(table.nbytes for table in self._group) >= ROW_GROUP_BYTES:
            self._write_group()

    def close(self) -> None:
        if self._group:
            self._write_group()
        super().close()

    def _write_group(self) -> None:
        # In some batches a column of ids may have only missing values, which pyarrow gives the
        # type null.
        table = pa.concat_tables(self._group, promote_options="permissive")
        self._group = []
        with _storage_errors(self.path):
            if self._file is None:
                # If all values in the first group are missing, the column becomes text.
                fields = [
                    column.with_type(pa.string()) if pa.types.is_null(column.type) else column
                    for column in table.schema
                ]
                self._file = pa.parquet.ParquetWriter(self._temporary, pa.schema(fields))
            self._file.write_table(table.cast(self._file.schema))


class MaskWriter(Writer):
    """Writes a folder of PNG masks whose pixel values are classes.

    A mask is named after its input image, or else after the example's number. The mask of x.jpg is
    x.png, or x.jpg.png if another image's mask is x.png already.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # Files that this process wrote; the folder was empty before.
        self._written: set[Path] = set()

    def add(self, rows: Rows) -> None:
        names = rows.get("file", [f"{number:08d}" for number in rows["example"]])
        for name, mask in zip(names, rows["mask"]):
            path = (self.path / str(name)).with_suffix(".png")
            if path in self._written:
                path = self.path / f"{name}.png"
            self._written.add(path)
            with _storage_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                # A pixel of an 8-bit PNG can have at most 256 values.
                dtype = np.uint8 if mask.max() < 256 else np.uint16
                Image.fromarray(mask.astype(dtype)).save(path)


def writer_for(output: Path, has_masks: bool, inputs: Any = ()) -> Writer:
    """Returns the writer that fits an output path and the kind of predictions.

    Args:
        output: a .csv or .parquet file, or a folder for masks.
        has_masks: True if the predictions are masks.
        inputs: nested settings, some of which name input files, which must not be overwritten.
            Which ones do depends on the data set, so every string is tried as a path.

    Raises:
        ConfigError: the output would replace an input, its suffix is unknown, its folder does not
            exist, or a folder for masks is not empty.
    """
    for value in keras.tree.flatten(inputs):
        is_input = False
        # samefile follows links. It raises an error unless both are paths that exist.
        with suppress(OSError, TypeError, ValueError):
            is_input = output.samefile(value)
        if is_input:
            raise ConfigError(f"--output {output} is also an input; choose another name")
    if has_masks:
        if output.suffix or output.is_file():
            raise ConfigError(
                f"--output {output} has a suffix or is a file; masks are images, so give a folder without a suffix"
            )
        if output.is_dir() and any(output.iterdir()):
            raise ConfigError(f"--output {output} is not empty; choose another folder")
        return MaskWriter(output)

    if output.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"--output {output} has an unknown suffix; give FILE.csv or FILE.parquet")
    # If the path is a symbolic link, its target is replaced, and the link is kept.
    path = page_path(output).resolve()
    return ParquetWriter(path) if output.suffix == ".parquet" else CsvWriter(path)
