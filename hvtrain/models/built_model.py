"""A model between its builder and its optimizer: what the settings change in it."""

from typing import Any

import keras

from hvtrain.config.model_options import model_options
from hvtrain.config.schema import RunConfig
from hvtrain.errors import ConfigError
from hvtrain.models.lora import add_lora
from hvtrain.models.parts import freeze
from hvtrain.models.remat import recompute


def change_parts(model: keras.Model, config: RunConfig, size: int) -> None:
    """Changes a built model, in place, as train.sync_batch_norm, train.remat, model.lora_rank and model.freeze want it.

    size is the number of ranks. Each rank does the same. Raises ConfigError.
    """
    options = model_options(config.model)
    if config.train.sync_batch_norm:
        _synchronize(model, size)
    if options.lora_rank:
        add_lora(model, options.lora_rank)
    if options.freeze:
        freeze(model, options.freeze)
    if config.train.remat:
        recompute(model)


def _synchronize(model: keras.Model, size: int) -> None:
    """Makes each batch normalization one over the batches of all ranks; with one rank Keras's is that already."""
    found: list[Any] = [
        layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)
    ]
    if not found:
        raise ConfigError(
            f"train.sync_batch_norm=true, but {model.name} has no BatchNormalization; leave the setting out"
        )
    if size == 1:
        return
    from hvtrain.keras.sync_batch_norm import SyncBatchNormalization, synchronize

    for layer in found:
        if isinstance(layer, SyncBatchNormalization):
            continue
        if type(layer) is not keras.layers.BatchNormalization or layer.synchronized:
            raise ConfigError(
                f"train.sync_batch_norm=true and the layer {layer.name}, a {type(layer).__name__} that may normalize "
                "in its own way; make it a plain keras.layers.BatchNormalization"
            )
        synchronize(layer)
