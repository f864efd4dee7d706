"""Images and masks as files: folders of both, or the layout of PASCAL VOC."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data.description import listed, percent
from hvtrain.data.formats.folders import left_out, split_folders, visible
from hvtrain.data.formats.image_files import SUFFIXES, describe_images, sample
from hvtrain.data.pipeline.decoding import decode_batch
from hvtrain.data.pipeline.streams import Read
from hvtrain.data.pipeline.transform import IGNORED, Transform
from hvtrain.data.source import check_class_names
from hvtrain.data.sources.image_folder import Files, ListedImages
from hvtrain.data.sources.mask_files import MaskReader, pair_up, parse_colors
from hvtrain.errors import DataError

IMAGE_FOLDERS = ("images", "image", "imgs", "img")
MASK_FOLDERS = ("masks", "mask", "labels", "annotations", "gt")
VOC_LISTS = {"train": "train.txt", "validation": "val.txt", "test": "test.txt"}
MAX_COUNTED = 64
"""Masks of a split whose pixels are counted before training."""


class SegmentationFolder(ListedImages):
    """Images, and a mask of class indices for each.

    Images are resized, and scaled to 0 ... 1; masks are resized to the nearest pixel, and padding is
    ignored. A mask is a grey or palette image whose values are classes, and 255 is ignored; or one
    whose colors are. With two classes and masks of 0 and 255 alone, 255 is class 1.

    Example:
        python -m hvtrain dataset=segmentation_folder dataset.dir=VOC2012 task=segmentation
            dataset.image_shape=[256,256,3] dataset.num_classes=21 model=deeplabv3plus

    Args:
        dir: holds SPLIT/images/NAME.jpg and SPLIT/masks/NAME.png (or NAME_mask.png and the like)
            for the splits train, validation and test; or images/SPLIT/ and masks/SPLIT/; or, as
            PASCAL VOC does, JPEGImages/, SegmentationClass/ and the lists
            ImageSets/Segmentation/train.txt and val.txt.
        image_shape: every image is resized to [height, width], and read with that many channels.
        num_classes: with the background.
        class_names: by class.
        shift_pixels, flip: augmentation of training images, with their masks; pixels that come in
            at a border are ignored.
        colors: of masks in colors, by class: [red, green, blue], '#rrggbb' or a grey level; one more
            is that of ignored pixels.
        sizing: resize, fit, crop_fraction and exif, for images and masks; see Sizing.

    Raises:
        ConfigError: if there is not one name, or color, for each class.
        DataError: if there are no training images, or an image has no mask.
    """

    name = "segmentation_folder"
    no_random_crop = "has masks, which such a crop does not move"

    def __init__(
        self,
        dir: str,
        image_shape: Sequence[int],
        num_classes: int,
        class_names: Sequence[str] | None = None,
        shift_pixels: int = 0,
        flip: bool = True,
        colors: Sequence[Any] | None = None,
        **sizing: Any,
    ) -> None:
        transform = Transform(scale=255.0, shift_pixels=shift_pixels, flip=flip)
        super().__init__(dir, image_shape, transform, **sizing)
        self.num_classes = num_classes
        self.class_names = check_class_names(class_names, num_classes)

        self._files, self._warnings = self.list_pairs()
        if not self._files.get("train"):
            raise DataError(
                f"{self.folder} holds no training images; files are needed as "
                "train/images/NAME.jpg and train/masks/NAME.png, or in the layout of PASCAL VOC"
            )

        images = sample([image for image, _ in self._files["train"]])
        self._look = describe_images(zip(images, images), self.sizing.phrase(), self.sizing.exif)
        self._masks = MaskReader(num_classes, parse_colors(colors, num_classes), self.sizing)
        values = set(self._count("train"))
        # Many tools paint the foreground white. As an ignored label it would leave one class alone.
        if num_classes == 2 and not colors and IGNORED in values <= {0, IGNORED}:
            self._masks = replace(self._masks, is_binary=True)

    def list_pairs(self) -> tuple[dict[str, Files], list[str]]:
        """Lists the images and masks of each split, and warnings."""
        # PASCAL VOC has files that list the images of each split; otherwise each split is a folder.
        if (self.folder / "ImageSets").is_dir():
            return voc_pairs(self.folder), []
        return list_pairs(self.folder)

    def _count(self, split: str) -> Counter[int]:
        """Counts the pixels of each label in some masks of a split."""
        return self._masks.count(sample([mask for _, mask in self._files[split]], MAX_COUNTED))

    def description(self) -> dict[str, list[str]]:
        phrases = []
        warnings = list(self._warnings)
        if self._masks.is_binary:
            phrases.append("0 and 255, read as the classes 0 and 1")
        names = [str(name) for name in self.class_names or range(self.num_classes)]
        for split, pairs in self._files.items():
            counts = self._count(split)
            if self._masks.is_binary:
                counts = Counter({0: counts[0], 1: counts[IGNORED]})
            total = sum(counts[label] for label in range(self.num_classes)) or 1
            scope = f"{len(sample(pairs, MAX_COUNTED))} of {len(pairs)} masks"
            shares = [f"{name} {percent(counts[label] / total)}" for label, name in enumerate(names)]
            phrases.append(f"pixels of {split} ({scope}): {listed(shares, 8)}")
            missing = [name for label, name in enumerate(names) if not counts[label]]
            if missing:
                warnings.append(f"{split} has no pixel of {listed(missing)} in {scope}")
        return {**super().description(), "images": self._look, "masks": phrases, "warnings": warnings}

    @property
    def element_spec(self) -> tuple[Any, ...]:
        image = tf.TensorSpec(self.image_shape, tf.float32)
        mask = tf.TensorSpec(self.image_shape[:2], tf.uint8)
        return image, mask

    def paths(self, split: str) -> list[str]:
        return [path for pair in self._files.get(split, ()) for path in pair]

    def reader(self, split: str, topology: Topology) -> Read:
        paths, masks = self.shard(split, topology)
        height, width, _ = self.image_shape

        # By Pillow, since TensorFlow turns the palette of a PNG into colours.
        def read_masks(images, indices):
            return np.stack([self._masks.read((path.decode(), masks[row])) for path, row in zip(images, indices)])

        def read(indices):
            local = tf.gather(paths, indices)
            classes = tf.numpy_function(read_masks, [local, indices], tf.uint8)
            images = decode_batch(self.read_files(local), self.sizing)
            return images, tf.ensure_shape(classes, [None, height, width])

        return read

    def augment(self, elements: tuple[Any, ...], seed: tf.Tensor) -> tuple[Any, ...]:
        images, masks = elements
        return self.transform.augment_with_masks(images, masks, seed)


def list_pairs(folder: Path) -> tuple[dict[str, Files], list[str]]:
    """Lists images and masks by split, and what belongs to neither, as warnings.

    The folders are SPLIT/images/ and SPLIT/masks/, or images/SPLIT/ and masks/SPLIT/.
    """
    folders = {split: (path, path) for split, path in split_folders(folder).items()}
    images = _named(folder, IMAGE_FOLDERS)
    masks = _named(folder, MASK_FOLDERS)
    if images and masks:
        mask_folders = split_folders(masks)
        parts = split_folders(images).items()
        folders = {split: (path, mask_folders.get(split, masks / path.name)) for split, path in parts}

    pairs: dict[str, Files] = {}
    warnings = []
    for split, (image_parent, mask_parent) in folders.items():
        if image_parent == mask_parent:
            image_parent = _named(image_parent, IMAGE_FOLDERS) or image_parent / "images"
            mask_parent = _named(mask_parent, MASK_FOLDERS) or mask_parent / "masks"
        entries = visible(image_parent)
        paths = [path for path in entries if path.suffix.lower() in SUFFIXES]
        pairs[split], unused = pair_up(paths, mask_parent)
        alone = [path.name for path in (*sorted(set(entries) - set(paths)), *unused)]
        if alone:
            warnings.append(f"{split}: left out what is no image, or has none: {listed(alone)}")

    if not (images and masks):
        others = [path for path in visible(folder) if path.is_dir() or path.suffix.lower() in SUFFIXES]
        warnings += left_out(others, [path for path, _ in folders.values()])
    return pairs, warnings


def _named(folder: Path, names: Sequence[str]) -> Path | None:
    """Returns the first folder of these names, in any case, if there is one."""
    folders = [path for path in visible(folder) if path.is_dir()]
    matches = [path for name in names for path in folders if path.name.lower() == name]
    return matches[0] if matches else None


def voc_pairs(folder: Path) -> dict[str, Files]:
    """Lists the pairs of the lists of PASCAL VOC, in their order."""
    images = {path.stem: path for path in visible(folder / "JPEGImages")}
    pairs = {}
    for split, name in VOC_LISTS.items():
        file = folder / "ImageSets" / "Segmentation" / name
        if not file.is_file():
            continue
        stems = file.read_text(encoding="utf-8").split()
        unknown = [stem for stem in stems if stem not in images]
        if unknown:
            raise DataError(f"{file} lists {listed(unknown)}, and JPEGImages/ has no such image; fix the list")
        pairs[split], _ = pair_up([images[stem] for stem in stems], folder / "SegmentationClass")
    return pairs
