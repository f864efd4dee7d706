"""Saves the models of a run, model.keras and best.keras, with a description; loading them needs only Keras.

A saved model takes raw examples, as they are in the user's arrays or files: it includes the
preprocessing of the input pipeline as Keras layers, see Source.preprocessing.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.checkpoint.writer import save_model
from hvtrain.core.topology import Topology
from hvtrain.data.source import Preprocessing, Source
from hvtrain.errors import StorageError, UserError, in_one_line
from hvtrain.system.files import write_atomic, write_json
from hvtrain.tasks import Task

log = logging.getLogger(__name__)

MODEL_FILE = "model.keras"
BEST_FILE = "best.keras"
DESCRIPTION_FILE = "model.json"
NUM_CHECKED = 4


def export(
    model: keras.Model,
    source: Source,
    task: Task,
    topology: Topology,
    folder: Path,
) -> None:
    """Writes the trained model and its description (chief only).

    The model includes its preprocessing. The source's own files, such as a tokenizer, are written beside it.
    """
    preprocessing = source.preprocessing()
    difference = check_preprocessing(preprocessing, source, topology)
    if difference:
        log.warning("%s may predict wrongly: %s", MODEL_FILE, difference)
    save(model, task, preprocessing, folder / MODEL_FILE)
    for name, content in source.assets().items():
        write_atomic(folder / name, content)
    write_json(folder / DESCRIPTION_FILE, description(source, task, preprocessing), indent=2)


def save(model: keras.Model, task: Task, preprocessing: Preprocessing, path: Path) -> None:
    """Saves the model with its preprocessing. Raises StorageError if the file cannot be written.

    The model is compiled again with the same loss and metrics, so that the file does not need
    hvtrain. If Keras cannot serialize the model's custom classes, or its tables do not fit into memory,
    only its weights are saved.
    """
    whole = with_preprocessing(model, task, preprocessing)
    try:
        whole.get_config()
        save_model(whole, path)
    except StorageError:
        raise
    except Exception as error:
        weights = path.with_suffix(".weights.h5")
        log.warning(
            "%s is written instead of %s, since Keras cannot save the whole model: %s",
            weights.name,
            path.name,
            in_one_line(error),
        )
        save_model(model, weights)


def with_preprocessing(model: keras.Model, task: Task, preprocessing: Preprocessing) -> keras.Model:
    """Returns a model that takes raw examples; its last layer is the trained model.

    The result and `model` are compiled again, with SGD. If a loss or metric is the user's own, both models
    are saved as if not compiled.
    """
    raw = preprocessing.inputs()
    whole = keras.Model(raw, model(preprocessing(raw)), name=f"{model.name}_from_raw")

    for part in (model, whole):
        # Keras cannot load a model that was compiled without an optimizer. SGD has no slots to
        # save.
        task.compile(part, keras.optimizers.SGD())

    users_names = sorted(set(custom_names(whole.get_compile_config())))
    if users_names:
        log.info(
            "the saved model is not compiled: a program that loads it may not have your %s",
            ", ".join(users_names),
        )
        # For both models: even with compile=False, Keras would compile
        # the inner one when it loads the file.
        model.get_compile_config = dict
        whole.get_compile_config = dict
    return whole


def custom_names(config: Any) -> Iterator[str]:
    """Yields the names of classes and functions in a Keras config that are not Keras's own."""
    if isinstance(config, dict):
        if config.get("registered_name"):
            # The name of a class is in class_name, that of a function in config.
            name = config["class_name"]
            yield name if name != "function" else config["config"]
        config = list(config.values())
    if isinstance(config, list | tuple):
        for value in config:
            yield from custom_names(value)


def description(source: Source, task: Task, preprocessing: Preprocessing) -> dict[str, Any]:
    """Returns the content of model.json, which describes the inputs and outputs of the saved model."""
    raw = preprocessing.shape
    if isinstance(raw, tuple):
        inputs = {
            "shape": raw,
            "dtype": "float32",
            "values": preprocessing.values,
            "range": preprocessing.range,
        }
    else:
        inputs = tf.nest.map_structure(
            lambda spec: {"shape": list(spec.shape), "dtype": spec.dtype.name}, raw
        )

    output_shape = task.output_shape(source)
    facts = source.facts()
    return {
        "dataset": source.name,
        "input": inputs,
        "output": {"shape": output_shape and list(output_shape), "values": task.output},
        "length": facts.get("length"),
        "num_classes": facts.get("num_classes"),
        "class_names": list(facts.get("class_names", ())) or None,
        "assets": list(source.assets()),
    }


def check_preprocessing(
    preprocessing: Preprocessing,
    source: Source,
    topology: Topology,
) -> str | None:
    """Compares preprocessing() with the source's stream on a few raw examples.

    Returns a description of the difference; None if they agree, or cannot be compared.
    """
    if source.skips:
        return None  # The stream may leave out the first examples.
    split = checked_split(source)
    try:
        batches = raw_batches(source, topology, NUM_CHECKED)
        if not batches:
            return None
        streamed, *_ = next(source.evaluation(split, topology, len(batches)).as_numpy_iterator())
    except (OSError, UserError, tf.errors.OpError):
        return None  # Missing files must not fail a finished run, which no longer needs them.

    for number, batch in enumerate(batches):
        # As in the stream: on a GPU the last bits of a resized image may differ.
        with tf.device("CPU:0"):
            preprocessed = tf.nest.flatten(preprocessing(batch))
        for part, streamed_part in zip(preprocessed, tf.nest.flatten(streamed)):
            actual = keras.ops.convert_to_numpy(part)[0]
            expected = streamed_part[number]
            if actual.shape != expected.shape:
                return (
                    f"preprocessing() of {source.name} gives examples of shape {actual.shape}, and the model was "
                    f"trained on {expected.shape}; make preprocessing() do the same as the stream"
                )
            gap = float(np.max(np.abs(actual - expected), initial=0.0))
            scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
            if not gap <= 1e-5 * scale:  # Also true for NaN.
                return (
                    f"example {number} ({split}) differs by {gap:.2g} between preprocessing() of {source.name} and "
                    "its stream; make preprocessing() do the same as the stream"
                )
    return None


def checked_split(source: Source) -> str:
    """Returns the split whose examples are used to check a saved model."""
    return "test" if source.num_examples("test") else "train"


def raw_batches(source: Source, topology: Topology, num_batches: int) -> list[Any]:
    """Returns `num_batches` batches of one raw example each, as the saved model takes them.

    There are fewer if the split is smaller, and none if the source has no raw examples.
    """
    # Raw images are integers, and the model takes float32; columns and tokens keep their types.
    dtype = tf.float32 if isinstance(source.preprocessing().shape, tuple) else None
    examples = source.raw_examples(checked_split(source), topology, num_batches)
    return tf.nest.map_structure(
        lambda value: tf.constant(np.asarray(value)[np.newaxis], dtype), list(examples)
    )
