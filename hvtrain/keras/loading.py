"""load_model: a saved model whose optimizer reduces."""

from collections.abc import Iterable
from pathlib import Path
from types import FunctionType
from typing import Any

import h5py
import horovod.tensorflow as hvd
import keras

from hvtrain.keras.optimizer import DistributedOptimizer, is_distributed


def load_model(
    filepath: str | Path,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = hvd.Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """keras.models.load_model, with the optimizer wrapped in DistributedOptimizer; its slots and iterations stay.

    custom_optimizers are classes of your own. custom_objects may also name a function that makes an optimizer from its
    configuration, as in Horovod's examples. A model that was saved without an optimizer comes without one.
    Raises ValueError for legacy_opts=True (Keras 3 has no legacy optimizers), and, as Keras does, for a file that
    holds code, such as a Lambda layer's, unless keras.config.enable_unsafe_deserialization() was called.
    """
    if legacy_opts:
        raise ValueError("legacy_opts=True asks for tf.keras.optimizers.legacy, which Keras 3 does not have")
    classes = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    own = {name: _as_class(name, made) for name, made in (custom_objects or {}).items()}
    model = keras.models.load_model(filepath, custom_objects={**classes, **own})
    if model.optimizer is not None and Path(filepath).suffix in (".h5", ".hdf5"):
        model.optimizer = _optimizer_of_h5(model, filepath)
    if model.optimizer is not None and not is_distributed(model.optimizer):
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model


def _as_class(name: str, made: Any) -> Any:
    """For Keras, which makes objects by from_config, a function under another name than its own, such as a lambda."""
    if not isinstance(made, FunctionType) or made.__name__ == name:
        return made

    class Maker:
        from_config = staticmethod(lambda config: made(**config))

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return made(*args, **kwargs)

    return Maker


def _optimizer_of_h5(model: keras.Model, path: str | Path) -> keras.optimizers.Optimizer:
    """The optimizer with its slots: Keras 3.15 builds it for no variable, and so drops them (legacy_h5_format.py)."""
    optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
    optimizer.build(model.trainable_variables)
    with h5py.File(path) as file:
        if group := file.get("optimizer_weights"):
            optimizer.set_weights([group[name][()] for name in group.attrs["weight_names"]])
    return optimizer
