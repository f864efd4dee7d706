"""Decodes images inside the input pipeline, turns them upright and resizes them to one size.

TensorFlow decodes JPEG, PNG, GIF, WebP and BMP. Pillow decodes what TensorFlow cannot decode or would
misread: photographs to be turned upright, TIFF, AVIF, WebP with transparency, BMP with a palette,
greyscale images in formats that TensorFlow decodes only in color, CMYK as greyscale, and most images of
four channels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps
from tensorflow import Tensor, TensorSpec

from hvtrain.config.validate import check_choice
from hvtrain.data.formats.image_files import decode_by_pillow
from hvtrain.errors import ConfigError

# A camera writes the orientation of a photograph near the start of the file, mostly in the first
# 200 bytes. A color profile before it takes up to 3 KB.
HEAD_BYTES = 4096

# In RE2, \C matches any byte. EXIF data are a TIFF file of either byte order. Its entry 0x0112 is
# the orientation; 2 ... 8 mean rotated or mirrored.
_BIG_ENDIAN = r"MM\x00\*\C*?\x01\x12\x00\x03\x00\x00\x00\x01\x00[\x02-\x08]"
_LITTLE_ENDIAN = r"II\*\x00\C*?\x12\x01\x03\x00\x01\x00\x00\x00[\x02-\x08]\x00"
# "Exif" marks EXIF data in a JPEG, and "eXIf" is the chunk in a PNG.
_TURNED = rf"\C*?(?:Exif\x00\x00|eXIf)(?:{_BIG_ENDIAN}|{_LITTLE_ENDIAN})"
# TIFF, AVIF, and files whose kind an error message names; see NOT_IMAGES in image_files.py.
_OTHERS = (r"II\*\x00", r"MM\x00\*", r"\C{4}ftyp", "<", "%PDF", "version https://git-lfs")
# WebP that may be turned, animated or transparent: TensorFlow does not turn it, and decodes neither an
# animation nor transparency to three channels. Bit 4 of byte 24 marks transparency in the lossless format.
_WEBP = r"RIFF\C{4}WEBPVP8(?:X|L\C{8}[\x10-\x1f])"
# Patterns for the start of files that Pillow decodes, by the number of requested channels. Byte 28
# of a BMP holds the bits per pixel: TensorFlow mistakes palette indices for grey levels.
_FOR_PILLOW = {
    1: (*_OTHERS, "BM", "GIF8", r"RIFF\C{4}WEBP"),
    3: (*_OTHERS, r"BM\C{26}[^\x18]", _WEBP),
    4: _OTHERS,
}
# TensorFlow decodes only PNG of 8 or 16 bits (byte 24) to four channels correctly. It refuses JPEG and opaque
# WebP, makes PNG of fewer bits almost transparent, and takes the unused byte of a 32-bit BMP for alpha.
_FOUR_CHANNELS = r"\CPNG\C{20}[\x08\x10]\C*"

# The header of a JPEG's frame with four components of 8 bits, CMYK, which libjpeg does not convert to grey.
# A color profile of any length may precede it.
_CMYK = r"\C*\x00\x14\x08\C{4}\x04[\x00\x01C]\C*"

RESIZES = ("bilinear", "area", "antialias")
# Values of `fit`, with phrases for the header of a run.
FITS = {
    "crop": "cropped to the aspect ratio",
    "pad": "padded to the aspect ratio",
    "stretch": "stretched",
}
# Number of crops drawn for each image; the first that fits is used, as in torchvision.
ATTEMPTS = 10
# libjpeg can decode a JPEG at a reduced size, with its sides divided by one of these numbers.
JPEG_DIVISORS = (1, 2, 4, 8)


@dataclass(frozen=True)
class RandomResizedCrop:
    """Crops a random part of each training image and resizes it to image_shape (Szegedy et al. 2015).

    The crop is taken from the full-size image during decoding, and only that part of a JPEG is
    decoded. The outer columns of that part may differ slightly in color from those of the whole JPEG.

    Attributes:
        area: Smallest and largest fraction of the image's area; drawn uniformly.
        aspect: Smallest and largest ratio of width to height; its logarithm is drawn uniformly.

    Raises:
        ConfigError: A limit is out of range.
    """

    area: Sequence[float] = (0.08, 1.0)
    aspect: Sequence[float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        for name, limits, most in (("area", self.area, 1.0), ("aspect", self.aspect, math.inf)):
            try:
                low, high = limits
                is_valid = 0 < low <= high <= most
            except (TypeError, ValueError):
                is_valid = False
            if not is_valid:
                raise ConfigError(
                    f"augment.random_resized_crop.{name}={limits} is out of range; give [smallest, largest], "
                    "both above 0 and, for area, at most 1"
                )

    def draw(self, num_images: Any, seed: Tensor) -> Tensor:
        """Draws random crops for images whose sizes are not yet known. Pure function of seed int64 [2].

        Returns:
            float32 [num_images, ATTEMPTS, 4]: height and width, divided by the square root of the image's
            area, and the position from the top and from the left, as a fraction of the free space.
        """
        draws = tf.random.stateless_uniform([num_images, ATTEMPTS, 4], seed)
        smallest, largest = self.area
        areas = smallest + (largest - smallest) * draws[..., 0]
        narrowest, widest = np.log(self.aspect).tolist()
        aspects = tf.exp(narrowest + (widest - narrowest) * draws[..., 1])
        sides = tf.sqrt(tf.stack([areas / aspects, areas * aspects], axis=-1))
        return tf.concat([sides, draws[..., 2:]], axis=-1)

    @staticmethod
    def windows(sizes: Tensor, draws: Tensor) -> Tensor:
        """Returns the first drawn crop that fits, for each image.

        If none fits, as is likely in an image ten times as wide as high, the first is clipped to the image.

        Args:
            sizes: int32 [num_images, 2], height and width.
            draws: See draw().

        Returns:
            int32 [num_images, 4]: top, left, height, width.
        """
        area = tf.cast(tf.reduce_prod(sizes, axis=1), tf.float32)
        sides = tf.sqrt(area)[:, None, None] * draws[..., :2]
        drawn = tf.maximum(tf.cast(tf.round(sides), tf.int32), 1)
        first = tf.argmax(tf.reduce_all(drawn <= sizes[:, None], axis=2), axis=1)
        parts = tf.minimum(tf.gather(drawn, first, batch_dims=1), sizes)
        positions = tf.gather(draws, first, batch_dims=1)[:, 2:]
        corners = tf.cast(positions * tf.cast(sizes - parts + 1, tf.float32), tf.int32)
        return tf.concat([corners, parts], axis=1)


@dataclass(frozen=True)
class Sizing:
    """Resizes and crops images of any size to image_shape.

    Attributes:
        image_shape: Height, width, channels.
        resize: bilinear interpolates between four pixels, the default of Keras and TensorFlow; area takes the
            mean of the pixels that an output pixel covers; antialias is bilinear with an anti-aliasing filter.
        fit: crop keeps the largest central part with the aspect ratio of image_shape; pad keeps the whole
            image, with black around it; stretch does not keep the aspect ratio.
        crop_fraction: The central fraction of the resized image's height and width that is kept.
            0.875 is ImageNet's 224 of 256.
        exif: Turn images upright, as their EXIF orientation says.
        crop: Random crop of each training image, instead of fit and crop_fraction.

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
        check_choice("dataset.resize", self.resize, RESIZES)
        check_choice("dataset.fit", self.fit, FITS)
        if not 0 < self.crop_fraction <= 1:
            raise ConfigError(
                f"dataset.crop_fraction={self.crop_fraction} is out of range; give a number above 0 and at most 1, "
                "such as 0.875"
            )

    @property
    def border(self) -> tuple[int, int]:
        """Height of the strips cut off at the top and bottom, and width of the strips cut off at the sides."""
        height, width, _ = self.image_shape
        share = (1 / self.crop_fraction - 1) / 2
        return round(height * share), round(width * share)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width to which images are resized, including the border."""
        height, width, _ = self.image_shape
        return height + 2 * self.border[0], width + 2 * self.border[1]

    @property
    def is_fixed(self) -> bool:
        """True if the saved model takes only images of image_shape: no Keras layer resizes by area."""
        return self.resize == "area"

    def phrase(self) -> str:
        """Describes the sizing for the header of a run."""
        share = self.crop_fraction
        part = "" if share == 1 else f", the central {share:g} of each side"
        return f"{FITS[self.fit]}{part}, resized to {list(self.image_shape)} ({self.resize})"

    def window(self, height: Any, width: Any) -> list[Tensor]:
        """Returns the part of an image that is resized to `size`: [top, left, height, width], as Keras computes it.

        With fit=pad, it reaches beyond the image.
        """
        sides = tf.stack([height, width])
        fitting = tf.stack(
            [width * self.size[0] // self.size[1], height * self.size[1] // self.size[0]]
        )
        corner = tf.zeros_like(sides)
        if self.fit == "crop":
            part = tf.clip_by_value(fitting, 1, sides)
            corner = (sides - part) // 2
            sides = part
        elif self.fit == "pad":
            corner = (sides - tf.maximum(fitting, sides) + 1) // 2
            sides -= 2 * corner
        return [*tf.unstack(corner), *tf.unstack(sides)]

    def resize_mask(self, labels: Image.Image, padding: Any) -> Image.Image:
        """Resizes a mask like its image, but by nearest neighbor, since labels cannot blend.

        Pixels outside the image get the label `padding`.
        """
        width, height = labels.size
        top, left, rows, columns = map(int, self.window(height, width))
        extent = (left, top, left + columns, top + rows)
        resized = labels.transform(
            self.size[::-1], Image.Transform.EXTENT, extent, fillcolor=padding
        )
        return ImageOps.crop(resized, 2 * self.border[::-1])

    def decode_for_model(self, encoded: Any) -> Tensor:
        """Decodes an image as the saved model takes it: at its own size, or resized if is_fixed."""
        if self.is_fixed:
            return decode(encoded, self)
        return _decode_whole(encoded, _are_for_pillow(encoded, self), self)

    def layers(self) -> list[Callable[[Any], Any]]:
        """Returns layers that resize a decoded image bit for bit as decode() does; none if is_fixed."""
        if self.is_fixed:
            return []
        # data_format is explicit, since keras.json may name another. keras.layers.Resizing
        # is not used: if a model begins with it and is called without `training`, its
        # later layers run in training mode.
        resize = partial(
            keras.ops.image.resize,
            size=self.size,
            antialias=self.resize == "antialias",
            crop_to_aspect_ratio=self.fit == "crop",
            pad_to_aspect_ratio=self.fit == "pad",
            data_format="channels_last",
        )
        layers = [resize, keras.ops.round]
        if self.crop_fraction < 1:
            layers.append(
                keras.layers.Cropping2D(self.border, data_format="channels_last", dtype="float32")
            )
        return layers


def _decode_whole(encoded: Any, is_for_pillow: Tensor, sizing: Sizing) -> Tensor:
    """Decodes one image at its own size to uint8 [h, w, channels]; of an animation, only the first frame."""
    channels = sizing.image_shape[2]

    def decode_with_pillow():
        # NumPy strips zero bytes at the end of a string, so another byte is appended.
        data = tf.strings.join([encoded, "."])
        read = partial(decode_by_pillow, channels=channels, exif=sizing.exif)
        pixels = tf.numpy_function(read, [data], tf.uint8, stateful=False)
        return tf.ensure_shape(pixels, [None, None, channels])

    return tf.cond(
        is_for_pillow,
        decode_with_pillow,
        lambda: tf.io.decode_image(encoded, channels=channels, expand_animations=False),
    )


def _are_for_pillow(encoded: Any, sizing: Sizing) -> Tensor:
    """True for images that TensorFlow cannot decode or would misread; bool in the shape of `encoded`."""
    head = tf.strings.substr(encoded, 0, HEAD_BYTES)
    begins = "|".join(_FOR_PILLOW[sizing.image_shape[2]] + ((_TURNED,) if sizing.exif else ()))
    # A single expression takes 0.02 to 0.05 ms; decoding a JPEG of 224x224 takes 0.7 ms. A switch of
    # three cases, with TensorFlow's operations for the orientation, would take up to 0.1 ms.
    are_for_pillow = tf.strings.regex_full_match(head, rf"(?:{begins})\C*")
    if sizing.image_shape[2] == 1:
        jpegs = tf.where(tf.io.is_jpeg(encoded), encoded, "")
        are_for_pillow |= tf.strings.regex_full_match(jpegs, _CMYK)
    if sizing.image_shape[2] == 4:
        are_for_pillow |= ~tf.strings.regex_full_match(head, _FOUR_CHANNELS)
    return are_for_pillow


def decode(encoded: Any, sizing: Sizing) -> Tensor:
    """Decodes one image to uint8 of sizing.image_shape, as validation and the saved model see it."""
    return decode_batch(tf.convert_to_tensor(encoded)[None], sizing)[0]


def decode_batch(encoded: Tensor, sizing: Sizing, draws: Tensor | None = None) -> Tensor:
    """Decodes encoded images, strings [batch], to uint8 [batch, h, w, c].

    Images are decoded one after another, since the pipeline decodes several batches at once. As much as
    possible is computed for the whole batch: each operation on one image costs 1 to 2 microseconds.

    Args:
        draws: The random crops, see RandomResizedCrop.draw(); None: `fit` and `crop_fraction` apply.
    """
    are_for_pillow = _are_for_pillow(encoded, sizing)
    elements: tuple[Any, ...] = (encoded, are_for_pillow)
    decode_one: Callable[..., Tensor] = partial(_decode_central, sizing)
    if draws is not None:
        elements += (tf.io.is_jpeg(encoded) & ~are_for_pillow, draws)
        decode_one = partial(_decode_random, sizing)
    image = TensorSpec(sizing.image_shape, tf.uint8)
    return tf.map_fn(lambda element: decode_one(*element), elements, fn_output_signature=image)


def _decode_central(sizing: Sizing, encoded: Tensor, is_for_pillow: Tensor) -> Tensor:
    """Decodes an image and resizes the part that `fit` and `crop_fraction` select."""
    # The whole image is decoded even if only a part is used: decode_and_crop_jpeg() saves nothing
    # for a central crop, and its outer columns differ in color from what the saved model gets.
    image = _decode_whole(encoded, is_for_pillow, sizing)
    window = sizing.window(*tf.unstack(tf.shape(image)[:2]))
    if sizing.fit == "pad":
        image = tf.pad(image, [[-window[0], -window[0]], [-window[1], -window[1]], [0, 0]])
    else:
        image = tf.slice(image, [*window[:2], 0], [*window[2:], -1])
    return _resize(image, sizing, sizing.size, sizing.border)


def _decode_random(
    sizing: Sizing, encoded: Tensor, is_for_pillow: Tensor, is_plain_jpeg: Tensor, draws: Tensor
) -> Tensor:
    """Decodes an image, or only its random crop if is_plain_jpeg, and resizes the crop."""
    height, width, channels = sizing.image_shape

    def window_in(size):
        return RandomResizedCrop.windows(size[None], draws[None])[0]

    def decode_crop():
        window = window_in(tf.io.extract_jpeg_shape(encoded)[:2])

        def decode_at(divisor):
            part = window // divisor
            return tf.image.decode_and_crop_jpeg(encoded, part, channels, ratio=divisor)

        if sizing.resize == "bilinear":
            return decode_at(1)
        # Decodes at the smallest size that is still large enough, with the crop rounded to
        # its pixels. Area and antialias average pixels anyway; bilinear does not, so it
        # decodes at full size like validation.
        reduction = tf.minimum(window[2] // height, window[3] // width)
        index = tf.reduce_sum(tf.cast(reduction >= JPEG_DIVISORS[1:], tf.int32))
        return tf.switch_case(index, [partial(decode_at, divisor) for divisor in JPEG_DIVISORS])

    def decode_then_crop():
        image = _decode_whole(encoded, is_for_pillow, sizing)
        window = window_in(tf.shape(image)[:2])
        return tf.image.crop_to_bounding_box(image, *tf.unstack(window))

    image = tf.cond(is_plain_jpeg, decode_crop, decode_then_crop)
    image = tf.ensure_shape(image, [None, None, channels])
    return _resize(image, sizing, (height, width), (0, 0))


def _resize(image: Tensor, sizing: Sizing, size: Any, border: tuple[int, int]) -> Tensor:
    """Resizes an image to `size` and cuts off the border."""
    height, width, _ = sizing.image_shape
    kept = slice(border[0], border[0] + height), slice(border[1], border[1] + width)

    def resize():
        method = "area" if sizing.resize == "area" else "bilinear"
        resized = tf.image.resize(image, size, method, antialias=sizing.resize == "antialias")
        # The border is cut last, from bytes: cutting floats takes longer than rounding the border.
        return tf.cast(tf.round(resized), tf.uint8)[kept]

    # Resizing to the same size would change nothing, but would take longer than decoding.
    fits = tf.reduce_all(tf.shape(image)[:2] == size)
    return tf.ensure_shape(tf.cond(fits, lambda: image[kept], resize), sizing.image_shape)
