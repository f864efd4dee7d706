"""Decodes encoded images to pixels of one size, upright, inside the input pipeline.

TensorFlow decodes JPEG, PNG, GIF, WebP and BMP. Pillow decodes what TensorFlow cannot, or would read
wrongly: TIFF, BMP with a palette, grey images from formats in which TensorFlow knows only colours.
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

# RE2's \C is any byte. EXIF is a TIFF, of either byte order, whose entry 0x0112 has the orientation.
_BIG_ENDIAN = r"MM\x00\*\C*?\x01\x12\x00\x03\x00\x00\x00\x01\x00([\x02-\x08])"
_LITTLE_ENDIAN = r"II\*\x00\C*?\x12\x01\x03\x00\x01\x00\x00\x00([\x02-\x08])\x00"
# "Exif" is the mark in a JPEG, "eXIf" the chunk of a PNG.
TURNED = rf"\C*?(?:Exif\x00\x00|eXIf)(?:{_BIG_ENDIAN}|{_LITTLE_ENDIAN})\C*"

TIFF = r"II\*\x00|MM\x00\*"
# A WebP has its EXIF behind the pixels; a flag at byte 20 announces it.
WEBP_WITH_EXIF = r"RIFF\C{4}WEBPVP8X\C{4}[\x08-\x0f\x18-\x1f\x28-\x2f\x38-\x3f]"
# By the bits of a pixel, at byte 28 of a BMP. TensorFlow takes the indices of a palette for grey.
BMP_OTHER_THAN_24_BITS = r"BM\C{26}[^\x18]"
BMP_OTHER_THAN_32_BITS = r"BM\C{26}[^\x20]"
FOR_PILLOW = {
    1: rf"(?:{TIFF}|BM|GIF8|RIFF\C{{4}}WEBP)\C*",
    3: rf"(?:{TIFF}|{BMP_OTHER_THAN_24_BITS}|{WEBP_WITH_EXIF})\C*",
    4: rf"(?:{TIFF}|{BMP_OTHER_THAN_32_BITS}|GIF8|{WEBP_WITH_EXIF})\C*",
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

    def plain() -> tf.Tensor:
        return tf.io.decode_image(encoded, channels=channels, expand_animations=False)

    def turned() -> tf.Tensor:
        orientation = tf.strings.regex_replace(head, TURNED, r"\1\2", replace_global=False)
        return upright(plain(), tf.cast(tf.io.decode_raw(orientation, tf.uint8)[0], tf.int32))

    def by_pillow() -> tf.Tensor:
        # Not numpy_function, whose strings lose the zeros at their end.
        read = partial(decode_by_pillow, channels=channels, exif=exif)
        pixels = tf.py_function(read, [encoded], tf.uint8)
        return tf.ensure_shape(pixels, [None, None, channels])

    is_for_pillow = tf.strings.regex_full_match(head, FOR_PILLOW[channels])
    if not exif:
        return tf.cond(is_for_pillow, by_pillow, plain)
    is_turned = tf.strings.regex_full_match(head, TURNED)
    kind = tf.where(is_for_pillow, 2, tf.cast(is_turned, tf.int32))
    return tf.switch_case(kind, [plain, turned, by_pillow])


def upright(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Turns and mirrors an image [h, w, c] as its EXIF orientation 1 ... 8 says."""

    def among(*orientations: int) -> tf.Tensor:
        return tf.reduce_any(orientation == tf.constant(orientations))

    image = tf.cond(orientation >= 5, lambda: tf.transpose(image, [1, 0, 2]), lambda: image)
    mirrored = tf.cond(among(2, 3, 6, 7), lambda: tf.reverse(image, [1]), lambda: image)
    return tf.cond(among(3, 4, 7, 8), lambda: tf.reverse(mirrored, [0]), lambda: mirrored)


@tf.autograph.experimental.do_not_convert
def decode_by_pillow(encoded: tf.Tensor, channels: int, exif: bool) -> np.ndarray:
    """Decodes an image to uint8 [h, w, channels].

    Raises:
        tf.errors.InvalidArgumentError: It cannot be decoded.
    """
    problem = "Image cannot be decoded: it is damaged"
    try:
        with Image.open(io.BytesIO(encoded.numpy())) as image:
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
