"""Runs exported models as other programs do: a batch in, all outputs out; named outputs in the order of their names."""

import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Run = Callable[[Any], list[np.ndarray]]


def _keras(path: Path) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        named = Path(folder) / "model.keras"
        shutil.copy(path, named)
        model = keras.models.load_model(named)
    return lambda batch: [np.asarray(keras.ops.convert_to_numpy(one)) for one in keras.tree.flatten(model(batch))]


def _saved_model(path: Path) -> Run:
    loaded = tf.saved_model.load(str(path))
    return lambda batch: [one.numpy() for one in tf.nest.flatten(loaded.serve(batch))]


def _onnx(path: Path) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return lambda batch: session.run(None, by_name(batch, names))


def _tflite(path: Path) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow warns that this moves to a package of its own.
        interpreter = tf.lite.Interpreter(str(path))
    runner = interpreter.get_signature_runner()
    names = list(runner.get_input_details())

    def run(batch: Any) -> list[np.ndarray]:
        found = runner(**by_name(batch, names))
        return [found[name] for name in sorted(found)]

    return run


def by_name(batch: Any, names: list[str]) -> dict[str, np.ndarray]:
    """The arrays of a batch by the names of the exported model's inputs."""
    if isinstance(batch, dict):
        return {name: np.asarray(batch[name]) for name in names}
    return dict(zip(names, map(np.asarray, tf.nest.flatten(batch)), strict=True))


RUNTIMES: dict[str, Callable[[Path], Run]] = {
    "keras": _keras,
    "savedmodel": _saved_model,
    "onnx": _onnx,
    "tflite": _tflite,
}
"""By format: opens a file and returns the function that runs it."""
