"""Finds parts of a model by name, and applies the settings that change them, such as model.freeze.

A part is named by an fnmatch pattern, in which * matches anything, including slashes. The pattern is
matched against a layer's name, its path (the names of its enclosing layers, then its own) and the
path of a variable. Examples are conv1, block2/* and */bias.
"""

import difflib
import fnmatch
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from keras import Model, layers

from hvtrain.config.schema import RunConfig
from hvtrain.errors import ConfigError
from hvtrain.models.hub_models import hub_layer
from hvtrain.models.memory import recompute
from hvtrain.system.text import counted

# Layers that Keras can add LoRA's matrices to.
LORA_LAYERS = (layers.Dense, layers.EinsumDense, layers.Embedding)


@dataclass(frozen=True)
class Part:
    """A layer that has variables of its own.

    Attributes:
        layer: the layer.
        path: its path in the model, without the model's name.
        variables: its own variables, without those of inner layers.
    """

    layer: layers.Layer
    path: str
    variables: Sequence[Any]

    def names(self, variable: Any) -> list[str]:
        """Returns the names that a pattern may match: the variable's path, and its layers' names and paths."""
        layer_names = self.path.split("/")
        paths = accumulate(layer_names, "{}/{}".format)
        return [*layer_names, *paths, f"{self.path}/{variable.name}".lstrip("/")]


def parts(model: Model) -> list[Part]:
    """Returns each layer that has variables of its own, in the order of model.weights.

    Unlike Keras's own variable paths, a part's path does not depend on how the layers were built. A
    nested Sequential, for example, is in Keras's path if its first call built it, but not if it was
    loaded.
    """
    # Layers may be shared, and each is visited only once.
    seen = set()
    num_uses = Counter[str]()

    def walk(layer, path):
        if id(layer) in seen:
            return
        seen.add(id(layer))
        num_uses[path] += 1
        if num_uses[path] > 1:  # Layers inside a layer may share a name.
            path = f"{path}_{num_uses[path] - 1}"
        variables = layer._trainable_variables + layer._non_trainable_variables
        if variables:
            yield Part(layer, path, variables)
        for inner in layer._layers:
            yield from walk(inner, f"{path}/{inner.name}".lstrip("/"))

    return list(walk(model, ""))


def head_of(model: Model) -> list[Part]:
    """Returns the parts of the head, which may be replaced for another task.

    The head is everything after a keras-hub backbone; without a backbone, the last layer with weights.
    """
    backbone = hub_layer(model, "Backbone")
    if backbone is None:
        return parts(model)[-1:]
    backbone_ids = set(map(id, backbone._flatten_layers()))
    return [part for part in parts(model) if id(part.layer) not in backbone_ids]


def find_variables(model: Model, patterns: Sequence[str], setting: str) -> set[int]:
    """Returns the ids of the variables that match any of the patterns.

    Ids stand for the variables, because == on Keras variables compares their values.

    Raises:
        ConfigError: a pattern matches nothing trainable. The message names the setting.
    """
    named_ids = [
        (id(variable), part.names(variable)) for part in parts(model) for variable in part.variables
    ]
    matched_ids = set()
    for pattern in patterns:
        matches = {key for key, names in named_ids if fnmatch.filter(names, pattern)}
        trainable_ids = set(map(id, model.trainable_variables))
        if matches.isdisjoint(trainable_ids):
            known_names = dict.fromkeys(
                name for key, names in named_ids if key in trainable_ids for name in names
            )
            similar = difflib.get_close_matches(pattern.strip("*/"), known_names, n=4, cutoff=0.5)
            # If none is similar, a few of the model's names are better than no hint.
            names = similar or list(known_names)[:4]
            raise ConfigError(
                f"{setting} names {pattern}, which matches nothing trainable; names in this model "
                f"include {', '.join(names)}"
            )
        matched_ids |= matches
    return matched_ids


def sharded_tables(model: Model) -> list[tuple[Any, int]]:
    """Returns this rank's rows of each sharded table, with the number of elements in a row.

    The rows are given as hvtrain.keras.table_rows.Rows.
    """
    tables = [variable for variable in model.weights if hasattr(variable, "rank_part")]
    return [(table.rank_part, math.prod(table.shape[1:])) for table in tables]


def num_parameters(model: Model) -> int:
    """Returns the number of parameters, including rows of sharded tables that are on other ranks."""
    on_others = sum((rows.num_rows - rows.num_own) * size for rows, size in sharded_tables(model))
    return model.count_params() + on_others


def describe_tables(model: Model) -> str:
    """Describes the sharded tables for the run's summary; empty if there are none."""
    return "; ".join(
        f"{rows.table} {rows.num_rows:,} x {size:,}, row r on rank r mod {rows.num_ranks}"
        for rows, size in sharded_tables(model)
    )


def describe_trainable(model: Model) -> str:
    """Describes how many of the trainable parameters are trained; empty if all are."""
    # Moving statistics, which are never trained, are not counted.
    num_trainable = sum(
        _size(variable) for part in parts(model) for variable in part.layer._trainable_variables
    )
    num_trained = sum(map(_size, model.trainable_variables))
    if num_trained >= num_trainable:
        return ""
    variables = counted(len(model.trainable_variables), "variable")
    return f"{num_trained:,} of {num_trainable:,} parameters, in {variables}"


def _size(variable) -> int:
    return math.prod(variable.shape)


def change_parts(model: Model, config: RunConfig, size: int) -> None:
    """Applies the settings that change a built model, in place (every rank).

    These are train.sync_batch_norm, model.lora_rank, model.freeze and train.remat.

    Args:
        model: a built model that is not compiled.
        config: the run's settings.
        size: number of ranks.

    Raises:
        ConfigError: a setting matches nothing, or does not fit the model.
    """
    options = config.model_options
    if config.train.sync_batch_norm:
        _synchronize(model, size)
    if options.lora_rank:
        add_lora(model, options.lora_rank)
    # After LoRA, so that freezing a part freezes its LoRA matrices too.
    if options.freeze:
        freeze(model, options.freeze)
    if config.train.remat:
        recompute(model)


def freeze(model: Model, patterns: Sequence[str]) -> None:
    """Freezes the variables that match the patterns, and runs layers that are frozen completely in inference mode.

    Raises:
        ConfigError: a pattern matches nothing trainable, or nothing trainable is left.
    """
    frozen_ids = find_variables(model, patterns, "model.freeze")
    for part in parts(model):
        frozen = [variable for variable in part.variables if id(variable) in frozen_ids]
        for variable in frozen:
            variable.trainable = False
        # Batch normalization, for example, then uses its moving statistics and leaves them unchanged.
        if frozen and not part.layer.trainable_variables:
            part.layer.trainable = False
    if not model.trainable_variables:
        raise ConfigError(
            f"model.freeze=[{','.join(patterns)}] leaves nothing to train; leave out a layer, "
            f"such as {parts(model)[-1].path}"
        )


def add_lora(model: Model, rank: int) -> None:
    """Freezes everything but the head, and adds two small trainable matrices to each kernel of LORA_LAYERS.

    This is low-rank adaptation (Hu et al. 2021, arXiv:2106.09685). The head, see head_of, is trained
    as a whole, since it may be new. A saved model is a plain one, with the matrices' product
    added to each kernel.

    Args:
        model: a built model.
        rank: the rank of the matrices.

    Raises:
        ConfigError: the model has no such layer before its head.
    """
    head_paths = {id(part.layer): part.path for part in head_of(model)}
    body = [part for part in parts(model) if id(part.layer) not in head_paths]
    adapted = [
        part.layer
        for part in body
        if isinstance(part.layer, LORA_LAYERS) and not _constraint(part.layer)
    ]
    if not adapted:
        raise ConfigError(
            f"model.lora_rank={rank}, but {model.name} has no Dense, EinsumDense or Embedding layer without a "
            f"constraint before its head ({', '.join(head_paths.values()) or 'none'}); freeze layers instead "
            "(model.freeze)"
        )

    # Everything is frozen first; adapted layers then train through their new matrices.
    for part in body:
        for variable in part.variables:
            variable.trainable = False
    trained_ids = head_paths.keys() | set(map(id, adapted))
    for layer in model._flatten_layers(include_self=False):
        if trained_ids.isdisjoint(map(id, layer._flatten_layers())):
            layer.trainable = False  # Batch normalization then runs as in inference.
    for layer in adapted:
        layer.enable_lora(rank)
        _save_plain(layer)


def _constraint(layer):
    # Keras cannot add the matrices to a kernel with a constraint, so such a layer stays frozen. In
    # an Embedding the attribute has another name.
    return getattr(layer, "kernel_constraint", getattr(layer, "embeddings_constraint", None))


def _save_plain(layer) -> None:
    """Makes a layer with LoRA save its config as a plain layer."""
    # Keras merges the matrices into the saved kernel. With lora_rank in its config,
    # a loaded layer would get new matrices too.
    get_config = layer.get_config
    layer.get_config = lambda: {
        key: value for key, value in get_config().items() if not key.startswith("lora_")
    }


def _synchronize(model: Model, size: int) -> None:
    """Makes each batch normalization layer normalize over the batches of all ranks."""
    norms = [
        layer for layer in model._flatten_layers() if isinstance(layer, layers.BatchNormalization)
    ]
    if not norms:
        raise ConfigError(
            f"train.sync_batch_norm=true, but {model.name} has no BatchNormalization; leave the setting out"
        )
    if size == 1:
        return  # On one rank, Keras's own layer normalizes over the whole batch already.
    from hvtrain.keras.over_ranks import SyncBatchNormalization, synchronize

    for layer in norms:
        if isinstance(layer, SyncBatchNormalization):
            continue
        if type(layer) is not layers.BatchNormalization or layer.synchronized:
            raise ConfigError(
                f"train.sync_batch_norm=true, but the layer {layer.name}, of type {type(layer).__name__}, "
                "may normalize in its own way; make it a keras.layers.BatchNormalization without synchronized=True"
            )
        synchronize(layer)
