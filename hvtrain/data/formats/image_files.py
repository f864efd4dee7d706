"""A look at some images of a data set before it is used: kinds, sizes, and what would be read wrongly."""

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import tensorflow as tf
from PIL import ExifTags, Image

from hvtrain.data.formats.tar_files import member_bytes
from hvtrain.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff")

MAX_PIXELS = 2**29
"""The most pixels of an image, as in TensorFlow."""
# Pillow refuses images of twice this limit. Its default is meant for photographs.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2

MAX_SAMPLE = 16
"""Images of a data set that are looked at, since a network file system may be slow."""
DEEP_PNG = b"\x10"
"""The byte of a PNG's header for 16 bits a channel."""
LEAST_DEEP_VALUE = 2**14
"""Values of 16 bits that stay below this are taken for 14, 12 or 10 bits."""

Item = TypeVar("Item")


def sample(items: Sequence[Item], number: int = MAX_SAMPLE) -> list[Item]:
    """Evenly spaced items, the first among them.

    >>> sample(range(10), 4)
    [0, 3, 6, 9]
    """
    return list(items[:: -(-len(items) // number) or 1])


def describe_images(
    images: Iterable[tuple[str, str | bytes]],
    sizing: str,
    exif: bool,
) -> list[str]:
    """Describes some images by their headers: formats, sizes, orientation.

    Args:
        images: The location of each, for messages, and its path or its bytes. What cannot be read
            is left to the streams, which name it.
        sizing: How they become one size, in words.
        exif: EXIF orientations are applied.

    Raises:
        DataError: Images of 16 bits use so few of them that they would be read as black.
    """
    formats: Counter[str] = Counter()
    sizes = set()
    num_turned = 0
    deep: dict[str, int] = {}  # The largest value of each image of 16 bits, by location.
    for location, content in images:
        # Pillow raises errors of many types, SyntaxError among them, for damaged files.
        with suppress(Exception):
            data = content
            if isinstance(content, str):
                data = member_bytes(content) or content
            if isinstance(data, str) and _may_be_deep(data):
                data = Path(data).read_bytes()
            with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data) as image:
                formats[image.format or "?"] += 1
                sizes.add(image.size)
                num_turned += image.getexif().get(ExifTags.Base.Orientation, 1) > 1
                is_deep = image.format == "PNG" and isinstance(data, bytes) and data[24:25] == DEEP_PNG
            if is_deep:
                deep[location] = int(tf.reduce_max(tf.io.decode_png(data, dtype=tf.uint16)))

    if not formats:
        return []
    if deep and max(deep.values()) < LEAST_DEEP_VALUE:
        location, largest = max(deep.items(), key=lambda item: item[1])
        raise DataError(
            f"{location} has 16 bits a channel and no value above {largest:,}, which would be read as "
            f"{largest >> 8} of 255; write the images with 8 bits (values x 255 / their largest possible one)"
        )

    kinds = " and ".join(name for name, _ in formats.most_common())
    scope = f"{sum(formats.values())} looked at"
    phrases = [f"{kinds} of {_size_phrase(sizes)} ({scope}), {sizing}"]
    if num_turned:
        state = "turned upright" if exif else "left as they are stored (dataset.exif=false)"
        phrases.append(f"{num_turned} with an EXIF orientation, {state}")
    return phrases


def _may_be_deep(path: str) -> bool:
    """True for the path of a PNG of 16 bits a channel."""
    with Path(path).open("rb") as file:
        return file.read(25)[24:] == DEEP_PNG


def _size_phrase(sizes: set[tuple[int, int]]) -> str:
    """Sizes as width x height, the smallest and the largest.

    >>> _size_phrase({(640, 480), (20, 10)})
    '20x10 to 640x480 pixels'
    """
    ordered = sorted(sizes, key=lambda size: size[0] * size[1])
    names = dict.fromkeys(f"{width}x{height}" for width, height in (ordered[0], ordered[-1]))
    return f"{' to '.join(names)} pixels"
