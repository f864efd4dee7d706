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

from hvtrain.errors import ConfigError
from hvtrain.models.hub_presets import backbone_of


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
