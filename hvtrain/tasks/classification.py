"""Classification tasks (one class of several, yes or no, any number of labels) and their figures."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from tensorflow import Tensor

from hvtrain.core.figures import Figure, Matrix, Pictures, Table
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.step.joint_loss import is_taking_gradients, subclass_under_its_name
from hvtrain.tasks.examples import (
    Columns,
    Fault,
    ReviewedExamples,
    as_bytes,
    draw_classes,
    first_fault,
    png,
)
from hvtrain.tasks.task import ClassTask, Losses, Metrics, Task

# With more classes than this, the report lists the most frequent confusions instead of a matrix.
MAX_MATRIX_CLASSES = 20
# The largest number of errors that the report shows one by one.
NUM_WORST = 12


class Classification(ClassTask):
    """One class per example: the model outputs a logit for each class.

    Targets are class indices.

    Args:
        loss: Default: cross-entropy of the logits.
        metrics: Default: accuracy.
        best: Default: accuracy.
        label_smoothing: Share of each target that the training loss spreads over all classes
            (Szegedy et al. 2015, arXiv:1512.00567, section 7).

    Raises:
        ConfigError: label_smoothing is below 0, or not below 1.

    Example:

    >>> Classification().decode(np.array([[0.1, 0.9], [0.7, -0.2]]))
    array([1, 0])
    """

    name = "classification"
    target = "one whole number, the index of a class (one-hot labels: y.argmax(axis=1))"
    output = "logits; keras.ops.softmax makes them probabilities"
    best = "accuracy"
    has_classes = True
    num_reviewed = 2000

    def __init__(self, *args: Any, label_smoothing: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not 0 <= label_smoothing < 1:
            raise ConfigError(
                f"task.label_smoothing={label_smoothing} is out of range; "
                "it must be at least 0 and below 1"
            )
        self.label_smoothing = label_smoothing

    def default_loss(self) -> Losses:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def softener(self, source: Source) -> Callable[[Any], Tensor]:
        (num_classes,) = self.output_shape(source)
        # MixUp and CutMix blend these one-hot rows into shares of the classes.
        return lambda targets: tf.one_hot(targets, num_classes)

    def harden(self, targets: Tensor) -> Tensor:
        # Accuracy needs one class per example: the one with the largest share.
        return tf.argmax(targets, axis=-1, output_type=tf.int32)

    def soft_loss(self) -> Losses:
        return with_soft_targets(self.loss, self.label_smoothing)

    def columns(self, outputs: np.ndarray, source: Source) -> Columns:
        """Returns each example's class, its name and probability, and every class's probability."""
        names = output_names(source, outputs.shape[-1])
        classes = self.decode(outputs)
        probabilities = ops.convert_to_numpy(ops.softmax(outputs))

        # Without the prefix p., a class named "class" or "name" would replace a column above it.
        return {
            "class": classes,
            "name": np.array(names, object)[classes],
            "probability": probabilities.max(axis=-1),
            **{f"p.{name}": column for name, column in zip(names, probabilities.T)},
        }

    def review(
        self, reviewed: ReviewedExamples, model: keras.Model, source: Source
    ) -> list[Figure]:
        return _class_figures(reviewed, reviewed.targets, reviewed.outputs, source)


class Multilabel(Task):
    """Any number of labels per example: the model outputs a logit for each label.

    Targets are 0 or 1 for each label.

    Args:
        loss: Default: binary cross-entropy of the logits, the mean over the labels.
        metrics: Default: accuracy, the fraction of labels that are predicted correctly.

    Example:

    >>> Multilabel().decode(np.array([[0.1, 0.9, -3.0], [0.7, -0.2, 2.0]]))
    array([[1, 1, 0],
           [1, 0, 1]], dtype=int32)
    """

    name = "multilabel"
    target = "a row of 0 and 1, one for each label"
    output = "logits, one for each label; keras.ops.sigmoid makes them probabilities"
    best = "accuracy"
    gives_logits = True
    num_reviewed = 2000

    def default_loss(self) -> Losses:
        return keras.losses.BinaryCrossentropy(from_logits=True)

    def default_metrics(self) -> Metrics:
        # The metric gets logits; a logit of 0 is a probability of one half.
        return {"accuracy": keras.metrics.BinaryAccuracy(threshold=0.0)}

    def takes(self, target: Any) -> bool:
        return hasattr(target, "shape") and target.shape.rank == 1

    def fault(self, targets: np.ndarray, source: Source) -> Fault:
        is_wrong = (targets != 0) & (targets != 1)

        def problem(row):
            return f"holds {targets[row][is_wrong[row]][0]}, which is neither 0 nor 1"

        return first_fault(is_wrong, problem)

    def softener(self, source: Source) -> Callable[[Any], Tensor]:
        return lambda targets: tf.cast(targets, tf.float32)

    def harden(self, targets: Tensor) -> Tensor:
        # A mixed label of at least one half counts as 1.
        return tf.cast(targets >= 0.5, tf.float32)

    def examples(self, source: Source) -> tuple[np.ndarray, np.ndarray]:
        targets, logits = draw_classes(self.output_shape(source) or (), 2)
        # draw_classes draws two logits for each label; this task has only one.
        return targets.astype(np.float32), logits[..., 0]

    def decode(self, outputs: np.ndarray) -> np.ndarray:
        return (outputs > 0).astype(np.int32)

    def columns(self, outputs: np.ndarray, source: Source) -> Columns:
        """Returns 0 or 1 for each label, and the probability of 1."""
        names = output_names(source, outputs.shape[-1], "label_names", "label.")
        decoded = self.decode(outputs)
        probabilities = ops.convert_to_numpy(ops.sigmoid(outputs))
        # A label may have the name of another label's probability.
        if not {f"p.{name}" for name in names}.isdisjoint(names):
            names = [f"label.{index}" for index in range(len(names))]
        columns = dict(zip(names, decoded.T))
        return columns | {f"p.{name}": column for name, column in zip(names, probabilities.T)}

    def review(
        self, reviewed: ReviewedExamples, model: keras.Model, source: Source
    ) -> list[Figure]:
        """Returns a table with each label's accuracy, precision and recall."""
        predictions = self.decode(reviewed.outputs) > 0.5
        names = output_names(source, predictions.shape[-1], "label_names")

        rows = []
        for name, true, predicted in zip(names, reviewed.targets.T > 0.5, predictions.T):
            num_true = int(true.sum())
            num_correct = (true & predicted).sum()
            accuracy = np.mean(true == predicted)

            # Precision is 0 for a label that is never predicted; recall, for one that never occurs.
            precision = num_correct / max(predicted.sum(), 1)
            recall = num_correct / max(num_true, 1)
            rows.append([name, num_true, f"{accuracy:.1%}", f"{precision:.1%}", f"{recall:.1%}"])

        columns = ["label", "examples", "accuracy", "precision", "recall"]
        return [Table("Labels", f"On {reviewed.description}.", columns, rows)]


class Binary(Multilabel):
    """Yes or no for each example: the model outputs one logit, and the target is 0 or 1.

    Args:
        loss: Default: binary cross-entropy of the logit.
        metrics: Default: accuracy.

    Example:

    >>> Binary().decode(np.array([[0.3], [-1.2]]))
    array([[1],
           [0]], dtype=int32)
    """

    name = "binary"
    target = "one number, 0 or 1"
    output = "a logit; keras.ops.sigmoid makes it the probability of 1"
    has_classes = True

    def takes(self, target: Any) -> bool:
        return hasattr(target, "shape") and tuple(target.shape) in ((), (1,))

    def columns(self, outputs: np.ndarray, source: Source) -> Columns:
        """Returns each example's class, 0 or 1, its name, and the probability of 1."""
        classes = self.decode(outputs)
        return {
            "class": classes,
            "name": np.array(output_names(source, 2), object)[classes],
            "probability": ops.convert_to_numpy(ops.sigmoid(outputs)),
        }

    def review(
        self, reviewed: ReviewedExamples, model: keras.Model, source: Source
    ) -> list[Figure]:
        # With a logit of 0 for "no", softmax gives "yes" the same probability as sigmoid.
        logits = np.pad(reviewed.outputs, [(0, 0), (1, 0)])
        targets = reviewed.targets.reshape(-1).astype(np.int64)
        return _class_figures(reviewed, targets, logits, source)


def output_names(
    source: Source, num_outputs: int, fact: str = "class_names", prefix: str = ""
) -> list[str]:
    """Returns a name for each of the model's outputs: that of its class or label.

    Args:
        source: The data set.
        num_outputs: The number of outputs.
        fact: The key of the names in the data set's facts.
        prefix: What precedes each output's index in its name, if the fact does not hold `num_outputs`
            distinct names.
    """
    names = source.facts().get(fact) or ()
    # A model may have a different number of outputs, and columns with the same name would overwrite
    # each other.
    if not len(names) == len(set(names)) == num_outputs:
        names = [f"{prefix}{index}" for index in range(num_outputs)]
    return list(map(str, names))


def with_soft_targets(loss: Any, label_smoothing: float) -> keras.losses.Loss:
    """Copies a sparse cross-entropy so that it takes mixed targets and smooths them in training.

    Targets with as many axes as the outputs contain each class's share; others are class indices.
    Keras saves the copy as the plain loss.

    Args:
        loss: A keras.losses.SparseCategoricalCrossentropy without ignore_class.
        label_smoothing: Share of each target that is spread over all classes in training.

    Raises:
        ConfigError: The loss is of another type, which may accept only class indices.
    """
    base = keras.losses.SparseCategoricalCrossentropy
    if type(loss) is not base or loss.ignore_class is not None:
        raise ConfigError(
            "augment or task.label_smoothing mixes classes, but task.loss is "
            f"{type(loss).__name__}, which may accept only class indices; choose "
            "keras.losses.SparseCategoricalCrossentropy without ignore_class, or leave out MixUp, "
            "CutMix and label_smoothing"
        )

    def call(self, y_true, y_pred):
        # Targets are smoothed only in training, so that validation and test losses are comparable
        # with those of other runs and of saved models.
        smoothing = label_smoothing if is_taking_gradients() else 0.0
        if len(y_true.shape) < len(y_pred.shape):
            if not smoothing:
                return base.call(self, y_true, y_pred)
            # Smoothed targets are shares of all classes, which an index cannot express.
            y_true = ops.one_hot(y_true, y_pred.shape[-1])
        return keras.losses.categorical_crossentropy(y_true, y_pred, self.from_logits, smoothing)

    # Copies the attributes, since the arguments that created the loss are unknown.
    extended: Any = object.__new__(subclass_under_its_name(base, call=call))
    vars(extended).update(vars(loss))
    return extended


def _class_figures(
    reviewed: ReviewedExamples, targets: np.ndarray, logits: np.ndarray, source: Source
) -> list[Figure]:
    """Returns a figure of the confusions and, if there are errors, a figure of the worst errors.

    The worst errors are those with the lowest probability of the true class.

    Args:
        reviewed: The examples.
        targets: Class indices [examples].
        logits: Logits [examples, classes].
        source: The data set.
    """
    names = output_names(source, logits.shape[-1])
    predicted = logits.argmax(axis=1)
    figures = [_confusions(reviewed, targets, predicted, names)]

    # Logarithms distinguish even probabilities that are too small for float32.
    log_probabilities = ops.convert_to_numpy(ops.log_softmax(logits))
    true_log_probabilities = log_probabilities[np.arange(len(targets)), targets]
    # A stable sort, so that ties keep the order of the examples.
    order = np.argsort(true_log_probabilities, kind="stable").tolist()
    worst = [row for row in order if targets[row] != predicted[row]][:NUM_WORST]
    if not worst:
        return figures

    title = "Worst examples"
    note = f"Errors with the lowest probability of the true class, among {reviewed.description}."

    examples = [row * reviewed.step for row in worst]
    cells = source.cells(reviewed.split, examples)
    pictures = []
    rows = []
    for row, example, *values in zip(worst, examples, *cells.values()):
        true_name = names[targets[row]]
        predicted_name = names[predicted[row]]
        probability = f"{np.exp(log_probabilities[row, predicted[row]]):.0%}"
        if reviewed.has_images:
            caption = f"{true_name}, predicted {predicted_name} ({probability})"
            pictures.append((png(as_bytes(reviewed.inputs[row])), caption))

        true_probability = f"{np.exp(true_log_probabilities[row]):.1%}"
        rows.append([example, true_name, predicted_name, probability, true_probability, *values])

    if pictures:
        return [*figures, Pictures(title, note, pictures)]
    columns = ["example", "true", "predicted", "probability", "of the true class", *cells]
    return [*figures, Table(title, note, columns, rows)]


def _confusions(
    reviewed: ReviewedExamples, targets: np.ndarray, predicted: np.ndarray, names: list[str]
) -> Figure:
    """Returns the confusion matrix or, for many classes, the most frequent confusions."""
    accuracy = f"{np.mean(targets == predicted):.1%} of {reviewed.description} are correct"
    if len(names) <= MAX_MATRIX_CLASSES:
        counts = tf.math.confusion_matrix(targets, predicted, len(names))
        note = f"{accuracy}. Rows: true class, columns: predicted."
        return Matrix("Confusion matrix", note, names, counts.numpy().tolist())

    # Lists only errors, since correct predictions would fill the list.
    is_wrong = targets != predicted
    pairs = Counter(zip(targets[is_wrong].tolist(), predicted[is_wrong].tolist()))
    rows = [
        [names[target], names[prediction], count]
        for (target, prediction), count in pairs.most_common(MAX_MATRIX_CLASSES)
    ]

    columns = ["true", "predicted", "examples"]
    return Table("Most frequent confusions", f"{accuracy}.", columns, rows)
