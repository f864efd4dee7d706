"""Losses over the joint batch of all ranks, with the gradients of one process that has it all."""

from typing import Any

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
    with an optimizer or a tape that averages. A loss that calls an attribute `joint_batch`, such as
    hvtrain.tasks.InBatchSoftmax, gets the function of that name.

    Args:
        loss: any keras.losses.Loss.

    Returns:
        A copy, of a subclass of the same name.

    Example:
        loss = hvd.DistributedLoss(keras.losses.SparseCategoricalCrossentropy(ignore_class=0))
        model.compile(hvd.DistributedOptimizer(optimizer), loss, jit_compile=False)
    """
    joint: Any = joint_loss(loss, mean_over_ranks, hvd.size)
    if hasattr(joint, "joint_batch"):
        joint.joint_batch = joint_batch
    return joint


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


def joint_batch(rows: Any, name: str | None = None, process_set: Any = hvd.global_process_set) -> Any:
    """Returns the rows of all ranks, in the ranks' order, with the gradient of the joint loss (every rank).

    For losses that set each example against those of all ranks, as CLIP (Radford et al. 2021) and
    SimCLR (Chen et al. 2020) do. A rank computes the loss of its own examples alone. The gradient
    of its rows is then the sum of what all ranks' losses say of them, while allgather gives the
    mean; and a DistributedOptimizer or DistributedGradientTape, which averages over the ranks, gets
    the gradient of the mean loss of the joint batch.

    Args:
        rows: tensor [own, ...]; the first dimension may differ between the ranks.

    Returns:
        Tensor [all, ...]. With equal batches this rank's rows begin at rank() * own.

    Raises:
        ValueError: inside XLA.

    Example:
        logits = images @ tf.transpose(hvd.joint_batch(texts)) / temperature
        own = hvd.rank() * tf.shape(images)[0] + tf.range(tf.shape(images)[0])
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(own, logits)
    """
    rows = tf.convert_to_tensor(rows)
    if process_set.size() == 1:
        return rows
    if is_compiled_by_xla():
        raise ValueError("joint_batch gathers rows within the step, which XLA cannot compile; leave out jit_compile")

    # Horovod's own names come from tensors, and so from layers, which each rank numbers by itself.
    name = name or positional_name("joint_batch")
    options = {"process_set": process_set, "ignore_name_scope": True}

    @tf.custom_gradient
    def gather(own: tf.Tensor) -> Any:
        lengths = hvd.allgather(tf.shape(own)[:1], name=f"{name}_lengths", **options)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            summed = hvd.allreduce(upstream, op=hvd.Sum, name=f"{name}_gradient", **options)
            return tf.split(summed, lengths, num=process_set.size())[process_set.rank()]

        return hvd.allgather(own, name=name, **options), gradient

    return gather(rows)
