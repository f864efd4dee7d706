"""Prepares batches within the train step: augmentation on the device, normalization, weights."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from threading import get_ident
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.config.schema import RunConfig
from hvtrain.data.description import count_classes
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.step.joint_loss import scale_gradient
from hvtrain.tasks import Task

BALANCED = "balanced"


def prepare_step(
    model: keras.Model,
    source: Source,
    has_batch_weights: bool = False,
    class_weights: Sequence[float] = (),
    harden: Callable[[Any], Any] = lambda targets: targets,
) -> None:
    """Makes the model's train step accept batches as the run's streams yield them.

    Args:
        model: The compiled model, whose losses joint_loss made.
        source: The data set, which says whether its batches are raw, and whether the step augments them.
        has_batch_weights: The ranks' batches differ in size, and come as pairs (batch, weight).
        class_weights: Weights by class, which multiply those of the examples; empty for none.
        harden: Task.harden, which turns mixed targets back into targets that metrics accept.

    Raises:
        ConfigError: When the step is traced, if the model's own train_step does not apply batch weights.
    """
    if not (has_batch_weights or source.raw_batches or class_weights):
        return
    train_step = model.train_step
    compute_loss = model.compute_loss
    compute_metrics = model.compute_metrics
    augmentation = source.augmentation
    mixes = augmentation and augmentation.mixes
    batch_weight: list[Any] = []  # The weight in the step being traced, until the loss uses it.
    # Targets without mixing and the examples' own weights, which metrics get. By thread: a strategy may
    # trace the steps of several replicas alternately.
    for_metrics: dict[int, Any] = {}

    @wraps(compute_loss)
    def weighted_loss(*args, **kwargs):
        loss = compute_loss(*args, **kwargs)
        return scale_gradient(loss, batch_weight.pop()) if batch_weight else loss

    @wraps(compute_metrics)
    def own_metrics(x, y, y_pred, sample_weight=None):
        hard_targets, weights = for_metrics.pop(get_ident(), (None, sample_weight))
        if hard_targets is not None:
            y = hard_targets
        return compute_metrics(x, y, y_pred, None if sample_weight is None else weights)

    def prepared_step(data):
        weight = 1.0
        if has_batch_weights:
            data, weight = data
            batch_weight[:] = [weight]
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(data)
        if augmentation and augmentation.in_step:
            images, seed = inputs
            inputs, targets = augmentation(images, targets, seed)
        if source.raw_batches:
            inputs = source.finish(inputs)

        if mixes or class_weights:
            for_metrics[get_ident()] = harden(targets) if mixes else None, weights
        if class_weights and mixes:
            targets, weights = weighted_mixture(targets, class_weights)
        elif class_weights:
            by_class = weights_of(targets, class_weights)
            weights = by_class if weights is None else product_by_example(by_class, weights)

        for loss in keras.tree.flatten(model.loss):
            if loss is not None:
                loss.batch_weight = weight

        result = train_step((inputs, targets) if weights is None else (inputs, targets, weights))
        # A model's own train_step may compute no metrics.
        for_metrics.pop(get_ident(), None)
        # compute_loss should have used the weight. Otherwise the gradients of all ranks would count
        # equally, whatever the sizes of their batches.
        if batch_weight:
            raise ConfigError(
                "ranks have batches of different sizes, which the loss has to weight, and the model's train_step does "
                "not call compute_loss; call it there, or let the ranks have equal batches with data.uneven=trim"
            )
        return result

    model.train_step = prepared_step
    if mixes or class_weights:
        model.compute_metrics = own_metrics
    if has_batch_weights:
        model.compute_loss = weighted_loss


def class_weights(config: RunConfig, source: Source, task: Task) -> list[float]:
    """Returns train.class_weights as a list indexed by class; empty if the setting is null.

    "balanced" gives a class that occurs `count` times among n labels the weight
    n / (classes x count), as in scikit-learn: every class then has the same sum of weights, and the
    mean weight is 1. A class without examples gets the weight 0.

    Raises:
        ConfigError: The task has no classes, the source has no counts, or a class or weight is invalid.
    """
    chosen = config.train.class_weights
    if chosen is None:
        return []
    setting = f"train.class_weights={chosen}"
    if not task.has_classes:
        raise ConfigError(
            f"{setting} needs a task whose targets are classes, and {type(task).__name__} has none; leave it out"
        )

    if chosen == BALANCED:
        return _balanced_weights(setting, source)
    if not isinstance(chosen, Mapping):
        raise ConfigError(
            f"{setting} is neither {BALANCED} nor a mapping such as {{0: 1.0, 1: 5.0}}"
        )
    return _weights_by_class(setting, chosen, source)


def _num_classes(source: Source) -> int:
    # For a binary task the source may give no number.
    return source.facts().get("num_classes", 2)


def _balanced_weights(setting: str, source: Source) -> list[float]:
    """Returns n / (classes x count) for each class. Raises ConfigError if the source has no counts."""
    targets = source.whole_targets().get("train")
    if targets is None:
        raise ConfigError(
            f"{setting} needs the number of examples of each class, which {source.name} does not give; "
            "give a weight for each class"
        )
    num_classes = _num_classes(source)
    counts = count_classes(np.asarray(targets), num_classes)
    balanced = counts.sum() / (num_classes * np.maximum(counts, 1))
    return np.where(counts, balanced, 0.0).tolist()


def _weights_by_class(setting: str, chosen: Mapping[Any, Any], source: Source) -> list[float]:
    """Returns the weights that the user has chosen by name or index; 1 for other classes.

    Raises ConfigError for an unknown class or an invalid weight.
    """
    names = [str(name) for name in source.facts().get("class_names", ())]
    num_classes = _num_classes(source)
    weights = [1.0] * num_classes
    # Where names are numbers, such as ratings from 1 to 5, a number is a name and never an index.
    are_numbers = any(re.fullmatch(r"-?\d+(\.\d+)?", name) for name in names)
    for key, weight in chosen.items():
        name = str(key)
        if isinstance(key, bool) and name not in names:
            name = name.lower()  # As in a CSV file; Hydra reads true as a truth value.
        index = -1
        if name in names:
            index = names.index(name)
        elif name.isdecimal() and not are_numbers:
            index = int(name)
        if not 0 <= index < num_classes:
            known = f"0 ... {num_classes - 1}"
            if names:
                numbers = "" if are_numbers else f"{known} or "
                known = f"{numbers}{', '.join(names)}"
            raise ConfigError(
                f"{setting} names the class {key}, and {source.name} has the classes {known}; choose from these"
            )
        if not (isinstance(weight, int | float) and 0 <= weight < float("inf")):
            raise ConfigError(
                f"{setting} gives the class {key} the weight {weight}; "
                "give a finite number of at least 0"
            )
        weights[index] = float(weight)
    return weights


def weights_of(targets: tf.Tensor, class_weights: Sequence[float]) -> tf.Tensor:
    """Returns the float32 weight of each target's class, in the targets' shape; 1 for an ignored label.

    >>> weights_of(tf.constant([0, 1, 255]), [1.0, 3.0]).numpy().tolist()
    [1.0, 3.0, 1.0]
    """
    classes = tf.cast(targets, tf.int32)
    table = tf.constant(class_weights, tf.float32)
    is_class = (classes >= 0) & (classes < len(class_weights))
    # On a CPU tf.gather fails for indices out of range, so ignored labels look up class 0.
    return tf.where(is_class, tf.gather(table, tf.where(is_class, classes, 0)), 1.0)


def product_by_example(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    """Returns the product of two weights of the same n examples; one may also weight parts of an example.

    Plain broadcasting would give [n, n] for [n, 1] and [n], and for [n, height, width] and [n] it would
    weight the columns.

    >>> product_by_example(tf.constant([[2.0], [3.0]]), tf.constant([1, 10])).numpy().tolist()
    [[2.0], [30.0]]
    """
    second = tf.cast(second, first.dtype)
    rank = max(first.shape.rank, second.shape.rank)
    return _with_rank(first, rank) * _with_rank(second, rank)


def _with_rank(weights: tf.Tensor, rank: int) -> tf.Tensor:
    """Appends axes of length 1 until the weights have `rank` axes."""
    index = (..., *[tf.newaxis] * (rank - weights.shape.rank))
    return weights[index]


def weighted_mixture(
    targets: tf.Tensor,
    class_weights: Sequence[float],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns targets, and weights [n], whose weighted cross-entropy sums share x weight x loss over the classes.

    Args:
        targets: The share of each class in an example, [n, classes]; for two classes also that of the
            second alone, [n] or [n, 1].
        class_weights: Weights by class.

    >>> weighted_mixture(tf.constant([[0.5, 0.5, 0.0]]), [1.0, 3.0, 1.0])[0].numpy().tolist()
    [[0.25, 0.75, 0.0]]
    >>> [part.numpy().tolist() for part in weighted_mixture(tf.constant([0.0, 0.5]), [1.0, 3.0])]
    [[0.0, 0.75], [1.0, 2.0]]
    """
    is_binary = targets.shape[-1] != len(class_weights) or targets.shape.rank == 1
    shares = targets
    if is_binary:
        second = tf.reshape(targets, [-1])
        shares = tf.stack([1 - second, second], axis=-1)

    # A cross-entropy is linear in the targets p: with class weights w, sum(w p log q) is sum(w p)
    # times that of the targets w p / sum(w p).
    weighted_shares = shares * tf.constant(class_weights, tf.float32)
    weights = tf.reduce_sum(weighted_shares, axis=-1)
    weighted_shares = tf.math.divide_no_nan(weighted_shares, weights[:, None])
    if is_binary:
        weighted_shares = tf.reshape(weighted_shares[:, 1], tf.shape(targets))
    return weighted_shares, weights
