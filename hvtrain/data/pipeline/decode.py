"""Encoded images (JPEG, PNG, GIF, BMP) to pixels of one size, inside the input pipeline."""

import tensorflow as tf

from hvtrain.data.pipeline.transform import Transform
from hvtrain.data.preprocessing import Preprocessing, resize
from hvtrain.errors import ConfigError


def decode(encoded: tf.Tensor, image_shape: tuple[int, int, int]) -> tf.Tensor:
    """Decodes one encoded image, a string scalar, to uint8 image_shape; an animation gives its first frame.

    Other sizes are resized (bilinear, antialiased); the aspect ratio is not kept. Antialiasing costs as much as the
    decoding itself: 1.8 ms against 1.4 ms for a JPEG of 300x400 to 224x224 on one core.
    """
    height, width, channels = image_shape
    image = tf.io.decode_image(encoded, channels=channels, expand_animations=False)
    image = tf.image.resize(image, [height, width], antialias=True)
    return tf.ensure_shape(tf.saturate_cast(tf.round(image), tf.uint8), image_shape)


def decode_batch(encoded: tf.Tensor, image_shape: tuple[int, int, int]) -> tf.Tensor:
    """Strings [batch] to uint8 [batch, h, w, c], in turn, since the pipeline decodes several batches at once."""
    return tf.map_fn(
        lambda one: decode(one, image_shape), encoded, fn_output_signature=tf.TensorSpec(image_shape, tf.uint8)
    )


def decoded_pixels(image_shape: tuple[int, int, int], transform: Transform) -> Preprocessing:
    """Preprocessing of a decoded image of any size: what decode() does after the decoding, then the transform."""
    values = "pixels of a decoded image (tf.io.decode_image, keras.utils.load_img), not divided by 255"
    layers = [*resize(image_shape), *transform.layers(image_shape)]
    return Preprocessing((None, None, image_shape[2]), layers, values, (0.0, 255.0))


def check_image_shape(image_shape: object) -> tuple[int, int, int]:
    """(height, width, channels) from a configuration's list, checked."""
    try:
        height, width, channels = (int(side) for side in image_shape)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"dataset.image_shape={image_shape} is not [height, width, channels]") from error
    if height < 1 or width < 1 or channels not in (1, 3, 4):
        raise ConfigError(
            f"dataset.image_shape={image_shape}: height and width of at least 1 and 1, 3 or 4 channels are needed"
        )
    return height, width, channels
