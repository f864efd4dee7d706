"""Data sets that Hugging Face's library, datasets, has saved to disk: images, numbers and lists of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.manifest import user_path
from hvtrain.data.pipeline.streams import IndexedSource, Read, end_with_python
from hvtrain.data.pipeline.transform import Transform, Unchanged, check_image_shape, decode_batch
from hvtrain.data.source import Preprocessing, reason
from hvtrain.data.sources.file_source import decode_whole, decoded_preprocessing, with_files
from hvtrain.data.sources.memory import as_models_take
from hvtrain.errors import ConfigError, DataError

INSTALL = "install scripts/lock/data.txt (docs/data.md)"


class HuggingFace(IndexedSource):
    """What save_to_disk() wrote, by itself the training part, or with the splits train, validation and test.

    Rows are read by number, so a resumed run reads none that it has seen.

    Args:
        dir: the folder that save_to_disk() wrote.
        input: the column of the inputs; a list of columns gives a dict of inputs by name.
        target: the column of the targets; a list gives a dict.
        image_shape: [height, width, channels] to which encoded images are resized; their pixels become 0 ... 1.
        shift_pixels, flip: augmentation of training images, if the input is one column of images.

    Raises:
        ConfigError: without the library, for unknown columns, and for images without an image_shape.
        DataError: if the folder cannot be read, or a column holds other values.
    """

    name = "huggingface"

    def __init__(
        self,
        dir: str,
        input: str | Sequence[str] = "image",
        target: str | Sequence[str] = "label",
        image_shape: Sequence[int] | None = None,
        shift_pixels: int = 0,
        flip: bool = False,
    ) -> None:
        self.folder = user_path(dir)
        self.origin = str(self.folder)
        self._input = input
        self._target = target
        self._splits = load_splits(self.folder)
        train = self._splits["train"]
        self._columns = [*_names(input), *_names(target)]
        missing = [name for name in self._columns if name not in train.features]
        if missing:
            raise ConfigError(
                f"dataset.input and dataset.target name {', '.join(missing)}; {self.folder} has "
                f"{', '.join(train.features)}"
            )

        feature_types = {name: type(train.features[name]).__name__ for name in self._columns}
        self._images = {name for name, feature_type in feature_types.items() if feature_type == "Image"}
        self._image_shape = check_image_shape(image_shape) if image_shape is not None else None
        if self._images and self._image_shape is None:
            raise ConfigError(
                f"{', '.join(self._images)} of {self.folder} holds images; give "
                "dataset.image_shape=[height,width,channels]"
            )

        self.transform: Transform = Unchanged()
        if isinstance(input, str) and input in self._images and self._image_shape:
            self.image_shape = self._image_shape
            self.transform = Transform(scale=255.0, shift_pixels=shift_pixels, flip=flip)
        if feature_types.get(str(target)) == "ClassLabel":
            self.class_names = train.features[target].names
            self.num_classes = len(train.features[target].names)

        first = train.with_format("arrow")[:1]
        self._specs = {name: self._column_spec(name, first[name]) for name in self._columns}
        self._failure: DataError | None = None

    @property
    def element_spec(self) -> tuple[Any, ...]:
        specs = {}
        for name, spec in self._specs.items():
            specs[name] = tf.TensorSpec(spec.shape, tf.float32) if name in self._images else spec
        return self._arranged(specs)

    def num_examples(self, split: str) -> int:
        return len(self._splits.get(split, ()))

    def manifest(self) -> dict[str, Any]:
        def paths(split: str) -> list[str]:
            return [file["filename"] for file in self._splits[split].cache_files]

        return with_files(super().manifest(), self.folder, paths)

    def whole_targets(self) -> dict[str, Any]:
        if not isinstance(self._target, str) or self._target in self._images:
            return {}
        targets = {}
        for split, rows in self._splits.items():
            table = rows.select_columns([self._target]).with_format("arrow")[:]
            targets[split] = self._array(table, self._target, split, np.arange(len(rows)))
        return targets

    def class_counts(self) -> np.ndarray | None:
        if not hasattr(self, "num_classes"):
            return None
        return np.bincount(self.whole_targets()["train"].ravel(), minlength=self.num_classes)

    def reader(self, split: str, topology: Topology) -> Read:
        if self.on_error == "skip":
            raise ConfigError("dataset=huggingface cannot skip what it cannot read; use data.on_error=stop")
        end_with_python()
        rows: Any = None  # Of a split that does not exist no row is read.
        if split in self._splits:
            rows = self._splits[split].select_columns(self._columns).with_format("arrow")
        local = np.asarray(topology.share(self.num_examples(split)), np.int64)
        types = [tf.string if name in self._images else spec.dtype for name, spec in self._specs.items()]

        def read_arrays(indices: np.ndarray) -> list[np.ndarray]:
            numbers = local[indices]
            table = rows[numbers.tolist()]
            return [self._array(table, name, split, numbers) for name in self._columns]

        def read(indices: tf.Tensor) -> tuple[Any, ...]:
            arrays = tf.numpy_function(read_arrays, [indices], types)
            return self._arranged({name: self._tensor(name, array) for name, array in zip(self._columns, arrays)})

        return read

    def _tensor(self, name: str, values: tf.Tensor) -> tf.Tensor:
        """Returns a batch of a column as streams give it, and decodes images."""
        if name in self._images:
            encoded = tf.ensure_shape(values, [None])
            values = decode_batch(encoded, self._image_shape)  # type: ignore[arg-type]
            if name != self._input:  # The transform scales the others.
                values = tf.cast(values, tf.float32) / 255.0
        return tf.ensure_shape(values, [None, *self._specs[name].shape])

    def preprocessing(self) -> Preprocessing:
        if isinstance(self.transform, Unchanged):
            return super().preprocessing()
        return decoded_preprocessing(self.transform, self.image_shape)

    def raw_examples(self, split: str, topology: Topology, number: int) -> list[np.ndarray]:
        if isinstance(self.transform, Unchanged) or split not in self._splits:
            return []
        numbers = np.asarray(topology.share(self.num_examples(split)), np.int64)[:number]
        table = self._splits[split].with_format("arrow")[numbers.tolist()]
        encoded = self._array(table, str(self._input), split, numbers)
        return [decode_whole(image, self.image_shape[2]) for image in encoded]

    def explain(self, error: Exception) -> Exception:
        if self._failure and "DataError" in str(error):
            return self._failure
        # Matches "Image" and "image". TensorFlow does not say which image it could not decode.
        if isinstance(error, tf.errors.InvalidArgumentError) and self._images and "mage" in str(error):
            return DataError(
                f"{self.folder}: an image in {', '.join(self._images)} cannot be read: "
                f"{reason(error).splitlines()[0]}; fix or remove it"
            )
        return error

    def _arranged(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """Returns (inputs, targets) of values by column, each a value or a dict by name."""
        parts = []
        for columns in (self._input, self._target):
            if isinstance(columns, str):
                parts.append(values[columns])
            else:
                parts.append({name: values[name] for name in columns})
        return tuple(parts)

    def _column_spec(self, name: str, column: pa.ChunkedArray) -> tf.TensorSpec:
        """Returns the shape and type of a column's values, from its first row."""
        if name in self._images:
            return tf.TensorSpec(self._image_shape, tf.uint8)
        shape = []
        values = plain_array(column)
        while pa.types.is_list(values.type) or pa.types.is_large_list(values.type) or is_fixed_list(values.type):
            shape.append(len(values[0]))
            values = values.flatten()

        array = as_models_take(values.to_numpy(zero_copy_only=False))
        if array.dtype.kind not in "iufbO":
            raise DataError(f"{self.folder}: {name} holds {values.type}; numbers, strings or images are needed")
        dtype = tf.string if array.dtype.kind == "O" else tf.as_dtype(array.dtype)
        return tf.TensorSpec(shape, dtype)

    def _array(self, table: pa.Table, name: str, split: str, numbers: np.ndarray) -> np.ndarray:
        """Returns a column of some rows, encoded images as objects.

        Args:
            numbers: of the rows in the split, for messages.

        Raises:
            DataError: for gaps and unlike lengths.
        """
        values = plain_array(table[name])
        spec = self._specs[name]
        count = len(values)
        if name in self._images:
            pairs = zip(values.field("bytes").to_pylist(), values.field("path").to_pylist())
            encoded = [Path(path).read_bytes() if data is None else data for data, path in pairs]
            return np.array(encoded, object)

        shape = list(spec.shape)
        for side in shape:
            lengths = np.array([len(value) if value.is_valid else -1 for value in values])
            unlike = np.flatnonzero(lengths != side)
            if unlike.size:
                number = numbers[unlike[0] * count // len(values)]
                raise self._fail(
                    f"row {number} has {lengths[unlike[0]]} values and row 0 of train {side}",
                    name,
                    split,
                )
            values = values.flatten()
        if values.null_count:
            first_gap = int(np.argmin(values.is_valid().to_numpy(zero_copy_only=False)))
            number = numbers[first_gap * count // len(values)]
            raise self._fail(f"row {number} has no value", name, split)

        array = values.to_numpy(zero_copy_only=False)
        if spec.dtype != tf.string:
            array = array.astype(spec.dtype.as_numpy_dtype)
        return array.reshape(count, *shape)

    def _fail(self, problem: str, name: str, split: str) -> DataError:
        self._failure = DataError(f"{self.folder}, {split}: {problem} in {name}; fix or remove it")
        return self._failure


def _names(columns: str | Sequence[str]) -> Sequence[str]:
    return [columns] if isinstance(columns, str) else columns


def plain_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Returns a column's values as one array, without chunks or an extension type."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    return column


def is_fixed_list(arrow_type: pa.DataType) -> bool:
    """Returns True for lists that are all of one length."""
    return pa.types.is_fixed_size_list(arrow_type)


def load_splits(folder: Path) -> dict[str, Any]:
    """Opens the data sets of a folder by split.

    Raises:
        ConfigError: without the library.
        DataError: if the folder cannot be read, or has no training part.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"dataset=huggingface needs the package datasets ({error}); {INSTALL}") from error
    try:
        saved = datasets.load_from_disk(str(folder))
    except (FileNotFoundError, OSError, ValueError) as error:
        raise DataError(
            f"{folder} cannot be read: {str(error).splitlines()[0]}; set dataset.dir to what save_to_disk() wrote"
        ) from error

    splits = dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    if not len(splits.get("train", [])):
        raise DataError(f"{folder} has {', '.join(splits)}; a split train with rows is needed")
    return splits
