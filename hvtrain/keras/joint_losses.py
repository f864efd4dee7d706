"""Losses over the joint batch of all ranks, with the gradients of a single process."""

from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvtrain.keras.in_graph import in_every_step, positional_name, refuse_xla
from hvtrain.step.joint_loss import joint_loss


def DistributedLoss(loss: keras.losses.Loss) -> keras.losses.Loss:  # noqa: N802, as DistributedOptimizer
    """Returns a copy of a loss whose gradients, averaged over the ranks, are those of the joint batch.

    Ranks may then hold different numbers of masked or ignored elements, or different sums of weights
    with reduction="mean_with_sample_weight"; reduction="sum" sums over all ranks. For other losses
    nothing changes, and there is no cost. The copy differs from the plain loss only where a gradient is
    taken, which every rank must do; in evaluation, and in a saved model, it is the plain loss. Use it
    with an optimizer or a tape that averages. If the loss has an attribute `joint_batch`, as
    hvtrain.tasks.InBatchSoftmax does, the copy gets the function joint_batch in its place.

    Args:
        loss: any keras.losses.Loss.

    Returns:
        A copy, whose class is a subclass of the same name.

    Example:
        loss = hvd.DistributedLoss(keras.losses.SparseCategoricalCrossentropy(ignore_class=0))
        model.compile(hvd.DistributedOptimizer(optimizer), loss, jit_compile=False)
    """
    joint: Any = joint_loss(loss, mean_over_ranks, hvd.size)
    if hasattr(joint, "joint_batch"):
        joint.joint_batch = joint_batch
    return joint


def joint_mean(values: tf.Tensor, weights: tf.Tensor | None = None) -> tf.Tensor:
    """Returns this rank's share of the joint weighted mean, times the number of ranks (every rank).

    The mean over the ranks of what they return is sum(values x weights) / sum(weights) over the joint
    batch. A DistributedGradientTape or DistributedOptimizer, which averages gradients, therefore gets the
    joint gradient. The result is 0 if the weights of all ranks sum to 0.

    Args:
        values: a tensor of any shape, such as a loss for each example or token.
        weights: a tensor whose shape broadcasts to that of the values; None: 1 each.

    Returns:
        A scalar of the values' type; float32 for half precision, whose sums would overflow.
    """
    if tf.as_dtype(values.dtype).size < 4:
        values = tf.cast(values, tf.float32)
    weights = tf.ones_like(values) if weights is None else tf.cast(weights, values.dtype)
    weights = tf.stop_gradient(tf.broadcast_to(weights, tf.shape(values)))
    mean_weight = tf.cast(mean_over_ranks(tf.reduce_sum(weights)), values.dtype)
    return tf.math.divide_no_nan(tf.reduce_sum(values * weights), mean_weight)


def mean_over_ranks(number: tf.Tensor) -> tf.Tensor:
    """Returns the mean of a scalar over all ranks, as float32 (every rank).

    Raises:
        ValueError: inside a function that XLA compiles.
    """
    number = tf.cast(number, tf.float32)
    if hvd.size() == 1:
        return number
    refuse_xla(
        "the exchange of the number by which this loss divides (a loss with reduction sum_over_batch_size and without "
        "a mask or an ignored label needs none)"
    )
    name = positional_name("joint_denominator")
    # It is constant if all weights are 1 and the batch's size is known while the step is traced.
    numbers = in_every_step(number[None])
    return hvd.allreduce(numbers, op=hvd.Average, name=name, ignore_name_scope=True)[0]


def joint_batch(rows: Any) -> Any:
    """Returns the rows of all ranks, in the ranks' order, with the gradient of the joint loss (every rank).

    For losses that contrast each example with those of all ranks, such as CLIP (Radford et al. 2021)
    and SimCLR (Chen et al. 2020). Each rank computes the loss of its own examples only. The gradient of
    its rows is the sum of their gradients from all ranks' losses (allgather would give the mean). A
    DistributedOptimizer or DistributedGradientTape, which averages over the ranks, therefore gets the
    gradient of the joint batch's mean loss. If batches differ in size, take the mean of the examples'
    losses with joint_mean.

    Args:
        rows: tensor [own, ...]; the first dimension may differ between ranks.

    Returns:
        Tensor [all, ...]. With equal batches this rank's rows begin at rank() * own.

    Raises:
        ValueError: inside a function that XLA compiles.

    Example:
        logits = images @ tf.transpose(hvd.joint_batch(texts)) / temperature
        own = hvd.rank() * tf.shape(images)[0] + tf.range(tf.shape(images)[0])
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(own, logits)
    """
    rows = tf.convert_to_tensor(rows)
    if hvd.size() == 1:
        return rows
    refuse_xla("joint_batch, which gathers the rows of all ranks")

    # Horovod would name the messages after the tensor, and so after layers,
    # which ranks may number differently.
    name = positional_name("joint_batch")

    @tf.custom_gradient
    def gather(own):
        lengths = hvd.allgather(tf.shape(own)[:1], name=f"{name}_lengths", ignore_name_scope=True)

        def gradient(upstream):
            summed = hvd.allreduce(
                upstream, op=hvd.Sum, name=f"{name}_gradient", ignore_name_scope=True
            )
            return tf.split(summed, lengths, num=hvd.size())[hvd.rank()]

        return hvd.allgather(own, name=name, ignore_name_scope=True), gradient

    # The number of rows is constant if it is known while the step is traced.
    return gather(in_every_step(rows))
