"""Loads saved models with an optimizer that reduces."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras

from hvtrain.keras.optimizer import DistributedOptimizer


def load_model(
    filepath: str | Path,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = hvd.Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """keras.models.load_model, with the optimizer wrapped in DistributedOptimizer; its slots and iterations stay.

    custom_optimizers are classes of your own. A model that was saved without an optimizer comes without one.
    Raises ValueError for legacy_opts=True (Keras 3 has no legacy optimizers), and, as Keras does, for a file that
    holds code, such as a Lambda layer's, unless keras.config.enable_unsafe_deserialization() was called.
    """
    if legacy_opts:
        raise ValueError("legacy_opts=True asks for tf.keras.optimizers.legacy, which Keras 3 does not have")
    classes = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**classes, **(custom_objects or {})})
    if model.optimizer is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
