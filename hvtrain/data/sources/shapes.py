"""Drawn shapes on textured ground, with a mask for each image: segmentation that needs no download."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from hvtrain.data.pipeline.transform import IGNORED, check_image_shape
from hvtrain.data.sources.arrays import Arrays, ImagesWithMasks
from hvtrain.errors import ConfigError

MIN_SIDE = 16
MOST = 3  # Shapes in an image, which may hide each other in part; at least one is drawn.
RADII = (0.2, 0.4)  # Of a shape's circumscribed circle, by the shorter side of the image.
PATCHES = 6  # Of random brightness, on each side of the image; the ground and each shape change smoothly between them.
CONTRAST = 60  # Grey levels between the darkest and the brightest patch.

Field = np.ndarray
"""A number for each pixel [h, w]."""


def shapes(
    image_shape: Sequence[int] = (96, 96, 3),
    num_train: int = 512,
    num_validation: int = 64,
    num_test: int = 128,
    noise: int = 15,
    border: int = 1,
    seed: int = 0,
    standardize: str = "per_channel",
    shift_pixels: int = 0,
    flip: bool = False,
) -> ImagesWithMasks:
    """Images (uint8) of discs, squares, triangles, rings and crosses in any size, rotation and colour.

    Only the form tells a shape's class. Example n of a split depends on the seed, the image_shape, the noise and the
    border alone, and is the same on every rank.

    noise: grey levels by which each value differs from what was drawn, up or down, at most.
    border: width in pixels of each shape's outline, which is labelled 255 and so ignored, as in PASCAL VOC; 0: none.
    """
    height, width, channels = check_image_shape(image_shape)
    if min(height, width) < MIN_SIDE:
        raise ConfigError(
            f"dataset.image_shape={list(image_shape)} is too small for shapes; give sides of at least {MIN_SIDE}"
        )
    counts = {"train": num_train, "validation": num_validation, "test": num_test}
    named = {**{f"num_{split}": count for split, count in counts.items()}, "noise": noise, "border": border}
    for name, value in {**named, "seed": seed}.items():
        if value < (low := int(name == "num_train")):
            raise ConfigError(f"dataset.{name}={value} is out of range; give a number from {low}")

    def load() -> Arrays:
        found = {}
        for number, (split, count) in enumerate(counts.items()):
            rng = np.random.default_rng([seed, number])
            drawn = [draw(rng, (height, width, channels), noise, border) for _ in range(count)]
            if drawn:
                found[split] = np.stack([image for image, _ in drawn]), np.stack([mask for _, mask in drawn])
        return found

    origin, changes = f"drawn with seed {seed}", (0, shift_pixels, flip)
    names = ("ground", *DISTANCES)
    return ImagesWithMasks(
        "shapes", load, (height, width, channels), len(names), origin, standardize, 255.0, *changes, names
    )


def draw(
    rng: np.random.Generator, image_shape: tuple[int, int, int], noise: int, border: int
) -> tuple[np.ndarray, np.ndarray]:
    """An image and its mask, with 1 ... MOST shapes.

    Sums, products and roots alone, which round alike on every processor, so that all hosts have the same bits.
    """
    height, width, channels = image_shape
    ground = rng.uniform(0, 255, channels)
    image, mask = _textured(rng, image_shape, ground), np.zeros((height, width), np.uint8)
    ys, xs = np.mgrid[:height, :width].astype(np.float64)
    for _ in range(rng.integers(1, MOST + 1)):
        label = int(rng.integers(1, len(DISTANCES) + 1))
        radius = rng.uniform(*RADII) * min(height, width)
        y, x = rng.uniform(radius / 2, np.array([height, width]) - radius / 2)
        cosine, sine = _direction(rng)
        across, along = cosine * (xs - x) - sine * (ys - y), sine * (xs - x) + cosine * (ys - y)
        distance = list(DISTANCES.values())[label - 1](across, along, radius)
        colour = (ground + rng.uniform(64, 192, channels)) % 256  # At least 64 grey levels from the ground's.
        covered = np.clip(0.5 - distance, 0, 1)[..., np.newaxis]  # Of each pixel, so that edges are smooth.
        image += covered * (_textured(rng, image_shape, colour) - image)
        mask[distance <= 0] = label
        mask[np.abs(distance) < border / 2] = IGNORED
    image += rng.integers(-noise, noise + 1, image_shape)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8), mask


def _textured(rng: np.random.Generator, image_shape: tuple[int, int, int], colour: np.ndarray) -> np.ndarray:
    """The colour, brighter and darker from place to place."""
    height, width, _ = image_shape
    patches = rng.uniform(-CONTRAST / 2, CONTRAST / 2, (PATCHES, PATCHES))
    return colour + _stretched(_stretched(patches, height).T, width).T[..., np.newaxis]


def _stretched(rows: np.ndarray, count: int) -> np.ndarray:
    """count rows, linear between the given ones."""
    at = np.linspace(0, len(rows) - 1, count)
    low = np.minimum(at.astype(int), len(rows) - 2)
    share = (at - low)[:, np.newaxis]
    return rows[low] * (1 - share) + rows[low + 1] * share


def _direction(rng: np.random.Generator) -> tuple[float, float]:
    """Cosine and sine of an angle, without the functions of these names, whose last bit differs between libraries."""
    while True:
        x, y = rng.uniform(-1, 1, 2)
        if 0.01 < (length := math.sqrt(x * x + y * y)) < 1:
            return x / length, y / length


def _disc(x: Field, y: Field, radius: float) -> Field:
    return np.sqrt(x * x + y * y) - radius


def _square(x: Field, y: Field, radius: float) -> Field:
    return np.maximum(np.abs(x), np.abs(y)) - radius * math.sqrt(0.5)


def _triangle(x: Field, y: Field, radius: float) -> Field:
    return np.maximum(-y, math.sqrt(0.75) * np.abs(x) + 0.5 * y) - radius / 2


def _ring(x: Field, y: Field, radius: float) -> Field:
    return np.abs(np.sqrt(x * x + y * y) - 0.75 * radius) - 0.25 * radius


def _cross(x: Field, y: Field, radius: float) -> Field:
    x, y = np.abs(x), np.abs(y)
    return np.maximum(np.minimum(x, y) - 0.28 * radius, np.maximum(x, y) - 0.96 * radius)


DISTANCES: dict[str, Callable[[Field, Field, float], Field]] = {
    "disc": _disc,
    "square": _square,
    "triangle": _triangle,
    "ring": _ring,
    "cross": _cross,
}
"""The shapes by name; class 0 is the ground. Each gives pixels' distances from the outline, in pixels, negative inside.

Beside corners the distance is too small. x and y are places from the centre, radius that of the circumscribed circle.
"""
