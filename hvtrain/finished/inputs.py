"""Reads the examples to predict, from a split or from files. Each example is predicted by one rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvtrain.data.formats.columns import Column
from hvtrain.data.formats.folders import files_below, is_junk
from hvtrain.data.formats.image_files import SUFFIXES, is_image
from hvtrain.data.formats.schema import plain_columns, read_cells
from hvtrain.data.formats.table_phrases import odd_texts
from hvtrain.data.formats.tables import is_table, read_table, table_files
from hvtrain.data.manifest import check_names
from hvtrain.data.pipeline.decoding import Sizing, decode
from hvtrain.data.pipeline.streams import IndexedSource, StreamedSource
from hvtrain.data.sources.memory import MemorySource
from hvtrain.data.sources.table import NewRows, Table
from hvtrain.errors import ConfigError, DataError, in_one_line
from hvtrain.finished.finished_run import FinishedRun
from hvtrain.system.files import is_remote

# Inputs as the model takes them, and columns to copy to the output by name, such as targets.
Batch = tuple[Any, dict[str, np.ndarray]]
ACCEPTED_INPUTS = (
    "a folder of images or an image, a .csv or .parquet file of a table, or a .npy file of an array"
)


@dataclass(frozen=True)
class Examples:
    """Examples to predict, as the batches of this rank.

    The examples are ordered by rounds: all ranks' first batches, then all ranks' second ones, and so on.

    Attributes:
        name: name of the examples in messages.
        total: number of examples on all ranks.
        batches: iterates over this rank's batches.
        is_interleaved: True if ranks alternate row by row (rank 0's first row, rank 1's first row,
            ...), False if they alternate by whole batches.
        note: a note for the user, appended to the last line that predict prints.
    """

    name: str
    total: int
    batches: Callable[[], Iterator[Batch]]
    is_interleaved: bool = False
    note: str = ""


def split_examples(run: FinishedRun, split: str) -> Examples:
    """Returns the examples of a split. Raises ConfigError if it has none.

    If the source can open single examples, each rank opens only its own. Other data, such as record
    files, are read completely by every rank, and each rank predicts every size-th batch.
    """
    source = run.source
    topology = run.strategy.topology
    batch_size = run.config.train.evaluation_batch_size
    # Checked before anything is opened, because a split may be empty.
    total = source.num_examples(split)
    if not total:
        raise ConfigError(
            f"split={split} of {source.name} has no examples; choose another split, or input=PATH"
        )

    # If each rank skipped examples of its own shard, no rank would know the others' example
    # numbers, so with on_error="skip" all ranks read everything. Data in memory are never skipped.
    opens_single_examples = isinstance(source, IndexedSource) and (
        not source.skips or isinstance(source, MemorySource)
    )
    if opens_single_examples:
        data = source.evaluation(split, topology, batch_size)
    else:
        single_rank = replace(topology, rank=0, size=1)
        if isinstance(source, StreamedSource) and source.skips:
            data = source.numbered_evaluation(split, single_rank, batch_size)
        else:
            data = source.evaluation(split, single_rank, batch_size)
        # Ranks take whole batches in turn, so joining their rows by rounds
        # gives the order of the examples.
        data = data.shard(topology.size, topology.rank)

    # The ids of this rank's shard are in the order of its batches.
    ids = source.ids(split, topology) if isinstance(source, Table) else {}

    def batches():
        start = 0
        for batch in data:
            elements = list(batch)
            end = start + len(tf.nest.flatten(batch)[0])
            columns = {name: values[start:end] for name, values in ids.items()}
            start = end
            if len(elements) > len(source.element_spec):
                # numbered_evaluation puts the examples' numbers first, since some may be skipped.
                columns["example"] = elements.pop(0).numpy()
            inputs, targets = elements[:2]
            # Targets become a column only if they are one number per example.
            if isinstance(targets, tf.Tensor) and targets.shape.rank == 1:
                columns["target"] = targets.numpy()
            yield inputs, columns

    return Examples(
        f"{split} of {source.name}", total, batches, is_interleaved=opens_single_examples
    )


def tables_in(settings: Any) -> list[Path]:
    """Returns the files of tables that nested settings name: as folders, as patterns, or with ~."""
    files = []
    for value in tf.nest.flatten(settings):
        # An address names no file of this host. Most settings name no table at all.
        if isinstance(value, str) and value and not is_remote(value):
            with suppress(OSError, ValueError):
                files += [file for file, _ in table_files(value, "input")]
    return files


def input_examples(run: FinishedRun, path: Path) -> Examples:
    """Returns the examples in a file or folder, preprocessed as in the run's saved model.

    Raises:
        ConfigError: there is no such path, or the model does not take this kind of input.
        DataError: a file cannot be read.
    """
    if not path.exists():
        raise ConfigError(f"input={path} does not exist; give {ACCEPTED_INPUTS}")
    if path.suffix == ".npy":
        return _array_examples(run, path)
    # For a run on a table, any other file is read as a table, whatever its suffix.
    reads_any_file = isinstance(run.source, Table) and path.is_file()
    paths = files_below(path, is_junk) if path.is_dir() else [path]
    images = list(filter(is_image, paths))
    takes_images = hasattr(run.source, "image_shape")
    # A folder of images may also hold a table, such as labels.csv.
    has_table = any(map(is_table, paths)) and not (images and takes_images)
    if reads_any_file or has_table:
        return _table_examples(run, path)
    if not images:
        raise ConfigError(
            f"input={path} has no images ({', '.join(SUFFIXES)}); give {ACCEPTED_INPUTS}"
        )

    shape = run.source.preprocessing().shape
    is_image_shape = isinstance(shape, tuple) and len(shape) in (2, 3)
    if not takes_images and "image_shape" in run.source.facts():
        raise ConfigError(
            f"input={path} has image files, and only the function of {run.source.name} knows how files become its "
            "arrays; give a .npy file of arrays as it yields them"
        )
    if not (is_image_shape and takes_images):
        raise ConfigError(
            f"input={path} has images, and the model does not take images; give a .csv or .parquet file of a table, "
            "or a .npy file of an array"
        )

    return _image_examples(run, path, images, len(paths) - len(images))


def _batch_slices(run: FinishedRun, total: int) -> Iterator[slice]:
    """Yields slices of `total` examples, one for each batch of this rank."""
    topology = run.strategy.topology
    batch_size = run.config.train.evaluation_batch_size
    # Each rank takes a batch in turn; the last round may have none for some ranks.
    for start in range(topology.rank * batch_size, total, topology.size * batch_size):
        yield slice(start, min(start + batch_size, total))


def _image_examples(
    run: FinishedRun, path: Path, files: Sequence[Path], num_others: int
) -> Examples:
    check_names(files)
    note = f"; left out {num_others:,} file(s) of other kinds" if num_others else ""
    preprocessing = run.source.preprocessing()
    sizing = run.source.sizing or Sizing(run.source.image_shape)
    # A source of arrays has no sizing: all its images, and so the model's inputs, are of one size.
    read = sizing.decode_for_model if run.source.sizing else partial(decode, sizing=sizing)
    if run.task.targets_are_masks:
        # The masks have the size of the resized images, not of those in the files.
        note += f"; masks of images {sizing.phrase()}"
    # Names in the output are relative to the user's path, so that a folder gives the same names
    # wherever it is.
    root = path if path.is_dir() else path.parent

    def read_image(file):
        """Reads and preprocesses one image on its own, since images may differ in size."""
        try:
            pixels = read(tf.io.read_file(str(file)))
            batch = tf.cast(pixels, tf.float32)[tf.newaxis]
            # The model may take images without an axis for channels.
            if len(preprocessing.shape) == 2:
                batch = batch[..., 0]
            with tf.device("CPU:0"):  # As in the stream of a split.
                return preprocessing(batch).numpy()[0]
        except Exception as error:
            raise DataError(
                f"{file} cannot be read as an image: {in_one_line(error)}; fix or remove it"
            ) from error

    def batches():
        for batch in _batch_slices(run, len(files)):
            names = [str(file.relative_to(root)) for file in files[batch]]
            pixels = np.stack([read_image(file) for file in files[batch]])
            yield pixels, {"file": np.array(names, object)}

    return Examples(str(path), len(files), batches, note=note)


def _array_examples(run: FinishedRun, path: Path) -> Examples:
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # Refuses pickles, which could run code.
    except (OSError, ValueError) as error:
        raise DataError(
            f"input={path} cannot be read as an array: {error}; write it with numpy.save"
        ) from error

    preprocessing = run.source.preprocessing()
    spec = preprocessing.shape
    if isinstance(spec, tuple):
        spec = tf.TensorSpec(spec)
    needed = "columns by name; give a table"
    is_array = isinstance(spec, tf.TensorSpec)
    if is_array:
        needed = f"[examples, {', '.join(map(str, spec.shape))}]; reshape the array"
    if not is_array or not tf.TensorShape([None, *spec.shape]).is_compatible_with(array.shape):
        raise DataError(
            f"input={path} is of shape {list(array.shape)}, and the model takes {needed}"
        )

    facts = run.source.facts()
    length = facts.get("length")
    if length and array.ndim == 2 and array.shape[1] > length:
        raise DataError(
            f"input={path} has rows of {array.shape[1]} tokens, and the model takes up to {length}; cut them"
        )

    def batches():
        for batch in _batch_slices(run, len(array)):
            converted = _cast(np.asarray(array[batch]), spec.dtype, f"input={path}")
            _check_tokens(converted, facts.get("vocabulary_size"), f"input={path}")
            yield preprocessing(tf.constant(converted)), {}

    return Examples(str(path), len(array), batches)


def _check_tokens(tokens: np.ndarray, vocabulary_size: int | None, location: str) -> None:
    """Raises DataError for a token that the model does not know, which a GPU would read as zeros."""
    if vocabulary_size is None or not tokens.size or tokens.dtype.kind not in "iu":
        return
    for token in (tokens.min(), tokens.max()):
        if not 0 <= token < vocabulary_size:
            raise DataError(
                f"{location} has the token {token}, and the model knows 0 ... {vocabulary_size - 1}; fix the file"
            )


def _cast(array: np.ndarray, dtype: tf.DType, location: str) -> np.ndarray:
    """Converts an array to a dtype.

    Raises DataError if a value cannot be converted, or if an integer dtype would change it, such as a fraction.
    """
    try:
        converted = array.astype(dtype.as_numpy_dtype)
    except (TypeError, ValueError) as error:
        raise DataError(f"{location}: {error}; fix the file") from error
    if converted.dtype.kind in "iu" and not np.array_equal(converted, array):
        raise DataError(
            f"{location} has {array[converted != array][0]}, which is not {dtype.name}; fix the file"
        )
    return converted


def _table_examples(run: FinishedRun, path: Path) -> Examples:
    """Returns the rows of a table, whose columns are those of dataset=table or, in other runs, the model's inputs."""
    preprocessing = run.source.preprocessing()
    spec = preprocessing.shape
    if isinstance(run.source, Table):
        rows = run.source.new_rows(path)
    elif isinstance(spec, dict):
        rows = _read_rows(spec, path)
    else:
        raise ConfigError(
            f"input={path} is a table, and the model takes no columns by name; give a folder of images or an image, "
            "or a .npy file of an array"
        )
    note = ""
    if rows.unknown:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in rows.unknown.items())
        note = f"; rows with names that training did not have: {shares}"

    def batches():
        for batch in _batch_slices(run, rows.num_rows):
            raw = rows.raw(np.arange(batch.start, batch.stop))
            columns = {name: tf.constant(array, spec[name].dtype) for name, array in raw.items()}
            yield preprocessing(columns), {name: values[batch] for name, values in rows.ids.items()}

    return Examples(str(path), rows.num_rows, batches, note=note)


def _read_rows(spec: Mapping[str, tf.TensorSpec], path: Path) -> NewRows:
    """Reads a table for a model that takes inputs by name but was not trained on dataset=table."""
    columns = [_column_of_spec(name, tensor_spec) for name, tensor_spec in spec.items()]
    table = read_table(path, "input")
    cells = read_cells(columns, plain_columns(table), f"input={path}")
    # Keyed by the model's input names, whatever the order of the columns in the file.
    arrays = {}
    for column, tensor_spec in zip(columns, spec.values()):
        is_gap = cells[column.name].is_gap
        if is_gap.any():
            odd = cells[column.name].odd
            unreadable = f"; unreadable cells: {odd_texts(cells[column.name])}" if odd else ""
            raise DataError(
                f"input={path}: row {np.argmax(is_gap)} has no {column.name} (rows without it: {is_gap.sum()}"
                f"{unreadable}); fill or drop them"
            )
        array = np.asarray(cells[column.name].values)
        converted = _cast(array, tensor_spec.dtype, f"input={path}: column {column.name}")
        arrays[column.name] = converted.reshape(-1, *tensor_spec.shape)

    def raw(rows):
        return {name: array[rows] for name, array in arrays.items()}

    return NewRows(table.num_rows, raw, {}, {})


def _column_of_spec(name: str, spec: tf.TensorSpec) -> Column:
    length = int(np.prod(spec.shape))
    kind = "number"
    if spec.dtype == tf.string:
        kind = "name"
    elif length > 1:
        kind = "vector"
    elif spec.dtype.is_integer:
        kind = "integer"
    return Column(name, name, kind, spec.dtype.name, length=length)
