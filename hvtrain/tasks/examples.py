"""Examples for a task: random ones to try its loss and metrics, and real ones for its figures.

Random examples show, before a run, whether a metric can be exact over ranks. Real ones show a trained
model's outputs in the report, with images as PNG.
"""

import base64
import io
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.metrics import (
    FBetaScore,
    Metric,
    SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy,
)
from PIL import Image, ImageOps

from hvtrain.errors import ConfigError, in_one_line
from hvtrain.system.text import counted

# Number of examples on which the loss and each metric are tried before a run.
NUM_CHECKED = 32
TOP_K = (TopKCategoricalAccuracy, SparseTopKCategoricalAccuracy)
# The longest side of an image in the report.
MAX_SIDE_PIXELS = 192
# The row of a batch's first wrong target and what is wrong with it; None if all targets are right.
Fault = tuple[int, str] | None
# Predictions by column name, each with a number or a row per example.
Columns = dict[str, np.ndarray]


def draw(*specs: Any) -> tuple[Any, ...]:
    """Draws NUM_CHECKED examples with the shapes and types of nested tf.TensorSpecs.

    Integers and booleans are 0 or 1, floats are between 0 and 1, and axes of unknown size get size 4.
    """
    # The same seed on all ranks, so that all of them accept or refuse a metric.
    rng = np.random.default_rng(0)

    def draw_part(spec):
        size = [NUM_CHECKED, *(side or 4 for side in spec.shape)]
        if spec.dtype.is_integer or spec.dtype.is_bool:
            return rng.integers(2, size=size).astype(spec.dtype.name)
        return rng.random(size).astype(np.float32)

    return keras.tree.map_structure(draw_part, specs)


def draw_classes(shape: tuple[int, ...], num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws NUM_CHECKED examples of class indices of this shape, and a logit per class for each index."""
    rng = np.random.default_rng(0)
    targets = rng.integers(num_classes, size=(NUM_CHECKED, *shape), dtype=np.int32)
    return targets, rng.normal(size=(*targets.shape, num_classes)).astype(np.float32)


def first_fault(is_wrong: np.ndarray, problem: Callable[[int], str]) -> Fault:
    """Returns the first example with True in an array [examples, ...], and its problem; None if there is none.

    >>> first_fault(np.array([[False, False], [False, True]]), lambda row: f"{row} is wrong")
    (1, '1 is wrong')
    """
    if not is_wrong.any():
        return None
    row = int(np.unravel_index(is_wrong.argmax(), is_wrong.shape)[0])
    return row, problem(row)


def out_of_range(targets: np.ndarray, limit: int, ignored: int | None = None) -> Fault:
    """Returns the first example with a target, other than `ignored`, outside 0 ... limit - 1, and its problem.

    >>> out_of_range(np.array([[0, 2], [255, 3]]), 3, ignored=255)
    (1, 'has the target 3, outside 0 ... 2')
    """
    is_wrong = ((targets < 0) | (targets >= limit)) & (targets != ignored)

    def problem(row):
        return f"has the target {targets[row][is_wrong[row]][0]}, outside 0 ... {limit - 1}"

    return first_fault(is_wrong, problem)


def check_loss(loss: Any, targets: Any, outputs: Any, are_logits: bool) -> None:
    """Checks that a loss accepts a task's outputs, and does not mistake logits for something else.

    Args:
        loss: The Keras loss.
        targets: NUM_CHECKED targets.
        outputs: Outputs for these targets.
        are_logits: True if outputs are logits.

    Raises:
        ConfigError: The loss cannot take these examples, or the outputs are logits and it does not take logits.
    """
    name = type(loss).__name__
    # Losses without from_logits take numbers or probabilities, except for hinges.
    takes_logits = getattr(loss, "from_logits", "Hinge" in name)
    if are_logits and type(loss).__module__.startswith("keras.") and not takes_logits:
        raise ConfigError(
            f"task.loss is a {name}, which does not take logits, but this task's outputs are logits; "
            "set task.loss.from_logits=true if it has that setting, or choose a cross-entropy"
        )
    specs = [tf.TensorSpec(array.shape, array.dtype) for array in (targets, outputs)]
    try:
        # Traced, not called: a loss over the joint batch would wait here for all ranks.
        tf.function(loss).get_concrete_function(*specs)
    except Exception as error:  # A user's own loss may raise anything.
        raise ConfigError(
            f"task.loss cannot take targets of shape {targets.shape} and outputs of {outputs.shape}, as this task "
            f"has them: {in_one_line(error)}"
        ) from error


def check_logits(outputs: Any, name: str, needed_by: str) -> None:
    """Raises ConfigError if a model ends with a sigmoid or softmax, so that its outputs are not logits.

    Args:
        outputs: A symbolic tensor that the model returned, or a nested structure of them.
        name: The model's name, for the message.
        needed_by: The setting that needs logits.
    """
    history = getattr(outputs, "_keras_history", None)
    # A functional model returns the output of one of its layers, which may be a model too.
    while history and getattr(history.operation, "outputs", None):
        history = history.operation.outputs[history.tensor_index]._keras_history
    if history is None or history.operation is None:
        return
    operation = history.operation
    activation = ""
    if type(operation).__module__.startswith("keras."):
        function = getattr(operation, "activation", operation)
        activation = getattr(function, "__name__", type(function).__name__).lower()
    else:
        # In a user's own layer or model, an activation need not come last, so the call is traced again.
        with suppress(Exception):  # A call that cannot be traced on its own may still train.
            node = operation._inbound_nodes[history.node_index]
            activation = _last_operation(node, history.tensor_index)
    if activation in ("sigmoid", "softmax"):
        raise ConfigError(
            f"{name} ends with a {activation}, and {needed_by} needs logits; leave the {activation} out"
        )


def _last_operation(node: Any, index: int) -> str:
    """Traces a layer's call, and returns the name of the TensorFlow operation that computes one of its outputs.

    Args:
        node: The keras.src.ops.node.Node of the call.
        index: The index of the output.
    """
    specs = {id(tensor): tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in node.input_tensors}
    args, kwargs = node.arguments.fill_in(specs)
    traced = tf.function(node.operation, autograph=False).get_concrete_function(*args, **kwargs)
    operation = traced.outputs[index].op
    while operation.type in ("Identity", "Cast", "Reshape"):
        operation = operation.inputs[0].op
    return operation.type.lower()


def check_additive(metric: Metric, name: str, targets: Any, outputs: Any) -> None:
    """Checks that a metric gives one number, from a state that is a sum over examples.

    An evaluation sums the ranks' states. The result equals the state of a single process on all
    examples only if the state is a sum, which is tried on parts of the examples and on all of them.

    Args:
        metric: The metric; it is copied.
        name: Its name below task.metrics, for messages.
        targets: NUM_CHECKED targets.
        outputs: Outputs for these targets.

    Raises:
        ConfigError: The metric cannot take these examples, gives several numbers, or has a state that is
            not a sum.
    """
    if not (hasattr(targets, "shape") and hasattr(outputs, "shape")):
        raise ConfigError(
            f"task.metrics.{name} takes one output, and there are several; give metrics by output"
        )
    quarter = NUM_CHECKED // 4
    parts = (slice(0), slice(quarter), slice(quarter, None), slice(None))
    try:
        checked = copy_metric(metric, name="checked")
        # Some metrics, such as F1Score, create their variables here.
        # Keras passes sample_weight to all.
        checked.update_state(targets, outputs, sample_weight=None)
        states = [_state(checked, targets[part], outputs[part]) for part in parts]
        result = checked.result()
    except Exception as error:  # A user's own metric may raise anything.
        raise ConfigError(
            f"task.metrics.{name} cannot take targets of shape {targets.shape} and outputs of {outputs.shape}, as "
            f"this task has them: {in_one_line(error)}"
        ) from error

    if isinstance(result, Mapping) or np.ndim(result):
        raise ConfigError(
            f"task.metrics.{name} gives several numbers, and a run logs one for each metric; let it average "
            f"them (task.metrics.{name}.average=macro for F1Score and FBetaScore), or choose another metric"
        )
    _check_k(metric, name, outputs.shape[-1])
    for initial, first, rest, whole in zip(*states):
        # Both parts' states include the initial state, so it is subtracted once. The tolerance is
        # for float32 sums in a different order.
        if not np.allclose(first + rest - initial, whole, rtol=1e-4):
            raise ConfigError(
                f"task.metrics.{name} cannot be exact over ranks: the state of {type(metric).__name__} is not a "
                "finite sum over examples; choose a metric that counts or averages, or compute it from the saved model"
            )


def _check_k(metric: Metric, name: str, num_outputs: int) -> None:
    """Raises ConfigError if a metric takes the k largest outputs of an example, and there are no more than k."""
    # Without a threshold, F1Score counts the largest output as positive.
    is_score = isinstance(metric, FBetaScore) and metric.threshold is None
    k = metric.k if isinstance(metric, TOP_K) else int(is_score)
    if k >= num_outputs:
        raise ConfigError(
            f"task.metrics.{name} takes the {k} largest of {counted(num_outputs, 'output')}, whatever they are; "
            "set the metric's k or threshold, or leave the metric out"
        )


def logits_metric(metric: Metric, setting: str) -> Metric:
    """Returns a Keras metric that takes logits, if this one would take them for probabilities.

    Thresholds of one half become 0, the logit for that probability. Metrics that are not Keras's own
    are returned unchanged.

    Args:
        metric: The metric.
        setting: The setting that it came from, for messages.

    Raises:
        ConfigError: The metric works only with probabilities, or has a threshold other than one half.
    """
    if not type(metric).__module__.startswith("keras."):
        return metric
    config = metric.get_config()
    if "from_logits" in config:
        # Thresholds stay as they are: such a metric first turns logits
        # into probabilities, as AUC does.
        return copy_metric(metric, from_logits=True)
    # Metrics with num_thresholds, such as PrecisionAtRecall, compare outputs with thresholds between
    # 0 and 1; regression and correlation metrics compare them with the targets themselves.
    metric_type = type(metric)
    takes_values = metric_type.__name__ in ("Accuracy", "KLDivergence", "Poisson")
    takes_values |= metric_type.__module__.endswith(("regression_metrics", "correlation_metrics"))
    if takes_values or "num_thresholds" in config:
        raise ConfigError(
            f"{setting} ({metric_type.__name__}) needs probabilities, and this task's outputs are logits; "
            "choose another metric, such as AUC, or compute it from the predictions"
        )

    # Without a threshold, F1Score takes the largest output, as do metrics with top_k.
    takes_largest = config.get("top_k") or isinstance(metric, FBetaScore)
    changes: dict[str, Any] = {}
    for name in config.keys() & {"threshold", "thresholds"}:
        if config[name] is None and takes_largest:
            continue
        if config[name] not in (None, 0, 0.5):
            raise ConfigError(
                f"{setting}.{name}={config[name]} is a probability, and this task's outputs are logits; give 0.5"
            )
        # F1Score and FBetaScore refuse a threshold of 0.
        changes[name] = 1e-30 if isinstance(metric, FBetaScore) else 0.0
    return copy_metric(metric, **changes) if changes else metric


def copy_metric(metric: Metric, **changes: Any) -> Metric:
    """Copies a metric without its state, with some arguments changed, such as its name."""
    return type(metric).from_config({**metric.get_config(), **changes})


def copy_metrics(metrics: Mapping[str, Any]) -> Any:
    """Copies all metrics without their state, in the structure that model.compile takes."""
    if any(isinstance(metric, Mapping) for metric in metrics.values()):
        # Keras takes a list of metrics for each output.
        return {output: copy_metrics(inner) for output, inner in metrics.items()}
    return [copy_metric(metric, name=name) for name, metric in metrics.items()]


def _state(metric: Metric, targets: np.ndarray, outputs: np.ndarray) -> list[np.ndarray]:
    """Resets the metric, updates it with these examples, and returns its variables."""
    metric.reset_state()
    if len(targets):
        metric.update_state(targets, outputs, sample_weight=None)
    return [np.asarray(variable.numpy(), np.float64) for variable in metric.variables]


class ReviewedExamples(NamedTuple):
    """Some examples of a split, in its order, with the model's outputs for them.

    Inputs, targets and outputs are arrays, or nested structures of arrays, whose first axis is the
    examples. `num_examples` is the number of these examples, and `total` that of the whole split, of
    which every `step`-th example is taken.
    """

    inputs: Any
    targets: Any
    outputs: Any
    num_examples: int
    split: str
    total: int
    step: int = 1

    @property
    def description(self) -> str:
        """Describes the examples in words.

        >>> ReviewedExamples(None, None, None, 360, "test", 360).description
        'all 360 test examples'
        >>> ReviewedExamples(None, None, None, 2000, "test", 10_000, step=5).description
        '2,000 of 10,000 test examples'
        """
        if self.num_examples == self.total:
            return f"all {self.total:,} {self.split} examples"
        first = "the first " if self.step == 1 else ""
        return f"{first}{self.num_examples:,} of {self.total:,} {self.split} examples"

    @property
    def has_images(self) -> bool:
        """True if the inputs are grey or RGB images."""
        shape: Any = getattr(self.inputs, "shape", ())
        return len(shape) == 4 and shape[-1] in (1, 3)


def as_numpy(output: Any) -> np.ndarray:
    """Converts a model's output to a NumPy array: floats to float32; integers and booleans keep their type."""
    array = keras.ops.convert_to_numpy(output)
    if array.dtype.kind in "iub":
        return array
    return array.astype(np.float32)  # Also from bfloat16, which NumPy hardly supports.


def as_bytes(image: np.ndarray) -> np.ndarray:
    """Converts an image [height, width, 1 or 3] to uint8 [height, width, 3].

    The data set may have normalized the values, so they are stretched to 0 ... 255.
    """
    image = image.astype(np.float64)
    low = np.nanmin(image)
    high = np.nanmax(image)
    # max() avoids dividing by 0 in an image of a single value. NaN becomes black.
    stretched = np.nan_to_num((image - low) / max(high - low, 1e-9)) * 255
    return np.broadcast_to(np.rint(stretched).astype(np.uint8), (*image.shape[:2], 3))


def png(*panels: np.ndarray) -> str:
    """Encodes uint8 images [height, width, 3], side by side, as one PNG in base64.

    Each image is resized to fit the last one's size. The result is then shrunk until no image is larger
    than MAX_SIDE_PIXELS.
    """
    height, width, _ = panels[-1].shape
    # The gaps between images are transparent, since pages may be light or dark.
    distance = width + max(1, width // 24)
    image = Image.new("RGBA", (len(panels) * distance - distance + width, height))
    for index, pixels in enumerate(panels):
        panel = ImageOps.contain(Image.fromarray(np.ascontiguousarray(pixels)), (width, height))
        left = index * distance + (width - panel.width) // 2
        image.paste(panel, (left, (height - panel.height) // 2))

    # thumbnail() keeps the aspect ratio and never enlarges: 8x8 pixels stay 8x8.
    image.thumbnail((MAX_SIDE_PIXELS * len(panels), MAX_SIDE_PIXELS))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
