"""Finds the mask file of each image, and reads its pixels as class indices."""

import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageColor

from hvtrain.data.formats.folders import visible
from hvtrain.data.formats.image_files import is_image, turn_upright
from hvtrain.data.formats.tar_files import member_bytes
from hvtrain.data.pipeline.decoding import Sizing
from hvtrain.data.pipeline.transform import IGNORED
from hvtrain.errors import ConfigError, DataError

# Paths of images, each with the path of its mask.
Pairs = list[tuple[str, str]]
# Levels of red, green and blue, 0 ... 255.
Color = tuple[int, int, int]

# Suffixes that tell a mask from its image, as in 7_mask.png beside 7_sat.jpg (DeepGlobe) or
# a_gtFine_labelIds.png beside a_leftImg8bit.png (Cityscapes).
_MASK_SUFFIX = re.compile(
    r"[ _.-](masks?|gt|gtFine_labelIds|labels?|labelIds|seg|segmentation|annotations?|anno|L)$",
    re.IGNORECASE,
)
_IMAGE_SUFFIX = re.compile(r"[ _.-](images?|img|sat|rgb|leftImg8bit)$", re.IGNORECASE)
# EXIF orientations that swap width and height.
TURNED_BY_90_DEGREES = (5, 6, 7, 8)


def match_masks(images: Iterable[Path], masks: Path) -> tuple[Pairs, list[Path]]:
    """Finds each image's mask in the folder `masks`, by the same name or one with a suffix such as _mask.

    Returns:
        The pairs in the order of the images, and the masks that belong to no image.

    Raises:
        DataError: An image has no mask, or several.
    """
    by_name = defaultdict(list)
    by_stem = defaultdict(list)
    for path in visible(masks):
        if is_image(path):
            by_name[path.stem].append(path)
            by_stem[_MASK_SUFFIX.sub("", path.stem)].append(path)

    pairs = []
    for image in images:
        matches = by_name.get(image.stem) or by_stem.get(_IMAGE_SUFFIX.sub("", image.stem), [])
        # If there are several, the PNG with the image's name is taken, since PNG is lossless.
        matches = [path for path in matches if path.name == f"{image.stem}.png"] or matches
        if len(matches) != 1:
            names = " and ".join(path.name for path in matches)
            raise DataError(
                f"{image} needs one mask, such as {masks / image.stem}.png, but has {names or 'none'}"
            )
        pairs.append((str(image), str(matches[0])))

    used = {mask for _, mask in pairs}
    return pairs, [path for paths in by_name.values() for path in paths if str(path) not in used]


def parse_colors(colors: Sequence[Any] | None, num_classes: int) -> list[Color]:
    """Parses dataset.colors as RGB: one color for each class, and at most one more for ignored pixels.

    >>> parse_colors([0, [255, 0, 0], "#0000ff"], 3)
    [(0, 0, 0), (255, 0, 0), (0, 0, 255)]

    Raises:
        ConfigError: There are too few or too many colors, one is not a color, or two are equal.
    """
    parsed = []
    for color in colors or ():
        try:
            levels = ImageColor.getrgb(color)[:3] if isinstance(color, str) else color
            # bytes() refuses levels outside 0 ... 255.
            red, green, blue = bytes(int(level) for level in np.broadcast_to(levels, 3))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"dataset.colors: {color} is not a color; give [red, green, blue], '#rrggbb' or a grey level"
            ) from error
        parsed.append((red, green, blue))

    if parsed and not num_classes <= len(set(parsed)) == len(parsed) <= num_classes + 1:
        raise ConfigError(
            f"dataset.colors={parsed} does not suit {num_classes} classes; give a different color for each class, and "
            "at most one more for ignored pixels"
        )
    return parsed


def _open_image(path: str) -> Image.Image:
    """Opens an image file, or a member of a shard."""
    data = member_bytes(path)
    return Image.open(path if data is None else io.BytesIO(data))


@dataclass(frozen=True)
class MaskReader:
    """Reads masks as class indices.

    Attributes:
        num_classes: Number of classes, including the background.
        colors: The color of each class in colored masks; empty if the values of masks are class indices.
        sizing: How images and their masks are resized.
        is_binary: True if 255 is class 1, not ignored.
    """

    num_classes: int
    colors: Sequence[Color]
    sizing: Sizing
    is_binary: bool = False

    def read(self, pair: tuple[str, str]) -> np.ndarray:
        """Reads the mask of a pair (image, mask) as class indices, uint8 [h, w], resized like its image.

        Padding is IGNORED.

        Raises:
            DataError: The mask or its image cannot be read, their sizes differ, a label or color has no class, or
                class indices are in a JPEG.
        """
        image, mask = pair
        try:
            with _open_image(image) as picture, _open_image(mask) as mask_picture:
                if mask_picture.format == "JPEG" and not (self.colors or self.is_binary):
                    raise DataError(
                        f"{mask} is a JPEG, which changes class indices a little; write masks as PNG"
                    )
                mask_size = self._size(mask_picture)
                image_size = self._size(picture)
                if image_size != mask_size:
                    raise DataError(
                        f"{mask} has {mask_size} pixels and its image {image_size}; both need the same size, upright "
                        "or, with dataset.exif=false, as they are stored"
                    )
                values = self._values(mask, mask_picture, resize=True)
                # An image of ones, resized in the same way and padded with zeros, shows where padding is.
                ones = Image.new("L", mask_size, 1)
                is_inside = np.asarray(self.sizing.resize_mask(ones, padding=0))
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(
                f"{mask} or its image cannot be read: {error}; fix or remove both, or cut them into tiles if they are "
                "too large"
            ) from error

        last = 0 if self.is_binary else self.num_classes - 1
        labels = values.astype(np.int32)
        # Fractions, as in TIFF files of floats, are not labels either.
        is_label = (labels == values) & (labels >= 0) & ((labels <= last) | (labels == IGNORED))
        if not is_label.all():
            known, settings = f"outside 0 ... {last} and {IGNORED}", " or dataset.num_classes"
            if self.is_binary:
                known = f"and the masks sampled here hold 0 and {IGNORED}, read as classes 0 and 1"
                settings = f", or set dataset.colors=[0,1,{IGNORED}] if {IGNORED} is to be ignored"
            raise DataError(
                f"{mask} has the label {values[~is_label][0]}, {known}; "
                f"fix the mask (write PNG, since JPEG changes labels){settings}"
            )
        classes = values == IGNORED if self.is_binary else values
        return np.where(is_inside, classes, IGNORED).astype(np.uint8)

    def count(self, masks: Iterable[str]) -> Counter[int]:
        """Counts the pixels of each value in some masks, skipping masks that cannot be read."""
        counts = Counter[int]()
        for mask in masks:
            # The streams report masks that cannot be read. Pillow raises errors of many types.
            with suppress(Exception), _open_image(mask) as labels:
                values, numbers = np.unique(self._values(mask, labels), return_counts=True)
                counts.update(dict(zip(values.tolist(), numbers.tolist())))
        return counts

    def _size(self, picture: Image.Image) -> tuple[int, int]:
        width, height = picture.size
        is_turned = picture.getexif().get(ExifTags.Base.Orientation) in TURNED_BY_90_DEGREES
        return (height, width) if self.sizing.exif and is_turned else (width, height)

    def _values(self, mask: str, labels: Image.Image, resize: bool = False) -> np.ndarray:
        """Returns the values of a mask, or the classes of its colors, upright and, with `resize`, resized."""
        if self.sizing.exif:
            labels = turn_upright(labels)
        # Pillow would clip the values of a single band, such as -9999 in a GeoTIFF, to 0 ... 255.
        if self.colors or len(labels.getbands()) > 1:
            labels = labels.convert("RGB")
        if resize:
            # Padding needs a valid value until read() sets it to IGNORED.
            labels = self.sizing.resize_mask(labels, padding=labels.getpixel((0, 0)))

        values = np.asarray(labels)
        if values.ndim == 2:
            return values
        if self.colors:
            return self._classes_of_colors(mask, values)
        # A grey image may be stored with three equal channels.
        if (values == values[..., :1]).all():
            return values[..., 0]
        raise DataError(
            f"{mask} is in color; give the color of each class, as in "
            "'dataset.colors=[[0,0,0],[128,0,0]]', or write grey or palette PNGs of class indices"
        )

    def _classes_of_colors(self, mask: str, pixels: np.ndarray) -> np.ndarray:
        classes = np.full(pixels.shape[:2], -1, np.int32)
        for number, color in enumerate(self.colors):
            label = number if number < self.num_classes else IGNORED
            classes[(pixels == color).all(axis=-1)] = label
        if (classes < 0).any():
            color = pixels[classes < 0][0].tolist()
            raise DataError(
                f"{mask} has the color {color}, which is not in dataset.colors; add it or fix the mask"
            )
        return classes
