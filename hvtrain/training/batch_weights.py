"""Weights of ranks whose batches differ in size, so that a step equals one on the joint batch.

The mean over ranks of their mean gradients is the joint batch's only if batches are equal. Otherwise a rank with n of
the step's N examples needs the weight n x ranks / N. Its batch carries that weight, and the loss applies it to the
gradient alone, so that losses and metrics still count examples.
"""

from typing import Any

import keras
import tensorflow as tf

from hvtrain.core.step_plan import StepPlan


def with_rank_weights(batches: tf.data.Dataset, plan: StepPlan, rank: int, start_step: int) -> tf.data.Dataset:
    """Turns (images, labels), from start_step on, into (images, labels, weights float32 [batch])."""
    steps = tf.data.Dataset.range(start_step, 2**62)

    def add(step: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        step_in_epoch = (step - plan.shift) % plan.steps_per_epoch
        weight = tf.cast(plan.weight(rank, step_in_epoch, tf.minimum), tf.float32)
        return *batch, tf.fill(tf.shape(batch[1])[:1], weight)

    return tf.data.Dataset.zip(steps, batches).map(add)


class RankWeighted(keras.losses.Loss):
    """The mean of a loss over the batch, with its gradient multiplied by the batch's weight."""

    def __init__(self, loss: keras.losses.Loss) -> None:
        super().__init__(name=loss.name)
        self.loss = loss

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = self.loss(y_true, y_pred)
        if sample_weight is None:
            return value
        weighted = value * tf.cast(sample_weight[0], value.dtype)
        return weighted + tf.stop_gradient(value - weighted)
