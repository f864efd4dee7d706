"""scikit-learn's 1,797 handwritten digits of 8x8 pixels: real data that needs no download."""

from functools import partial
from importlib.metadata import distribution

import numpy as np

from hvtrain.data.sources.arrays import ArraySource
from hvtrain.data.sources.memory import SPLIT_SEED, Elements
from hvtrain.errors import ConfigError

NUM_DIGITS = 1797
# Traits of digits, as targets of several labels per image.
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
        num_test: number of images in the test part, which is stratified and the same in every run.
        num_validation, standardize, shift_pixels: see ArraySource.

    Raises:
        ConfigError: if num_test leaves too few images for testing or training.
    """
    if not 10 <= num_test <= NUM_DIGITS - 10:
        raise ConfigError(f"dataset.num_test={num_test} is outside 10 ... {NUM_DIGITS - 10}")

    def load() -> Elements:
        images, labels = read()
        targets = labels
        if has_traits:
            columns = [np.isin(labels, members) for members in TRAITS.values()]
            targets = np.stack(columns, axis=1).astype(np.float32)
        # Stratified by class for both sources, so that their test parts are the same.
        is_test = stratified(labels, num_test)
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


def read() -> tuple[np.ndarray, np.ndarray]:
    """Reads images uint8 [1797, 8, 8] and labels int64 [1797] from scikit-learn's own file."""
    # Read without importing scikit-learn, which would take longer than training on this data.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), np.uint8, delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)


def stratified(labels: np.ndarray, number: int) -> np.ndarray:
    """Returns a mask that selects `number` examples at random, from each class in proportion."""
    # Rows are shuffled, then sorted by class, so evenly spaced ones come
    # from each class in proportion.
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    chosen = np.zeros(len(labels), bool)
    chosen[order[(2 * np.arange(number) + 1) * len(labels) // (2 * number)]] = True
    return chosen
