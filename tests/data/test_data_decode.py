"""Decoded pixels are those of TensorFlow's decoder and, with resize=antialias and fit=stretch, of its resize."""

from __future__ import annotations

import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from hvtrain.data.pipeline.decoding import Sizing, decode, decode_batch
from hvtrain.data.pipeline.transform import Transform

SHAPE = (20, 30)


def always_resized(encoded: bytes, image_shape: tuple[int, int, int]) -> np.ndarray:
    image = tf.io.decode_image(encoded, channels=image_shape[2], expand_animations=False)
    resized = tf.image.resize(image, image_shape[:2], antialias=True)
    return tf.saturate_cast(tf.round(resized), tf.uint8).numpy()


def encoded(kind: str, height: int, width: int) -> bytes:
    random, data = np.random.default_rng(height * width), io.BytesIO()
    frames = [
        Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)) for _ in range(2)
    ]
    more = {"save_all": True, "append_images": frames[1:]} if kind == "GIF" else {}
    frames[0].save(data, kind, **more)
    return data.getvalue()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP"])
def test_pixels_have_the_same_bits_as_if_each_image_were_resized(kind, channels, tmp_path):
    if (kind, channels) in {("GIF", 1), ("BMP", 1)}:
        pytest.skip("TensorFlow's decoder has no grey GIF and turns no colours of a BMP to grey")
    shape = (*SHAPE, channels)
    sizes = [SHAPE, SHAPE[::-1], (20, 31), (19, 30), (7, 9), (61, 50), (1, 1)]
    images = [encoded(kind, *size) for size in sizes]
    wanted = np.stack([always_resized(image, shape) for image in images])
    sizing = Sizing(shape, "antialias", "stretch")
    together = tf.function(lambda batch: decode_batch(batch, sizing))(tf.constant(images)).numpy()
    assert together.dtype == np.uint8 and np.array_equal(together, wanted)
    assert np.array_equal(np.stack([decode(image, sizing).numpy() for image in images]), wanted)
    paths = [tmp_path / str(number) for number in range(len(images))]
    for path, image in zip(paths, images):
        path.write_bytes(image)
    again = decode_batch(
        tf.map_fn(tf.io.read_file, tf.constant([str(path) for path in paths])), sizing
    )
    assert np.array_equal(again.numpy(), wanted)
    raw = tf.io.decode_image(images[0], channels=channels, expand_animations=False).numpy()
    assert np.array_equal(wanted[0], raw) and wanted.std() > 10


def test_a_grey_image_of_the_right_size_gets_its_channels():
    grey = tf.io.encode_png(
        np.arange(600, dtype=np.uint16).astype(np.uint8).reshape(*SHAPE, 1)
    ).numpy()
    assert np.array_equal(
        decode(grey, Sizing((*SHAPE, 3))).numpy(), always_resized(grey, (*SHAPE, 3))
    )


def test_four_channels_are_those_of_pillow():
    """TensorFlow refuses JPEG and WebP, and gives other alpha values for few bits and for BMP."""
    colors = Image.open(io.BytesIO(encoded("PNG", *SHAPE)))
    transparent = Image.merge("RGBA", [*colors.split(), colors.getchannel(0)])
    pictures = [
        (colors, "JPEG"),
        (colors, "WEBP"),
        (colors.convert("1"), "PNG"),
        (colors.quantize(16), "PNG"),
        (transparent, "PNG"),
        (transparent, "BMP"),
    ]
    for picture, kind in pictures:
        data = io.BytesIO()
        picture.save(data, kind)
        four = decode(data.getvalue(), Sizing((*SHAPE, 4))).numpy()
        expected = np.asarray(Image.open(data).convert("RGBA"))
        assert np.array_equal(four, expected), (picture.mode, kind)


@pytest.mark.parametrize(
    "values", [np.arange(256, dtype=np.uint8), np.array([-0.0, 0.1, -3e38, 1e-45], np.float32)]
)
@pytest.mark.parametrize(
    ("mean", "scale"), [(0.0, 255.0), (0.0, 1.0), (np.zeros(1), 3.0), (7.0, 1.0), (7.0, 3.0)]
)
def test_leaving_out_a_mean_of_0_changes_no_bit(values, mean, scale):
    images = np.broadcast_to(values[:, None, None, None], (len(values), 2, 2, 1))
    found = Transform(mean, scale).normalize(tf.constant(images)).numpy()
    wanted = (tf.cast(images, tf.float32) - np.float32(mean)) / np.float32(scale)
    assert found.dtype == np.float32 and found.tobytes() == wanted.numpy().tobytes()
