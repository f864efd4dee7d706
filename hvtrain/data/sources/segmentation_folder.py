"""Images and masks as files: folders of both, or the layout of PASCAL VOC."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image, UnidentifiedImageError

from hvtrain.core.topology import Topology
from hvtrain.data.manifest import of_files, user_path
from hvtrain.data.pipeline.streams import IndexedSource, Read, end_with_python
from hvtrain.data.pipeline.transform import IGNORED, Transform, check_image_shape, decode_files
from hvtrain.data.source import Preprocessing, reason
from hvtrain.errors import ConfigError, DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp")
VOC_LISTS = {"train": "train.txt", "validation": "val.txt", "test": "test.txt"}

MOST_PIXELS = 2**29
"""Of an image, as in TensorFlow."""
Image.MAX_IMAGE_PIXELS = MOST_PIXELS // 2  # Pillow refuses twice as many; its own limit is that of photographs.

Pairs = list[tuple[str, str]]  # Paths of an image and of its mask.


class SegmentationFolder(IndexedSource):
    """Images, resized and scaled to 0 ... 1, and masks of class indices, resized to the nearest pixel.

    dir holds SPLIT/images/NAME.jpg and SPLIT/masks/NAME.png for the splits train, validation and test; or, as PASCAL
    VOC does, JPEGImages/, SegmentationClass/ and the lists ImageSets/Segmentation/train.txt and val.txt. A mask is a
    grey or palette PNG whose values are classes; 255 is ignored.

    Args:
        image_shape: every image is resized to [height, width], and read with that many channels.
        num_classes: with the background.
        class_names: by class.
        shift_pixels, flip: augmentation of training images, with their masks; what comes in at a border is ignored.
    """

    name = "segmentation_folder"

    def __init__(
        self,
        dir: str,
        image_shape: Sequence[int],
        num_classes: int,
        class_names: Sequence[str] | None = None,
        shift_pixels: int = 0,
        flip: bool = True,
    ) -> None:
        self.folder = user_path(dir)
        self.origin, self.image_shape = str(self.folder), check_image_shape(image_shape)
        if class_names is not None and len(class_names) != num_classes:
            raise ConfigError(
                f"dataset.class_names has {len(class_names)} names for {num_classes} classes; give one each"
            )
        self.num_classes, self.class_names = num_classes, class_names
        self.transform = Transform(scale=255.0, shift_pixels=shift_pixels, flip=flip)
        is_voc = (self.folder / "ImageSets").is_dir()
        self._pairs = {split: (voc_pairs if is_voc else folder_pairs)(self.folder, split) for split in self.SPLITS}
        if not self._pairs["train"]:
            raise DataError(
                f"{self.folder} holds no training images; files are needed as train/images/NAME.jpg and "
                "train/masks/NAME.png, or in the layout of PASCAL VOC"
            )
        self._failure: DataError | None = None

    @property
    def element_spec(self) -> tuple[Any, ...]:
        return tf.TensorSpec(self.image_shape, tf.float32), tf.TensorSpec(self.image_shape[:2], tf.uint8)

    def num_examples(self, split: str) -> int:
        return len(self._pairs.get(split, []))

    def manifest(self) -> dict[str, Any]:
        found = super().manifest()
        for split, part in found["splits"].items():
            part.update(of_files(self.folder, [path for pair in self._pairs[split] for path in pair]))
        return found

    def reader(self, split: str, topology: Topology) -> Read:
        if self.on_error == "skip":
            raise ConfigError("dataset=segmentation_folder cannot skip what it cannot read; use data.on_error=stop")
        end_with_python()
        pairs, (height, width, _) = self._pairs.get(split, []), self.image_shape
        mine = [pairs[index] for index in topology.share(len(pairs))]
        with tf.device("CPU:0"):
            paths = tf.constant([image for image, _ in mine], tf.string)

        def masks(indices: np.ndarray) -> np.ndarray:
            try:
                return np.stack([read_mask(mine[index], (width, height), self.num_classes) for index in indices])
            except DataError as error:
                self._failure = error
                raise

        def read(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            found = tf.numpy_function(masks, [indices], tf.uint8)
            return decode_files(tf.gather(paths, indices), self.image_shape), tf.ensure_shape(
                found, [None, height, width]
            )

        return read

    def augment(self, elements: tuple[Any, ...], seed: tf.Tensor) -> tuple[Any, ...]:
        images, masks = elements
        return self.transform.augment_with_masks(images, masks, seed)

    def preprocessing(self) -> Preprocessing:
        values = "pixels of a decoded image (tf.io.decode_image, keras.utils.load_img), not divided by 255"
        return self.transform.preprocessing((None, None, self.image_shape[2]), self.image_shape, values, (0.0, 255.0))

    def raw_examples(self, split: str, topology: Topology, number: int) -> list[np.ndarray]:
        pairs = self._pairs.get(split, [])
        paths = [pairs[index][0] for index in topology.share(len(pairs))][:number]
        channels = self.image_shape[2]
        return [tf.io.decode_image(tf.io.read_file(path), channels, expand_animations=False).numpy() for path in paths]

    def explain(self, error: Exception) -> Exception:
        if self._failure and "DataError" in str(error):
            return self._failure
        is_of_a_file = isinstance(error, tf.errors.InvalidArgumentError | tf.errors.NotFoundError)
        # All images are read below, so not after another error, such as that of a layer.
        if not is_of_a_file or not re.search("DecodeImage|ReadFile", str(error)):
            return error
        for pair in (pair for pairs in self._pairs.values() for pair in pairs):
            try:
                tf.io.decode_image(tf.io.read_file(pair[0]))
            except tf.errors.OpError as found:
                return DataError(f"{pair[0]} cannot be read: {reason(found)}; fix or remove it")
        return error


def read_mask(pair: tuple[str, str], size: tuple[int, int], num_classes: int) -> np.ndarray:
    """A mask as uint8 of that (width, height). Raises DataError if it has not its image's size, or other labels."""
    image, mask = pair
    try:
        with Image.open(image) as picture, Image.open(mask) as labels:
            if picture.size != labels.size:
                raise DataError(f"{mask} is {labels.size} pixels and its image {picture.size}; both need one size")
            if labels.mode not in ("P", "L", "1"):
                raise DataError(f"{mask} is a picture of mode {labels.mode}; a grey or palette PNG of labels is needed")
            found = np.asarray(labels.resize(size, Image.Resampling.NEAREST), np.uint8)
    except Image.DecompressionBombError as error:
        raise DataError(f"{mask} or its image has more than {MOST_PIXELS:,} pixels; cut both into tiles") from error
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"{mask} cannot be read: {error}; fix or remove it") from error
    if (wrong := (found >= num_classes) & (found != IGNORED)).any():
        raise DataError(
            f"{mask} has the label {found[wrong][0]}, outside 0 ... {num_classes - 1}; fix it or num_classes"
        )
    return found


def folder_pairs(folder: Path, split: str) -> Pairs:
    """Images and masks of the same name, sorted."""
    images = folder / split / "images"
    paths = sorted(path for path in images.iterdir() if path.suffix.lower() in SUFFIXES) if images.is_dir() else []
    return [(str(path), _mask(folder / split / "masks" / f"{path.stem}.png", path)) for path in paths]


def voc_pairs(folder: Path, split: str) -> Pairs:
    """Those of a list of PASCAL VOC, in its order."""
    names = folder / "ImageSets" / "Segmentation" / VOC_LISTS[split]
    if not names.is_file():
        return []
    paths = [folder / "JPEGImages" / f"{name}.jpg" for name in names.read_text(encoding="utf-8").split()]
    return [(str(path), _mask(folder / "SegmentationClass" / f"{path.stem}.png", path)) for path in paths]


def _mask(path: Path, image: Path) -> str:
    if not path.is_file():
        raise DataError(f"{image} has no mask; {path} is needed")
    return str(path)
