"""Reads images with Pillow: those that TensorFlow cannot decode, and a sample of each data set.

The sample is read before training. It shows formats and sizes, and reveals images that would be
misread.
"""

import io
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from hvtrain.data.formats.tar_files import members_ahead
from hvtrain.errors import DataError, StorageError, first_line

SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".gif", ".bmp", ".webp", ".avif", ".tif", ".tiff")

# Pillow refuses images of more than twice this many pixels, so its limit is now 2**29, as in
# TensorFlow. The default is meant for photographs.
Image.MAX_IMAGE_PIXELS = 2**28

# Number of images in a data set's sample; small, since a network file system may be slow.
MAX_SAMPLE = 16
# The bit depth in the header of a 16-bit PNG, at byte 24.
DEEP_PNG = b"\x10"
# 16-bit images whose values are all below this are assumed to use only 14, 12 or 10 bits.
LEAST_DEEP_VALUE = 2**14

# Pillow's modes, by number of channels.
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
# Descriptions of files that are often mistaken for images, by their first bytes. The first match
# counts, so b"<svg" comes before b"<".
NOT_IMAGES = {
    b"<svg": "SVG, which must be converted",
    b"<": "a web page",
    b"%PDF": "a PDF",
    b"version https://git-lfs": "a Git LFS pointer; `git lfs pull` gets the image itself",
}

Item = TypeVar("Item")


def is_image(path: Path) -> bool:
    """True for a path with the suffix of an image."""
    return path.suffix.lower() in SUFFIXES


def sample(items: Sequence[Item], max_items: int = MAX_SAMPLE) -> list[Item]:
    """Returns at most `max_items` evenly spaced items, starting with the first.

    >>> sample(range(10), 4)
    [0, 3, 6, 9]
    """
    stride = -(-len(items) // max_items)  # Rounded up.
    return list(items[:: stride or 1])


def describe_images(images: Iterable[tuple[str, str | bytes]], sizing: Any) -> list[str]:
    """Describes a sample of images: formats, sizes, orientation.

    Args:
        images: For each image, its location, for messages, and its path or its bytes. Unreadable
            images are skipped here; the streams that read the data set report them.
        sizing: The Sizing of the data set.

    Returns:
        Phrases, such as "JPEG of 20x10 to 640x480 pixels (16 sampled), ..."; none if no image is
        readable.

    Raises:
        DataError: The 16-bit images use so few of their bits that they would look almost black.
        StorageError: The storage cannot be read.
    """
    formats = Counter[str]()
    sizes = set()
    num_turned = 0
    deep_images = []  # The largest value of each 16-bit image, and its location.
    for location, content in images:
        try:
            if isinstance(content, str):
                content = members_ahead.take(content) or Path(content).read_bytes()
            with Image.open(io.BytesIO(content)) as image:
                formats[image.format or "?"] += 1
                sizes.add(image.size)
                num_turned += image.getexif().get(ExifTags.Base.Orientation, 1) > 1
                if image.format == "PNG" and content[24:25] == DEEP_PNG:
                    values = tf.io.decode_png(content, dtype=tf.uint16)
                    deep_images.append((int(tf.reduce_max(values)), location))
        except StorageError:
            raise
        except Exception:
            # For damaged files, Pillow raises errors of many types, even SyntaxError.
            continue

    if not formats:
        return []
    if deep_images:
        largest, location = max(deep_images)
        if largest < LEAST_DEEP_VALUE:
            raise DataError(
                f"{location} has 16 bits per channel and no value above {largest:,}, which would "
                f"become {largest >> 8} of 255; rescale the images to 8 bits "
                "(value x 255 / largest possible value)"
            )

    names = " and ".join(name for name, _ in formats.most_common())
    by_area = sorted(sizes, key=math.prod)
    # The smallest and the largest size; only one if all images have the same size.
    ends = dict.fromkeys(f"{width}x{height}" for width, height in (by_area[0], by_area[-1]))
    phrases = [
        f"{names} of {' to '.join(ends)} pixels ({formats.total()} sampled), {sizing.phrase()}"
    ]
    if num_turned:
        state = "turned upright" if sizing.exif else "left as they are stored (dataset.exif=false)"
        phrases.append(f"{num_turned} with an EXIF orientation, {state}")
    return phrases


def turn_upright(image: Image.Image) -> Image.Image:
    """Turns an image upright, as its EXIF orientation says."""
    # If info held the EXIF data, Pillow would rewrite all entries, and would fail on an odd one, such as the
    # exposure bias of -2/0 that some phones write (python-pillow/Pillow#8965).
    image.getexif()
    image.info.pop("exif", None)
    return ImageOps.exif_transpose(image)


@tf.autograph.experimental.do_not_convert
def decode_by_pillow(data: Any, channels: int, exif: bool) -> np.ndarray:
    """Decodes an image to uint8 [h, w, channels].

    Args:
        data: The bytes of the image and one extra byte, since NumPy strips trailing zero bytes.
        channels: 1, 3 or 4.
        exif: Whether to turn the image upright, as its EXIF orientation says.

    Raises:
        tf.errors.InvalidArgumentError: The image cannot be decoded.
    """
    content = np.asarray(data).item()[:-1]
    kinds = (kind for start, kind in NOT_IMAGES.items() if content.startswith(start))
    kind = next(kinds, "damaged")
    if content[4:8] == b"ftyp":
        kind = "HEIC or a video, which must be converted"
    problem = f"Image cannot be decoded: it is {kind}"
    try:
        with Image.open(io.BytesIO(content)) as image:
            # In the modes I, I;16 and F, pixels have more than 8 bits, which convert() would clip.
            # Pillow opens 16-bit color as 8-bit RGB and drops the lower bits; only the tile's mode,
            # such as RGB;16L, shows it.
            is_deep = image.format == "TIFF" and ";16" in str(image.tile)
            if not is_deep and image.mode[0] not in "IF":
                picture = turn_upright(image) if exif else image
                pixels = np.asarray(picture.convert(MODES[channels]))
                return pixels.reshape(*pixels.shape[:2], channels)
            problem = (
                f"Image has more than 8 bits per channel ({image.format}, mode {image.mode}); "
                "write it with 8 bits"
            )
    except UnidentifiedImageError:
        pass  # Pillow's message for an unknown format is left out: it contains a memory address.
    except Exception as error:  # Pillow raises errors of many types, even SyntaxError.
        problem = f"Image cannot be decoded: {first_line(error)}"
    # TensorFlow's own decoder raises the same type of error.
    raise tf.errors.InvalidArgumentError(None, None, problem)
