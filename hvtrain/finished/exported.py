"""Exports a model to another format, runs the export as other programs would, and compares outputs with the model's."""

import json
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import Model

from hvtrain.errors import ConfigError, UserError, in_one_line
from hvtrain.finished.finished_run import FinishedRun
from hvtrain.finished.hugging_face import CARD_FILE, model_card
from hvtrain.system.files import TEMPORARY, remove, write_atomic
from hvtrain.system.text import counted
from hvtrain.training.saved_model import checked_split, description, raw_batches, with_preprocessing

NUM_EXAMPLES = 8
# Relative to the largest output, or to 1 if all outputs are smaller. Other runtimes round
# differently.
LARGEST_DIFFERENCE = 1e-3
ONNX_PACKAGES = ("tf2onnx", "onnxruntime")

# All outputs of a model in keras.tree's order, which sorts the keys of a dict.
Outputs = list[np.ndarray]
# Runs an exported model on a batch and returns its outputs.
Runtime = Callable[[Any], Outputs]


def export_checked(
    run: FinishedRun, model_format: str, path: Path, result: Mapping[str, Any], address: str
) -> str:
    """Exports the run's model to a new path, and checks the export's outputs against the model's on examples.

    Args:
        run: the finished run.
        model_format: a key of FORMATS.
        path: where the model is written. Its description is written beside it, or into the folder
            with format=hf.
        result: the run's result.json, for the model card of format=hf.
        address: the address from which Keras will load the model, for that card.

    Returns:
        A phrase that says how far the outputs differ.

    Raises:
        ConfigError: the model cannot be exported, the export's outputs differ, or a file beside it
            belongs to another model. Nothing is left at the path.
    """
    if model_format == "onnx":
        missing = [name for name in ONNX_PACKAGES if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"format=onnx needs {' and '.join(missing)}; to install: "
                "./scripts/run uv pip install --no-deps -r scripts/lock/export.txt"
            )

    preprocessing = run.source.preprocessing()
    facts = {**description(run.source, run.task, preprocessing), "checkpoint": run.checkpoint}
    companions = companion_files(
        path, model_format, json.dumps(facts, indent=2) + "\n", run.source.assets()
    )
    if model_format == "hf":
        is_image = "image_shape" in run.source.facts()
        companions[path / CARD_FILE] = model_card(
            facts, result, run.task.name, is_image, address
        ).encode()
    model = with_preprocessing(run.in_float32(), run.task, preprocessing)
    examples = raw_examples(run)
    expected = [as_arrays(model(batch, training=False)) for batch in examples]

    unfinished = path.with_name(f"{TEMPORARY}{path.name}")
    write, open_exported = FORMATS[model_format]
    try:
        remove(unfinished)
        try:
            write(model, unfinished)
            run_exported = open_exported(unfinished)
            actual = [run_exported(batch) for batch in examples]
        except ConfigError:
            raise
        except Exception as error:  # Each exporter and each runtime has its own error types.
            raise ConfigError(
                f"format={model_format} cannot represent this model: {in_one_line(error)}; choose another format"
            ) from error

        verdict = compare_outputs(actual, expected, model_format)
        unfinished.rename(path)
    finally:
        remove(unfinished)

    # Written last, so that a failed export leaves no description behind.
    for file, content in companions.items():
        write_atomic(file, content)

    return verdict


def companion_files(
    path: Path, model_format: str, facts: str, assets: Mapping[str, bytes]
) -> dict[Path, bytes]:
    """Returns the files to write with an exported model: its description and assets, by path.

    Assets are files such as a tokenizer. Exports of a model to several formats share these files.
    Raises ConfigError if one exists with other contents, since it then belongs to another model.
    """
    # A folder's name may contain a dot that does not begin a suffix, as in lr0.1.
    name = path.name if model_format in ("savedmodel", "hf") else path.stem
    folder = path if model_format == "hf" else path.parent
    files = {folder / f"{name}.json": facts.encode()}
    files |= {folder / asset: content for asset, content in assets.items()}
    for file, content in files.items():
        if file.exists() and file.read_bytes() != content:
            raise ConfigError(
                f"--output {path} would replace {file}, which belongs to another model; choose another path"
            )

    return files


def raw_examples(run: FinishedRun) -> list[Any]:
    """Returns up to NUM_EXAMPLES batches of one raw example each, as the exported model takes them.

    The examples are not batched together because their shapes may differ.
    """
    source = run.source
    topology = run.strategy.topology
    try:
        batches = raw_batches(source, topology, NUM_EXAMPLES)
    except (OSError, UserError, tf.errors.OpError):
        # The model itself does not need the files, which may be gone or damaged.
        return []
    if batches or source.preprocessing().layers:
        return batches
    # Without preprocessing layers, the exported model takes the pipeline's output.
    dataset = source.evaluation(checked_split(source), topology, 1).take(NUM_EXAMPLES)
    return [keras.tree.map_structure(tf.convert_to_tensor, inputs) for inputs, *_ in dataset]


def as_arrays(outputs: Any) -> Outputs:
    return list(map(keras.ops.convert_to_numpy, keras.tree.flatten(outputs)))


def compare_outputs(
    actual: Sequence[Outputs], expected: Sequence[Outputs], model_format: str
) -> str:
    """Describes the largest absolute difference between two models' outputs.

    Args:
        actual: the exported model's outputs, for each example.
        expected: the original model's outputs, for each example.
        model_format: the format, for messages.

    Raises:
        ConfigError: the difference exceeds LARGEST_DIFFERENCE, an output is not finite, or shapes differ.

    >>> compare_outputs([[np.array([0.25])]], [[np.array([0.2502])]], "onnx")
    'its outputs on 1 example differ by at most 0.0002 (largest output: 0.25)'
    """
    if not expected:
        return "not checked, since no raw examples can be read from the data set"
    difference = 0.0
    largest = 0.0

    for actual_outputs, expected_outputs in zip(actual, expected):
        for array, reference in zip(actual_outputs, expected_outputs, strict=True):
            if array.shape != reference.shape:
                raise ConfigError(
                    f"format={model_format} gives outputs of shape {array.shape} instead of {reference.shape}; "
                    "choose another format"
                )

            # Unlike Python's max, np.max propagates a NaN.
            difference = float(np.max(np.abs(array - reference), initial=difference))
            largest = max(largest, float(np.max(np.abs(reference), initial=0.0)))

    if not difference <= LARGEST_DIFFERENCE * max(largest, 1.0):  # Also if it is NaN.
        raise ConfigError(
            f"the model in format={model_format} gives outputs that differ from the run's by {difference:.2g}, "
            f"with a largest output of {largest:.2g}; choose another format"
        )

    return (
        f"its outputs on {counted(len(expected), 'example')} differ by at most {difference:.2g} "
        f"(largest output: {largest:.2g})"
    )


def _write_saved_model(model: Model, path: Path) -> None:
    names = [argument_name(tensor.name) for tensor in keras.tree.flatten(model.input)]
    if len(set(names)) < len(names):
        raise ConfigError(
            "two columns get the same name in a SavedModel's signature, which allows only letters, "
            f"digits and _ ({', '.join(names)}); rename one of them"
        )
    signature = keras.tree.map_structure(
        lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype, argument_name(tensor.name)),
        model.input,
    )
    model.export(str(path), format="tf_saved_model", verbose=False, input_signature=[signature])


def argument_name(name: str) -> str:
    """Turns an input's name, such as a table's column, into one that a SavedModel's signature allows.

    >>> argument_name("sepal length (cm)"), argument_name("_size")
    ('sepal_length__cm_', 'arg__size')
    """
    # TensorFlow replaces characters in the same way, but keeps non-ASCII letters and then rejects them.
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    return name if name[0].isalpha() else f"arg_{name}"


def _write_onnx(model: Model, path: Path) -> None:
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Normalization):
            # tf2onnx turns each captured tensor into an input of the model, but arrays into
            # constants.
            layer.mean = np.asarray(layer.mean)
            layer.variance = np.asarray(layer.variance)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras looks up a name that NumPy has removed.
        model.export(str(path), format="onnx", verbose=False)


def _write_tflite(model: Model, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _write_saved_model(model, Path(folder))
        path.write_bytes(tf.lite.TFLiteConverter.from_saved_model(folder).convert())


def _open_keras(path: Path) -> Runtime:
    model = keras.models.load_model(path)
    return lambda batch: as_arrays(model(batch))


def _open_saved_model(path: Path) -> Runtime:
    loaded = tf.saved_model.load(str(path))
    return lambda batch: as_arrays(loaded.serve(batch))


def _open_onnx(path: Path) -> Runtime:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [model_input.name for model_input in session.get_inputs()]
    return lambda batch: session.run(None, arrays_by_name(batch, names))


def _open_tflite(path: Path) -> Runtime:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow warns that the interpreter will move.
        interpreter = tf.lite.Interpreter(str(path))

    runner = interpreter.get_signature_runner()
    names = list(runner.get_input_details())

    def run(batch):
        outputs = runner(**arrays_by_name(batch, names))
        order = sorted(outputs)
        # The outputs of a list are numbered; sorted as text, output_10 would precede output_2.
        if "output_10" in outputs:
            order.sort(key=len)
        return [outputs[name] for name in order]

    return run


def arrays_by_name(batch: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the arrays of a batch by the names of the exported model's inputs."""
    if isinstance(batch, dict):
        batch = batch | {argument_name(name): array for name, array in batch.items()}
        return {name: np.asarray(batch[name]) for name in names}
    return dict(zip(names, map(np.asarray, tf.nest.flatten(batch)), strict=True))


# For each format, the function that writes a model to a path, and the one that opens it as other
# programs would.
FORMATS: dict[str, tuple[Any, Callable[[Path], Runtime]]] = {
    "keras": (Model.save, _open_keras),
    "savedmodel": (_write_saved_model, _open_saved_model),
    "onnx": (_write_onnx, _open_onnx),
    "tflite": (_write_tflite, _open_tflite),
    "hf": (partial(Model.save, zipped=False), _open_keras),
}
