"""Images and masks as files: folders of both, or the layout of PASCAL VOC."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image, UnidentifiedImageError

from hvtrain.core.topology import Topology
from hvtrain.data.manifest import user_path
from hvtrain.data.pipeline.streams import IndexedSource, Read, end_with_python
from hvtrain.data.pipeline.transform import (
    IGNORED,
    Transform,
    check_image_shape,
    decode_files,
)
from hvtrain.data.source import Preprocessing, reason
from hvtrain.data.sources.file_source import (
    NotesFailure,
    decode_whole,
    decoded_preprocessing,
    with_files,
)
from hvtrain.errors import ConfigError, DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp")
VOC_LISTS = {"train": "train.txt", "validation": "val.txt", "test": "test.txt"}

# The most pixels of an image, as in TensorFlow.
MAX_PIXELS = 2**29
# Pillow refuses images of twice this limit. Its default is meant for photographs.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2

Pairs = list[tuple[str, str]]
"""Paths of an image and of its mask."""


class SegmentationFolder(NotesFailure, IndexedSource):
    """Images, and a mask of class indices for each.

    Images are resized, and scaled to 0 ... 1; masks are resized to the nearest pixel. A mask is a
    grey or palette PNG whose values are classes; 255 is ignored.

    Example:
        python -m hvtrain dataset=segmentation_folder dataset.dir=VOC2012 task=segmentation
            dataset.image_shape=[256,256,3] dataset.num_classes=21 model=deeplabv3plus

    Args:
        dir: holds SPLIT/images/NAME.jpg and SPLIT/masks/NAME.png for the splits train, validation
            and test; or, as PASCAL VOC does, JPEGImages/, SegmentationClass/ and the lists
            ImageSets/Segmentation/train.txt and val.txt.
        image_shape: every image is resized to [height, width], and read with that many channels.
        num_classes: with the background.
        class_names: by class.
        shift_pixels, flip: augmentation of training images, with their masks; pixels that come in
            at a border are ignored.

    Raises:
        ConfigError: if there is not one name for each class.
        DataError: if there are no training images, or an image has no mask.
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
        if class_names is not None and len(class_names) != num_classes:
            raise ConfigError(
                f"dataset.class_names has {len(class_names)} names for {num_classes} classes; give one each"
            )

        self.folder = user_path(dir)
        self.origin = str(self.folder)
        self.image_shape = check_image_shape(image_shape)
        self.num_classes = num_classes
        self.class_names = class_names
        self.transform = Transform(scale=255.0, shift_pixels=shift_pixels, flip=flip)

        # PASCAL VOC has files that list the images of each split; otherwise each split is a folder.
        is_voc = (self.folder / "ImageSets").is_dir()
        list_pairs = voc_pairs if is_voc else folder_pairs
        self._pairs = {split: list_pairs(self.folder, split) for split in self.SPLITS}
        if not self._pairs["train"]:
            raise DataError(
                f"{self.folder} holds no training images; files are needed as "
                "train/images/NAME.jpg and train/masks/NAME.png, or in the layout of PASCAL VOC"
            )

    @property
    def element_spec(self) -> tuple[Any, ...]:
        image = tf.TensorSpec(self.image_shape, tf.float32)
        mask = tf.TensorSpec(self.image_shape[:2], tf.uint8)
        return image, mask

    def num_examples(self, split: str) -> int:
        return len(self._pairs.get(split, []))

    def manifest(self) -> dict[str, Any]:
        def paths(split):
            return [path for pair in self._pairs[split] for path in pair]

        return with_files(super().manifest(), self.folder, paths)

    def reader(self, split: str, topology: Topology) -> Read:
        if self.on_error == "skip":
            raise ConfigError("dataset=segmentation_folder cannot skip what it cannot read; use data.on_error=stop")

        end_with_python()
        height, width, _ = self.image_shape
        pairs = self._shard(split, topology)
        with tf.device("CPU:0"):
            image_paths = tf.constant([image for image, _ in pairs], tf.string)

        # By Pillow, since TensorFlow turns the palette of a PNG into colours.
        def read_masks(indices):
            size = width, height
            try:
                masks = [read_mask(pairs[index], size, self.num_classes) for index in indices]
                return np.stack(masks)
            except DataError as error:
                raise self.fail(str(error)) from error

        def read(indices):
            masks = tf.numpy_function(read_masks, [indices], tf.uint8)
            images = decode_files(tf.gather(image_paths, indices), self.image_shape)
            return images, tf.ensure_shape(masks, [None, height, width])

        return read

    def _shard(self, split: str, topology: Topology) -> Pairs:
        """Returns this rank's pairs."""
        pairs = self._pairs.get(split, [])
        return [pairs[index] for index in topology.share(len(pairs))]

    def augment(self, elements: tuple[Any, ...], seed: tf.Tensor) -> tuple[Any, ...]:
        images, masks = elements
        return self.transform.augment_with_masks(images, masks, seed)

    def preprocessing(self) -> Preprocessing:
        return decoded_preprocessing(self.transform, self.image_shape)

    def raw_examples(self, split: str, topology: Topology, number: int) -> list[np.ndarray]:
        # Without masks, which are not inputs of the saved model.
        pairs = self._shard(split, topology)[:number]
        return [decode_whole(tf.io.read_file(image), self.image_shape[2]) for image, _ in pairs]

    def explain(self, error: Exception) -> Exception:
        explained = super().explain(error)
        if explained is not error:
            return explained

        is_of_a_file = isinstance(error, tf.errors.InvalidArgumentError | tf.errors.NotFoundError)
        # All images are read below, so not after another error, such as that of a layer.
        if not is_of_a_file or not re.search("DecodeImage|ReadFile", str(error)):
            return error
        for pairs in self._pairs.values():
            for image, _ in pairs:
                try:  # TensorFlow does not say which image it could not decode.
                    tf.io.decode_image(tf.io.read_file(image))
                except tf.errors.OpError as failure:
                    return DataError(f"{image} cannot be read: {reason(failure)}; fix or remove it")

        return error


def read_mask(pair: tuple[str, str], size: tuple[int, int], num_classes: int) -> np.ndarray:
    """Reads the mask of (image, mask), and resizes it to uint8 of `size`, which is (width, height).

    Raises:
        DataError: if it cannot be read, differs in size from its image, or has other labels.
    """
    image, mask = pair
    try:
        with Image.open(image) as picture, Image.open(mask) as labels:
            if picture.size != labels.size:
                raise DataError(f"{mask} is {labels.size} pixels and its image {picture.size}; both need one size")
            # A picture in colours has lost the numbers of the classes.
            if labels.mode not in ("P", "L", "1"):
                raise DataError(f"{mask} is a picture of mode {labels.mode}; a grey or palette PNG of labels is needed")
            # Labels are not interpolated: there is no class between two others.
            classes = np.asarray(labels.resize(size, Image.Resampling.NEAREST), np.uint8)
    except Image.DecompressionBombError as error:
        raise DataError(f"{mask} or its image has more than {MAX_PIXELS:,} pixels; cut both into tiles") from error
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"{mask} cannot be read: {error}; fix or remove it") from error

    is_outside = (classes >= num_classes) & (classes != IGNORED)
    if is_outside.any():
        raise DataError(
            f"{mask} has the label {classes[is_outside][0]}, outside 0 ... {num_classes - 1}; fix it or num_classes"
        )

    return classes


def folder_pairs(folder: Path, split: str) -> Pairs:
    """Lists images and masks of the same name, sorted; none if there is no such folder."""
    images = folder / split / "images"
    # Sorted, since file systems list a folder in any order, and all ranks need the same one.
    paths = []
    if images.is_dir():
        paths = sorted(path for path in images.iterdir() if path.suffix.lower() in SUFFIXES)
    return [_pair(path, folder / split / "masks") for path in paths]


def voc_pairs(folder: Path, split: str) -> Pairs:
    """Lists the pairs of a list of PASCAL VOC, in its order; none if there is no such list."""
    names = folder / "ImageSets" / "Segmentation" / VOC_LISTS[split]
    if not names.is_file():
        return []

    stems = names.read_text(encoding="utf-8").split()
    paths = [folder / "JPEGImages" / f"{stem}.jpg" for stem in stems]
    return [_pair(path, folder / "SegmentationClass") for path in paths]


def _pair(image: Path, masks: Path) -> tuple[str, str]:
    """Returns an image with its mask in a folder. Raises DataError if it is missing."""
    mask = masks / f"{image.stem}.png"
    if not mask.is_file():
        raise DataError(f"{image} has no mask; {mask} is needed")
    return str(image), str(mask)
