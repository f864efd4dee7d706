"""Draws shapes on a textured background, with masks: segmentation data without a download."""

import math
from collections.abc import Sequence

import numpy as np

from hvtrain.config.validate import check_least
from hvtrain.data.pipeline.transform import IGNORED, check_image_shape
from hvtrain.data.source import ImageShape
from hvtrain.data.sources.arrays import ImagesWithMasks
from hvtrain.data.sources.memory import check_counts

# The minimum height and width of an image, in pixels.
MIN_SIDE = 16
# The maximum number of shapes in an image; they may overlap.
MAX_SHAPES = 3
# The range of the radius of a shape's circumscribed circle, as a share of the image's shorter side.
RADII = (0.2, 0.4)
# The number of patches of random brightness along each side. Brightness is interpolated between the
# patches.
PATCHES = 6
# The largest difference in grey levels between the darkest and the brightest patch.
CONTRAST = 60
# The minimum difference between the colors of a shape and of the background, in grey levels of each
# channel, modulo 256.
COLOR_DISTANCE = 64


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
    """Makes a source of discs, squares, triangles, rings and crosses.

    Sizes, positions, rotations and colors are random, so only the outline of a shape reveals its
    class. Example n of a split depends only on seed, image_shape, noise and border; it is the same
    on every rank.

    Args:
        image_shape: [height, width, channels] of the images, which are uint8.
        num_train, num_validation, num_test: number of examples in each split.
        noise: the most that noise adds to or subtracts from a value, in grey levels.
        border: width in pixels of each shape's outline in the mask, where pixels are labelled 255
            and so ignored, as in PASCAL VOC; 0: no outline.
        seed: seed of the drawings, independent of the run's seed.
        standardize, shift_pixels, flip: see ArraySource.

    Raises:
        ConfigError: if a value is out of range.
    """
    shape = check_image_shape(image_shape)
    check_least("dataset.image_shape (each side)", min(shape[:2]), MIN_SIDE)

    check_counts(1, num_train=num_train)
    check_counts(
        num_validation=num_validation, num_test=num_test, noise=noise, border=border, seed=seed
    )
    counts = {"train": num_train, "validation": num_validation, "test": num_test}

    def load():
        arrays = {}
        for number, (split, count) in enumerate(counts.items()):
            # Each split has its own random numbers, so its size does not change the other splits.
            rng = np.random.default_rng([seed, number])
            examples = [draw(rng, shape, noise, border) for _ in range(count)]
            if examples:
                images, masks = zip(*examples)
                arrays[split] = np.stack(images), np.stack(masks)

        return arrays

    class_names = ("ground", *DISTANCES)
    return ImagesWithMasks(
        "shapes",
        load,
        shape,
        len(class_names),
        origin=f"drawn with seed {seed}",
        standardize=standardize,
        shift_pixels=shift_pixels,
        flip=flip,
        class_names=class_names,
    )


def draw(
    rng: np.random.Generator, image_shape: ImageShape, noise: int, border: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws an image, uint8 [h, w, c], of 1 to MAX_SHAPES shapes, and its mask, uint8 [h, w].

    Uses only arithmetic and square roots, which every processor rounds in the same way, so all
    hosts draw the same bits.
    """
    height, width, channels = image_shape
    ground_color = rng.uniform(0, 255, channels)
    image = _draw_texture(rng, image_shape, ground_color)
    mask = np.zeros((height, width), np.uint8)
    ys, xs = np.mgrid[:height, :width].astype(np.float64)
    distance_functions = list(DISTANCES.values())

    for _ in range(rng.integers(1, MAX_SHAPES + 1)):
        label = rng.integers(1, len(DISTANCES) + 1)
        radius = rng.uniform(*RADII) * min(height, width)
        center_y, center_x = rng.uniform(radius / 2, np.array([height, width]) - radius / 2)
        cosine, sine = _draw_direction(rng)

        # The pixels' offsets from the shape's center, along the shape's own axes.
        across = cosine * (xs - center_x) - sine * (ys - center_y)
        along = sine * (xs - center_x) + cosine * (ys - center_y)
        distance = distance_functions[label - 1](across, along, radius)

        color_shift = rng.uniform(COLOR_DISTANCE, 256 - COLOR_DISTANCE, channels)
        color = (ground_color + color_shift) % 256
        # Smooth edges: each pixel is blended in proportion to the part that the shape covers.
        coverage = np.clip(0.5 - distance, 0, 1)[..., None]
        image += coverage * (_draw_texture(rng, image_shape, color) - image)
        mask[distance <= 0] = label
        mask[np.abs(distance) < border / 2] = IGNORED

    image += rng.integers(-noise, noise + 1, image_shape)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8), mask


def _draw_texture(
    rng: np.random.Generator, image_shape: ImageShape, color: np.ndarray
) -> np.ndarray:
    """Returns an image of one color, float64 [h, w, c], with smoothly varying random brightness."""
    height, width, _ = image_shape
    patches = rng.uniform(-CONTRAST / 2, CONTRAST / 2, (PATCHES, PATCHES))
    rows = _interpolate(patches, height)
    brightness = _interpolate(rows.T, width).T
    return color + brightness[..., None]


def _interpolate(rows: np.ndarray, count: int) -> np.ndarray:
    """Interpolates `rows` linearly to `count` rows."""
    positions = np.linspace(0, len(rows) - 1, count)
    low = np.minimum(positions.astype(int), len(rows) - 2)
    weight = (positions - low)[:, None]
    return rows[low] * (1 - weight) + rows[low + 1] * weight


def _draw_direction(rng: np.random.Generator) -> tuple[float, float]:
    """Returns the cosine and sine of a random angle."""
    # math.cos and math.sin are not used, since their last bit differs between C libraries. Random
    # points in the unit disc have uniformly distributed directions. Points near the center, which
    # has no direction, are drawn again.
    while True:
        x, y = rng.uniform(-1, 1, 2)
        length = math.sqrt(x * x + y * y)
        if 0.01 < length < 1:
            return x / length, y / length


# The shapes by name, as classes from 1 on; class 0 is the ground. Each function returns the
# distance of each pixel from the outline, in pixels, negative inside. Near corners, it is less than
# the true distance. x and y are offsets from the center, and radius is that of the circumscribed
# circle.
DISTANCES = {
    "disc": lambda x, y, radius: np.sqrt(x * x + y * y) - radius,
    "square": lambda x, y, radius: np.maximum(np.abs(x), np.abs(y)) - radius * math.sqrt(0.5),
    "triangle": lambda x, y, radius: (
        np.maximum(-y, math.sqrt(0.75) * np.abs(x) + 0.5 * y) - radius / 2
    ),
    "ring": lambda x, y, radius: np.abs(np.sqrt(x * x + y * y) - 0.75 * radius) - 0.25 * radius,
    # The ends of the bars reach the circumscribed circle: 0.28² + 0.96² = 1.
    "cross": lambda x, y, radius: np.maximum(
        np.minimum(np.abs(x), np.abs(y)) - 0.28 * radius,
        np.maximum(np.abs(x), np.abs(y)) - 0.96 * radius,
    ),
}
