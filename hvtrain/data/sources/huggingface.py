"""Data sets that Hugging Face's `datasets` library has saved to disk.

Columns may hold images, numbers, strings, and lists of numbers. Nothing is downloaded.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf
from tensorflow import TensorSpec

from hvtrain.core.topology import Topology
from hvtrain.data.formats.columns import LISTS, one_array
from hvtrain.data.formats.folders import split_entries, unused_warnings
from hvtrain.data.formats.image_files import MAX_SAMPLE, describe_images
from hvtrain.data.manifest import data_path, with_files
from hvtrain.data.pipeline.decoding import Sizing, decode_batch
from hvtrain.data.pipeline.epochs import call_python
from hvtrain.data.pipeline.streams import IndexedSource, Read
from hvtrain.data.pipeline.transform import Transform, Unchanged, check_image_shape
from hvtrain.data.source import Parts, Phrases, Preprocessing, reason
from hvtrain.data.sources.file_source import StreamErrors, decoded_preprocessing
from hvtrain.data.sources.memory import names_as_text, narrow_dtype
from hvtrain.errors import ConfigError, DataError, first_line


class HuggingFace(StreamErrors, IndexedSource):
    """A data set that save_to_disk() wrote: a DatasetDict, or one Dataset, which is the training part.

    The splits of a DatasetDict are train, validation (or val, valid, dev) and test. Rows are read by index, so a
    resumed run does not read again what it has seen.

    Args:
        dir: The folder that save_to_disk() wrote.
        input: The column of the inputs; a list of columns gives a dict of inputs by name.
        target: The column of the targets; a list gives a dict.
        image_shape: [height, width, channels] to which encoded images are resized; their pixels
            become 0 ... 1.
        shift_pixels, flip: Augmentation of training images, if the input is one column of images.
        sizing: How images are resized: resize, fit, crop_fraction and exif; see Sizing.

    Raises:
        ConfigError: If the library is missing, a column is unknown, or a column holds images and
            image_shape is not given.
        DataError: If the folder cannot be read, or a column holds unsupported values.
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
        **sizing: Any,
    ) -> None:
        self.folder = data_path(dir)
        self.origin = str(self.folder)
        input = names_as_text(input)
        target = names_as_text(target)
        self._input = input
        self._target = target
        self._splits, self._warnings = load_splits(self.folder)
        train = self._splits["train"]

        columns = tf.nest.flatten([input, target])
        missing = [name for name in columns if name not in train.features]
        if missing:
            raise ConfigError(
                f"dataset.input and dataset.target name {', '.join(missing)}, but {self.folder} has "
                f"{', '.join(train.features)}; choose from these"
            )

        # Types are compared by name, so that the library need not be imported here.
        types = {name: type(train.features[name]).__name__ for name in columns}
        self._images = {name for name in types if types[name] == "Image"}
        if image_shape is not None:
            self.sizing = Sizing(check_image_shape(image_shape), **sizing)
        elif self._images:
            raise ConfigError(
                f"{self.folder} holds images in {', '.join(self._images)}; give "
                "dataset.image_shape=[height,width,channels]"
            )

        # Inputs other than a single column of images reach the model unchanged.
        self.transform = Unchanged()
        if isinstance(input, str) and input in self._images:
            self.image_shape = self.sizing.image_shape
            self.no_random_crop = ""
            self.transform = Transform(scale=255.0, shift_pixels=shift_pixels, flip=flip)

        if isinstance(target, str) and types[target] == "ClassLabel":
            self.class_names = train.features[target].names
            self.num_classes = len(self.class_names)
            # DatasetDict.class_encode_column() numbers the classes of each split separately.
            for split, rows in self._splits.items():
                names = getattr(rows.features.get(target), "names", self.class_names)
                if names != self.class_names:
                    raise DataError(
                        f"{self.folder}: {target} has other classes in {split} than in train; "
                        f"cast {split} to train's features (Dataset.cast)"
                    )
            self._leave_out_unlabelled(target)

        # The first row determines types and lengths; _array() checks those of all other rows.
        first = train[:1]
        self._specs = {name: self._column_spec(name, first[name]) for name in columns}

    def _leave_out_unlabelled(self, target: str) -> None:
        """Leaves out splits with labels of -1 only: benchmarks publish their test sets without labels in this way."""
        for split in ("validation", "test"):
            if split not in self._splits:
                continue
            labels = self._splits[split].select_columns([target]).unique(target)
            if labels == [-1]:
                del self._splits[split]
                self._warnings.append(f"{split} has no labels ({target} is -1) and is left out")

    @property
    def element_spec(self) -> Parts:
        specs = dict(self._specs)
        for name in self._images:  # Pixels are scaled to float32.
            specs[name] = TensorSpec(specs[name].shape, tf.float32)
        return self._arrange(specs)

    def num_examples(self, split: str) -> int:
        return len(self._splits.get(split, ()))

    def description(self) -> Phrases:
        description = super().description()
        rows = self._splits["train"][:MAX_SAMPLE]
        for name in sorted(self._images):
            encoded = enumerate(self._array(rows, name, "train", np.arange(rows.num_rows)))
            images = [
                (f"{self.folder}, train: row {row} of {name}", image) for row, image in encoded
            ]
            description.setdefault("images", []).extend(describe_images(images, self.sizing))
        return description | {"warnings": self._warnings}

    def manifest(self) -> dict[str, Any]:
        return with_files(
            super().manifest(),
            self.folder,
            lambda split: [file["filename"] for file in self._splits[split].cache_files],
        )

    def whole_targets(self) -> dict[str, Any]:
        if not isinstance(self._target, str) or self._target in self._images:
            return {}

        return {
            split: self._array(
                rows.select_columns([self._target])[:], self._target, split, np.arange(len(rows))
            )
            for split, rows in self._splits.items()
        }

    def reader(self, split: str, topology: Topology) -> Read:
        if self.skips:
            raise ConfigError(
                "dataset=huggingface cannot skip unreadable examples; set data.on_error=stop"
            )

        rows: Any = None  # A missing split has no rows to read.
        if split in self._splits:
            rows = self._splits[split].select_columns(list(self._specs))
        local = self.shard_rows(split, topology)
        encoded = TensorSpec([None], tf.string)
        specs = [
            encoded if name in self._images else TensorSpec([None, *spec.shape], spec.dtype)
            for name, spec in self._specs.items()
        ]

        def read_arrays(indices):
            row_indices = local[indices]
            table = rows[row_indices.tolist()]
            return [self._array(table, name, split, row_indices) for name in self._specs]

        def read(indices, *draws):
            values = dict(zip(self._specs, call_python(read_arrays, [indices], specs)))
            for name in self._images:
                # Only a single input is cropped at random, and scaled by the transform.
                if name == self._input:
                    values[name] = decode_batch(values[name], self.sizing, *draws)
                else:
                    images = decode_batch(values[name], self.sizing)
                    values[name] = tf.cast(images, tf.float32) / 255.0
            return self._arrange(values)

        return read

    def preprocessing(self) -> Preprocessing:
        if isinstance(self.transform, Unchanged):
            return super().preprocessing()
        return decoded_preprocessing(self.transform, self.sizing)

    def raw_examples(self, split: str, topology: Topology, count: int) -> list[np.ndarray]:
        if isinstance(self.transform, Unchanged) or split not in self._splits:
            return []

        row_indices = self.shard_rows(split, topology)[:count]
        table = self._splits[split][row_indices.tolist()]
        encoded = self._array(table, str(self._input), split, row_indices)
        return [self.sizing.decode_for_model(image).numpy() for image in encoded]

    def explain(self, error: Exception) -> Exception:
        explained = super().explain(error)
        if explained is not error:
            return explained

        mentions_image = self._images and re.search("[Ii]mage", str(error))
        if not mentions_image or not isinstance(
            error, tf.errors.InvalidArgumentError | tf.errors.UnknownError
        ):
            return error
        # TensorFlow does not say which image it could not decode.
        return DataError(
            f"{self.folder}: an image in {', '.join(self._images)} cannot be read: "
            f"{reason(error).splitlines()[0]}; fix or remove it"
        )

    def _arrange(self, values: dict[str, Any]) -> Parts:
        """Arranges the columns' values as (inputs, targets), each a value or a dict by name."""

        def select(columns):
            if isinstance(columns, str):
                return values[columns]
            return {name: values[name] for name in columns}

        return select(self._input), select(self._target)

    def _column_spec(self, name: str, column: pa.ChunkedArray) -> TensorSpec:
        """Returns the shape and type of a column's values, from its first row."""
        if name in self._images:
            return TensorSpec(self.sizing.image_shape, tf.uint8)

        shape = []
        values = one_array(column)
        # Nested lists are the axes of an array.
        while isinstance(values.type, LISTS):
            if not len(values) or values.null_count:
                raise DataError(
                    f"{self.folder}, train: row 0 has no value in {name}; fix or remove it"
                )
            shape.append(len(values[0]))
            values = values.flatten()

        array = narrow_dtype(np.asarray(values))
        if pa.types.is_nested(values.type) or array.dtype.kind not in "iufbO":
            raise DataError(
                f"{self.folder}: {name} holds {values.type}; numbers, strings or images are needed"
            )
        # An array of Python objects holds strings.
        dtype = tf.string if array.dtype.kind == "O" else tf.as_dtype(array.dtype)
        return TensorSpec(shape, dtype)

    def _array(self, table: pa.Table, name: str, split: str, row_indices: np.ndarray) -> np.ndarray:
        """Returns a column of some rows as a NumPy array; encoded images become bytes objects.

        Args:
            table: The rows.
            name: Name of the column.
            split: The rows' split, for messages.
            row_indices: The rows' indices in the split, for messages.

        Raises:
            DataError: A value is missing, a list has another length than in row 0 of train, or an integer needs
                more than 32 bits.
        """
        values = one_array(table[name])
        count = len(values)

        def row_error(index, content):
            # The lists of each level flattened so far are equally long, so each row has the same
            # number of values.
            row = row_indices[index * count // len(values)]
            return self.fail(
                f"{self.folder}, {split}: row {row} has {content} in {name}; fix or remove it"
            )

        if values.null_count:
            raise row_error(np.argmax(values.is_null()), "no value")
        if name in self._images:
            # The library stores an image's bytes, or only the path of its file.
            pairs = zip(*(values.field(key).to_pylist() for key in ("bytes", "path")))
            encoded = [Path(path).read_bytes() if data is None else data for data, path in pairs]
            return np.array(encoded, object)

        # Flattens one level of lists after another. All lists of a
        # level must be as long as the first.
        shape = self._specs[name].shape
        for side in shape:
            lengths = np.asarray(pc.list_value_length(values).fill_null(-1))
            unlike = np.flatnonzero(lengths != side)
            if unlike.size:
                index = unlike[0]
                content = f"a list of length {lengths[index]} (row 0 of train: {side})"
                raise row_error(index, content if lengths[index] >= 0 else "no value")
            values = values.flatten()

        if values.null_count:
            raise row_error(np.argmax(values.is_null()), "no value")

        array = np.asarray(values)
        dtype = self._specs[name].dtype
        if dtype != tf.string:
            try:
                # narrow_dtype() refuses integers that do not fit.
                array = narrow_dtype(array).astype(dtype.as_numpy_dtype)
            except DataError as error:
                raise self.fail(f"{self.folder}, {split}, {name}: {error}") from None
        return array.reshape(count, *shape)


def load_splits(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Loads the data sets in a folder, by split; also returns warnings about those that belong to no split.

    Raises:
        ConfigError: If the library is missing.
        DataError: If the folder cannot be read, or has no training part.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"dataset=huggingface needs the package datasets ({error}); install "
            "scripts/lock/data.txt (docs/data.md)"
        ) from error

    try:
        saved = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} cannot be read: {first_line(error)}; set dataset.dir to what save_to_disk() wrote"
        ) from error

    # A single Dataset has no splits, so all of it is for training.
    parts = dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    names = split_entries(parts)
    if not len(parts.get(names.get("train"), ())):
        raise DataError(
            f"{folder} has {', '.join(parts) or 'no splits'}; a split named train is needed, with at least one row"
        )
    warnings = unused_warnings(map(Path, parts), map(Path, names.values()))
    # Arrow tables keep images encoded, for TensorFlow to decode.
    return {split: parts[name].with_format("arrow") for split, name in names.items()}, warnings
