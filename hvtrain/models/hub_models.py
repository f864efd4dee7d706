"""Any backbone or task model of keras-hub by its name, untrained, or with the architecture of a preset on disk.

hub_wrapper.py fits it to the data set and the task; hub_presets.py knows what lies in a preset.
"""

import difflib
import inspect
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf

from hvtrain.errors import ConfigError, in_one_line
from hvtrain.models.hub_presets import preset_folder, task_config
from hvtrain.models.hub_wrapper import fit_inputs, fit_outputs
from hvtrain.models.networks import check_rate

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
