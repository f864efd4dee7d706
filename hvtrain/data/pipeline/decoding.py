"""Decodes encoded images to pixels of one size, upright, inside the input pipeline.

TensorFlow decodes JPEG, PNG, GIF, WebP and BMP. Pillow decodes what TensorFlow cannot, or would read
wrongly: turned photographs, TIFF, BMP with a palette, grey images from formats in which TensorFlow
knows only colours.
"""

import io
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps, UnidentifiedImageError

from hvtrain.data.formats.image_files import MAX_PIXELS

# A camera writes the orientation of a photograph near the file's begin, mostly in the first 200
# bytes. A profile of colours before it takes up to 3 KB.
HEAD_BYTES = 4096

# RE2's \C is any byte. EXIF is a TIFF, of either byte order, whose entry 0x0112 has the orientation:
# 2 ... 8 are turned or mirrored.
_BIG_ENDIAN = r"MM\x00\*\C*?\x01\x12\x00\x03\x00\x00\x00\x01\x00[\x02-\x08]"
_LITTLE_ENDIAN = r"II\*\x00\C*?\x12\x01\x03\x00\x01\x00\x00\x00[\x02-\x08]\x00"
# "Exif" is the mark in a JPEG, "eXIf" the chunk of a PNG. A WebP has its EXIF behind the pixels, and
# a flag at byte 20 announces it.
_TURNED = (
    rf"\C*?(?:Exif\x00\x00|eXIf)(?:{_BIG_ENDIAN}|{_LITTLE_ENDIAN})",
    r"RIFF\C{4}WEBPVP8X\C{4}[\x08-\x0f\x18-\x1f\x28-\x2f\x38-\x3f]",
)
_TIFF = (r"II\*\x00", r"MM\x00\*")
# By the bits of a pixel, at byte 28 of a BMP. TensorFlow takes the indices of a palette for grey.
_FOR_PILLOW = {
    1: (*_TIFF, "BM", "GIF8", r"RIFF\C{4}WEBP"),
    3: (*_TIFF, r"BM\C{26}[^\x18]"),
    4: (*_TIFF, r"BM\C{26}[^\x20]", "GIF8"),
}
"""Begins of files that Pillow reads, by the number of channels that are asked for."""

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's names for images of so many channels."""
DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
"""Pillow's modes of more than 8 bits, which it would cut off at 255."""


def decode_whole(encoded: Any, channels: int, exif: bool = True) -> tf.Tensor:
    """Decodes one encoded image in its own size to uint8 [h, w, channels].

    An animation gives its first frame.

    Args:
        exif: Turn the image upright, as its EXIF orientation says.
    """
    head = tf.strings.substr(encoded, 0, tf.minimum(HEAD_BYTES, tf.strings.length(encoded)))
    begins = "|".join(_FOR_PILLOW[channels] + (_TURNED if exif else ()))

    def by_tensorflow() -> tf.Tensor:
        return tf.io.decode_image(encoded, channels=channels, expand_animations=False)

    def by_pillow() -> tf.Tensor:
        # NumPy's strings lose the zeros at their end, so another byte follows.
        data = tf.strings.join([encoded, "."])
        read = partial(decode_by_pillow, channels=channels, exif=exif)
        pixels = tf.numpy_function(read, [data], tf.uint8, stateful=False)
        return tf.ensure_shape(pixels, [None, None, channels])

    # A single condition: this costs 0.02 to 0.05 of 0.7 ms for a JPEG of 224x224, and a switch of
    # three cases, with TensorFlow's own operations for the orientation, up to 0.1 ms.
    return tf.cond(tf.strings.regex_full_match(head, rf"(?:{begins})\C*"), by_pillow, by_tensorflow)


@tf.autograph.experimental.do_not_convert
def decode_by_pillow(data: Any, channels: int, exif: bool) -> np.ndarray:
    """Decodes an image to uint8 [h, w, channels].

    Args:
        data: The bytes of the image, and one more.

    Raises:
        tf.errors.InvalidArgumentError: It cannot be decoded.
    """
    problem = "Image cannot be decoded: it is damaged"
    try:
        with Image.open(io.BytesIO(np.asarray(data).item()[:-1])) as image:
            if image.mode not in DEEP_MODES:
                picture = ImageOps.exif_transpose(image) if exif else image
                pixels = np.asarray(picture.convert(MODES[channels]))
                return pixels.reshape(*pixels.shape[:2], channels)
            problem = f"Image has more than 8 bits a channel ({image.format}, mode {image.mode}); write it with 8 bits"
    except Image.DecompressionBombError:
        problem = f"Image has more than {MAX_PIXELS:,} pixels"
    except Exception as error:  # Pillow raises errors of many types, SyntaxError among them.
        # Not its text for an unknown format, which has an address of memory.
        if not isinstance(error, UnidentifiedImageError):
            problem = f"Image cannot be decoded: {str(error).partition(chr(10))[0]}"
    # An OpError, as of TensorFlow's own decoder.
    raise tf.errors.InvalidArgumentError(None, None, problem)


def decode(encoded: tf.Tensor, image_shape: tuple[int, int, int], exif: bool = True) -> tf.Tensor:
    """Decodes one encoded image to uint8 image_shape.

    Other sizes are resized (bilinear, antialiased); the aspect ratio is not kept. Antialiasing
    costs more than the decoding itself (docs/input.md).
    """
    height, width, channels = image_shape
    image = decode_whole(encoded, channels, exif)

    def resize() -> tf.Tensor:
        resized = tf.image.resize(image, [height, width], antialias=True)
        return tf.saturate_cast(tf.round(resized), tf.uint8)

    # Resizing to the same size would change no bit, and take longer than the decoding.
    fits = tf.reduce_all(tf.shape(image) == image_shape)
    return tf.ensure_shape(tf.cond(fits, lambda: image, resize), image_shape)


def decode_batch(encoded: tf.Tensor, image_shape: tuple[int, int, int], exif: bool = True) -> tf.Tensor:
    """Decodes strings [batch] to uint8 [batch, h, w, c].

    In turn, since the pipeline decodes several batches at once.
    """
    return tf.map_fn(
        lambda image: decode(image, image_shape, exif),
        encoded,
        fn_output_signature=tf.TensorSpec(image_shape, tf.uint8),
    )


def decode_files(paths: tf.Tensor, image_shape: tuple[int, int, int], exif: bool = True) -> tf.Tensor:
    """Reads the files of these paths and decodes them, as decode_batch() does."""
    return tf.map_fn(
        lambda path: decode(tf.io.read_file(path), image_shape, exif),
        paths,
        fn_output_signature=tf.TensorSpec(image_shape, tf.uint8),
    )
