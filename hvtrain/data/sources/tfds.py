"""Data sets that tensorflow_datasets has prepared on disk. Nothing is downloaded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvtrain.data.formats.folders import split_entries
from hvtrain.data.manifest import user_path, with_files
from hvtrain.data.pipeline.decoding import Sizing, decode
from hvtrain.data.pipeline.transform import Transform, check_image_shape
from hvtrain.data.source import Parts, Preprocessing
from hvtrain.data.sources.file_source import decoded_preprocessing
from hvtrain.data.sources.user_dataset import FunctionSource
from hvtrain.data.sources.user_shards import UserFunction
from hvtrain.errors import ConfigError, DataError, first_line


class PreparedDataset(FunctionSource):
    """A data set prepared by tensorflow_datasets, of which each rank reads an equal part.

    Example:
        python -m hvtrain dataset=tfds dataset.dataset=mnist dataset.image_shape=[28,28,1]

    Each epoch reads the files in a different order, and shuffles their examples within a buffer. A
    resumed run reads the epoch's earlier examples again, but does not decode their images.

    Args:
        dataset: The name of the data set, such as "mnist", "mnist:3.0.1" or "NAME/CONFIG".
        data_dir: The folder of prepared data sets; None: the default of tensorflow_datasets.
        input, target: Names of features; None: those that the data set itself declares.
        splits: The run's splits, in the notation of tensorflow_datasets: {train: "train[:90%]",
            validation: "train[90%:]"}; None: those named train, validation and test.
        image_shape: [height, width, channels] to which images are resized; their pixels are scaled
            to 0 ... 1.
        shuffle_buffer: Number of examples in the shuffle buffer, whose images are still encoded.
        sizing: How images are resized: resize, fit, crop_fraction and exif; see Sizing.

    Raises:
        ConfigError: If the library is not installed, a feature or split is unknown, or images have no
            image_shape.
        DataError: If the data set is not prepared.
    """

    def __init__(
        self,
        dataset: str,
        data_dir: str | None = None,
        input: str | None = None,
        target: str | None = None,
        splits: Mapping[str, str] | None = None,
        image_shape: Sequence[int] | None = None,
        shuffle_buffer: int = 10_000,
        **sizing: Any,
    ) -> None:
        builder = open_builder(dataset, data_dir)
        features = builder.info.features

        # The data set may declare its inputs and targets.
        supervised = builder.info.supervised_keys or (None, None)
        self._keys = [input or supervised[0], target or supervised[1]]
        if not {*self._keys} <= features.keys():
            raise ConfigError(
                f"dataset.input={self._keys[0] or 'null'} and dataset.target={self._keys[1] or 'null'} are not both "
                f"features of {dataset}; choose from {', '.join(features)}"
            )

        self._tfds_splits = dict(splits or split_entries(builder.info.splits))
        unknown = [split for split in self._tfds_splits if split not in self.SPLITS]
        if unknown:
            raise ConfigError(
                f"dataset.splits names {', '.join(unknown)}; it may name {', '.join(self.SPLITS)}"
            )

        # Types are compared by name, so that this file need not import the library's classes.
        self._images = [key for key in self._keys if type(features[key]).__name__ == "Image"]
        if image_shape is not None:
            self.sizing = Sizing(check_image_shape(image_shape), **sizing)
            if self._keys[0] in self._images:
                self.image_shape = self.sizing.image_shape
        elif self._images:
            raise ConfigError(
                f"{dataset} holds images; give dataset.image_shape=[height,width,channels]"
            )

        self._builder = builder
        self._shuffle_buffer = shuffle_buffer

        # A ClassLabel feature knows its classes.
        facts = {"class_names": getattr(features[self._keys[1]], "names", None)}

        super().__init__(UserFunction(self._read, dataset), None, facts)
        self.origin = str(builder.data_path)

    def _read(
        self, shard: int, num_shards: int, split: str, seed: int, epoch: int, start: int
    ) -> Any:
        """Returns a shard's examples of an epoch from `start` on; None for a missing split. See from_dataset()."""
        import tensorflow_datasets as tfds

        if split not in self._tfds_splits:
            return None

        tfds_split = self._tfds_splits[split]
        is_training = split == "train"
        # The library raises for unknown splits, and for more shards than examples.
        try:
            part = tfds.even_splits(tfds_split, num_shards, drop_remainder=False)[shard]
            examples = self._builder.as_dataset(
                split=part,
                shuffle_files=is_training,
                # Images are decoded after the shuffle, so that its buffer holds encoded ones.
                decoders={key: tfds.decode.SkipDecoding() for key in self._images},
                read_config=tfds.ReadConfig(shuffle_seed=seed + epoch, try_autocache=False),
            )
        except (ValueError, AssertionError) as error:
            raise DataError(
                f"{self._builder.name}, {tfds_split} in {num_shards} shard(s): "
                f"{first_line(error)}; choose other splits or fewer ranks"
            ) from error

        examples = examples.map(lambda example: tuple(example[key] for key in self._keys))
        # The run's seed and the epoch seed this shuffle; see global_seed() in epochs.py.
        if is_training and self._shuffle_buffer > 1:
            examples = examples.shuffle(self._shuffle_buffer)
        # Examples are skipped before they are decoded.
        return examples.skip(start).map(self._decode_images, num_parallel_calls=tf.data.AUTOTUNE)

    def _decode_images(self, *values: Any) -> Parts:
        """Returns an example with its images decoded and scaled to 0 ... 1."""
        return tuple(
            tf.cast(decode(value, self.sizing), tf.float32) / 255.0
            if key in self._images
            else value
            for key, value in zip(self._keys, values)
        )

    def manifest(self) -> dict[str, Any]:
        folder = Path(self.origin)
        paths = sorted(str(path) for path in folder.iterdir() if path.is_file())
        # Every split lists all files: only the library knows which files belong to which split.
        return with_files(super().manifest(), folder, lambda _: paths)

    def preprocessing(self) -> Preprocessing:
        if self._keys[0] not in self._images:
            return super().preprocessing()
        return decoded_preprocessing(Transform(scale=255.0), self.sizing)

    def value_range(self) -> tuple[float, float] | None:
        # preprocessing() takes pixels of 0 ... 255; augmentation layers get what _decode_images() returns.
        return (0.0, 1.0) if self._keys[0] in self._images else super().value_range()


def open_builder(dataset: str, data_dir: str | None) -> Any:
    """Opens a prepared data set.

    Raises:
        ConfigError: If the library is not installed.
        DataError: If the data set is not prepared.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ConfigError(
            f"dataset=tfds needs the package tensorflow-datasets ({error}); install "
            "scripts/lock/data.txt (docs/data.md)"
        ) from error

    folder = user_path(data_dir or tfds.core.constants.DATA_DIR)
    problem = "is not prepared"
    try:
        builder = tfds.builder(dataset, data_dir=str(folder))
        if builder.is_prepared() and builder.info.splits:
            return builder
    except (ValueError, OSError, ImportError, AssertionError) as error:
        problem = f"cannot be opened ({' '.join(str(error).split())[:120]})"

    raise DataError(
        f"{dataset} {problem} in {folder}; prepare it once with tfds.builder({dataset.partition(':')[0]!r}, "
        f"data_dir={str(folder)!r}).download_and_prepare(), or set dataset.data_dir to the folder that holds it"
    )
