"""Losses that are exact over ranks, whatever each rank holds; see hvtrain/step/joint_loss.py."""

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvtrain.keras.in_graph import is_compiled_by_xla, positional_name
from hvtrain.step.joint_loss import joint_loss


def DistributedLoss(loss: keras.losses.Loss) -> keras.losses.Loss:  # noqa: N802, as DistributedOptimizer
    """Changes a loss so that the mean over ranks of its gradients is that of the joint batch.

    Ranks may then hold different numbers of masked or ignored elements, or different sums of
    weights with reduction="mean_with_sample_weight"; reduction="sum" sums over all ranks. Other
    losses stay as they are, and cost nothing. It acts only where a gradient is taken, which has to
    be on every rank: in evaluation it is the plain loss. Keras saves it as the plain loss. Use it
    with an optimizer or a tape that averages.

    Args:
        loss: any keras.losses.Loss.

    Returns:
        A copy, of a subclass of the same name.

    Example:
        loss = hvd.DistributedLoss(keras.losses.SparseCategoricalCrossentropy(ignore_class=0))
        model.compile(hvd.DistributedOptimizer(optimizer), loss, jit_compile=False)
    """
    return joint_loss(loss, mean_over_ranks, hvd.size)


def joint_mean(values: tf.Tensor, weights: tf.Tensor | None = None) -> tf.Tensor:
    """Returns this rank's part of the joint weighted mean, times the number of ranks (every rank).

    So the mean over ranks of these numbers is sum(values x weights) / sum(weights) over the joint
    batch, and a DistributedGradientTape or DistributedOptimizer, which takes the mean of gradients,
    gets the joint gradient. 0 if no rank has a weight above 0.

    Args:
        values: a tensor of any shape, such as a loss for each example or token.
        weights: a tensor whose shape broadcasts to that of the values; None: 1 each.
    """
    weights = tf.ones_like(values) if weights is None else tf.cast(weights, values.dtype)
    weights = tf.stop_gradient(tf.broadcast_to(weights, tf.shape(values)))
    mean_weight = tf.cast(mean_over_ranks(tf.reduce_sum(weights)), values.dtype)
    return tf.math.divide_no_nan(tf.reduce_sum(values * weights), mean_weight)


def mean_over_ranks(number: tf.Tensor) -> tf.Tensor:
    """Returns the mean of a scalar over all ranks, as float32, in the graph.

    Raises:
        ValueError: inside XLA.
    """
    number = tf.cast(number, tf.float32)
    if hvd.size() == 1:
        return number
    if is_compiled_by_xla():
        raise ValueError(
            "this loss divides by what each batch holds (a mask, an ignored label or the sum of weights), so the ranks "
            "exchange that number within the step, which XLA cannot compile; leave out jit_compile, or choose a loss "
            "with reduction sum_over_batch_size and no mask"
        )
    name = positional_name("joint_denominator")
    return hvd.allreduce(number, op=hvd.Average, name=name, ignore_name_scope=True)
