"""Data sets that Hugging Face's library, datasets, has saved to disk: images, numbers and lists of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.manifest import of_files, user_path
from hvtrain.data.pipeline.streams import IndexedSource, Read, end_with_python
from hvtrain.data.pipeline.transform import Transform, Unchanged, check_image_shape, decode_batch
from hvtrain.data.source import Preprocessing, reason
from hvtrain.data.sources.memory import as_models_take
from hvtrain.errors import ConfigError, DataError

INSTALL = "install scripts/lock/data.txt (docs/data.md)"


class HuggingFace(IndexedSource):
    """What save_to_disk() wrote, by itself the training part, or with the splits train, validation and test.

    Rows are read by number, so a resumed run reads none that it has seen.

    Args:
        input: the column of the inputs; a list of columns gives a dict of inputs by name.
        target: the column of the targets; a list gives a dict.
        image_shape: [height, width, channels] to which encoded images are resized; their pixels become 0 ... 1.
        shift_pixels, flip: augmentation of training images, if the input is one column of images.
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
        self.origin, self._input, self._target = str(self.folder), input, target
        self._splits = load(self.folder)
        train = self._splits["train"]
        self._columns = [name for part in (input, target) for name in ([part] if isinstance(part, str) else part)]
        if missing := [name for name in self._columns if name not in train.features]:
            has = ", ".join(train.features)
            raise ConfigError(f"dataset.input and dataset.target name {', '.join(missing)}; {self.folder} has {has}")
        kinds = {name: type(train.features[name]).__name__ for name in self._columns}
        self._images = {name for name, kind in kinds.items() if kind == "Image"}
        self._image_shape = check_image_shape(image_shape) if image_shape is not None else None
        if self._images and self._image_shape is None:
            found = f"{', '.join(self._images)} of {self.folder} holds images"
            raise ConfigError(f"{found}; give dataset.image_shape=[height,width,channels]")
        self.transform: Transform = Unchanged()
        if isinstance(input, str) and input in self._images and self._image_shape:
            self.image_shape = self._image_shape
            self.transform = Transform(scale=255.0, shift_pixels=shift_pixels, flip=flip)
        if kinds.get(str(target)) == "ClassLabel":
            self.class_names = train.features[target].names
            self.num_classes = len(train.features[target].names)
        first = train.with_format("arrow")[:1]
        self._specs = {name: self._spec(name, first[name]) for name in self._columns}
        self._failure: DataError | None = None

    @property
    def element_spec(self) -> tuple[Any, ...]:
        return self._arranged(
            {n: tf.TensorSpec(s.shape, tf.float32) if n in self._images else s for n, s in self._specs.items()}
        )

    def num_examples(self, split: str) -> int:
        return len(self._splits[split]) if split in self._splits else 0

    def manifest(self) -> dict[str, Any]:
        found = super().manifest()
        for split, part in found["splits"].items():
            part.update(of_files(self.folder, [file["filename"] for file in self._splits[split].cache_files]))
        return found

    def whole_targets(self) -> dict[str, Any]:
        if not isinstance(self._target, str) or self._target in self._images:
            return {}
        tables = {
            split: rows.select_columns([self._target]).with_format("arrow") for split, rows in self._splits.items()
        }
        return {split: self._array(table[:], self._target, split, None) for split, table in tables.items()}

    def class_counts(self) -> np.ndarray | None:
        classes = self.whole_targets()["train"].ravel()
        return np.bincount(classes, minlength=self.num_classes) if hasattr(self, "num_classes") else None

    def reader(self, split: str, topology: Topology) -> Read:
        if self.on_error == "skip":
            raise ConfigError("dataset=huggingface cannot skip what it cannot read; use data.on_error=stop")
        end_with_python()
        rows = self._splits[split].select_columns(self._columns).with_format("arrow") if split in self._splits else None
        mine = np.asarray(topology.share(self.num_examples(split)), np.int64)
        kinds = [tf.string if name in self._images else spec.dtype for name, spec in self._specs.items()]

        def arrays(indices: np.ndarray) -> list[np.ndarray]:
            numbers = mine[indices]
            table = rows[numbers.tolist()]  # type: ignore[index]
            return [self._array(table, name, split, numbers) for name in self._columns]

        def read(indices: tf.Tensor) -> tuple[Any, ...]:
            found = dict(zip(self._columns, tf.numpy_function(arrays, [indices], kinds)))
            for name, spec in self._specs.items():
                if name in self._images:
                    found[name] = decode_batch(tf.ensure_shape(found[name], [None]), self._image_shape)  # type: ignore[arg-type]
                    if name != self._input:
                        found[name] = tf.cast(found[name], tf.float32) / 255.0
                found[name] = tf.ensure_shape(found[name], [None, *spec.shape])
            return self._arranged(found)

        return read

    def preprocessing(self) -> Preprocessing:
        if isinstance(self.transform, Unchanged):
            return super().preprocessing()
        values = "pixels of a decoded image (tf.io.decode_image, keras.utils.load_img), not divided by 255"
        return self.transform.preprocessing((None, None, self.image_shape[2]), self.image_shape, values, (0.0, 255.0))

    def raw_examples(self, split: str, topology: Topology, number: int) -> list[np.ndarray]:
        if isinstance(self.transform, Unchanged) or split not in self._splits:
            return []
        numbers = np.asarray(topology.share(self.num_examples(split)), np.int64)[:number]
        encoded = self._array(
            self._splits[split].with_format("arrow")[numbers.tolist()], str(self._input), split, numbers
        )
        channels = self.image_shape[2]
        return [tf.io.decode_image(one, channels, expand_animations=False).numpy() for one in encoded]

    def explain(self, error: Exception) -> Exception:
        if self._failure and "DataError" in str(error):
            return self._failure
        if isinstance(error, tf.errors.InvalidArgumentError) and self._images and "mage" in str(error):
            found = f"{self.folder}: an image in {', '.join(self._images)} cannot be read"
            return DataError(f"{found}: {reason(error).splitlines()[0]}; fix or remove it")
        return error

    def _arranged(self, found: dict[str, Any]) -> tuple[Any, ...]:
        """(inputs, targets) of values by column."""
        parts = (self._input, self._target)
        return tuple(found[part] if isinstance(part, str) else {name: found[name] for name in part} for part in parts)

    def _spec(self, name: str, column: pa.ChunkedArray) -> tf.TensorSpec:
        if name in self._images:
            return tf.TensorSpec(self._image_shape, tf.uint8)
        shape, values = [], storage(column)
        while pa.types.is_list(values.type) or pa.types.is_large_list(values.type) or is_fixed(values.type):
            shape.append(len(values[0]))
            values = values.flatten()
        array = as_models_take(values.to_numpy(zero_copy_only=False))
        if array.dtype.kind not in "iufbO":
            raise DataError(f"{self.folder}: {name} holds {values.type}; numbers, strings or images are needed")
        return tf.TensorSpec(shape, tf.string if array.dtype.kind == "O" else tf.as_dtype(array.dtype))

    def _array(self, table: pa.Table, name: str, split: str, numbers: np.ndarray | None) -> np.ndarray:
        """A column of some rows. Raises DataError, with the row's number, for gaps and unlike lengths."""
        values, spec = storage(table[name]), self._specs[name]
        count = len(values)
        if name in self._images:
            pairs = zip(values.field("bytes").to_pylist(), values.field("path").to_pylist())
            return np.array([data if data is not None else Path(path).read_bytes() for data, path in pairs], object)
        shape = list(spec.shape)
        for side in shape:
            lengths = np.array([len(value) if value.is_valid else -1 for value in values])
            if (unlike := np.flatnonzero(lengths != side)).size:
                row = unlike[0] * count // len(values)
                raise self._wrong(name, split, numbers, row, f"{lengths[unlike[0]]} values and row 0 of train {side}")
            values = values.flatten()
        if values.null_count:
            row = int(np.argmin(values.is_valid().to_numpy(zero_copy_only=False))) * count // len(values)
            raise self._wrong(name, split, numbers, row, "no value")
        array = values.to_numpy(zero_copy_only=False)
        array = array if spec.dtype == tf.string else array.astype(spec.dtype.as_numpy_dtype)
        return array.reshape(count, *shape)

    def _wrong(self, name: str, split: str, numbers: np.ndarray | None, row: int, what: str) -> DataError:
        number = row if numbers is None else numbers[row]
        self._failure = DataError(f"{self.folder}, {split}: row {number} has {what} in {name}; fix or remove it")
        return self._failure


def storage(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """The values of a column as one plain array."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    array = pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def is_fixed(kind: pa.DataType) -> bool:
    """True for lists that are all of one length."""
    return pa.types.is_fixed_size_list(kind)


def load(folder: Path) -> dict[str, Any]:
    """The data sets of a folder by split. Raises ConfigError without the library, DataError without a training part."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"dataset=huggingface needs the package datasets ({error}); {INSTALL}") from error
    try:
        found = datasets.load_from_disk(str(folder))
    except (FileNotFoundError, OSError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise DataError(f"{folder} cannot be read: {said}; set dataset.dir to what save_to_disk() wrote") from error
    splits = dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}
    if not len(splits.get("train", [])):
        raise DataError(f"{folder} has {', '.join(splits)}; a split train with rows is needed")
    return splits
