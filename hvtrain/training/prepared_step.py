"""What a batch still needs once it is in the step: augmentation, if it is done there, normalization, and weights."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from threading import get_ident
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.config.schema import RunConfig
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.step.joint_loss import weighted
from hvtrain.tasks import Task


def prepare_step(
    model: keras.Model,
    source: Source,
    losses: Sequence[Any],
    has_batch_weights: bool = False,
    class_weights: Sequence[float] = (),
    harden: Callable[[Any], Any] = lambda targets: targets,
) -> None:
    """Makes the model's train step take batches as the run's streams give them, which is (batch, weight of the batch)
    if batches of different ranks differ in size.

    Args:
        losses: of joint_loss, which the model is compiled with.
        class_weights: by class, which multiply the weights of targets; empty: none.
        harden: of the task; makes targets that augmentation has mixed those that metrics take.
    """
    if not (has_batch_weights or source.raw_batches or class_weights):
        return
    train_step, compute_loss, compute_metrics = model.train_step, model.compute_loss, model.compute_metrics
    augmentation = source.augmentation
    batch_weight: list[Any] = []  # Of the step that is being traced.
    hard_targets: dict[int, Any] = {}  # By thread: a strategy may trace the step of several replicas in turns.

    @wraps(compute_loss)
    def weighted_loss(*args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(*args, **kwargs)
        return weighted(loss, batch_weight.pop()) if batch_weight else loss

    @wraps(compute_metrics)
    def hard_metrics(x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return compute_metrics(x, hard_targets.pop(get_ident(), y), y_pred, sample_weight)

    def prepared(data: Any) -> Any:
        if has_batch_weights:
            data, weight = data
            batch_weight[:] = [weight]
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(data)
        if augmentation and augmentation.in_step:
            images, seed = inputs
            inputs, targets = augmentation(images, targets, seed)
        if source.raw_batches:
            inputs = source.finish(inputs)
        mixes = bool(augmentation and augmentation.mixes)
        if mixes:
            hard_targets[get_ident()] = harden(targets)
        if class_weights and mixes:
            targets, weights = weighted_mixture(targets, class_weights)
        elif class_weights:
            of_targets = weights_of(targets, class_weights)
            weights = of_targets if weights is None else product_by_example(of_targets, weights)
        for loss in losses:
            loss.batch_weight = weight if has_batch_weights else 1.0
        result = train_step((inputs, targets) if weights is None else (inputs, targets, weights))
        if batch_weight:
            raise ConfigError(
                "ranks have batches of different sizes, which the loss has to weight, and the model's train_step does "
                "not call compute_loss; call it there, or let the ranks have equal batches with data.uneven=trim"
            )
        return result

    model.train_step = prepared
    if augmentation and augmentation.mixes:
        model.compute_metrics = hard_metrics
    if has_batch_weights:
        model.compute_loss = weighted_loss


def weights_of(targets: tf.Tensor, class_weights: Sequence[float]) -> tf.Tensor:
    """The weight of each target's class; 1 for an ignored label, which has no class.

    >>> weights_of(tf.constant([0, 1, 255]), [1.0, 3.0]).numpy().tolist()
    [1.0, 3.0, 1.0]
    """
    classes = tf.cast(targets, tf.int32)
    table = tf.constant(class_weights, tf.float32)
    is_class = (classes >= 0) & (classes < len(class_weights))
    return tf.where(is_class, tf.gather(table, tf.where(is_class, classes, 0)), 1.0)


def product_by_example(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    """The product of two weights of the same examples, of which one may have a weight for each part of an example.

    Multiplied as they are, [n, 1] and [n] would give [n, n], and [n, height, width] and [n] a weight by column.

    >>> product_by_example(tf.constant([[2.0], [3.0]]), tf.constant([1, 10])).numpy().tolist()
    [[2.0], [30.0]]
    """
    second = tf.cast(second, first.dtype)
    parts = max(first.shape.rank, second.shape.rank)
    return _with_parts(first, parts) * _with_parts(second, parts)


def _with_parts(weights: tf.Tensor, rank: int) -> tf.Tensor:
    ones = tf.ones([rank - weights.shape.rank], tf.int32)
    return tf.reshape(weights, tf.concat([tf.shape(weights), ones], axis=0))


def weighted_mixture(targets: tf.Tensor, class_weights: Sequence[float]) -> tuple[tf.Tensor, tf.Tensor]:
    """Targets and weights whose weighted loss is the mixture of the weighted losses of the classes.

    Args:
        targets: rows of the parts that classes have in an example, or the part of the second of two.

    >>> weighted_mixture(tf.constant([[0.5, 0.5, 0.0]]), [1.0, 3.0, 1.0])[0].numpy().tolist()
    [[0.25, 0.75, 0.0]]
    >>> [part.numpy().tolist() for part in weighted_mixture(tf.constant([0.0, 0.5]), [1.0, 3.0])]
    [[0.0, 0.75], [1.0, 2.0]]
    """
    one = targets.shape[-1] != len(class_weights) or targets.shape.rank == 1
    rows = tf.stack([1 - (flat := tf.reshape(targets, [-1])), flat], axis=-1) if one else targets
    heavy = rows * tf.constant(class_weights, tf.float32)
    weights = tf.reduce_sum(heavy, axis=-1)
    heavy = tf.math.divide_no_nan(heavy, weights[:, None])
    return tf.reshape(heavy[:, 1], tf.shape(targets)) if one else heavy, weights


BALANCED = "balanced"


def class_weights(config: RunConfig, source: Source, task: Task) -> list[float]:
    """train.class_weights as a list by class; empty without.

    "balanced" is n / (classes x count) for a class with that count among n labels, as in scikit-learn: every class then
    has the same sum of weights, and the mean weight is 1. A class without examples has the weight 0.
    """
    chosen = config.train.class_weights
    if chosen is None:
        return []
    setting = f"train.class_weights={chosen}"
    if not task.has_classes:
        raise ConfigError(f"{setting} needs a task whose targets are classes; {type(task).__name__} has none")
    num_classes = source.facts().get("num_classes", 2)
    if chosen == BALANCED:
        counts = source.class_counts()
        if counts is None:
            raise ConfigError(
                f"{setting} needs counts, which {source.name} does not give; give a weight for each class"
            )
        weights = counts.sum() / (num_classes * np.maximum(counts, 1))
        return [float(weight) for weight in np.where(counts, weights, 0.0)]
    if not isinstance(chosen, Mapping):
        raise ConfigError(f"{setting} is neither {BALANCED} nor a mapping such as {{0: 1.0, 1: 5.0}}")
    names = [str(name) for name in source.facts().get("class_names", ())]
    by_class = [1.0] * num_classes
    for name, weight in chosen.items():
        index = names.index(str(name)) if str(name) in names else int(name) if str(name).isdigit() else -1
        if not 0 <= index < num_classes:
            known = f"0 ... {num_classes - 1}" + (f" or {', '.join(names)}" if names else "")
            raise ConfigError(f"{setting} names the class {name}, and {source.name} has {known}")
        if not (isinstance(weight, int | float) and 0 <= weight < float("inf")):
            raise ConfigError(f"{setting} gives the class {name} the weight {weight}; give a number from 0")
        by_class[index] = float(weight)
    return by_class
