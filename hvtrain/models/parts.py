"""Parts of a model by name, and which of them train: model.freeze.

A part is written as a pattern of fnmatch, in which * stands for anything, slashes too. It matches a layer's name, its
place (the names of the layers that it is in, then its own) or the place of a variable: conv1, block2/*, */bias.
"""

import difflib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import keras

from hvtrain.config.schema import model_options
from hvtrain.config.schema import RunConfig
from hvtrain.errors import ConfigError
from hvtrain.models.hub_models import backbone_of
from hvtrain.models.remat import recompute


@dataclass(frozen=True)
class Part:
    """A layer and its place in the model, without the model's own name. own are its variables, but not its parts'."""

    layer: keras.layers.Layer
    place: str
    own: tuple[Any, ...]

    def names(self, variable: Any) -> tuple[str, ...]:
        """All names by which a pattern may call the variable: its own, and those of the layers that it is in."""
        around = self.place.split("/")
        places = ("/".join(around[:depth]) for depth in range(1, len(around) + 1))
        return tuple(dict.fromkeys([*around, *places, f"{self.place}/{variable.name}".lstrip("/")]))


def parts(model: keras.Model) -> list[Part]:
    """All layers that hold variables themselves, in the order of model.weights, each once.

    Places do not depend on how Keras was brought to build the layers, as variables' paths do: a nested Sequential is
    in the path if it was built by its first call, and not if it was loaded.
    """
    seen: set[int] = set()
    number_of = Counter[str]()

    def walk(layer: Any, place: str) -> Iterator[Part]:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        number_of[place] += 1
        if number_of[place] > 1:
            place = f"{place}_{number_of[place] - 1}"
        own = layer._trainable_variables + layer._non_trainable_variables
        if own:
            yield Part(layer, place, tuple(own))
        for inner in layer._layers:
            yield from walk(inner, f"{place}/{inner.name}".lstrip("/"))

    return list(walk(model, ""))


def head_of(model: keras.Model) -> list[Part]:
    """What may be new for another task: the last layer with weights, or all parts after a backbone of keras-hub."""
    if (backbone := backbone_of(model)) is None:
        return parts(model)[-1:]
    inside = {id(layer) for layer in backbone._flatten_layers()}
    return [part for part in parts(model) if id(part.layer) not in inside]


def find(model: keras.Model, pattern: str, setting: str) -> list[Any]:
    """Variables that the pattern names. Raises ConfigError, which names the setting, if none of them trains."""
    known: dict[str, None] = {}
    found = []
    trained = {id(variable) for variable in model.trainable_variables}
    for part in parts(model):
        for variable in part.own:
            names = part.names(variable)
            known |= dict.fromkeys(names)
            if any(fnmatchcase(name, pattern) for name in names):
                found.append(variable)
    if trained.isdisjoint(map(id, found)):
        near = difflib.get_close_matches(pattern.strip("*/"), known, n=4, cutoff=0.5) or list(known)[:4]
        raise ConfigError(
            f"{setting} names {pattern}, which matches nothing that trains; near names: {', '.join(near)}"
        )
    return found


def freeze(model: keras.Model, patterns: Sequence[str]) -> None:
    """Makes what the patterns name not train. A layer of which nothing trains any more runs as in inference.

    So batch normalization of a frozen part keeps its moving statistics. Raises ConfigError.
    """
    named = {id(variable) for pattern in patterns for variable in find(model, pattern, "model.freeze")}
    for part in parts(model):
        frozen = [variable for variable in part.own if id(variable) in named]
        for variable in frozen:
            variable.trainable = False
        if frozen and not part.layer.trainable_variables:
            part.layer.trainable = False
    if not model.trainable_variables:
        head = parts(model)[-1].place
        raise ConfigError(
            f"model.freeze=[{','.join(patterns)}] leaves nothing that trains; leave out a layer, such as {head}"
        )


def trained_in_words(model: keras.Model) -> str:
    """How much of the model trains; empty if that is all but what never does, such as moving statistics."""
    can = sum(_size(variable) for part in parts(model) for variable in part.layer._trainable_variables)
    does = sum(map(_size, model.trainable_variables))
    return f"{does:,} of {can:,} parameters, in {len(model.trainable_variables)} variables" if does < can else ""


def _size(variable: Any) -> int:
    return math.prod(variable.shape)


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
