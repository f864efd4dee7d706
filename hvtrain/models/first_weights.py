"""model.weights: a new run begins with the weights of another one, or of a file.

Rank 0 reads them, and the broadcast before the first step brings them to the others.

Variables are matched by the path of their layer and their order in it. A head, the last layer with
weights or what comes after a backbone of keras-hub, may be another one than the source's; whatever
else differs is refused, unless model.weights_except names it.
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
from hvtrain.models.parts import Part, find_variables, head_of, parts

log = logging.getLogger(__name__)

# Models in a run folder, the preferred one first; see training/saved_model.py.
RUN_FILES = ("best.keras", "best.weights.h5", "model.keras", "model.weights.h5")
SOURCES = "a .keras file, a .weights.h5 file, a run folder or a preset of keras-hub"

# Weights by key: LAYER/INDEX, where INDEX counts the layer's own variables, or the variable's path
# in a checkpoint.
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Slot:
    """A variable of a model, and where its value is in a source.

    layer: its layer's path. index: its number among the layer's own variables.
    """

    layer: str
    name: str
    index: int
    variable: Any

    @property
    def path(self) -> str:
        return f"{self.layer}/{self.name}".lstrip("/")

    @property
    def key(self) -> str:
        return f"{self.layer}/{self.index}"

    def key_in(self, arrays: Arrays) -> str:
        """Returns the key of its value: the variable's path in a checkpoint, else `key`."""
        return self.variable.path if self.variable.path in arrays else self.key

    def fits(self, arrays: Arrays) -> bool:
        """Returns True if the source has its value, in its shape."""
        array = arrays.get(self.key_in(arrays))
        return array is not None and array.shape == tuple(self.variable.shape)


def begin_with(model: keras.Model, source: str, excepted: Sequence[str] = ()) -> None:
    """Sets the weights of a built model to those of the source (chief only).

    Args:
        model: built.
        source: path of a file or folder, one of SOURCES.
        excepted: patterns (see parts) of what stays new; the source may then have anything else
            too, which is left out.

    Raises:
        ConfigError: the source cannot be read, or differs; names the first variable that differs.
    """
    path, arrays = _read(Path(source), model)
    excepted_ids = set()
    for pattern in excepted:
        excepted_ids |= set(map(id, find_variables(model, pattern, "model.weights_except")))

    slots = [slot for slot in _slots(parts(model)) if id(slot.variable) not in excepted_ids]

    # The head is taken as a whole, or stays new as a whole.
    head_layers = {part.path for part in head_of(model)}
    head = [slot for slot in slots if slot.layer in head_layers]
    is_head_new = not all(slot.fits(arrays) for slot in head)
    taken = [slot for slot in slots if not (is_head_new and slot.layer in head_layers)]
    for slot in taken:
        if not slot.fits(arrays):
            raise _difference(
                source,
                slot.path,
                arrays.get(slot.key_in(arrays)),
                slot.variable,
            )

    unused = arrays.keys() - {slot.key_in(arrays) for slot in slots}
    unused_layers = sorted({key.rpartition("/")[0] for key in unused})
    # If the head is new, the source may have one of its own, by another name.
    is_other_head = is_head_new and len(unused_layers) == 1
    if unused and not excepted and not is_other_head:
        key = min(unused)
        raise _difference(source, key, arrays[key], None)

    # Nothing is assigned before everything is known to fit.
    for slot in taken:
        slot.variable.assign(arrays[slot.key_in(arrays)])
    new = [f"{slot.path} {tuple(slot.variable.shape)}" for slot in head if is_head_new]
    _log_taken(path, taken, [*new, *excepted])
    if unused and excepted:
        named = ", ".join(unused_layers[:5]) + " ..." * (len(unused_layers) > 5)
        log.info("               not taken from there: %s", named)


def _log_taken(path: Path, taken: Sequence[Slot], new: Sequence[str]) -> None:
    number = sum(int(np.prod(slot.variable.shape)) for slot in taken)
    suffix = f"; new: {', '.join(new)}" if new else ""
    log.info("weights        %s parameters from %s%s", f"{number:,}", path, suffix)


def _slots(model_parts: Sequence[Part]) -> Iterator[Slot]:
    for part in model_parts:
        # A source has the matrices of model.lora_rank added to the kernels.
        plain = [value for value in part.variables if not value.name.startswith("lora_")]
        for index, variable in enumerate(plain):
            yield Slot(part.path, variable.name, index, variable)


def _difference(
    source: str,
    path: str,
    array: np.ndarray | None,
    variable: Any,
) -> ConfigError:
    def describe(value: Any) -> str:
        return "nothing" if value is None else f"shape {tuple(value.shape)}"

    return ConfigError(
        f"model.weights={source} is of another model: it has {describe(array)} where {path} of "
        f"this one has {describe(variable)}; choose the model that it was made with, or name in "
        "model.weights_except what stays new"
    )


def _read(path: Path, model: keras.Model) -> tuple[Path, Arrays]:
    """Returns the file or checkpoint that is read, and its weights. Raises ConfigError."""
    if (path / CONFIG_FILE).is_file():
        return path, _read_preset(path, model)
    if path.is_dir():
        return _read_run_folder(path, model)
    if not path.is_file():
        raise ConfigError(f"model.weights={path} is not there; choose {SOURCES}")
    try:
        if path.name.endswith(".keras"):
            return path, _read_keras(path, model)
        if path.name.endswith(".weights.h5"):
            return path, _read_h5(path)
    except Exception as error:
        raise _unreadable(path, error) from error
    raise ConfigError(f"model.weights={path} is of another kind; choose {SOURCES}")


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"model.weights={path} cannot be read: {in_one_line(error)}; choose {SOURCES}")


def _read_run_folder(path: Path, model: keras.Model) -> tuple[Path, Arrays]:
    """Reads the preferred model of a run folder, or its newest whole checkpoint."""
    # Keras's files hold the averages of train.ema; the weights of a checkpoint are the raw ones.
    for name in RUN_FILES:
        if (path / name).is_file():
            return _read(path / name, model)
    # From the newest one on; a damaged one is passed over, with a warning.
    for folder in reversed(store.list_checkpoints(path / "checkpoints")):
        try:
            return folder, _of_checkpoint(store.read(folder).arrays)
        except CheckpointError as error:
            log.warning("%s", error)
    raise ConfigError(f"model.weights={path} is a folder without a model or a whole checkpoint; choose {SOURCES}")


def _read_keras(path: Path, model: keras.Model) -> Arrays:
    loaded = keras.models.load_model(path, compile=False)
    # A run saves its model with the preprocessing around the trained one.
    if loaded.name.endswith("_from_raw") and isinstance(loaded.layers[-1], keras.Model):
        loaded = loaded.layers[-1]
    return _of_model(loaded, model)


def _read_preset(path: Path, model: keras.Model) -> Arrays:
    """Reads the weights in a preset, those of its task too if the model is of the same class."""
    if backbone_of(model) is None:
        raise ConfigError(
            f"model.weights={path} is a preset of keras-hub, and {model.name} has none of its "
            "backbones; choose model=keras_hub"
        )
    import keras_hub

    folder = preset_folder(str(path), "model.weights")
    task = task_of(model)
    try:
        if task is not None and task_config(folder, type(task)):
            loaded = type(task).from_preset(folder, preprocessor=None, dtype="float32")
        else:
            loaded = keras_hub.models.Backbone.from_preset(folder, dtype="float32")
        return _of_model(loaded, model)
    except Exception as error:
        raise _unreadable(path, error) from error


def _of_model(source: keras.Model, model: keras.Model) -> Arrays:
    """Returns the weights of a loaded model by the keys of this one.

    Backbones of keras-hub are matched wherever they are in the two models, and heads if they have
    the same variables.
    """
    backbone = backbone_of(model)
    source_backbone = backbone_of(source)
    if backbone is None or source_backbone is None:
        return {slot.key: slot.variable.numpy() for slot in _slots(parts(source))}

    # The backbone may be deeper in one model than in the other, so its layers have other paths
    # there.
    key_of = {id(slot.variable): slot.key for slot in _slots(parts(model))}

    def with_keys_of(own: Sequence[Part], others: Sequence[Part]) -> Arrays:
        keys = {slot.key: key_of[id(slot.variable)] for slot in _slots(own)}
        return {keys.get(slot.key, slot.key): slot.variable.numpy() for slot in _slots(others)}

    arrays = with_keys_of(parts(backbone), parts(source_backbone))
    head = with_keys_of(head_of(task_of(model) or model), head_of(task_of(source) or source))
    return arrays | head if head.keys() <= set(key_of.values()) else arrays


def _of_checkpoint(arrays: Arrays) -> Arrays:
    """Returns the model's weights in a checkpoint, LoRA's matrices added to the kernels."""
    # Keys are model/NUMBER/PATH; others are of the optimizer and the ranks.
    model_arrays = {key: array for key, array in arrays.items() if key.startswith("model/")}
    weights = {key.split("/", 2)[2]: array for key, array in model_arrays.items()}
    for path in [path for path in weights if path.endswith("_a") and "/lora_" in path]:
        # lora_kernel_a and lora_kernel_b belong to kernel.
        first = weights.pop(path)
        second = weights.pop(f"{path.removesuffix('_a')}_b")
        base = path.removesuffix("_a").replace("/lora_", "/")
        weights[base] = weights[base] + np.matmul(first, second)
    return weights


def _read_h5(path: Path) -> Arrays:
    """Reads the weights in Keras's file, in which each layer's group `vars` has its name.

    Raises ValueError for two layers of one name in a layer, whose order the file does not keep.
    """
    import h5py

    arrays: Arrays = {}

    def walk(group: Any, layer: str) -> None:
        for key in group:
            inner = group[key]
            if key == "vars":
                for index in inner:
                    if f"{layer}/{index}" in arrays:
                        raise ValueError(f"two layers have the name {layer}, which a .keras file could tell apart")
                    arrays[f"{layer}/{index}"] = np.asarray(inner[index])
            elif isinstance(inner, h5py.Group):
                # Keras's groups have names that it made up; the layer's own is an attribute.
                name = inner["vars"].attrs.get("name", key) if "vars" in inner else ""
                walk(inner, f"{layer}/{name}".strip("/"))

    with h5py.File(path) as file:
        walk(file, "")
    return arrays
