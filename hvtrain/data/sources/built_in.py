"""Sources that need neither files nor a download: handwritten digits, drawn shapes with masks, and a random batch.

The digits are scikit-learn's 1,797 images of 8x8 pixels.
"""

import math
from collections.abc import Sequence
from functools import partial
from importlib.metadata import distribution

import numpy as np
import tensorflow as tf
from tensorflow.data import Dataset

from hvtrain.config.validate import check_least
from hvtrain.core.topology import Topology
from hvtrain.data.pipeline.streams import FOREVER, finish
from hvtrain.data.pipeline.transform import IGNORED, check_image_shape
from hvtrain.data.source import ImageShape, Source, StreamRequest
from hvtrain.data.sources.arrays import ArraySource, ImagesWithMasks
from hvtrain.data.sources.memory import SPLIT_SEED, Elements, check_counts, on_cpu
from hvtrain.errors import ConfigError

NUM_DIGITS = 1797
# Traits of digits: the labels of digits_traits, whose images may have several.
TRAITS = {
    "even": (0, 2, 4, 6, 8),
    "prime": (2, 3, 5, 7),
    "above four": (5, 6, 7, 8, 9),
    "with a loop": (0, 6, 8, 9),
}


def _digits(
    name: str,
    has_traits: bool,
    /,
    num_test: int = 360,
    num_validation: int = 0,
    standardize: str = "scale",
    shift_pixels: int = 0,
) -> ArraySource:
    """Makes a source of images [8, 8, 1] with pixels 0 ... 16.

    The targets are 10 classes or, with has_traits, float32 [traits]: 1 for each of TRAITS that the digit
    has, else 0.

    Args:
        num_test: Number of images in the test part, which is stratified and the same in every run.
        num_validation, standardize, shift_pixels: See ArraySource.

    Raises:
        ConfigError: If num_test leaves too few images for testing or training.
    """
    if not 10 <= num_test <= NUM_DIGITS - 10:
        raise ConfigError(f"dataset.num_test={num_test} is outside 10 ... {NUM_DIGITS - 10}")

    def load() -> Elements:
        images, labels = read_digits()
        targets = labels
        if has_traits:
            columns = [np.isin(labels, members) for members in TRAITS.values()]
            targets = np.stack(columns, axis=1).astype(np.float32)
        # Stratified by class for both sources, so that their test parts are the same.
        is_test = stratified_mask(labels, num_test)
        return {
            "train": (images[~is_test], targets[~is_test]),
            "test": (images[is_test], targets[is_test]),
        }

    return ArraySource(
        name,
        load,
        image_shape=(8, 8, 1),
        num_classes=None if has_traits else 10,
        origin="inside scikit-learn",
        standardize=standardize,
        max_value=16.0,
        num_validation=num_validation,
        shift_pixels=shift_pixels,
        class_names=None if has_traits else tuple("0123456789"),
        more_facts={"label_names": tuple(TRAITS)} if has_traits else None,
    )


digits = partial(_digits, "digits", False)
digits_traits = partial(_digits, "digits_traits", True)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Reads images uint8 [1797, 8, 8] and labels int64 [1797] from scikit-learn's own file."""
    # Read without importing scikit-learn, which would take longer than training on this data.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), np.uint8, delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)


def stratified_mask(labels: np.ndarray, num_selected: int) -> np.ndarray:
    """Returns a mask that selects `num_selected` examples at random, stratified by class."""
    # Rows are shuffled, then sorted by class, so evenly spaced rows come
    # from each class in proportion to its size.
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    chosen = np.zeros(len(labels), bool)
    chosen[order[(2 * np.arange(num_selected) + 1) * len(labels) // (2 * num_selected)]] = True
    return chosen


class Synthetic(Source):
    """A source of Gaussian noise and random labels; each rank repeats a batch. Nothing can be learned.

    The defaults have the size of ImageNet: 1,281,167 training images in 1000 classes.

    Example:
        python -m hvtrain dataset=synthetic model=resnet50 train.steps=100

    Args:
        image_shape: [height, width, channels].
        num_classes: Number of classes; labels are whole numbers from 0 to num_classes - 1.
        num_train, num_validation, num_test: Number of examples of each split, all from the same batch.

    Raises:
        ConfigError: If a number is out of range.
    """

    name = "synthetic"
    origin = "random numbers"

    def __init__(
        self,
        image_shape: Sequence[int] = (224, 224, 3),
        num_classes: int = 1000,
        num_train: int = 1_281_167,
        num_validation: int = 0,
        num_test: int = 0,
    ) -> None:
        self.image_shape = check_image_shape(image_shape)
        self.num_classes = num_classes
        check_counts(1, num_classes=num_classes)
        check_counts(num_train=num_train, num_validation=num_validation, num_test=num_test)
        self._counts = {"train": num_train, "validation": num_validation, "test": num_test}

    def num_examples(self, split: str) -> int:
        return self._counts.get(split, 0)

    def training(self, request: StreamRequest) -> Dataset:
        topology = request.topology
        images, labels = self._batch(topology, request.batch_size, request.seed)
        share = request.share_of(topology.share_size(self.num_examples("train")))
        # Full steps repeat the batch that is in memory.
        if share.is_full:
            return finish(Dataset.from_tensors((images, labels)).repeat(), topology)

        # Smaller steps get the first examples of the batch.
        def cut(step):
            step %= share.steps
            size = share.begin(step + 1) - share.begin(step)
            return images[:size], labels[:size]

        steps = Dataset.range(request.start_step, FOREVER)
        return finish(steps.map(cut), topology)

    def evaluation(self, split: str, topology: Topology, batch_size: int) -> Dataset:
        batch = self._batch(topology, batch_size, seed=0)
        num_local = topology.share_size(self.num_examples(split))
        examples = Dataset.from_tensor_slices(batch).repeat().take(num_local)
        return finish(examples.batch(batch_size), topology)

    def _batch(self, topology: Topology, batch_size: int, seed: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a rank's only batch, a function of the seed and the rank."""
        random = np.random.default_rng([seed, topology.rank])
        images = random.standard_normal((batch_size, *self.image_shape), np.float32)
        labels = random.integers(self.num_classes, size=batch_size, dtype=np.int32)
        return on_cpu((images, labels))


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
        num_train, num_validation, num_test: Number of examples in each split.
        noise: The most that noise adds to or subtracts from a value, in grey levels.
        border: Width in pixels of each shape's outline in the mask, where pixels are labelled 255
            and so ignored, as in PASCAL VOC; 0: no outline.
        seed: Seed of the drawings, independent of the run's seed.
        standardize, shift_pixels, flip: See ArraySource.

    Raises:
        ConfigError: If a value is out of range.
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


# The shapes by name, as classes from 1 on; class 0 is the background. Each function returns the
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
