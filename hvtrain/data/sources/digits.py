"""scikit-learn's 1,797 handwritten digits of 8x8: real data that needs no download."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from hvtrain.data.sources.arrays import Arrays, ArraySource
from hvtrain.data.sources.memory import SPLIT_SEED
from hvtrain.errors import ConfigError, DataError

NUM_DIGITS = 1797
TRAITS = {"even": (0, 2, 4, 6, 8), "prime": (2, 3, 5, 7), "above four": (5, 6, 7, 8, 9), "with a loop": (0, 6, 8, 9)}


def digits(
    num_test: int = 360, num_validation: int = 0, standardize: str = "scale", shift_pixels: int = 0
) -> ArraySource:
    """Pixels 0 ... 16, 10 classes. The test part is stratified and the same in every run."""
    _check_num_test(num_test)

    def load() -> Arrays:
        images, labels = read()
        is_test = stratified(labels, num_test)
        return {"train": (images[~is_test], labels[~is_test]), "test": (images[is_test], labels[is_test])}

    changes, origin = (num_validation, shift_pixels, False), "inside scikit-learn"
    return ArraySource("digits", load, (8, 8, 1), 10, origin, standardize, 16.0, *changes, tuple("0123456789"))


def digits_traits(
    num_test: int = 360, num_validation: int = 0, standardize: str = "scale", shift_pixels: int = 0
) -> ArraySource:
    """The same images, with TRAITS of the digit as targets: float32 0 or 1 for each."""
    _check_num_test(num_test)

    def load() -> Arrays:
        images, labels = read()
        targets = np.stack([np.isin(labels, digits) for digits in TRAITS.values()], axis=1).astype(np.float32)
        is_test = stratified(labels, num_test)
        return {"train": (images[~is_test], targets[~is_test]), "test": (images[is_test], targets[is_test])}

    changes, origin = (num_validation, shift_pixels, False), "inside scikit-learn"
    facts = {"label_names": tuple(TRAITS)}
    return ArraySource("digits_traits", load, (8, 8, 1), None, origin, standardize, 16.0, *changes, more_facts=facts)


def _check_num_test(num_test: int) -> None:
    if not 10 <= num_test <= NUM_DIGITS - 10:
        raise ConfigError(f"dataset.num_test={num_test} is outside 10 ... {NUM_DIGITS - 10}")


def read() -> tuple[np.ndarray, np.ndarray]:
    """Images (uint8, [1797, 8, 8]) and labels (int64, [1797]) from the file in scikit-learn's package.

    The package is not imported, since that takes longer than training on this data.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("dataset=digits is part of scikit-learn, which is not installed; run pip install scikit-learn")
    rows = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", np.uint8, delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)


def stratified(labels: np.ndarray, number: int) -> np.ndarray:
    """Mask of a random, stratified choice of `number` labels: evenly spaced ones, shuffled and then sorted by class."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    chosen = np.zeros(len(labels), bool)
    chosen[order[(2 * np.arange(number) + 1) * len(labels) // (2 * number)]] = True
    return chosen
