"""Images and masks as files, in folders or in the layout of PASCAL VOC."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import TensorSpec

from hvtrain.core.topology import Topology
from hvtrain.data.description import class_labels, listed, percent
from hvtrain.data.formats.folders import (
    read_text,
    split_entries,
    split_folders,
    unused_warnings,
    visible,
)
from hvtrain.data.formats.image_files import is_image, sample
from hvtrain.data.pipeline.decoding import decode_batch
from hvtrain.data.pipeline.epochs import call_python
from hvtrain.data.pipeline.streams import Read
from hvtrain.data.pipeline.transform import IGNORED
from hvtrain.data.source import Parts, Phrases
from hvtrain.data.sources.image_folder import Files, ListedImages
from hvtrain.data.sources.mask_files import MaskReader, match_masks, parse_colors
from hvtrain.errors import ConfigError, DataError

IMAGE_FOLDERS = ("images", "image", "imgs", "img")
MASK_FOLDERS = ("masks", "mask", "labels", "annotations", "gt")
# Before training, the pixels of at most this many masks of a split are counted.
MAX_COUNTED = 64
# The file in which a run records whether 255 is class 1 or ignored.
WHITE_FILE = "white_is_class_1"


class SegmentationFolder(ListedImages):
    """A source of images, each with a mask of class indices.

    Images are resized and scaled to 0 ... 1. Masks are resized by nearest neighbor, and their
    padding is ignored. A mask is a grey or palette image whose values are class indices, with 255 for
    ignored pixels, or an image whose colors stand for classes. If there are two classes and masks hold only 0
    and 255, then 255 is class 1.

    Example:
        python -m hvtrain dataset=segmentation_folder dataset.dir=VOC2012 task=segmentation
            dataset.image_shape=[256,256,3] dataset.num_classes=21 model=deeplabv3plus

    Args:
        dir: Holds SPLIT/images/NAME.jpg and SPLIT/masks/NAME.png (or NAME_mask.png and the like)
            for the splits train, validation and test; or images/SPLIT/ and masks/SPLIT/; or, as
            PASCAL VOC does, JPEGImages/, SegmentationClass/ and the lists
            ImageSets/Segmentation/train.txt and val.txt.
        image_shape: [height, width, channels]; every image is resized, and read with that many channels.
        num_classes: Number of classes, including the background.
        flip: Mirrors half of the training images, and their masks.
        colors: The color of each class in colored masks: [red, green, blue], '#rrggbb' or a grey
            level; after them, optionally, the color of ignored pixels.
        images: class_names, shift_pixels (pixels that enter at a border are ignored), and how images
            and masks are resized; see FileSource.

    Raises:
        ConfigError: If there are too few or too many classes, or not one name and one color for each.
        DataError: If there are no training images, or an image has no mask.
    """

    name = "segmentation_folder"
    has_masks = True
    no_random_crop = "has masks, which such a crop does not move"

    def __init__(
        self,
        dir: str,
        image_shape: Sequence[int],
        num_classes: int,
        flip: bool = True,
        colors: Sequence[Any] | None = None,
        **images: Any,
    ) -> None:
        # With one class, a white foreground would be ignored, and the loss always 0.
        if not 2 <= num_classes <= IGNORED:
            raise ConfigError(
                f"dataset.num_classes={num_classes}: 8-bit masks hold 2 to {IGNORED} classes; count the "
                "background as one, or merge some"
            )
        super().__init__(dir, image_shape, num_classes, flip=flip, **images)
        self._files, self._warnings = self.list_pairs()
        if not self._files.get("train"):
            raise DataError(
                f"{self.folder} holds no training images; files are needed as "
                "train/images/NAME.jpg and train/masks/NAME.png, or in the layout of PASCAL VOC"
            )

        # Computed here, since it refuses images that would be misread.
        self._image_phrases  # noqa: B018
        self._masks = MaskReader(num_classes, parse_colors(colors, num_classes), self.sizing)
        if num_classes == 2 and not colors:
            self._masks = replace(self._masks, is_binary=self._has_white_foreground())

    def fitted(self) -> dict[str, bytes]:
        return {WHITE_FILE: str(self._masks.is_binary).encode()}

    def fit_as(self, files: Mapping[str, bytes]) -> None:
        # If the run read 255 as class 1, so does this source, whose masks may lack 255. Otherwise, the values of its
        # own masks decide: if they hold only 0 and 255 and 255 were ignored, only the background would be evaluated.
        if files.get(WHITE_FILE) == b"True":
            self._masks = replace(self._masks, is_binary=True)

    def list_pairs(self) -> tuple[dict[str, Files], list[str]]:
        """Lists the images and masks of each split, and returns warnings about unused entries."""
        # PASCAL VOC lists the images of each split in a file; otherwise, each split is a folder.
        if (self.folder / "ImageSets").is_dir():
            return voc_pairs(self.folder), []
        return list_pairs(self.folder)

    def _has_white_foreground(self) -> bool:
        """True if training masks hold 255 and no other value except 0. Then 255 is class 1, not ignored.

        Many tools paint the foreground white. If it were ignored, only one class would be left.
        """
        values = set(self._count("train"))
        # A rare class may be missing from the sample, so all masks are searched until one has it.
        if values <= {0}:
            rest = (set(self._masks.count([mask])) for _, mask in self._files["train"])
            values |= next((labels for labels in rest if labels - {0}), set())
        return IGNORED in values <= {0, IGNORED}

    def _count(self, split: str) -> Counter[int]:
        """Counts the pixels of each label in up to MAX_COUNTED masks of a split."""
        return self._masks.count(sample([mask for _, mask in self._files[split]], MAX_COUNTED))

    def description(self) -> Phrases:
        description = super().description()
        phrases = []
        if self._masks.is_binary:
            phrases.append("0 and 255, read as classes 0 and 1")
        names = class_labels(self)
        for split, pairs in self._files.items():
            counts = self._count(split)
            if self._masks.is_binary:
                counts = Counter({0: counts[0], 1: counts[IGNORED]})
            total = sum(counts[label] for label in range(self.num_classes)) or 1
            scope = f"{len(sample(pairs, MAX_COUNTED))} of {len(pairs)} masks"
            shares = [
                f"{name} {percent(counts[label] / total)}" for label, name in enumerate(names)
            ]
            phrases.append(f"pixels of {split} ({scope}): {listed(shares, 8)}")
            missing = [name for label, name in enumerate(names) if not counts[label]]
            if missing:
                description["warnings"].append(
                    f"{split} has no pixel of {listed(missing)} in {scope}"
                )
        return description | {"masks": phrases}

    @property
    def element_spec(self) -> Parts:
        mask = TensorSpec(self.image_shape[:2], tf.uint8)
        return TensorSpec(self.image_shape, tf.float32), mask

    def paths(self, split: str) -> list[str]:
        return [path for pair in self._files.get(split, ()) for path in pair]

    def reader(self, split: str, topology: Topology) -> Read:
        paths, masks = self.shard(split, topology)
        spec = TensorSpec([None, *self.image_shape[:2]], tf.uint8)

        # Masks are read with Pillow, since TensorFlow would convert palette indices to colors.
        def read_masks(images, indices):
            pairs = [(path.decode(), masks[row]) for path, row in zip(images, indices)]
            return [np.stack(list(map(self._masks.read, pairs)))]

        def read(indices):
            local = tf.gather(paths, indices)
            images = decode_batch(self.read_files(local), self.sizing)
            return images, *call_python(read_masks, [local, indices], [spec])

        return read


def list_pairs(folder: Path) -> tuple[dict[str, Files], list[str]]:
    """Lists images and masks by split, and returns warnings about unused entries.

    The folders are SPLIT/images/ and SPLIT/masks/, or images/SPLIT/ and masks/SPLIT/.
    """
    images = _find_folder(folder, IMAGE_FOLDERS)
    masks = _find_folder(folder, MASK_FOLDERS)
    if images and masks:
        folder = images
    parts = split_folders(folder)
    entries = [path for path in visible(folder) if path.is_dir() or is_image(path)]
    warnings = unused_warnings(entries, parts.values())

    pairs = {}
    for split, path in parts.items():
        if images and masks:
            image_folder = path
            mask_folder = split_folders(masks).get(split, masks / path.name)
        else:
            image_folder = _find_folder(path, IMAGE_FOLDERS) or path / "images"
            mask_folder = _find_folder(path, MASK_FOLDERS) or path / "masks"
        entries = visible(image_folder)
        paths = list(filter(is_image, entries))
        pairs[split], unused = match_masks(paths, mask_folder)
        others = [path.name for path in (*sorted(set(entries) - set(paths)), *unused)]
        if others:
            warnings.append(
                f"{split}: left out files that are not images, or masks without one: {listed(others)}"
            )

    return pairs, warnings


def _find_folder(folder: Path, names: Sequence[str]) -> Path | None:
    """Returns the folder with the first of these names that exists, ignoring case; None if there is none."""
    folders = [path for path in visible(folder) if path.is_dir()]
    matches = (path for name in names for path in folders if path.name.lower() == name)
    return next(matches, None)


def voc_pairs(folder: Path) -> dict[str, Files]:
    """Lists the pairs of image and mask named in PASCAL VOC's lists, in their order, by split.

    Raises DataError if a list names an image that does not exist.
    """
    # Annotation tools write a file such as NAME.json beside each image.
    images = {path.stem: path for path in filter(is_image, visible(folder / "JPEGImages"))}
    entries = visible(folder / "ImageSets" / "Segmentation")
    lists = {path.stem: path for path in entries if path.suffix == ".txt"}
    pairs = {}
    for split, name in split_entries(lists).items():
        file = lists[name]
        stems = read_text(file).split()
        unknown = [stem for stem in stems if stem not in images]
        if unknown:
            raise DataError(
                f"{file} lists {listed(unknown)}, but JPEGImages/ has no such image; fix the list"
            )
        pairs[split], _ = match_masks(
            [images[stem] for stem in stems], folder / "SegmentationClass"
        )
    return pairs
