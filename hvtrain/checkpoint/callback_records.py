"""State of callbacks in a checkpoint: counters, best values and best weights."""

from typing import Any

import numpy as np

from hvtrain.errors import CheckpointError

# Attributes that Keras's EarlyStopping, ReduceLROnPlateau and the like count with, and reset whenever a fit begins.
NUMBERS = ("wait", "best", "best_epoch", "cooldown_counter")

SavedCallbacks = dict[str, dict[str, Any]]


def saved_callbacks(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> SavedCallbacks:
    """Reads from a checkpoint what CallbackState wrote. Raises CheckpointError for anything else."""
    # Only numbers of known names, so that a checkpoint cannot set any other attribute of a callback.
    try:
        saved: SavedCallbacks = {
            name: {key: float(numbers[key]) for key in NUMBERS if key in numbers}
            for name, numbers in meta.get("callbacks", {}).items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's callback state is not made of numbers ({error}); choose another run.dir"
        ) from error
    for name, values in saved.items():
        weights = [arrays[key] for key in sorted(arrays) if key.startswith(f"callback/{name}/")]
        if weights:
            values["best_weights"] = weights
    return saved
