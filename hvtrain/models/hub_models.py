"""Any backbone or task model of keras-hub by its name, untrained, or with the architecture of a preset on disk.

hub_wrapper.py fits it to the data set and the task; hub_presets.py knows what lies in a preset.
"""

import difflib
import inspect
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from hvtrain.data.source import symbolic
from hvtrain.errors import ConfigError, in_one_line
from hvtrain.models.networks import check_rate, logits

OURS = {"self", "args", "kwargs", "backbone", "preprocessor", "activation", "name", "compile", "dtype"}
"""Arguments of keras-hub's constructors that are not up to the user."""


def hub_model(
    input_spec: Any,
    name: str,
    num_outputs: int | None = None,
    output_shape: Sequence[Any] | None = None,
    image_shape: Sequence[int] | None = None,
    vocabulary_size: int | None = None,
    preset: str | None = None,
    padding_token: int | None = None,
    backbone: Mapping[str, Any] | None = None,
    **options: Any,
) -> keras.Model:
    """keras_hub.models.<name> without its preprocessor, with float32 logits of the shape that the run's task needs.

    It is a plain keras.Model around that of keras-hub, which has a fit of its own. A backbone by itself gets a dense
    layer, on pooled features unless the task needs an output at each place.

    Args:
        output_shape: of an example; None, as of task=custom: the outputs stay as they are.
        preset: a folder that save_to_preset of keras-hub wrote. It gives the architecture; model.weights, the same
            folder unless it is set, gives the weights.
        padding_token: fills up short texts, and is not attended to; None: all tokens are.
        backbone: options of the backbone's constructor, before what data set and preset say.
        options: of the task's constructor; of a backbone `dropout`, before the dense layer.

    Raises:
        ConfigError: keras-hub is not installed, no such class, a preset that is no folder, impossible options.
    """
    hub = _keras_hub()
    chosen, own = _chosen(hub, name), dict(backbone or {})
    lengths = [one.shape[0] for one in tf.nest.flatten(input_spec) if one.dtype.is_integer and one.shape.rank == 1]
    facts = {"vocabulary_size": vocabulary_size, "max_sequence_length": max(lengths, default=None)}
    facts |= {"image_shape": tuple(image_shape) if image_shape else None}
    is_task, rate = issubclass(chosen, hub.models.Task), 0.0
    if not is_task:
        _check_options(name, "model", options, {"dropout"})
        check_rate(name, rate := options.pop("dropout", 0.0))
    try:
        folder = preset_folder(preset, "model.preset") if preset else None
        network = _of_preset(hub, folder, own) if folder else _untrained(hub, chosen, own, facts)
        _check_size(network, facts)
        kind = _fitting(hub, chosen, type(network))
        if is_task:
            network = _task(kind, network, task_config(folder, kind) if folder else {}, options, num_outputs)
        inputs, given = fit_inputs(network, input_spec, padding_token)
        outputs = fit_outputs(network(given), given, output_shape, rate, is_task)
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"keras_hub.models.{name} cannot be built: {in_one_line(error)}; change model.backbone, other options of "
            "model, or the shape of the examples"
        ) from error
    return keras.Model(inputs, outputs, name=kind.__name__)


def _keras_hub() -> ModuleType:
    try:
        import keras_hub
    except ImportError as error:
        raise ConfigError(
            f"model=keras_hub needs keras-hub ({in_one_line(error)}); install it: ./scripts/run uv pip install "
            "--no-deps -r scripts/lock/keras-hub.txt"
        ) from error
    return keras_hub


def _known(hub: ModuleType) -> dict[str, Any]:
    """Backbones and tasks by name."""
    kinds = (hub.models.Backbone, hub.models.Task)
    return {name: kind for name, kind in vars(hub.models).items() if inspect.isclass(kind) and issubclass(kind, kinds)}


def _chosen(hub: ModuleType, name: str) -> Any:
    """The class of that name."""
    known = _known(hub)
    if name not in known:
        by_lower_case = {key.lower(): key for key in known}
        near = difflib.get_close_matches(str(name).lower(), by_lower_case, n=4) or ["bertbackbone", "gpt2causallm"]
        raise ConfigError(
            f"keras_hub.models has no backbone or task {name!r}; the nearest: "
            f"{', '.join(by_lower_case[key] for key in near)}"
        )
    chosen = known[name]
    if issubclass(chosen, hub.models.Task) and chosen.compute_loss is not keras.Model.compute_loss:
        raise ConfigError(f"model.name={name} has a loss of its own, which runs do not use; choose another class")
    return chosen


def _fitting(hub: ModuleType, chosen: Any, backbone: type) -> Any:
    """The class that was chosen, or the one of its kind, such as TextClassifier, that goes with the backbone."""
    kinds = {kind for kind in _known(hub).values() if backbone in (kind, getattr(kind, "backbone_cls", None))}
    fitting = [chosen] if chosen in kinds else [kind for kind in kinds if issubclass(kind, chosen)]
    if len(fitting) != 1:
        raise ConfigError(
            f"model.name={chosen.__name__} does not go with model.preset, which has a {backbone.__name__}; choose "
            f"{', '.join(sorted(kind.__name__ for kind in kinds))}"
        )
    return fitting[0]


def _of_preset(hub: ModuleType, folder: str, options: dict[str, Any]) -> keras.Model:
    """The backbone of a preset, untrained."""
    policy = keras.config.dtype_policy()
    return hub.models.Backbone.from_preset(folder, load_weights=False, name="backbone", dtype=policy, **options)


def _untrained(hub: ModuleType, chosen: Any, options: dict[str, Any], facts: Mapping[str, Any]) -> keras.Model:
    """The backbone of the class, with these options and those facts that it takes."""
    kind = getattr(chosen, "backbone_cls", chosen)
    if kind in (None, hub.models.Backbone):
        some = sorted({one.__name__ for one in _known(hub).values() if issubclass(one, chosen) and one is not chosen})
        raise ConfigError(
            f"model.name={chosen.__name__} is a kind of models; choose one, such as {', '.join(some[:4])}, or give "
            "model.preset"
        )
    free = _free(kind)
    _check_options(kind.__name__, "model.backbone", options, free)
    options = {key: value for key, value in facts.items() if key in free and value is not None} | options
    if missing := [key for key, one in free.items() if one.default is one.empty and key not in options]:
        words = " ".join(f"+model.backbone.{key}=..." for key in missing)
        raise ConfigError(f"{kind.__name__} needs {', '.join(missing)}; add {words}")
    return kind(name="backbone", dtype=keras.config.dtype_policy(), **options)


def _task(
    kind: Any, backbone: keras.Model, saved: dict[str, Any], options: dict[str, Any], num_outputs: int | None
) -> keras.Model:
    """The task model of that class, with the options that were saved, those of the run, and those of the user."""
    free = _free(kind)
    _check_options(kind.__name__, "model", options, free)
    named = _arguments(kind)
    run: dict[str, Any] = {"num_classes": num_outputs} if "num_classes" in free and num_outputs else {}
    run |= {"activation": None} if "activation" in named else {}
    fixed = {"backbone": backbone, "preprocessor": None, "name": "task", "compile": False}
    task = kind.from_config(saved | run | options | fixed)
    get_config = task.get_config
    # Otherwise a loaded model compiles it, and Keras warns of an optimizer without variables.
    task.get_config = lambda: {**get_config(), "compile": False}
    return task


def _free(kind: type) -> dict[str, inspect.Parameter]:
    """Arguments of a constructor that are up to the user."""
    return {name: one for name, one in _arguments(kind).items() if name not in OURS}


def _arguments(kind: Any) -> dict[str, inspect.Parameter]:
    """Those of __init__: for a class that inherits it, Python 3.10 gives those of Keras's __new__ instead."""
    _, *rest = inspect.signature(kind.__init__).parameters.items()
    return dict(rest)


def _check_options(name: str, place: str, options: Mapping[str, Any], free: Collection[str]) -> None:
    if unknown := sorted(set(options) - set(free)):
        raise ConfigError(
            f"{name} was given {', '.join(f'{place}.{key}' for key in unknown)}; options that it takes there: "
            f"{', '.join(free) or 'none'}"
        )


def _check_size(backbone: Any, facts: Mapping[str, Any]) -> None:
    """Raises ConfigError for tokens or texts beyond what the backbone has weights for: a GPU would read zeros."""
    for fact, of_what in (("vocabulary_size", "tokens"), ("max_sequence_length", "places")):
        has, needed = getattr(backbone, fact, None), facts[fact]
        if has is not None and needed is not None and needed > has:
            raise ConfigError(
                f"{type(backbone).__name__} has {fact}={has}, and the data set needs {needed} {of_what}; choose "
                f"another preset, or +model.backbone.{fact}={needed}"
            )


CONFIG_FILE = "config.json"
"""In every preset, and in no run folder."""


def preset_folder(preset: str, setting: str) -> str:
    """The folder's whole path, since keras-hub downloads what has the name of a preset that it knows.

    Raises ConfigError, which names the setting, if there is no preset.
    """
    path = Path(preset)
    if not (path / CONFIG_FILE).is_file():
        what = f"has no {CONFIG_FILE}" if path.is_dir() else "is not a folder"
        raise ConfigError(
            f"{setting}={preset} {what}; give a folder that save_to_preset of keras-hub wrote: nothing is downloaded"
        )
    return str(path.resolve())


def task_config(folder: str, kind: type) -> dict[str, Any]:
    """The options of a task model in a preset, without its backbone; empty if it is of another class, or has none."""
    path = Path(folder) / "task.json"
    saved = json.loads(path.read_text()) if path.is_file() else {}
    if saved.get("class_name") != kind.__name__:
        return {}
    return {key: value for key, value in saved["config"].items() if key not in ("backbone", "preprocessor")}


def backbone_of(model: keras.Model) -> keras.Model | None:
    """The backbone of keras-hub in a model: what presets have the weights of, whatever the task. None without one."""
    return _inside(model, "Backbone")


def task_of(model: keras.Model) -> keras.Model | None:
    """The task model of keras-hub in a model: its backbone and a head. None without one."""
    return _inside(model, "Task")


def _inside(model: keras.Model, kind: str) -> Any:
    if (hub := sys.modules.get("keras_hub")) is None:
        return None
    return next((layer for layer in model._flatten_layers() if isinstance(layer, getattr(hub.models, kind))), None)


TOKENS, MASK, SEGMENTS, POSITIONS = "token_ids", "padding_mask", "segment_ids", "mask_positions"


def fit_inputs(network: keras.Model, spec: Any, padding_token: int | None) -> tuple[Any, Any]:
    """Inputs of these tf.TensorSpecs, and what the network takes, made of them.

    A single array is the tokens or the image. What a text model takes besides is made of the tokens if it is missing:
    the mask of those that are not padding, one segment, and all places as those whose tokens are predicted. Raises
    ConfigError for inputs of other names, or with other numbers of axes.
    """
    inputs, has_names = symbolic(spec), isinstance(network.input, Mapping)
    wanted = dict(network.input) if has_names else {"image": network.input}
    if isinstance(inputs, Mapping):
        given = dict(inputs)
    else:
        given = {TOKENS if TOKENS in wanted else next(iter(wanted)): inputs}
    made = {name: _made(name, given, padding_token) for name in wanted if name not in given}
    given |= {name: one for name, one in made.items() if one is not None}
    if given.keys() != wanted.keys() or any(len(given[name].shape) != len(wanted[name].shape) for name in wanted):
        needed, came = (
            ", ".join(f"{name} {tuple(one.shape)}" for name, one in ones.items())
            for ones in (wanted, inputs if isinstance(inputs, Mapping) else given)
        )
        raise ConfigError(
            f"{type(network).__name__} takes {needed}, and the data set gives {came}; give it such inputs"
        )
    return inputs, given if has_names else given["image"]


def _made(name: str, given: Mapping[str, Any], padding_token: int | None) -> Any:
    """An input that follows from the tokens beside it (decoder_token_ids for decoder_padding_mask); None for others."""
    kind = next((kind for kind in (MASK, SEGMENTS, POSITIONS) if name.endswith(kind)), None)
    tokens = given.get(f"{name.removesuffix(kind)}{TOKENS}") if kind else None
    if tokens is None:
        return None
    if kind == SEGMENTS:
        return ops.zeros_like(tokens)
    if kind == POSITIONS:
        return ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    return ops.ones_like(tokens) if padding_token is None else ops.cast(ops.not_equal(tokens, padding_token), "int32")


def fit_outputs(outputs: Any, given: Any, shape: Sequence[Any] | None, dropout: float, has_head: bool) -> Any:
    """Float32 logits of that shape for an example; without a shape the network's own outputs.

    given: what the network took, with the mask of a text. has_head: its outputs are logits already.
    """
    if shape is None:
        return outputs
    if not has_head:
        mask = given.get(MASK) if isinstance(given, Mapping) else None
        outputs = _features(outputs, mask, is_pooled=len(shape) == 1)
        outputs = layers.Dropout(dropout, name="dropout")(outputs) if dropout else outputs
        outputs = logits(outputs, shape[-1])
    if len(shape) == 3 and len(outputs.shape) == 4 and tuple(outputs.shape[1:3]) != tuple(shape[:2]):
        outputs = layers.Resizing(*shape[:2], dtype="float32", name="resize")(outputs)
    if outputs.dtype != "float32":
        outputs = layers.Activation("linear", dtype="float32", name="float32")(outputs)
    return outputs


def _features(outputs: Any, mask: Any, is_pooled: bool) -> Any:
    """What the dense layer is put on: of an example, or of each of its places."""
    if isinstance(outputs, Mapping):
        if is_pooled and "pooled_output" in outputs:
            return outputs["pooled_output"]
        named = [name for name in outputs if name.endswith("sequence_output")]
        outputs = outputs[named[-1] if named else list(outputs)[-1]]
    if is_pooled and len(outputs.shape) == 4:
        return layers.GlobalAveragePooling2D(name="pool")(outputs)
    if is_pooled and len(outputs.shape) == 3:
        return layers.GlobalAveragePooling1D(name="pool")(outputs, mask=mask)
    return outputs
