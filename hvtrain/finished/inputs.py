"""The examples to predict, from a split or from files. Each example is on one rank."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import keras
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import tensorflow as tf

from hvtrain.data.manifest import check_names
from hvtrain.data.pipeline.streams import IndexedSource, StreamedSource
from hvtrain.data.sources.table import refuse_gaps, text_options
from hvtrain.errors import ConfigError, DataError, in_one_line
from hvtrain.finished.finished_run import FinishedRun

# Inputs as the model takes them, and further columns of the output by name, such as targets.
Batch = tuple[Any, dict[str, np.ndarray]]
IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".bmp")
NEEDED = "a folder of images or an image, a .csv or .parquet file of a table, or a .npy file of an array"


@dataclass(frozen=True)
class Examples:
    """This rank's batches. The examples come in the order of all ranks' first batches, then their second ones, ...

    Attributes:
        name: what they are, for the user.
        total: number of examples on all ranks.
        batches: iterates over this rank's batches.
        is_interleaved: True if a row of each rank comes in turn (rank 0's first row, rank 1's first
            row, ...), False for whole batches.
    """

    name: str
    total: int
    batches: Callable[[], Iterator[Batch]]
    is_interleaved: bool = False


def of_split(run: FinishedRun, split: str) -> Examples:
    """Returns the examples of a split. Raises ConfigError if it has none.

    If the source can open single examples, each rank opens only its own. Other data, such as record files, are read
    whole by every rank, which predicts some of the batches.
    """
    source = run.source
    topology = run.strategy.topology
    batch_size = run.config.train.evaluation_batch_size
    total = source.num_examples(split)
    if not total:
        raise ConfigError(f"split={split} of {source.name} has no examples; choose another split, or input=PATH")

    # With on_error="skip" a rank would not know which numbers the examples of the others have.
    opens_single_examples = isinstance(source, IndexedSource) and source.on_error == "stop"
    if opens_single_examples:
        data = source.evaluation(split, topology, batch_size)
    else:
        whole = replace(topology, rank=0, size=1)
        if isinstance(source, StreamedSource) and source.on_error == "skip":
            data = source.numbered_evaluation(split, whole, batch_size)
        else:
            data = source.evaluation(split, whole, batch_size)
        # Whole batches in turn, so that the order over all ranks is that of the examples.
        data = data.shard(topology.size, topology.rank)

    def batches() -> Iterator[Batch]:
        for batch in data:
            columns = {}
            elements = list(batch)
            if len(elements) > len(source.element_spec):  # Numbers of examples, where some may be skipped.
                columns["example"] = elements.pop(0).numpy()
            inputs, targets = elements[:2]
            # Targets are a column if they are one number for each example.
            if isinstance(targets, tf.Tensor) and targets.shape.rank == 1:
                columns["target"] = targets.numpy()
            yield inputs, columns

    return Examples(f"{split} of {source.name}", total, batches, is_interleaved=opens_single_examples)


def of_input(run: FinishedRun, path: Path) -> Examples:
    """Returns the examples in files, in the form that the run's saved model takes.

    Raises:
        ConfigError: there are no such files, or the model takes something else.
        DataError: a file cannot be read.
    """
    if not path.exists():
        raise ConfigError(f"input={path} is not there; give {NEEDED}")
    if path.suffix in (".csv", ".parquet"):
        return _of_table(run, path)
    if path.suffix == ".npy":
        return _of_array(run, path)

    paths = sorted(path.rglob("*")) if path.is_dir() else [path]
    images = [file for file in paths if file.suffix.lower() in IMAGES]
    if not images:
        raise ConfigError(f"input={path} has no images ({', '.join(IMAGES)}); give {NEEDED}")
    shape = run.source.preprocessing().shape
    if not isinstance(shape, tuple) or len(shape) not in (2, 3) or not hasattr(run.source, "image_shape"):
        raise ConfigError(f"input={path} has images, and the model does not take images; give {NEEDED}")

    return _of_images(run, path, images, has_channels=len(shape) == 3)


def _parts(run: FinishedRun, total: int) -> Iterator[slice]:
    """Yields this rank's batches of `total` examples: every topology.size-th."""
    topology = run.strategy.topology
    batch_size = run.config.train.evaluation_batch_size
    # Each rank takes a batch in turn; the last round may have none for some of them.
    for start in range(topology.rank * batch_size, total, topology.size * batch_size):
        yield slice(start, min(start + batch_size, total))


def _of_images(run: FinishedRun, path: Path, files: Sequence[Path], has_channels: bool) -> Examples:
    check_names(files)
    preprocessing = run.source.preprocessing()
    channels = run.source.image_shape[-1]
    # Names in the output are relative to what the user gave.
    root = path if path.is_dir() else path.parent

    def preprocessed(file: Path) -> np.ndarray:
        """Reads one image and preprocesses it by itself, since images may differ in size."""
        try:
            pixels = tf.io.decode_image(tf.io.read_file(str(file)), channels, expand_animations=False)
            batch = tf.cast(pixels, tf.float32)[tf.newaxis]
            if not has_channels:
                batch = batch[..., 0]

            return keras.ops.convert_to_numpy(preprocessing(batch))[0]
        except Exception as error:
            raise DataError(f"{file} cannot be read as an image: {in_one_line(error)}; fix or remove it") from error

    def batches() -> Iterator[Batch]:
        for part in _parts(run, len(files)):
            names = [str(file.relative_to(root)) for file in files[part]]
            yield (
                np.stack([preprocessed(file) for file in files[part]]),
                {"file": np.array(names, object)},
            )

    return Examples(str(path), len(files), batches)


def _of_array(run: FinishedRun, path: Path) -> Examples:
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # It reads no pickles.
    except (OSError, ValueError) as error:
        raise DataError(f"input={path} cannot be read as an array: {error}; write it with numpy.save") from error

    preprocessing = run.source.preprocessing()
    spec = preprocessing.shape
    dtype = "float32"
    if isinstance(spec, tuple):
        shape = spec
    else:
        shape = tuple(getattr(spec, "shape", ()))
        if not shape:
            _refuse_shape(path, array, "columns by name")
        dtype = spec.dtype.name

    # None in the shape stands for any length.
    fits = array.ndim == len(shape) + 1
    fits = fits and all(needed in (None, length) for needed, length in zip(shape, array.shape[1:]))
    if not fits:
        _refuse_shape(path, array, f"[examples, {', '.join(map(str, shape))}]")

    def batches() -> Iterator[Batch]:
        for part in _parts(run, len(array)):
            yield preprocessing(tf.constant(np.asarray(array[part]).astype(dtype))), {}

    return Examples(str(path), len(array), batches)


def _refuse_shape(path: Path, array: np.ndarray, needed: str) -> NoReturn:
    raise DataError(f"input={path} is of shape {list(array.shape)}, and the model takes {needed}; reshape it")


def _of_table(run: FinishedRun, path: Path) -> Examples:
    preprocessing = run.source.preprocessing()
    spec = preprocessing.shape
    if not isinstance(spec, dict):
        raise ConfigError(f"input={path} is a table, and the model takes no columns by name; give {NEEDED}")

    texts = [name for name, column in spec.items() if column.dtype == tf.string]

    try:
        # In a CSV file only its spelling tells a name from a number, so the model's columns say which is which.
        if path.suffix == ".csv":
            table = pa.csv.read_csv(path, convert_options=text_options(texts))
        else:
            table = pa.parquet.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"input={path} cannot be read: {in_one_line(error)}; fix the file") from error

    missing = [name for name in spec if name not in table.column_names]
    if missing:
        raise DataError(f"input={path} lacks the column {', '.join(missing)}; it has {', '.join(table.column_names)}")
    # Training refuses them too: a gap would become NaN, and so would the prediction.
    refuse_gaps(table, spec, f"input={path}")

    def batches() -> Iterator[Batch]:
        for part in _parts(run, table.num_rows):
            rows = table.slice(part.start, part.stop - part.start)
            columns = {name: _column(rows, name, column, path) for name, column in spec.items()}
            yield preprocessing(columns), {}

    return Examples(str(path), table.num_rows, batches)


def _column(rows: pa.Table, name: str, spec: tf.TensorSpec, path: Path) -> tf.Tensor:
    """Converts a column of some rows. Raises DataError if it is of another type."""
    dtype = spec.dtype
    values = rows[name].to_pylist()
    if dtype == tf.string and not isinstance(values[0], str | bytes | list):
        values = rows[name].to_numpy().astype(str).tolist()  # As dataset=table makes names of numbers.
    try:
        array = np.array(values, object if dtype == tf.string else dtype.as_numpy_dtype)
    except (TypeError, ValueError) as error:
        raise DataError(f"input={path}: column {name} is not all {dtype.name}: {error}; fix the file") from error

    # NumPy cuts fractions off without a word.
    if dtype.is_integer and not np.array_equal(array, values):
        raise DataError(f"input={path}: column {name} is not all {dtype.name}; it has fractions; fix the file")

    return tf.constant(array.reshape(-1, *spec.shape), dtype)
