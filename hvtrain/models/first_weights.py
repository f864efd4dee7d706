"""Implements model.weights: a new run starts from the weights of another run, a file or a preset.

Rank 0 reads them, and the broadcast before the first step sends them to the other ranks.

Variables are matched by the path of their layer and their index in it. The head (the last layer with
weights, or everything after a backbone of keras-hub) may differ from the source's; any other
difference is refused, unless model.weights_except names it.
"""

import logging
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import Model

from hvtrain.checkpoint import store
from hvtrain.checkpoint.store import whole_shape
from hvtrain.data.description import listed
from hvtrain.errors import CheckpointError, ConfigError, in_one_line
from hvtrain.models.hub_models import CONFIG_FILE, hub_layer, task_config
from hvtrain.models.parts import Part, find_variables, head_of, parts
from hvtrain.system.storage.cache import path_of

log = logging.getLogger(__name__)

# Models in a run folder, the preferred one first; see training/saved_model.py.
RUN_FILES = ("best.keras", "best.weights.h5", "model.keras", "model.weights.h5")
SOURCES = "a .keras file, a .weights.h5 file, a run folder or a preset of keras-hub"

# Weights by key LAYER/INDEX, where LAYER is a layer's path and INDEX counts its own variables.
Arrays = dict[str, np.ndarray]


def begin_with(model: Model, source: str, excepted: Sequence[str] = ()) -> None:
    """Sets the weights of a built model to the weights in a source (chief only).

    Args:
        model: a built model.
        source: path or address of one of SOURCES.
        excepted: patterns (see parts.py) of variables that keep their initial values. If there are
            any, weights that only the source has are ignored.

    Raises:
        ConfigError: the source cannot be read or belongs to another model; the message names the
            first difference.
    """
    path, arrays = _read(path_of(source), model)
    excepted_ids = find_variables(model, excepted, "model.weights_except")
    variables = {
        key: variable
        for key, variable in _variables_by_key(parts(model)).items()
        if id(variable) not in excepted_ids
    }

    def fits(key: str) -> bool:
        return key in arrays and arrays[key].shape == whole_shape(variables[key])

    # The head is restored as a whole, or not at all.
    new_head = [key for key in _variables_by_key(head_of(model)) if key in variables]
    if all(map(fits, new_head)):
        new_head = []
    restored = {key: variable for key, variable in variables.items() if key not in new_head}
    for key, variable in restored.items():
        if not fits(key):
            raise _difference(source, _path(key, variable), arrays.get(key), variable)

    unused = arrays.keys() - variables.keys()
    unused_layers = sorted({key.rpartition("/")[0] for key in unused})
    is_other_head = _is_other_head(unused, arrays, {key: variables[key] for key in new_head})
    if unused and not excepted and not is_other_head:
        key = min(unused)
        raise _difference(source, key, arrays[key], None)

    # Nothing is assigned until everything is known to fit.
    for key, variable in restored.items():
        if hasattr(variable, "rank_part"):
            # broadcast_model gives each rank its part of the whole table.
            variable.whole = arrays[key]
        else:
            variable.assign(arrays[key])
    _restart_slots(model)

    num_parameters = sum(arrays[key].size for key in restored)
    new = [f"{_path(key, variables[key])} {tuple(variables[key].shape)}" for key in new_head]
    new += excepted
    suffix = f"; new: {', '.join(new)}" if new else ""
    log.info(f"weights        {num_parameters:,} parameters from {path}{suffix}")
    if unused and excepted:
        log.info(f"               not used: {listed(unused_layers)}")


def _is_other_head(unused: Set[str], arrays: Arrays, new_head: Mapping[str, Any]) -> bool:
    """Returns True if the weights that only the source has are its own head, under another name.

    It takes the same features as the new head. Any other layer changes what the rest of the weights mean.
    """
    is_one_layer = len({key.rpartition("/")[0] for key in unused}) == 1
    if not is_one_layer or any(key in arrays for key in new_head):
        return False
    old_shapes = [arrays[key].shape for key in unused]
    new_shapes = [whole_shape(variable) for variable in new_head.values()]
    # Biases, which have one axis, say nothing about the features.
    old_features, new_features = (
        {shape[:-1] for shape in shapes if len(shape) > 1} for shapes in (old_shapes, new_shapes)
    )
    return bool(old_features & new_features)


def _restart_slots(model: Model) -> None:
    """Sets the slots of ScheduleFreeAdamW, which Keras builds as copies of the weights, to the new weights."""
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(inner, keras.optimizers.ScheduleFreeAdamW) or not inner.built:
        return
    for slot, variable in zip(inner._momentums, inner._trainable_variables):
        if slot is not None:
            slot.assign(variable)


def _variables_by_key(model_parts: Sequence[Part]) -> dict[str, Any]:
    """Returns the parts' variables by key, without LoRA's matrices."""
    variables: dict[str, Any] = {}
    for part in model_parts:
        # No source has the matrices of model.lora_rank: they are already added to its kernels.
        plain = [variable for variable in part.variables if not variable.name.startswith("lora_")]
        variables |= {f"{part.path}/{index}": variable for index, variable in enumerate(plain)}
    return variables


def _path(key: str, variable) -> str:
    """Returns a variable's path LAYER/NAME, for messages."""
    return f"{key.rpartition('/')[0]}/{variable.name}".lstrip("/")


def _difference(source: str, path: str, array, variable) -> ConfigError:
    def describe(value):
        return "nothing" if value is None else f"shape {whole_shape(value)}"

    return ConfigError(
        f"model.weights={source} belongs to another model: it has {describe(array)} where {path} of "
        f"this model has {describe(variable)}; choose the model that it was made with, or list the "
        "variables that stay new in model.weights_except"
    )


def _read(path: Path, model: Model) -> tuple[Path, Arrays]:
    """Returns the file, preset or checkpoint that holds a source's weights, and the weights. Raises ConfigError."""
    is_preset = (path / CONFIG_FILE).is_file()
    if path.is_dir() and not is_preset:
        return _read_run_folder(path, model)
    if not path.exists():
        raise ConfigError(f"model.weights={path} does not exist; choose {SOURCES}")
    if is_preset and hub_layer(model, "Backbone") is None:
        raise ConfigError(
            f"model.weights={path} is a preset of keras-hub, and {model.name} has none of its "
            "backbones; choose model=keras_hub"
        )
    try:
        if is_preset:
            return path, _read_preset(path, model)
        if path.name.endswith(".keras"):
            return path, _read_keras(path, model)
        if path.name.endswith(".weights.h5"):
            return path, _read_h5(path)
    except Exception as error:
        raise ConfigError(
            f"model.weights={path} cannot be read: {in_one_line(error)}; choose {SOURCES}"
        ) from error
    raise ConfigError(f"model.weights={path} is not a source of weights; choose {SOURCES}")


def _read_run_folder(path: Path, model: Model) -> tuple[Path, Arrays]:
    """Reads the preferred model file of a run folder, or else its newest intact checkpoint."""
    # Model files are preferred: with train.ema they hold the averages, and checkpoints the raw
    # weights.
    for name in RUN_FILES:
        if (path / name).is_file():
            return _read(path / name, model)
    # Newest first. Damaged checkpoints are skipped with a warning.
    for folder in reversed(store.list_checkpoints(path / "checkpoints")):
        try:
            return folder, _weights_of_checkpoint(store.read(folder).arrays, model)
        except CheckpointError as error:
            log.warning("%s", error)
    raise ConfigError(
        f"model.weights={path} is a folder without a model or an intact checkpoint; choose {SOURCES}"
    )


def _read_keras(path: Path, model: Model) -> Arrays:
    loaded = keras.models.load_model(path, compile=False)
    # A run saves its model wrapped in preprocessing; the last layer is the trained model.
    if loaded.name.endswith("_from_raw") and isinstance(loaded.layers[-1], Model):
        loaded = loaded.layers[-1]
    return _weights_of_model(loaded, model)


def _read_preset(path: Path, model: Model) -> Arrays:
    """Reads a preset's backbone weights, and its task's if the model contains a task of the same class."""
    import keras_hub

    folder = str(path.resolve())
    task = hub_layer(model, "Task")
    if task is not None and task_config(folder, type(task)):
        source = type(task).from_preset(folder, preprocessor=None, dtype="float32")
    else:
        source = keras_hub.models.Backbone.from_preset(folder, dtype="float32")
    return _weights_of_model(source, model)


def _weights_of_model(source: Model, model: Model) -> Arrays:
    """Returns the weights of the loaded model `source`, keyed as in `model`.

    Backbones of keras-hub are matched wherever they are nested in the two models. Heads are matched
    if they have the same variables.
    """
    backbone = hub_layer(model, "Backbone")
    source_backbone = hub_layer(source, "Backbone")
    if backbone is None or source_backbone is None:
        return {key: variable.numpy() for key, variable in _variables_by_key(parts(source)).items()}

    # The backbone may be nested more deeply in one of the two, where its layers have other paths.
    keys = {id(variable): key for key, variable in _variables_by_key(parts(model)).items()}

    def rekey(own: Sequence[Part], others: Sequence[Part]) -> Arrays:
        own_keys = {key: keys[id(variable)] for key, variable in _variables_by_key(own).items()}
        return {
            own_keys.get(key, key): variable.numpy()
            for key, variable in _variables_by_key(others).items()
        }

    arrays = rekey(parts(backbone), parts(source_backbone))
    head = rekey(
        head_of(hub_layer(model, "Task") or model), head_of(hub_layer(source, "Task") or source)
    )
    return arrays | head if head.keys() <= set(keys.values()) else arrays


def _weights_of_checkpoint(arrays: Arrays, model: Model) -> Arrays:
    """Returns the weights in a checkpoint, keyed as in the model, with LoRA's matrices added to the kernels."""
    # In a checkpoint, weights have keys model/NUMBER/PATH; other keys belong to the optimizer and the ranks.
    weights = {
        key.split("/", 2)[2]: array for key, array in arrays.items() if key.startswith("model/")
    }
    for path in [path for path in weights if path.endswith("_a") and "/lora_" in path]:
        # lora_kernel_a and lora_kernel_b belong to kernel.
        first = weights.pop(path)
        second = weights.pop(f"{path.removesuffix('_a')}_b")
        base = path.removesuffix("_a").replace("/lora_", "/")
        weights[base] = weights[base] + first @ second
    keys = {variable.path: key for key, variable in _variables_by_key(parts(model)).items()}
    return {keys.get(path, path): array for path, array in weights.items()}


def _read_h5(path: Path) -> Arrays:
    """Reads a Keras weights file, in which each layer's group `vars` has the layer's name as an attribute.

    Raises ValueError if two layers inside the same layer have the same name, since the file does not
    keep their order.
    """
    import h5py

    arrays = {}

    def walk(group, layer):
        for key in group:
            inner = group[key]
            if key == "vars":
                for index in inner:
                    if f"{layer}/{index}" in arrays:
                        raise ValueError(
                            f"two layers are named {layer}; a .keras file can tell them apart"
                        )
                    arrays[f"{layer}/{index}"] = np.asarray(inner[index])
            # A compiled model's file holds its optimizer too.
            elif isinstance(inner, h5py.Group) and inner.name != "/optimizer":
                # The groups' own names are generated by Keras.
                name = inner["vars"].attrs.get("name", key) if "vars" in inner else ""
                walk(inner, f"{layer}/{name}".strip("/"))

    with h5py.File(path) as file:
        walk(file, "")
    return arrays
