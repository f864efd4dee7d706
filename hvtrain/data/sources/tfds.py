"""Data sets that tensorflow_datasets has prepared on disk. Nothing is downloaded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvtrain.data.manifest import of_files, user_path
from hvtrain.data.pipeline.transform import Transform, check_image_shape, decode
from hvtrain.data.source import Preprocessing
from hvtrain.data.sources.own_function import OwnFunction
from hvtrain.data.sources.own_pipeline import FunctionSource
from hvtrain.errors import ConfigError, DataError

INSTALL = "install scripts/lock/data.txt (docs/data.md)"


class PreparedDataset(FunctionSource):
    """A data set of tensorflow_datasets, of which each rank reads an even part.

    The examples of an epoch are read from the files in another order, then shuffled within a buffer. A resumed run
    reads those that it has seen again, but decodes no image of them.

    Args:
        dataset: its name, "mnist", "mnist:3.0.1" or "NAME/CONFIG".
        data_dir: folder of prepared data sets; None: that of tensorflow_datasets.
        input, target: names of features; None: those that the data set itself names as such.
        splits: of this run, as tensorflow_datasets writes them: {train: "train[:90%]", validation: "train[90%:]"}.
            None: those named train, validation and test.
        image_shape: [height, width, channels] to which images are resized; their pixels become 0 ... 1.
        shuffle_buffer: examples, with encoded images, that are shuffled together.
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
    ) -> None:
        self._builder = builder = open_builder(dataset, data_dir)
        keys = builder.info.supervised_keys or (None, None)
        self._keys: list[Any] = [input or keys[0], target or keys[1]]
        features = builder.info.features
        if unknown := [key for key in self._keys if key not in features]:
            raise ConfigError(
                f"dataset.input and dataset.target name {', '.join(map(str, unknown))}; {dataset} has "
                f"{', '.join(features)}"
            )
        self._splits_of = dict(splits) if splits else {key: key for key in self.SPLITS if key in builder.info.splits}
        if unknown := [key for key in self._splits_of if key not in self.SPLITS]:
            raise ConfigError(f"dataset.splits names {', '.join(unknown)}; it may name {', '.join(self.SPLITS)}")
        self._images = [key for key in self._keys if type(features[key]).__name__ == "Image"]
        self._image_shape = check_image_shape(image_shape) if image_shape is not None else None
        if self._images and self._image_shape is None:
            raise ConfigError(f"{dataset} holds images; give dataset.image_shape=[height,width,channels]")
        self._shuffle_buffer = shuffle_buffer
        label = features[self._keys[1]]
        facts = {"num_classes": label.num_classes, "class_names": label.names} if hasattr(label, "num_classes") else {}
        super().__init__(OwnFunction(self._read, dataset), None, facts)
        self.name, self.origin = dataset, str(builder.data_path)

    def _read(self, shard: int, num_shards: int, split: str, seed: int, epoch: int, start: int) -> Any:
        """A shard of a split, from an example on."""
        import tensorflow_datasets as tfds

        if split not in self._splits_of:
            return None
        training = split == "train"
        try:
            part = tfds.even_splits(self._splits_of[split], num_shards, drop_remainder=False)[shard]
            examples = self._builder.as_dataset(
                split=part,
                shuffle_files=training,
                decoders={key: tfds.decode.SkipDecoding() for key in self._images},
                read_config=tfds.ReadConfig(shuffle_seed=seed + epoch, try_autocache=False),
            )
        except (ValueError, AssertionError) as error:
            raise DataError(
                f"{self._builder.name}, {self._splits_of[split]} in {num_shards} shards: {str(error).splitlines()[0]}; "
                "choose other splits or fewer ranks"
            ) from error
        examples = examples.map(lambda one: tuple(one[key] for key in self._keys))
        if training and self._shuffle_buffer > 1:
            examples = examples.shuffle(self._shuffle_buffer)
        return examples.skip(start).map(self._decoded, num_parallel_calls=tf.data.AUTOTUNE)

    def _decoded(self, *values: Any) -> tuple[Any, ...]:
        shape: Any = self._image_shape
        return tuple(
            tf.cast(decode(value, shape), tf.float32) / 255.0 if key in self._images else value
            for key, value in zip(self._keys, values)
        )

    def manifest(self) -> dict[str, Any]:
        found = super().manifest()
        folder = Path(self.origin)
        for part in found["splits"].values():
            part.update(of_files(folder, sorted(str(path) for path in folder.iterdir() if path.is_file())))
        return found

    def preprocessing(self) -> Preprocessing:
        if self._keys[0] not in self._images or self._image_shape is None:
            return super().preprocessing()
        values = "pixels of a decoded image (tf.io.decode_image, keras.utils.load_img), not divided by 255"
        shape = (None, None, self._image_shape[2])
        return Transform(scale=255.0).preprocessing(shape, self._image_shape, values, (0.0, 255.0))


def open_builder(dataset: str, data_dir: str | None) -> Any:
    """The builder of a prepared data set. Raises ConfigError without the library, DataError if it is not prepared."""
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ConfigError(f"dataset=tfds needs the package tensorflow-datasets ({error}); {INSTALL}") from error
    place = user_path(data_dir or str(tfds.core.constants.DATA_DIR))
    try:
        builder = tfds.builder(dataset, data_dir=str(place))
        is_prepared = builder.is_prepared() and bool(builder.info.splits)
        why = "is not prepared"
    except (tfds.core.registered.DatasetNotFoundError, ValueError, OSError, ImportError, AssertionError) as error:
        builder, is_prepared, why = None, False, f"cannot be opened ({' '.join(str(error).split())[:120]})"
    if not is_prepared:
        name = dataset.partition(":")[0]
        raise DataError(
            f"{dataset} {why} in {place}; prepare it once with tfds.builder({name!r}, data_dir={str(place)!r})"
            ".download_and_prepare(), or set dataset.data_dir to the folder that holds it"
        )
    return builder
