"""model.lora_rank: two small matrices train in place of each large one (LoRA, Hu et al. 2021, arXiv:2106.09685)."""

from typing import Any

import keras

from hvtrain.errors import ConfigError
from hvtrain.models.parts import head_of, parts

KINDS = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding)


def add_lora(model: keras.Model, rank: int) -> None:
    """Freezes a built model, apart from its head, and gives each of its KINDS of layers two matrices that train.

    The head, see head_of, trains as a whole, since it may be new. A saved model has the matrices added to the kernels,
    and is a plain one. Raises ConfigError if there is no such layer.
    """
    head = {id(part.layer): part.place for part in head_of(model)}
    body = [part for part in parts(model) if id(part.layer) not in head]
    chosen = [part.layer for part in body if isinstance(part.layer, KINDS) and not _constraint(part.layer)]
    if not chosen:
        raise ConfigError(
            f"model.lora_rank={rank}, but {model.name} has no Dense, EinsumDense or Embedding layer before its head "
            f"{', '.join(head.values())}; freeze layers instead (model.freeze)"
        )
    adapted = {id(layer) for layer in chosen}
    for part in body:
        for variable in part.own:
            variable.trainable = False
    for layer in model._flatten_layers(include_self=False):
        inner = {id(one) for one in layer._flatten_layers()}
        if not inner & (head.keys() | adapted):
            layer.trainable = False  # Batch normalization then runs as in inference.
    for layer in chosen:
        layer.enable_lora(rank)
        _save_plain(layer)


def _constraint(layer: Any) -> Any:
    """A constraint on the kernel, with which Keras cannot add the matrices; such a layer stays frozen."""
    return getattr(layer, "kernel_constraint", None) or getattr(layer, "embeddings_constraint", None)


def _save_plain(layer: Any) -> None:
    """Keras saves the sum as the kernel; without lora_rank it loads as a layer without matrices that are zero."""
    get_config = layer.get_config
    layer.get_config = lambda: {key: value for key, value in get_config().items() if not key.startswith("lora_")}
