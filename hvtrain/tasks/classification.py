"""Classes: one of several, one of two, or any number of several."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.core.figures import Figure, Matrix, Pictures, Table
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.tasks.reviewed import Reviewed, as_bytes, png
from hvtrain.tasks.task import Losses, Metrics, Task, refuse_targets


class Classification(Task):
    """One class for each example: the model gives a logit for each class, targets are class indices.

    Args:
        loss: default: cross-entropy of the logits.
        metrics: default: accuracy.
    """

    output = "logits; keras.ops.softmax makes them probabilities"
    best = "accuracy"
    has_classes = True
    num_reviewed = 2000

    def __init__(self, loss: Losses = None, metrics: Metrics | None = None, best: str | None = None) -> None:
        super().__init__(
            keras.losses.SparseCategoricalCrossentropy(from_logits=True) if loss is None else loss,
            {"accuracy": keras.metrics.SparseCategoricalAccuracy()} if metrics is None else metrics,
            best,
        )

    def output_shape(self, source: Source) -> tuple[Any, ...]:
        return (source.fact("num_classes", "task=classification"),)

    def check_targets(self, source: Source) -> None:
        target = source.element_spec[1]
        if not (hasattr(target, "dtype") and target.dtype.is_integer and target.shape.rank == 0):
            raise refuse_targets("classification", "one whole number, the index of a class", source)

    def fault(self, targets: np.ndarray, source: Source) -> tuple[int, str] | None:
        outside = np.flatnonzero((targets < 0) | (targets >= source.num_classes))
        if not outside.size:
            return None
        return int(outside[0]), f"label {targets[outside[0]]} is outside 0 ... {source.num_classes - 1}"

    def softener(self, source: Source) -> Callable[[Any], tf.Tensor]:
        (classes,) = self.output_shape(source)
        return lambda targets: tf.one_hot(targets, classes)

    def harden(self, targets: tf.Tensor) -> tf.Tensor:
        return tf.argmax(targets, axis=-1, output_type=tf.int32)

    def soft_loss(self) -> Losses:
        return of_parts(self.loss)

    def examples(self, number: int, source: Source) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        (classes,) = self.output_shape(source)
        return rng.integers(classes, size=number, dtype=np.int32), rng.normal(size=(number, classes)).astype(np.float32)

    def decode(self, outputs: np.ndarray) -> np.ndarray:
        return outputs.argmax(axis=-1)

    def review(self, reviewed: Reviewed, model: keras.Model, source: Source) -> list[Figure]:
        names = class_names(source, reviewed.outputs.shape[-1])
        return review_classes(reviewed, reviewed.targets, reviewed.outputs, names)

    def columns(self, outputs: np.ndarray, source: Source) -> dict[str, np.ndarray]:
        """Each example's class, its name and probability, and the probabilities of all classes."""
        names = class_names(source, outputs.shape[-1])
        probabilities, classes = keras.ops.convert_to_numpy(keras.ops.softmax(outputs)), self.decode(outputs)
        return {
            "class": classes,
            "name": np.array(names, object)[classes],
            "probability": probabilities.max(axis=-1),
            **{f"p.{name}": probabilities[:, index] for index, name in enumerate(names)},
        }


class Multilabel(Task):
    """Any number of labels for each example: the model gives a logit for each, targets are 0 or 1 for each.

    Args:
        loss: default: cross-entropy of the logits, the mean over the labels.
        metrics: default: the fraction of labels that are right.
    """

    output = "logits, one for each label; keras.ops.sigmoid makes them probabilities"
    best = "accuracy"
    num_reviewed = 2000

    def __init__(self, loss: Losses = None, metrics: Metrics | None = None, best: str | None = None) -> None:
        # A logit of 0 is a probability of one half.
        super().__init__(
            keras.losses.BinaryCrossentropy(from_logits=True) if loss is None else loss,
            {"accuracy": keras.metrics.BinaryAccuracy(threshold=0.0)} if metrics is None else metrics,
            best,
        )

    def output_shape(self, source: Source) -> tuple[Any, ...]:
        return tuple(source.element_spec[1].shape)

    def check_targets(self, source: Source) -> None:
        target = source.element_spec[1]
        if not hasattr(target, "shape") or target.shape.rank != 1:
            raise refuse_targets("multilabel", "a row of 0 and 1, one for each label", source)

    def fault(self, targets: np.ndarray, source: Source) -> tuple[int, str] | None:
        rows = ((targets != 0) & (targets != 1)).reshape(len(targets), -1).any(axis=1)
        return (int(np.argmax(rows)), "holds a number that is neither 0 nor 1") if rows.any() else None

    def softener(self, source: Source) -> Callable[[Any], tf.Tensor]:
        return lambda targets: tf.cast(targets, tf.float32)

    def harden(self, targets: tf.Tensor) -> tf.Tensor:
        return tf.cast(targets >= 0.5, tf.float32)

    def examples(self, number: int, source: Source) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        shape = (number, *self.output_shape(source))
        return rng.integers(2, size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)

    def decode(self, outputs: np.ndarray) -> np.ndarray:
        return (outputs > 0).astype(np.int32)

    def review(self, reviewed: Reviewed, model: keras.Model, source: Source) -> list[Figure]:
        return review_labels(reviewed, reviewed.targets, self.decode(reviewed.outputs))

    def columns(self, outputs: np.ndarray, source: Source) -> dict[str, np.ndarray]:
        """For each label 0 or 1, and the probability of 1."""
        names = source.facts().get("label_names") or [f"label.{index}" for index in range(outputs.shape[-1])]
        probabilities, decoded = keras.ops.convert_to_numpy(keras.ops.sigmoid(outputs)), self.decode(outputs)
        found = {str(name): decoded[:, index] for index, name in enumerate(names)}
        return {**found, **{f"p.{name}": probabilities[:, index] for index, name in enumerate(names)}}


class Binary(Multilabel):
    """Yes or no for each example: the model gives one logit, the target is 0 or 1.

    Args:
        loss: default: cross-entropy of the logit.
        metrics: default: accuracy.
    """

    output = "a logit; keras.ops.sigmoid makes it the probability of 1"
    has_classes = True

    def output_shape(self, source: Source) -> tuple[Any, ...]:
        return (1,)

    def check_targets(self, source: Source) -> None:
        target: Any = source.element_spec[1]
        if not hasattr(target, "shape") or tuple(target.shape) not in ((), (1,)):
            raise refuse_targets("binary", "one number, 0 or 1", source)

    def review(self, reviewed: Reviewed, model: keras.Model, source: Source) -> list[Figure]:
        logits = np.concatenate([np.zeros_like(reviewed.outputs), reviewed.outputs], axis=1)
        targets = reviewed.targets.reshape(-1).astype(np.int64)
        return review_classes(reviewed, targets, logits, class_names(source, 2))

    def columns(self, outputs: np.ndarray, source: Source) -> dict[str, np.ndarray]:
        """0 or 1, and the probability of 1."""
        return {"class": self.decode(outputs), "probability": keras.ops.convert_to_numpy(keras.ops.sigmoid(outputs))}


def class_names(source: Source, number: int) -> list[str]:
    """The names of the classes; their numbers, if the source does not know them."""
    names = source.facts().get("class_names") or ()
    return [str(name) for name in names] if len(names) == number else [str(label) for label in range(number)]


def of_parts(loss: Any) -> keras.losses.Loss:
    """The sparse cross-entropy, which takes rows of parts as well as indices of classes; their rank tells which.

    Keras saves it as the plain loss. Raises ConfigError for another loss, which may take indices alone.
    """
    base = keras.losses.SparseCategoricalCrossentropy
    if type(loss) is not base or loss.ignore_class is not None:
        raise ConfigError(
            f"augment mixes the classes of examples, and task.loss is {type(loss).__name__}, which may take indices of "
            "classes alone; choose keras.losses.SparseCategoricalCrossentropy, or leave out what mixes (MixUp, CutMix)"
        )

    def call(self: Any, y_true: Any, y_pred: Any) -> Any:
        if len(y_true.shape) < len(y_pred.shape):
            return base.call(self, y_true, y_pred)
        return keras.losses.categorical_crossentropy(y_true, y_pred, from_logits=self.from_logits)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    either: Any = object.__new__(type(base.__name__, (base,), {**names, "call": call}))
    vars(either).update(vars(loss))
    return either


MOST_CLASSES = 20  # In a matrix; with more classes, the most frequent confusions are listed.
NUM_WORST = 12


def review_classes(reviewed: Reviewed, targets: np.ndarray, logits: np.ndarray, names: Sequence[str]) -> list[Figure]:
    """Figures of targets [examples] and logits [examples, classes]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_parts = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    predicted = logits.argmax(axis=1)
    return [
        _confusions(reviewed, targets, predicted, names),
        *_worst(reviewed, targets, predicted, log_parts, names),
    ]


def _confusions(reviewed: Reviewed, targets: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> Figure:
    right = f"{np.mean(targets == predicted):.1%} of {reviewed.which} are correct"
    if len(names) <= MOST_CLASSES:
        counts = np.zeros((len(names), len(names)), np.int64)
        np.add.at(counts, (targets, predicted), 1)
        return Matrix(
            "Confusion matrix", f"{right}. Rows: true class, columns: predicted.", list(names), counts.tolist()
        )
    wrong = targets != predicted
    pairs = Counter(zip(targets[wrong].tolist(), predicted[wrong].tolist())).most_common(MOST_CLASSES)
    rows = [[names[true], names[taken], count] for (true, taken), count in pairs]
    return Table("Most frequent confusions", f"{right}.", ["true", "predicted", "examples"], rows)


def _worst(
    reviewed: Reviewed, targets: np.ndarray, predicted: np.ndarray, log_parts: np.ndarray, names: Sequence[str]
) -> list[Figure]:
    own = log_parts[np.arange(len(targets)), targets]
    worst = [int(row) for row in np.argsort(own, kind="stable") if targets[row] != predicted[row]][:NUM_WORST]
    if not worst:
        return []
    title, note = "Worst examples", f"Errors with the lowest probability of the true class, among {reviewed.which}."
    sure = np.exp(log_parts[worst, predicted[worst]])
    if reviewed.has_images:
        captions = [
            f"{names[targets[row]]}, predicted {names[predicted[row]]} ({part:.0%})" for row, part in zip(worst, sure)
        ]
        return [
            Pictures(title, note, [(png(as_bytes(reviewed.inputs[row])), text) for row, text in zip(worst, captions)])
        ]
    rows = [
        [row, names[targets[row]], names[predicted[row]], f"{part:.0%}", f"{np.exp(own[row]):.1%}"]
        for row, part in zip(worst, sure)
    ]
    return [Table(title, note, ["example", "true", "predicted", "probability", "of the true class"], rows)]


def review_labels(reviewed: Reviewed, targets: np.ndarray, predicted: np.ndarray) -> list[Figure]:
    """A row for each label of targets and predictions [examples, labels], each 0 or 1."""
    rows = []
    for label, (true, taken) in enumerate(zip(targets.T > 0.5, predicted.T > 0.5)):
        both = int((true & taken).sum())
        precision, recall = both / max(int(taken.sum()), 1), both / max(int(true.sum()), 1)
        rows.append([label, int(true.sum()), f"{np.mean(true == taken):.1%}", f"{precision:.1%}", f"{recall:.1%}"])
    note = f"On {reviewed.which}."
    return [Table("Labels", note, ["label", "examples", "accuracy", "precision", "recall"], rows)]
