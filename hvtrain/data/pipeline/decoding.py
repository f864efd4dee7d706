"""Decodes encoded images to pixels of one size, upright, inside the input pipeline.

TensorFlow decodes JPEG, PNG, GIF, WebP and BMP. Pillow decodes what TensorFlow cannot, or would read
wrongly: turned photographs, TIFF, BMP with a palette, grey images from formats in which TensorFlow
knows only colours.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps, UnidentifiedImageError

from hvtrain.data.formats.image_files import MAX_PIXELS
from hvtrain.errors import ConfigError

# A camera writes the orientation of a photograph near the file's begin, mostly in the first 200
# bytes. A profile of colours before it takes up to 3 KB.
HEAD_BYTES = 4096
JPEG_BEGIN = b"\xff\xd8\xff"

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

RESIZES = ("bilinear", "area", "antialias")
FITS = ("crop", "pad", "stretch")
ATTEMPTS = 10
"""Crops that are drawn for an image, of which the first that fits is taken; as many as in torchvision."""
JPEG_FRACTIONS = (1, 2, 4, 8)
"""Parts of its sides at which libjpeg can decode a JPEG."""


@dataclass(frozen=True)
class RandomResizedCrop:
    """A random part of each training image, resized to the size of the data set (Szegedy et al. 2015).

    It is taken while images are decoded, from their full size, and only that part of a JPEG is
    decoded. The colours of its outer columns may differ by some levels from those of the whole JPEG.

    Attributes:
        area: Smallest and largest part of the image's area; each area is as likely.
        aspect: Smallest and largest width divided by height; each logarithm is as likely.

    Raises:
        ConfigError: They are out of range.
    """

    area: Sequence[float] = (0.08, 1.0)
    aspect: Sequence[float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        for name, limits, most in (("area", self.area, 1.0), ("aspect", self.aspect, math.inf)):
            low, high = limits
            if not 0 < low <= high <= most:
                raise ConfigError(
                    f"augment.random_resized_crop.{name}={list(limits)} is out of range; give [smallest, largest] "
                    "above 0, of area at most 1"
                )

    def draw(self, number: Any, seed: tf.Tensor) -> tf.Tensor:
        """Draws crops for some images, before their sizes are known. Pure.

        Returns:
            float32 [number, ATTEMPTS, 4]: height and width, by the square root of the image's area,
            and the place, 0 ... 1 from the top and from the left.
        """
        draws = tf.random.stateless_uniform([number, ATTEMPTS, 4], seed)
        smallest, largest = self.area
        areas = smallest + (largest - smallest) * draws[..., 0]
        narrowest, widest = np.log(self.aspect).tolist()
        aspects = tf.exp(narrowest + (widest - narrowest) * draws[..., 1])
        sides = tf.sqrt(tf.stack([areas / aspects, areas * aspects], axis=-1))
        return tf.concat([sides, draws[..., 2:]], axis=-1)

    @staticmethod
    def windows(sizes: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """Returns the first drawn crop that fits, for each image.

        If none does, as in an image more than ten times as wide as high, the first is cut to it.

        Args:
            sizes: int32 [number, 2], height and width.
            draws: see draw().

        Returns:
            int32 [number, 4]: top, left, height, width.
        """
        area = tf.cast(tf.reduce_prod(sizes, axis=1), tf.float32)
        sides = tf.sqrt(area)[:, tf.newaxis, tf.newaxis] * draws[..., :2]
        drawn = tf.maximum(tf.cast(tf.round(sides), tf.int32), 1)
        first = tf.argmax(tf.reduce_all(drawn <= sizes[:, tf.newaxis], axis=2), axis=1)
        parts = tf.minimum(tf.gather(drawn, first, batch_dims=1), sizes)
        places = tf.gather(draws, first, batch_dims=1)[:, 2:]
        corners = tf.cast(places * tf.cast(sizes - parts + 1, tf.float32), tf.int32)
        return tf.concat([corners, parts], axis=1)


@dataclass(frozen=True)
class Sizing:
    """How an encoded image of any size becomes one of image_shape.

    Attributes:
        image_shape: Height, width, channels.
        resize: bilinear, between four pixels, as Keras and TensorFlow do by default; area, the mean
            of the pixels that an output pixel covers; antialias, bilinear over those pixels.
        fit: crop keeps the largest central part of the aspect ratio of image_shape, pad the whole
            image with black around it; stretch does not keep the aspect ratio.
        crop_fraction: The central part of that which is used, by its sides: 0.875 is the 224 of 256
            of ImageNet.
        exif: Images are turned upright, as their EXIF orientation says.
        crop: Random part of each training image, in place of fit and crop_fraction.

    Raises:
        ConfigError: A setting is out of range.
    """

    image_shape: tuple[int, int, int]
    resize: str = "bilinear"
    fit: str = "crop"
    crop_fraction: float = 1.0
    exif: bool = True
    crop: RandomResizedCrop | None = None

    def __post_init__(self) -> None:
        for name, value, choices in (("resize", self.resize, RESIZES), ("fit", self.fit, FITS)):
            if value not in choices:
                raise ConfigError(f"dataset.{name}={value} is unknown; choose {', '.join(choices)}")
        if not 0 < self.crop_fraction <= 1:
            raise ConfigError(
                f"dataset.crop_fraction={self.crop_fraction} is out of range; give a part of the sides, such as 0.875"
            )

    @property
    def border(self) -> tuple[int, int]:
        """Pixels that crop_fraction cuts off at the top and at the left, and as many opposite."""
        height, width = (round(side * (1 / self.crop_fraction - 1) / 2) for side in self.image_shape[:2])
        return height, width

    @property
    def size(self) -> tuple[int, int]:
        """Height and width to which images are resized, with the border."""
        height, width, _ = self.image_shape
        return height + 2 * self.border[0], width + 2 * self.border[1]

    @property
    def is_fixed(self) -> bool:
        """True if the saved model takes images of image_shape: Keras has no layer that resizes by area."""
        return self.resize == "area"

    def phrase(self) -> str:
        """Describes it, for the header of a run."""
        parts = {"crop": "cropped to the aspect ratio", "pad": "padded to the aspect ratio", "stretch": "stretched"}
        part = "" if self.crop_fraction == 1 else f", the central {self.crop_fraction:g} of it"
        return f"{parts[self.fit]}{part}, resized to {list(self.image_shape)} ({self.resize})"

    def window(self, height: Any, width: Any) -> list[tf.Tensor]:
        """Returns the part of an image that becomes `size`: [top, left, height, width], as Keras computes it.

        With fit=pad it reaches beyond the image.
        """
        sides = tf.stack([height, width])
        fitting = tf.stack([width * self.size[0] // self.size[1], height * self.size[1] // self.size[0]])
        corner = tf.zeros_like(sides)
        if self.fit == "crop":
            part = tf.clip_by_value(fitting, 1, sides)
            corner = (sides - part) // 2
            sides = part
        elif self.fit == "pad":
            corner = (sides - tf.maximum(fitting, sides) + 1) // 2
            sides -= 2 * corner
        return [*tf.unstack(corner), *tf.unstack(sides)]

    def follow(self, labels: Image.Image, padding: Any) -> Image.Image:
        """Returns a mask in the size of images, by its nearest pixels: no class lies between two others."""
        width, height = labels.size
        top, left, rows, columns = map(int, self.window(height, width))
        extent = (left, top, left + columns, top + rows)
        resized = labels.transform(self.size[::-1], Image.Transform.EXTENT, extent, fillcolor=padding)
        return ImageOps.crop(resized, (*self.border[::-1], *self.border[::-1]))

    def whole(self, encoded: Any) -> tf.Tensor:
        """Decodes an image as the saved model takes it: in its own size, or resized if that is_fixed."""
        return decode(encoded, self) if self.is_fixed else _decode_whole(encoded, _are_for_pillow(encoded, self), self)

    def layers(self) -> list[Callable[[Any], Any]]:
        """Layers that resize a decoded image as decode() does, to the last bit; none if the size is_fixed."""
        if self.is_fixed:
            return []
        # The format is explicit, since the user's keras.json may name another. Not
        # keras.layers.Resizing: a model that begins with it and is called without `training` trains
        # behind it.
        resize = partial(
            keras.ops.image.resize,
            size=self.size,
            antialias=self.resize == "antialias",
            crop_to_aspect_ratio=self.fit == "crop",
            pad_to_aspect_ratio=self.fit == "pad",
            data_format="channels_last",
        )
        layers: list[Callable[[Any], Any]] = [resize, keras.ops.round]
        if self.crop_fraction < 1:
            layers.append(keras.layers.Cropping2D(self.border, data_format="channels_last", dtype="float32"))
        return layers


def _decode_whole(encoded: Any, is_for_pillow: tf.Tensor, sizing: Sizing) -> tf.Tensor:
    """Decodes one encoded image in its own size to uint8 [h, w, channels]; of an animation the first frame."""
    channels = sizing.image_shape[2]

    def by_tensorflow() -> tf.Tensor:
        return tf.io.decode_image(encoded, channels=channels, expand_animations=False)

    def by_pillow() -> tf.Tensor:
        # NumPy's strings lose the zeros at their end, so another byte follows.
        data = tf.strings.join([encoded, "."])
        read = partial(decode_by_pillow, channels=channels, exif=sizing.exif)
        pixels = tf.numpy_function(read, [data], tf.uint8, stateful=False)
        return tf.ensure_shape(pixels, [None, None, channels])

    return tf.cond(is_for_pillow, by_pillow, by_tensorflow)


def _are_for_pillow(encoded: Any, sizing: Sizing) -> tf.Tensor:
    """True where TensorFlow cannot read an image, or would read it wrongly; in the shape of `encoded`."""
    head = tf.strings.substr(encoded, 0, HEAD_BYTES)
    begins = "|".join(_FOR_PILLOW[sizing.image_shape[2]] + (_TURNED if sizing.exif else ()))
    # A single expression: this costs 0.02 to 0.05 of 0.7 ms for a JPEG of 224x224, and a switch of
    # three cases, with TensorFlow's own operations for the orientation, up to 0.1 ms.
    return tf.strings.regex_full_match(head, rf"(?:{begins})\C*")


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


def decode(encoded: Any, sizing: Sizing) -> tf.Tensor:
    """Decodes one encoded image to uint8 sizing.image_shape, as validation and the saved model see it."""
    return decode_batch(tf.convert_to_tensor(encoded)[tf.newaxis], sizing)[0]


def decode_batch(encoded: tf.Tensor, sizing: Sizing, draws: tf.Tensor | None = None) -> tf.Tensor:
    """Decodes strings [batch] to uint8 [batch, h, w, c].

    In turn, since the pipeline decodes several batches at once. What can be computed for the whole
    batch is: each operation on a single image costs a microsecond or two.

    Args:
        draws: Of the random crops, in training; see RandomResizedCrop.draw().
    """
    are_for_pillow = _are_for_pillow(encoded, sizing)
    elements: tuple[Any, ...] = (encoded, are_for_pillow)
    decode_one: Callable[..., tf.Tensor] = partial(_decode_central, sizing)
    if draws is not None:
        are_jpegs = tf.strings.substr(encoded, 0, len(JPEG_BEGIN)) == JPEG_BEGIN
        # TensorFlow gives a JPEG no alpha.
        are_cropped = are_jpegs & ~are_for_pillow & (sizing.image_shape[2] != 4)
        windows = RandomResizedCrop.windows(_jpeg_sizes(encoded, are_cropped), draws)
        elements += (are_cropped, windows, draws)
        decode_one = partial(_decode_random, sizing)
    image = tf.TensorSpec(sizing.image_shape, tf.uint8)
    return tf.map_fn(lambda element: decode_one(*element), elements, fn_output_signature=image)


def _jpeg_sizes(encoded: tf.Tensor, are_jpegs: tf.Tensor) -> tf.Tensor:
    """Returns height and width of JPEGs, int32 [batch, 2], before they are decoded; of others 1 and 1."""

    def size(element: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        image, is_jpeg = element
        return tf.cond(is_jpeg, lambda: tf.io.extract_jpeg_shape(image)[:2], lambda: tf.ones([2], tf.int32))

    return tf.map_fn(size, (encoded, are_jpegs), fn_output_signature=tf.TensorSpec([2], tf.int32))


def _decode_central(sizing: Sizing, encoded: tf.Tensor, is_for_pillow: tf.Tensor) -> tf.Tensor:
    """Decodes an image, and resizes the part that `fit` and `crop_fraction` say."""
    # The whole image, also where a part is used: for the middle decode_and_crop_jpeg() saves
    # nothing, and its outer columns have other colours than the saved model gets.
    image = _decode_whole(encoded, is_for_pillow, sizing)
    window = sizing.window(*tf.unstack(tf.shape(image)[:2]))
    if sizing.fit == "pad":
        image = tf.pad(image, [[-window[0], -window[0]], [-window[1], -window[1]], [0, 0]])
    else:
        image = tf.slice(image, [*window[:2], 0], [*window[2:], -1])
    return _resize(image, sizing, sizing.size, sizing.border)


def _decode_random(
    sizing: Sizing,
    encoded: tf.Tensor,
    is_for_pillow: tf.Tensor,
    is_cropped: tf.Tensor,
    window: tf.Tensor,
    draws: tf.Tensor,
) -> tf.Tensor:
    """Decodes a random part of an image, of a JPEG that is_cropped it alone, and resizes it."""
    height, width, channels = sizing.image_shape

    def decode_at(fraction: int) -> tf.Tensor:
        return tf.image.decode_and_crop_jpeg(encoded, window // fraction, channels, ratio=fraction)

    def of_jpeg() -> tf.Tensor:
        if sizing.resize == "bilinear":
            return decode_at(1)
        # The smallest size that is still large enough, with the place rounded to its pixels. They
        # would be averaged anyway. Those of bilinear would not, and in validation they are not.
        reduction = tf.minimum(window[2] // height, window[3] // width)
        index = tf.reduce_sum(tf.cast(reduction >= JPEG_FRACTIONS[1:], tf.int32))
        return tf.switch_case(index, [partial(decode_at, fraction) for fraction in JPEG_FRACTIONS])

    def of_whole() -> tf.Tensor:
        image = _decode_whole(encoded, is_for_pillow, sizing)
        size = tf.shape(image)[:2]
        top, left, rows, columns = tf.unstack(RandomResizedCrop.windows(size[tf.newaxis], draws[tf.newaxis])[0])
        return image[top : top + rows, left : left + columns]

    image = tf.ensure_shape(tf.cond(is_cropped, of_jpeg, of_whole), [None, None, channels])
    return _resize(image, sizing, (height, width), (0, 0))


def _resize(image: tf.Tensor, sizing: Sizing, size: tuple[int, int], border: tuple[int, int]) -> tf.Tensor:
    """Resizes pixels to `size`, and cuts the border off."""
    height, width, _ = sizing.image_shape
    kept = slice(border[0], border[0] + height), slice(border[1], border[1] + width)

    def resize() -> tf.Tensor:
        method = "area" if sizing.resize == "area" else "bilinear"
        resized = tf.image.resize(image, size, method, antialias=sizing.resize == "antialias")
        return tf.cast(tf.round(resized[kept]), tf.uint8)

    # Resizing to the same size would change no bit, and take longer than the decoding.
    fits = tf.reduce_all(tf.shape(image)[:2] == size)
    return tf.ensure_shape(tf.cond(fits, lambda: image[kept], resize), sizing.image_shape)
