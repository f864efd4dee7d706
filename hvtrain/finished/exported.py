"""Writes a model in another format, and compares its outputs with those of the trained model."""

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.core.records import TEMPORARY, remove, write_atomic
from hvtrain.errors import ConfigError, in_one_line
from hvtrain.finished.finished_run import FinishedRun
from hvtrain.finished.runtimes import RUNTIMES
from hvtrain.training.saved_model import description, with_preprocessing

NUM_EXAMPLES = 8
LARGEST_DIFFERENCE = 1e-3  # Relative to the largest output; other programs round differently.
ONNX_PACKAGES = ("tf2onnx", "onnxruntime")


def export_checked(run: FinishedRun, chosen: str, path: Path) -> str:
    """Exports to a new path; returns how far the outputs differ, in words.

    Raises ConfigError, and leaves nothing at the path, if the model cannot be exported or differs, or if a
    file beside it is that of another model.
    """
    if chosen == "onnx" and (missing := [name for name in ONNX_PACKAGES if find_spec(name) is None]):
        raise ConfigError(
            f"format=onnx needs {' and '.join(missing)}, which is not installed; install it: "
            "./scripts/run uv pip install --no-deps -r scripts/lock/export.txt"
        )
    preprocessing = run.source.preprocessing()
    described = {**description(run.source, run.task, preprocessing), "checkpoint": run.checkpoint}
    told = json.dumps(described, indent=2) + "\n"
    beside = files_beside(path, chosen, told, run.source.assets())
    whole = with_preprocessing(run.in_float32(), run.task, preprocessing)
    examples = real_examples(run)
    expected = [as_arrays(whole(one, training=False)) for one in examples]
    unfinished = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        remove(unfinished)
        try:
            WRITERS[chosen](whole, unfinished)
            run_exported = RUNTIMES[chosen](unfinished)
            actual = [run_exported(one) for one in examples]
        except Exception as error:
            raise ConfigError(
                f"format={chosen} cannot have this model: {in_one_line(error)}; choose another format"
            ) from error
        found = _difference(actual, expected, chosen)
        unfinished.rename(path)
    finally:
        remove(unfinished)
    for file, content in beside.items():
        write_atomic(file, content)
    return found


def files_beside(path: Path, chosen: str, told: str, assets: Mapping[str, bytes]) -> dict[Path, bytes]:
    """What an export writes beside the model: its description, and files such as a tokenizer.

    Exports of the same model to other formats share them. Raises ConfigError if one of them is another model's.
    """
    name = path.name if chosen == "savedmodel" else path.stem  # A folder's name may have dots: lr0.1
    files = {path.with_name(f"{name}.json"): told.encode()}
    files |= {path.with_name(name): content for name, content in assets.items()}
    for file, content in files.items():
        if file.exists() and file.read_bytes() != content:
            raise ConfigError(f"--output {path} would replace {file}, which is another model's; choose another path")
    return files


def real_examples(run: FinishedRun) -> list[Any]:
    """Batches of one raw example of the run's data each, as the exported model takes them; they may differ in size."""
    source, place = run.source, run.strategy.topology
    split = "test" if source.num_examples("test") else "train"
    raw: list[Any] = source.raw_examples(split, place, NUM_EXAMPLES)
    preprocessing = source.preprocessing()
    if not raw and not preprocessing.layers:
        stream = source.evaluation(split, place, 1).take(NUM_EXAMPLES)
        return [keras.tree.map_structure(tf.convert_to_tensor, inputs) for inputs, *_ in stream]
    images = isinstance(preprocessing.shape, tuple)
    return [
        tf.nest.map_structure(
            lambda value: tf.constant(np.asarray(value)[np.newaxis], tf.float32 if images else None), one
        )
        for one in raw
    ]


def as_arrays(outputs: Any) -> list[np.ndarray]:
    """All outputs in Keras's order; those of a dict in the order of their names."""
    return [np.asarray(keras.ops.convert_to_numpy(output)) for output in keras.tree.flatten(outputs)]


def _difference(actual: list[list[np.ndarray]], expected: list[list[np.ndarray]], chosen: str) -> str:
    """The largest difference in words. Raises ConfigError if it is beyond rounding."""
    if not expected:
        return "not checked, since the data set gives no raw examples"
    gap, largest = 0.0, 1.0
    for ours, theirs in zip(actual, expected):
        for one, other in zip(ours, theirs, strict=True):
            if one.shape != other.shape:
                raise ConfigError(f"format={chosen} gives outputs of shape {one.shape} instead of {other.shape}")
            if not np.isfinite(one).all():
                raise ConfigError(
                    f"the model in format={chosen} gives {one[~np.isfinite(one)][0]}; choose another format"
                )
            gap = max(gap, float(np.max(np.abs(one - other), initial=0.0)))
            largest = max(largest, float(np.max(np.abs(other), initial=0.0)))
    if not gap <= LARGEST_DIFFERENCE * largest:
        raise ConfigError(
            f"the model in format={chosen} gives outputs that differ by {gap:.2g}, of {largest:.2g} at most; "
            "choose another format"
        )
    return (
        f"largest difference of its outputs on {len(expected)} examples: {gap:.2g} (the largest output: {largest:.2g})"
    )


def _keras(model: keras.Model, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:  # Keras demands its own suffix.
        model.save(Path(folder) / "model.keras")
        shutil.copy(Path(folder) / "model.keras", path)


def _saved_model(model: keras.Model, path: Path) -> None:
    model.export(str(path), format="tf_saved_model", verbose=False)


def _onnx(model: keras.Model, path: Path) -> None:
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Normalization):
            # tf2onnx makes an input of each tensor that a function takes from outside; arrays become constants in it.
            layer.mean, layer.variance = (np.asarray(one) for one in (layer.mean, layer.variance))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras looks for a name that NumPy has dropped.
        model.export(str(path), format="onnx", verbose=False)


def _tflite(model: keras.Model, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _saved_model(model, Path(folder))
        path.write_bytes(tf.lite.TFLiteConverter.from_saved_model(folder).convert())


WRITERS: dict[str, Callable[[keras.Model, Path], None]] = {
    "keras": _keras,
    "savedmodel": _saved_model,
    "onnx": _onnx,
    "tflite": _tflite,
}
