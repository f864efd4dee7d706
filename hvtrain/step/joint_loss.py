"""Losses whose mean over all ranks is that of the joint batch, whatever each rank's batch contains.

The mean of the ranks' means is the joint mean only if all ranks divide by the same number. With
masks, ignored labels or weighted means, the denominator depends on the batch, so the ranks average
their denominators. This costs one message with a single number, which depends only on masks and
weights and can be sent while the model computes. Unlike a correction sent with the gradients, this
is exact for several losses, for accumulated gradients and for the loss in the logs.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask
from keras.src.losses.loss import apply_mask
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES
from tensorflow.python.eager.record import could_possibly_record as is_taking_gradients

from hvtrain.errors import ConfigError


def joint_loss(
    loss: keras.losses.Loss,
    mean_over_ranks: Callable[[tf.Tensor], tf.Tensor],
    num_ranks: Callable[[], float],
) -> keras.losses.Loss:
    """Copies a loss so that its gradients, averaged over the ranks, are those of the joint batch.

    The copy's values differ from those of the plain loss only while gradients are taken. Keras
    saves the copy as the plain loss.

    Args:
        loss: any keras.losses.Loss.
        mean_over_ranks: a function that returns the mean of a float32 scalar over all ranks.
        num_ranks: a function that returns the number of ranks; called while a step is traced. If
            the mean gradient weights each rank by its batch size, it must return the size of the
            joint batch divided by the size of this rank's batch.

    Returns:
        The copy, with two more attributes. `denominator` is the number by which the last value was
        divided; None if that is the number of elements, or if nothing was divided. `batch_weight`
        is 1; set it to n x ranks / N if this rank has n of the step's N examples and its gradient
        is multiplied by that number afterwards.
    """
    base = type(loss)

    def call(self, y_true, y_pred):
        self._elements = base.call(self, y_true, y_pred)
        return self._elements

    def __call__(self, y_true, y_pred, sample_weight=None):  # noqa: N807
        self._elements = self.denominator = None
        value = base.__call__(self, y_true, y_pred, sample_weight)
        if self._elements is None:
            return value  # The loss overrides __call__ and did not use call().
        mask = get_keras_mask(y_pred)
        elements_mask = get_keras_mask(self._elements)
        if mask is None:
            mask = elements_mask
        elif elements_mask is not None:
            mask = mask & elements_mask
        self.denominator = _denominator(self._elements, mask, sample_weight, self.reduction)

        if not is_taking_gradients():
            return value
        if self.reduction == "sum":
            # The mean of these values over the ranks is the sum over the joint batch.
            return value * num_ranks() / self.batch_weight
        if self.denominator is None:
            return value
        # value x ratio is this rank's sum / the mean denominator. Its mean over the ranks is the
        # joint sum / the joint denominator.
        ratio = tf.math.divide_no_nan(self.denominator, mean_over_ranks(self.denominator))
        factor = tf.stop_gradient(ratio / self.batch_weight)
        return value * tf.cast(factor, value.dtype)

    # Bypasses __init__, whose arguments are unknown here.
    joint: Any = object.__new__(subclass_under_its_name(base, __call__=__call__, call=call))
    vars(joint).update(vars(loss), _elements=None, denominator=None, batch_weight=1.0)
    return joint


def refuse_joint_batch(loss: Any, strategy: str) -> None:
    """Raises ConfigError for a loss that needs all ranks' examples, which this strategy does not give it."""
    if hasattr(loss, "joint_batch"):
        raise ConfigError(
            f"strategy={strategy} gives a loss one replica's examples, but {type(loss).__name__} "
            "compares the examples of all replicas; choose strategy=horovod"
        )


def subclass_under_its_name(base: type, *mixins: type, **members: Any) -> type:
    """Makes a subclass of the mixins and `base` that has the name of `base`.

    Keras writes class names into saved models, so a saved model loads with the plain class.
    """
    attributes = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        **members,
    }
    made = type(base.__name__, (*mixins, base), attributes)
    # Keras looks up the name under which a class is registered by the class itself.
    if base in GLOBAL_CUSTOM_NAMES:
        GLOBAL_CUSTOM_NAMES[made] = GLOBAL_CUSTOM_NAMES[base]
    return made


def overridden_steps(cls: type) -> list[str]:
    """Returns the names of Keras's step methods that an optimizer or model class overrides.

    >>> overridden_steps(keras.optimizers.Adam)
    []
    """
    base = keras.optimizers.Optimizer
    steps = ["apply", "apply_gradients", "_backend_apply_gradients"]
    if issubclass(cls, keras.Model):
        base = keras.Model
        steps = ["train_step", "compute_loss"]
    return [name for name in steps if getattr(cls, name) is not getattr(base, name)]


def _denominator(
    elements: tf.Tensor, mask: Any, weights: Any, reduction: str | None
) -> tf.Tensor | None:
    """Returns the number by which Keras divides the sum of the elements.

    Returns None if it is the number of elements, or if Keras does not divide. A mask of any shape
    counts by the fraction of its entries that are True, as in keras.src.losses.loss.
    """
    if reduction == "mean_with_sample_weight":
        weights = apply_mask(weights, mask, "float32", reduction)
        return None if weights is None else tf.reduce_sum(tf.cast(weights, tf.float32))
    if mask is None or reduction not in ("sum_over_batch_size", "mean"):
        return None
    kept_fraction = tf.reduce_mean(tf.cast(mask, tf.float32))
    return kept_fraction * tf.cast(tf.size(elements), tf.float32)


def scale_gradient(loss: tf.Tensor, batch_weight: tf.Tensor) -> tf.Tensor:
    """Returns a tensor with the value of the loss, and with its gradient multiplied by batch_weight."""
    scaled = loss * tf.cast(batch_weight, loss.dtype)
    return scaled + tf.stop_gradient(loss - scaled)


class ExactLoss(keras.metrics.Mean):
    """Mean loss that does not depend on how an evaluation's examples are batched.

    It replaces the model's own loss metric, which weights each batch by its number of examples. If
    the loss divides by another number (that of unmasked elements, or the sum of weights), an
    evaluation weights each batch by that number. The result, over all batches of all ranks, is the
    sum of the losses divided by the sum of the denominators.

    Args:
        loss: a loss that joint_loss returned.
    """

    def __init__(self, loss: Any) -> None:
        super().__init__(name="loss")
        self._loss = loss

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        # A strategy may use the plain loss, which lacks this attribute.
        denominator = getattr(self._loss, "denominator", None)
        if denominator is not None and not is_taking_gradients():
            sample_weight = denominator
        super().update_state(values, sample_weight)
