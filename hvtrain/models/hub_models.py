"""Builds any backbone or task model of keras-hub, untrained, by its name or from a preset on disk.

Maps the data set's inputs to the model's names, and the model's outputs to the shape that the task
needs. Also reads presets (folders written by keras-hub's save_to_preset), and finds a
keras-hub backbone or task inside a model.
"""

import difflib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras import Model, layers, ops

from hvtrain.data.source import symbolic
from hvtrain.errors import ConfigError, in_one_line
from hvtrain.models.networks import logits, token_mask

# Parameters of keras-hub's constructors that users cannot set, mostly because a run sets them.
_RESERVED = {
    "self",
    "args",
    "kwargs",
    "name",
    "dtype",
    "compile",
    "backbone",
    "preprocessor",
    "activation",
}
CONFIG_FILE = "config.json"  # In every preset, and in no run folder.
# Names of the inputs of keras-hub's text models, or their endings in encoder-decoders.
TOKENS = "token_ids"
MASK = "padding_mask"
SEGMENTS = "segment_ids"
POSITIONS = "mask_positions"

# Options, facts or tensors by name.
Named = Mapping[str, Any]


def hub_model(
    input_spec: Any,
    name: str,
    num_outputs: int | None = None,
    output_shape: Sequence[Any] | None = None,
    image_shape: Sequence[int] | None = None,
    vocabulary_size: int | None = None,
    preset: str | None = None,
    padding_token: int | None = None,
    length: int | None = None,
    backbone: Named | None = None,
    **options: Any,
) -> Model:
    """Builds keras_hub.models.<name>, with float32 logits of the shape that the run's task needs.

    The keras-hub model, which has its own fit method, is wrapped in a plain keras.Model. A bare backbone
    gets a dense layer, on pooled features unless the task needs outputs at each position.

    Args:
        input_spec: tf.TensorSpec of one example, or a mapping of them by name.
        name: a class of keras_hub.models, such as BertTextClassifier.
        num_outputs: size of the output, such as the number of classes.
        output_shape: shape of an example's output; None (for task=custom): outputs stay unchanged.
        image_shape: (height, width, channels), for image models.
        vocabulary_size: vocabulary size of the data set's tokenizer, for text models.
        preset: a folder written by keras-hub's save_to_preset. It gives the architecture;
            model.weights, by default the same folder, gives the weights.
        padding_token: the token that pads short texts and is not attended to; None: all tokens are
            attended to.
        length: the largest number of tokens, for texts of unequal lengths.
        backbone: options of the backbone's constructor, which take precedence over the data set's
            and the preset's.
        options: options of the task's constructor; for a bare backbone, only `dropout`, the fraction
            dropped before the dense layer.

    Raises:
        ConfigError: keras-hub, the class or the preset is missing, or options are invalid.
    """
    hub = _import_keras_hub()
    chosen = _find_class(name)
    is_task = issubclass(chosen, hub.models.Task)
    backbone_options = dict(backbone or {})
    dropout = 0.0
    if not is_task:
        _check_options(name, "model", options, ["dropout"])
        dropout = options.get("dropout", 0.0)

    specs = tf.nest.flatten(input_spec)
    lengths = [spec.shape[0] for spec in specs if spec.dtype.is_integer and spec.shape.rank == 1]
    # Facts about the data set. A new backbone gets those for which its constructor has an argument.
    facts = {
        "vocabulary_size": vocabulary_size,
        "max_sequence_length": max(filter(None, lengths), default=length),
        "image_shape": image_shape,
    }

    try:
        folder = _preset_folder(preset) if preset else None
        if folder:
            network = hub.models.Backbone.from_preset(
                folder,
                load_weights=False,  # Rank 0 alone reads them: see first_weights.py.
                name="backbone",
                dtype=keras.config.dtype_policy(),
                **backbone_options,
            )
        else:
            network = _new_backbone(chosen, backbone_options, facts)
        _check_size(network, facts)
        cls = _class_for_backbone(chosen, type(network))
        if is_task:
            network = _new_task(cls, network, folder, options, num_outputs)
        inputs, named_inputs = fit_inputs(network, input_spec, padding_token)
        outputs = fit_outputs(network(named_inputs), named_inputs, output_shape, dropout, is_task)
    except ConfigError:
        raise  # It is a ValueError too, but already says what to do.
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"keras_hub.models.{name} cannot be built: {in_one_line(error)}; change "
            "model.backbone, other options of model, or the shape of the examples"
        ) from error
    return Model(inputs, outputs, name=cls.__name__)


def _import_keras_hub():
    try:
        import keras_hub
    except ImportError as error:
        raise ConfigError(
            f"model=keras_hub needs keras-hub ({in_one_line(error)}); install it: ./scripts/run uv "
            "pip install --no-deps -r scripts/lock/keras-hub.txt"
        ) from error
    return keras_hub


def _classes() -> dict[str, Any]:
    """Returns the classes of backbones and tasks, by name."""
    from keras_hub import models

    bases = (models.Backbone, models.Task)
    classes = inspect.getmembers(models, inspect.isclass)
    return {name: cls for name, cls in classes if issubclass(cls, bases)}


def _find_class(name: str):
    classes = _classes()
    if name not in classes:
        # If no name is similar, two examples show what such names look like.
        names = difflib.get_close_matches(name, classes, n=4) or ["BertBackbone", "GPT2CausalLM"]
        raise ConfigError(
            f"keras_hub.models has no backbone or task {name!r}; choose one such as "
            f"{', '.join(names)}"
        )
    chosen = classes[name]
    if hasattr(chosen, "backbone_cls") and chosen.compute_loss is not Model.compute_loss:
        raise ConfigError(
            f"model.name={name} has its own loss, which runs do not use; choose another class"
        )
    return chosen


def _class_for_backbone(chosen, backbone: type):
    """Returns the chosen class, or its subclass for that backbone.

    TextClassifier with a BertBackbone becomes BertTextClassifier.
    """
    # A set, since keras-hub exports some classes under two names.
    suitable = {
        cls for cls in _classes().values() if backbone in (cls, getattr(cls, "backbone_cls", None))
    }
    if chosen in suitable:
        return chosen
    matches = [cls for cls in suitable if issubclass(cls, chosen)]
    if len(matches) != 1:
        raise ConfigError(
            f"model.name={chosen.__name__} does not fit model.preset, whose backbone is "
            f"{backbone.__name__}; choose {', '.join(sorted(cls.__name__ for cls in suitable))}"
        )
    return matches[0]


def _new_backbone(chosen, options: dict[str, Any], facts: Named) -> Model:
    """Builds the backbone of a class, with these options and the facts for which it has arguments."""
    cls = getattr(chosen, "backbone_cls", chosen)
    if cls is None or cls.__name__ == "Backbone":
        subclasses = {cls for cls in _classes().values() if issubclass(cls, chosen)}
        examples = sorted(cls.__name__ for cls in subclasses - {chosen})[:4]
        raise ConfigError(
            f"model.name={chosen.__name__} is a base class; choose a subclass, such as "
            f"{', '.join(examples)}, or give model.preset"
        )

    parameters = _user_parameters(cls)
    _check_options(cls.__name__, "model.backbone", options, parameters)
    known = {key: facts[key] for key in facts.keys() & parameters if facts[key] is not None}
    # Names are fixed, here and for tasks, so that variables have the same paths in every build. The
    # user's options take precedence over the data set's facts.
    return cls(name="backbone", dtype=keras.config.dtype_policy(), **known | options)


def _new_task(
    cls, backbone: Model, folder: str | None, options: dict[str, Any], num_outputs: int | None
) -> Model:
    """Builds the task model. The user's options take precedence over the run's, and these over the preset's."""
    parameters = _user_parameters(cls)
    _check_options(cls.__name__, "model", options, parameters)
    run_options: dict[str, Any] = {}
    if "num_classes" in parameters and num_outputs:
        run_options["num_classes"] = num_outputs
    if "activation" in _parameters(cls):
        run_options["activation"] = None  # The losses of runs take logits.
    fixed = {"backbone": backbone, "preprocessor": None, "name": "task", "compile": False}
    saved = task_config(folder, cls) if folder else {}
    task = cls.from_config(saved | run_options | options | fixed)

    # Otherwise loading a saved model would compile the task, and Keras would warn about
    # an optimizer without variables.
    get_config = task.get_config
    task.get_config = lambda: {**get_config(), "compile": False}
    return task


def _user_parameters(cls: type) -> list[str]:
    """Returns the names of a constructor's arguments that users can set."""
    return [name for name in _parameters(cls) if name not in _RESERVED]


def _parameters(cls) -> Mapping[str, inspect.Parameter]:
    # The signature is that of __init__, not of the class: for an inherited __init__,
    # Python 3.10 returns the signature of Keras's __new__.
    return inspect.signature(cls.__init__).parameters


def _check_options(name: str, setting: str, options: Named, known: Sequence[str]) -> None:
    unknown = [f"{setting}.{key}" for key in sorted(options.keys() - known)]
    if unknown:
        raise ConfigError(
            f"{name} does not take {', '.join(unknown)}; its options in {setting}: {', '.join(known) or 'none'}"
        )


def _check_size(backbone, facts: Named) -> None:
    """Raises ConfigError if the data set has tokens or positions beyond the backbone's embeddings."""
    # Checked here because on a GPU such lookups return zeros, without an error.
    for fact, unit in (("vocabulary_size", "tokens"), ("max_sequence_length", "positions")):
        size = getattr(backbone, fact, None)
        needed = facts[fact]
        if size and needed and needed > size:
            raise ConfigError(
                f"{type(backbone).__name__} has {fact}={size}, and the data set needs {needed} "
                f"{unit}; choose another preset, or +model.backbone.{fact}={needed}"
            )


def fit_inputs(network: Model, spec: Any, padding_token: int | None) -> tuple[Any, Any]:
    """Makes symbolic inputs from the data set's tf.TensorSpecs, and maps them to the network's inputs.

    A single array is the tokens or the image. Other inputs of a text model are derived from the
    tokens if the data set lacks them; see _derive_input.

    Returns the symbolic inputs in the structure of `spec`, and the network's inputs made from them.
    Raises ConfigError if the network's inputs have other names, or other numbers of axes.
    """
    inputs = symbolic(spec)
    has_names = isinstance(network.input, Mapping)
    expected = dict(network.input) if has_names else {"image": network.input}
    data_inputs = inputs
    if not isinstance(inputs, Mapping):
        # A text model has other inputs too, such as a mask, which are derived below.
        name = TOKENS if TOKENS in expected else next(iter(expected))
        data_inputs = {name: inputs}

    named = dict(data_inputs)
    for name in expected:
        if name not in data_inputs:
            derived = _derive_input(name, data_inputs, padding_token)
            if derived is not None:
                named[name] = derived

    # A data set may leave lengths unknown, so only the numbers of axes are compared.
    axes = {name: len(tensor.shape) for name, tensor in named.items()}
    if axes != {name: len(tensor.shape) for name, tensor in expected.items()}:
        raise ConfigError(
            f"{type(network).__name__} takes {_shapes(expected)}, and the data set gives "
            f"{_shapes(data_inputs)}; use a data set with these inputs, or another model"
        )
    return inputs, named if has_names else named["image"]


def _shapes(tensors: Named) -> str:
    return ", ".join(f"{name} {tensor.shape}" for name, tensor in tensors.items())


def _derive_input(name: str, inputs: Named, padding_token: int | None):
    """Derives the input `name` from the matching tokens; returns None if it cannot be derived.

    The mask selects tokens that are not padding, all tokens belong to one segment, and all positions
    are predicted. padding_mask is derived from token_ids, decoder_padding_mask from decoder_token_ids.
    """
    ending = next((ending for ending in (MASK, SEGMENTS, POSITIONS) if name.endswith(ending)), "")
    tokens = inputs.get(name.removesuffix(ending) + TOKENS)
    if not ending or tokens is None:
        return None
    if ending == SEGMENTS:
        return ops.zeros_like(tokens)
    if ending == POSITIONS:
        return ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    if padding_token is None:
        return ops.ones_like(tokens)
    return ops.cast(token_mask(tokens, padding_token), "int32")


def fit_outputs(
    outputs: Any, inputs: Any, shape: Sequence[Any] | None, dropout: float, has_head: bool
) -> Any:
    """Turns the network's outputs into float32 logits.

    Args:
        outputs: the network's outputs.
        inputs: the network's inputs, for a text including its padding mask.
        shape: shape of an example's logits; None: returns the outputs unchanged.
        dropout: fraction dropped before the dense layer.
        has_head: True if the outputs are logits already.
    """
    if shape is None:
        return outputs
    if not has_head:
        mask = inputs.get(MASK) if isinstance(inputs, Mapping) else None
        outputs = _features(outputs, mask, is_pooled=len(shape) == 1)
        if dropout:
            outputs = layers.Dropout(dropout, name="dropout")(outputs)
        outputs = logits(outputs, shape[-1])

    # A segmentation model may output logits at a fraction of the image's size.
    is_image = len(shape) == 3 and len(outputs.shape) == 4
    if is_image and outputs.shape[1:3] != tuple(shape[:2]):
        outputs = layers.Resizing(*shape[:2], dtype="float32", name="resize")(outputs)
    if outputs.dtype != "float32":
        outputs = layers.Activation("linear", dtype="float32", name="float32")(outputs)
    return outputs


def _features(outputs, mask, is_pooled: bool):
    """Returns features for the head: pooled per example, or one vector per position."""
    if isinstance(outputs, Mapping):
        if is_pooled and "pooled_output" in outputs:
            return outputs["pooled_output"]
        # An encoder-decoder has two sequence outputs; the last one is the decoder's.
        names = [name for name in outputs if name.endswith("sequence_output")] or list(outputs)
        outputs = outputs[names[-1]]
    if is_pooled and len(outputs.shape) == 4:
        return layers.GlobalAveragePooling2D(name="pool")(outputs)
    if is_pooled and len(outputs.shape) == 3:
        return layers.GlobalAveragePooling1D(name="pool")(outputs, mask=mask)
    return outputs


def _preset_folder(preset: str) -> str:
    """Returns the absolute path of a preset's folder. Raises ConfigError if it is not one."""
    path = Path(preset)
    if not (path / CONFIG_FILE).is_file():
        raise ConfigError(
            f"model.preset={preset} is not a folder with {CONFIG_FILE}; give a folder written by "
            "keras-hub's save_to_preset: nothing is downloaded"
        )
    # Absolute, since keras-hub would download a preset that it knows by name, such as bert_base_en.
    return str(path.resolve())


def task_config(folder: str, cls: type) -> dict[str, Any]:
    """Returns the constructor options of a preset's task model; empty if it has none of this class."""
    path = Path(folder) / "task.json"
    saved = json.loads(path.read_text()) if path.is_file() else {}
    if saved.get("class_name") != cls.__name__:
        return {}
    parts = ("backbone", "preprocessor")
    return {key: value for key, value in saved["config"].items() if key not in parts}


def hub_layer(model: Model, class_name: str) -> Model | None:
    """Returns the layer of a keras-hub class inside a model; None if the model has none.

    Args:
        model: a built model.
        class_name: "Backbone", or "Task" for a backbone with a head.
    """
    # If keras-hub was never imported, no model can contain one of its layers.
    hub = sys.modules.get("keras_hub")
    if hub is None:
        return None
    cls = getattr(hub.models, class_name)
    return next((layer for layer in model._flatten_layers() if isinstance(layer, cls)), None)
