"""Tiny sets of images and the comparison of streams: each image can be told from all others, as bytes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import tensorflow as tf

SHAPE = (6, 6, 1)
KINDS = ["arrays", "image_folder", "image_folder_cached", "parquet", "tfrecord"]


def random_images(num_examples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images of noise, all different, and labels 0, 1, 2, 0, 1, 2 ..."""
    images = np.random.default_rng(seed).integers(0, 256, (num_examples, *SHAPE), np.uint8)
    return images, np.arange(num_examples) % 3


def write_folder(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """folder/CLASS/NUMBER.png, one file per image."""
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / f"class_{label}" / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(image).numpy())


def images_of(batches: tf.data.Dataset, num_batches: int | None = None) -> list[bytes]:
    """Every image of the (first) batches, in order, as bytes that can be compared and counted."""
    batches = batches if num_batches is None else batches.take(num_batches)
    return [image.tobytes() for images, _ in batches.as_numpy_iterator() for image in images]


def scaled(images: np.ndarray) -> list[bytes]:
    """The result of images_of for raw images that were divided by 255 and neither shifted nor flipped."""
    return [image.tobytes() for image in images.astype(np.float32) / np.float32(255)]


def joined(lists: Iterable[list]) -> list:
    return list(chain.from_iterable(lists))
