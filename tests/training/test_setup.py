"""What a run sets up before it has data: its random numbers."""

import keras
import numpy as np

from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.training.setup import seed_everything


def dropped(rank, *settings):
    """The units that a new layer drops on that rank, in its first two steps."""
    seed_everything(from_dict(compose([*settings])), rank)
    layer = keras.layers.Dropout(0.5)
    return np.stack([layer(np.ones(64, "float32"), training=True) == 0 for _ in range(2)])


def test_each_rank_drops_other_units():
    """With one seed for all, N ranks would train on one mask instead of N. A rank that starts again has its own."""
    first, second, again = dropped(0), dropped(1), dropped(0)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, again)
    # Seeds may be as large as the time in nanoseconds.
    assert np.array_equal(dropped(1, f"seed={2**32 - 1}"), dropped(0, "seed=0"))
