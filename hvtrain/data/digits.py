"""scikit-learn's 1,797 handwritten digits, 8x8: real data that needs no file and no network."""

from __future__ import annotations

import numpy as np

from hvtrain.data.arrays import SPLIT_SEED, Arrays, ArraySource
from hvtrain.errors import ConfigError

NUM_DIGITS = 1797


def digits(
    num_test: int = 360,
    num_validation: int = 0,
    standardize: str = "scale",
    shift_pixels: int = 0,
) -> ArraySource:
    """Pixels 0 ... 16, 10 classes; the test part is stratified and the same in every run."""
    if not 10 <= num_test <= NUM_DIGITS - 10:
        raise ConfigError(f"dataset.num_test={num_test} is outside 10 ... {NUM_DIGITS - 10}")

    def load() -> Arrays:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        data = load_digits()
        x_train, x_test, y_train, y_test = train_test_split(
            data.images.astype(np.uint8),
            data.target,
            test_size=num_test,
            stratify=data.target,
            random_state=SPLIT_SEED,
        )
        return {"train": (x_train, y_train), "test": (x_test, y_test)}

    return ArraySource(
        "digits",
        load,
        (8, 8, 1),
        10,
        origin="inside scikit-learn",
        standardize=standardize,
        max_value=16.0,
        num_validation=num_validation,
        shift_pixels=shift_pixels,
    )
