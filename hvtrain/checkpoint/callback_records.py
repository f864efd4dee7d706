"""What a checkpoint keeps of callbacks: their counters, best values and best weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvtrain.errors import CheckpointError

# What Keras's EarlyStopping, ReduceLROnPlateau and their like count, and reset whenever a fit begins.
NUMBERS = ("wait", "best", "best_epoch", "cooldown_counter")

Saved = dict[str, dict[str, Any]]


def saved_state(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> Saved:
    """What `numbers` and `arrays` gave a checkpoint. Raises CheckpointError for anything else."""
    # Numbers alone, by known names: a checkpoint sets nothing else of a callback.
    try:
        saved: Saved = {
            name: {key: float(numbers[key]) for key in NUMBERS if key in numbers}
            for name, numbers in meta.get("callbacks", {}).items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's callbacks are no numbers ({error}); choose another run.dir") from error
    for name, values in saved.items():
        prefix = f"callback/{name}/"
        weights = [arrays[key] for key in sorted(arrays) if key.startswith(prefix)]
        if weights:
            values["best_weights"] = weights
    return saved
