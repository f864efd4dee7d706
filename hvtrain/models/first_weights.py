"""model.weights: a new run begins with the weights of another one, or of a file (rank 0 reads; the broadcast follows).

Variables are matched by the place of their layer and their order in it. A head, the last layer with weights or what
comes after a backbone of keras-hub, may be another one than the source's; whatever else differs is refused, unless
model.weights_except names it.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvtrain.checkpoint import store
from hvtrain.errors import CheckpointError, ConfigError, in_one_line
from hvtrain.models.hub_models import CONFIG_FILE, backbone_of, preset_folder, task_config, task_of
from hvtrain.models.parts import Part, find, head_of, parts

log = logging.getLogger(__name__)

RUN_FILES = ("best.keras", "best.weights.h5", "model.keras", "model.weights.h5")
"""Models in a run folder, the preferred one first; see training/saved_model.py."""
KINDS = "a .keras file, a .weights.h5 file, a run folder or a preset of keras-hub"


@dataclass(frozen=True)
class Slot:
    """A variable of the model: its place, by name, and the key of its value in each kind of source."""

    layer: str
    name: str
    index: int
    variable: Any

    @property
    def place(self) -> str:
        return f"{self.layer}/{self.name}".lstrip("/")

    @property
    def key(self) -> str:
        return f"{self.layer}/{self.index}"

    def find(self, arrays: dict[str, np.ndarray]) -> str:
        """The key of its value: the variable's path in a checkpoint, else its layer and its order there."""
        return self.variable.path if self.variable.path in arrays else self.key


def begin_with(model: keras.Model, source: str, excepted: Sequence[str] = ()) -> None:
    """Sets the weights of a built model to those of the source (chief only).

    excepted: patterns (see parts) of what stays new; the source may then have anything else too, which is left out.
    Raises ConfigError if the source cannot be read, or names the first variable that differs.
    """
    path, arrays = _read(Path(source), model)
    new = {id(variable) for pattern in excepted for variable in find(model, pattern, "model.weights_except")}
    slots = [slot for slot in _slots(parts(model)) if id(slot.variable) not in new]
    places = {part.place for part in head_of(model)}
    head = [slot for slot in slots if slot.layer in places]
    keys = {slot.place: slot.find(arrays) for slot in slots}
    fits = {slot.place: arrays.get(keys[slot.place], np.empty(0)).shape == tuple(slot.variable.shape) for slot in slots}
    new_head = [] if all(fits[slot.place] for slot in head) else head
    kept = [slot for slot in slots if slot not in new_head]
    for slot in kept:
        if not fits[slot.place]:
            raise _difference(source, slot.place, arrays.get(keys[slot.place]), slot.variable)
    rest = arrays.keys() - keys.values()
    # The source has a head of its own, by another name.
    if rest and not excepted and not (new_head and len({key.rpartition("/")[0] for key in rest}) == 1):
        key = min(rest)
        raise _difference(source, key, arrays[key], None)
    for slot in kept:
        slot.variable.assign(arrays[keys[slot.place]])
    number = sum(int(np.prod(slot.variable.shape)) for slot in kept)
    left = ", ".join([*(f"{slot.place} {tuple(slot.variable.shape)}" for slot in new_head), *excepted])
    log.info("weights        %s parameters from %s%s", f"{number:,}", path, f"; new: {left}" if left else "")
    if rest and excepted:
        layers = sorted({key.rpartition("/")[0] for key in rest})
        log.info("               not taken from there: %s", f"{', '.join(layers[:5])}{' ...' * (len(layers) > 5)}")


def _slots(some: Sequence[Part]) -> Iterator[Slot]:
    for part in some:
        own = [variable for variable in part.own if not variable.name.startswith("lora_")]
        for index, variable in enumerate(own):
            yield Slot(part.place, variable.name, index, variable)


def _difference(source: str, place: str, theirs: np.ndarray | None, ours: Any) -> ConfigError:
    came, needed = ("nothing" if one is None else f"shape {tuple(one.shape)}" for one in (theirs, ours))
    return ConfigError(
        f"model.weights={source} is of another model: it has {came} where {place} of this one has {needed}; "
        "choose the model that it was made with, or name in model.weights_except what stays new"
    )


def _read(path: Path, model: keras.Model) -> tuple[Path, dict[str, np.ndarray]]:
    """The file or checkpoint that is read, and its weights: by LAYER/ORDER, or those of a checkpoint by their paths."""
    if (path / CONFIG_FILE).is_file():
        return path, _of_preset(path, model)
    if path.is_dir():
        if files := [path / name for name in RUN_FILES if (path / name).is_file()]:
            return _read(files[0], model)
        for folder in reversed(store.list_checkpoints(path / "checkpoints")):
            try:
                return folder, _of_checkpoint(store.read(folder).arrays)
            except CheckpointError as error:
                log.warning("%s", error)
        raise ConfigError(f"model.weights={path} is a folder without a model or a whole checkpoint; choose {KINDS}")
    if not path.is_file():
        raise ConfigError(f"model.weights={path} is not there; choose {KINDS}")
    read = next((read for ending, read in _READERS.items() if path.name.endswith(ending)), None)
    if read is None:
        raise ConfigError(f"model.weights={path} is of another kind; choose {KINDS}")
    try:
        return path, read(path, model)
    except Exception as error:
        raise ConfigError(f"model.weights={path} cannot be read: {in_one_line(error)}; choose {KINDS}") from error


def _of_keras(path: Path, model: keras.Model) -> dict[str, np.ndarray]:
    loaded = keras.models.load_model(path, compile=False)
    if loaded.name.endswith("_from_raw") and isinstance(loaded.layers[-1], keras.Model):
        loaded = loaded.layers[-1]  # What a run saves has the preprocessing around the trained model.
    return _of_model(loaded, model)


def _of_preset(path: Path, model: keras.Model) -> dict[str, np.ndarray]:
    """The weights in a preset, those of its task too if the model is of the same class."""
    if backbone_of(model) is None:
        raise ConfigError(
            f"model.weights={path} is a preset of keras-hub, and {model.name} has none of its backbones; choose "
            "model=keras_hub"
        )
    import keras_hub

    folder = preset_folder(str(path), "model.weights")
    task = task_of(model)
    try:
        if task is not None and task_config(folder, type(task)):
            return _of_model(type(task).from_preset(folder, preprocessor=None, dtype="float32"), model)
        return _of_model(keras_hub.models.Backbone.from_preset(folder, dtype="float32"), model)
    except Exception as error:
        raise ConfigError(f"model.weights={path} cannot be read: {in_one_line(error)}; choose {KINDS}") from error


def _of_model(theirs: keras.Model, model: keras.Model) -> dict[str, np.ndarray]:
    """The weights of a loaded model by their places.

    Backbones of keras-hub are matched wherever they are in the two models, and heads if they have the same variables.
    """
    ours, backbone = backbone_of(model), backbone_of(theirs)
    if ours is None or backbone is None:
        return {slot.key: slot.variable.numpy() for slot in _slots(parts(theirs))}
    place_of = {id(slot.variable): slot.key for slot in _slots(parts(model))}

    def renamed(mine: Sequence[Part], others: Sequence[Part]) -> dict[str, np.ndarray]:
        names = {slot.key: place_of[id(slot.variable)] for slot in _slots(mine)}
        return {names.get(slot.key, slot.key): slot.variable.numpy() for slot in _slots(others)}

    found = renamed(parts(ours), parts(backbone))
    head = renamed(*(head_of(task_of(one) or one) for one in (model, theirs)))
    return found | head if head.keys() <= set(place_of.values()) else found


def _of_checkpoint(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model's weights in a checkpoint, those of model.lora_rank added to what they belong to."""
    weights = {key.split("/", 2)[2]: array for key, array in arrays.items() if key.startswith("model/")}
    for path in [path for path in weights if path.endswith("_a") and "/lora_" in path]:
        first, second = weights.pop(path), weights.pop(f"{path[:-1]}b")
        base = path.removesuffix("_a").replace("/lora_", "/")
        weights[base] = weights[base] + np.matmul(first, second)
    return weights


def _of_h5(path: Path, model: keras.Model) -> dict[str, np.ndarray]:
    """The weights in Keras's file, in which each layer's group `vars` has its name."""
    import h5py

    found: dict[str, np.ndarray] = {}

    def walk(group: Any, place: str) -> None:
        if "vars" in group:
            own = group["vars"]
            for index in own:
                if f"{place}/{index}" in found:
                    raise ValueError(f"two layers have the name {place}, which a .keras file could tell apart")
                found[f"{place}/{index}"] = np.asarray(own[index])
        for key in group:
            inner = group[key]
            if key != "vars" and isinstance(inner, h5py.Group):
                named = inner["vars"].attrs.get("name", key) if "vars" in inner else ""
                walk(inner, f"{place}/{named}".strip("/"))

    with h5py.File(path) as file:
        walk(file, "")
    return found


_READERS = {".keras": _of_keras, ".weights.h5": _of_h5}
