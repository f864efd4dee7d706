"""The examples to predict for, from a split or from files. Each example is on one rank."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.manifest import check_names
from hvtrain.data.pipeline.streams import IndexedSource, StreamedSource
from hvtrain.data.sources.table import refuse_gaps, text_options
from hvtrain.errors import ConfigError, DataError, in_one_line
from hvtrain.finished.finished_run import FinishedRun

Batch = tuple[Any, dict[str, np.ndarray]]
"""Inputs as the model takes them, and further columns of the output by name, such as targets."""
IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".bmp")
NEEDED = "a folder of images or an image, a .csv or .parquet file of a table, or a .npy file of an array"


@dataclass(frozen=True)
class Examples:
    """This rank's batches. The examples come in the order of all ranks' first batches, then their second ones, ...

    is_interleaved: one row of each rank in turn (rank 0's first row, rank 1's first row, ...); otherwise whole batches.
    """

    name: str
    total: int
    batches: Callable[[], Iterator[Batch]]
    is_interleaved: bool = False


def of_split(run: FinishedRun, split: str) -> Examples:
    """The examples of a split. Raises ConfigError if it has none.

    If the source can open single examples, each rank opens only its own. Other data, such as record files, are read
    whole by every rank, which predicts some of the batches.
    """
    source, topology, size = run.source, run.strategy.topology, run.config.train.evaluation_batch_size
    if not (total := source.num_examples(split)):
        raise ConfigError(f"split={split} of {source.name} has no examples; choose another split, or input=PATH")
    whole = replace(topology, rank=0, size=1)
    by_number = isinstance(source, IndexedSource) and source.on_error == "stop"
    if by_number:
        data = source.evaluation(split, topology, size)
    elif isinstance(source, StreamedSource) and source.on_error == "skip":
        data = source.numbered_evaluation(split, whole, size).shard(topology.size, topology.rank)
    else:
        data = source.evaluation(split, whole, size).shard(topology.size, topology.rank)

    def batches() -> Iterator[Batch]:
        for batch in data:
            numbers = {"example": batch[0].numpy()} if len(batch) > len(source.element_spec) else {}
            inputs, targets = batch[len(numbers) : len(numbers) + 2]
            yield inputs, {**numbers, **_plain(targets)}

    return Examples(f"{split} of {source.name}", total, batches, by_number)


def _plain(targets: Any) -> dict[str, np.ndarray]:
    """The targets as a column, if they are one number for each example."""
    if isinstance(targets, tf.Tensor) and targets.shape.rank == 1:
        return {"target": targets.numpy()}
    return {}


def of_input(run: FinishedRun, path: Path) -> Examples:
    """The examples in files, in the form that the run's saved model takes. Raises ConfigError and DataError."""
    topology, size = run.strategy.topology, run.config.train.evaluation_batch_size
    spec = run.source.preprocessing().shape
    if not path.exists():
        raise ConfigError(f"input={path} is not there; give {NEEDED}")
    if path.suffix in (".csv", ".parquet"):
        return _of_table(run, path, spec, topology, size)
    if path.suffix == ".npy":
        return _of_array(run, path, spec, topology, size)
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    if not (files := [file for file in found if file.suffix.lower() in IMAGES]):
        raise ConfigError(f"input={path} has no images ({', '.join(IMAGES)}); give {NEEDED}")
    if not isinstance(spec, tuple) or len(spec) not in (2, 3) or not hasattr(run.source, "image_shape"):
        raise ConfigError(f"input={path} has images, and the model does not take images; give {NEEDED}")
    return _of_images(run, path, files, has_channels=len(spec) == 3)


def _parts(total: int, topology: Topology, size: int) -> Iterator[slice]:
    """This rank's batches of `total` examples: every topology.size-th."""
    for begin in range(topology.rank * size, total, topology.size * size):
        yield slice(begin, min(begin + size, total))


def _of_images(run: FinishedRun, path: Path, files: Sequence[Path], has_channels: bool) -> Examples:
    check_names(files)
    topology, size = run.strategy.topology, run.config.train.evaluation_batch_size
    preprocessing, channels = run.source.preprocessing(), run.source.image_shape[-1]
    root = path if path.is_dir() else path.parent

    def one(file: Path) -> np.ndarray:
        """One image, preprocessed by itself, since images may differ in size."""
        try:
            pixels = tf.io.decode_image(tf.io.read_file(str(file)), channels, expand_animations=False)
            raw = tf.cast(pixels, tf.float32)[tf.newaxis]
            return keras.ops.convert_to_numpy(preprocessing(raw if has_channels else raw[..., 0]))[0]
        except Exception as error:
            raise DataError(f"{file} cannot be read as an image: {in_one_line(error)}; fix or remove it") from error

    def batches() -> Iterator[Batch]:
        for part in _parts(len(files), topology, size):
            names = [str(file.relative_to(root)) for file in files[part]]
            yield np.stack([one(file) for file in files[part]]), {"file": np.array(names, object)}

    return Examples(str(path), len(files), batches)


def _of_array(run: FinishedRun, path: Path, spec: Any, topology: Topology, size: int) -> Examples:
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # It reads no pickles.
    except (OSError, ValueError) as error:
        raise DataError(f"input={path} cannot be read as an array: {error}; write it with numpy.save") from error
    shape = spec if isinstance(spec, tuple) else tuple(getattr(spec, "shape", ())) or None
    if shape is None or array.ndim != len(shape) + 1 or any(w not in (None, h) for w, h in zip(shape, array.shape[1:])):
        needed = f"[examples, {', '.join(map(str, shape))}]" if shape is not None else "columns by name"
        raise DataError(f"input={path} is of shape {list(array.shape)}, and the model takes {needed}; reshape it")
    kind, preprocessing = "float32" if isinstance(spec, tuple) else spec.dtype.name, run.source.preprocessing()

    def batches() -> Iterator[Batch]:
        for part in _parts(len(array), topology, size):
            yield preprocessing(tf.constant(np.asarray(array[part]).astype(kind))), {}

    return Examples(str(path), len(array), batches)


def _of_table(run: FinishedRun, path: Path, spec: Any, topology: Topology, size: int) -> Examples:
    if not isinstance(spec, dict):
        raise ConfigError(f"input={path} is a table, and the model takes no columns by name; give {NEEDED}")
    names = [name for name, one in spec.items() if one.dtype == tf.string]
    try:
        if path.suffix == ".csv":
            table = pa.csv.read_csv(path, convert_options=text_options(names))
        else:
            table = pa.parquet.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"input={path} cannot be read: {in_one_line(error)}; fix the file") from error
    if missing := [name for name in spec if name not in table.column_names]:
        raise DataError(f"input={path} lacks the column {', '.join(missing)}; it has {', '.join(table.column_names)}")
    refuse_gaps(table, spec, f"input={path}")
    preprocessing = run.source.preprocessing()

    def column(rows: pa.Table, name: str) -> tf.Tensor:
        kind = spec[name].dtype
        values = rows[name].to_pylist()
        if kind == tf.string and not isinstance(values[0], str | bytes | list):
            values = rows[name].to_numpy().astype(str).tolist()  # As dataset=table makes names of numbers.
        try:
            array = np.array(values, object if kind == tf.string else kind.as_numpy_dtype)
        except (TypeError, ValueError) as error:
            raise DataError(f"input={path}: column {name} is not all {kind.name}: {error}; fix the file") from error
        if kind.is_integer and not np.array_equal(array, values):
            raise DataError(f"input={path}: column {name} is not all {kind.name}; it has fractions; fix the file")
        return tf.constant(array.reshape(-1, *spec[name].shape), kind)

    def batches() -> Iterator[Batch]:
        for part in _parts(table.num_rows, topology, size):
            rows = table.slice(part.start, part.stop - part.start)
            yield preprocessing({name: column(rows, name) for name in spec}), {}

    return Examples(str(path), table.num_rows, batches)
