"""The joint batch of all ranks: losses with the gradients of a single process, and batch normalization.

Keras's own BatchNormalization sees only one rank's batch. Here each rank sends its mean, its sum of squared
deviations and its count to all ranks, which combine them (Chan, Golub and LeVeque 1979). Horovod's
layer for Keras 2 reduces means of squares instead, and loses the variance if the mean is large: if it
is thousands of standard deviations, no digit of the variance is right.
"""

from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvtrain.keras.in_graph import counter, in_every_step, positional_name, refuse_xla
from hvtrain.step.joint_loss import joint_loss, subclass_under_its_name


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

    The mean of the ranks' results is sum(values x weights) / sum(weights) over the joint batch. So a
    DistributedGradientTape or DistributedOptimizer, which averages gradients, gets the joint gradient.
    The result is 0 if the weights of all ranks sum to 0.

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


def mean_over_ranks(scalar: tf.Tensor) -> tf.Tensor:
    """Returns the mean of a scalar over all ranks, as float32 (every rank).

    Raises:
        ConfigError: Inside a function that XLA compiles.
    """
    scalar = tf.cast(scalar, tf.float32)
    if hvd.size() == 1:
        return scalar
    refuse_xla(
        "the exchange of the number by which this loss divides (a loss with reduction sum_over_batch_size and without "
        "a mask or an ignored label needs none)"
    )
    name = positional_name("joint_denominator")
    # A constant if all weights are 1 and the batch's size is known while the step is traced.
    vector = in_every_step(scalar[None])
    return hvd.allreduce(vector, op=hvd.Average, name=name, ignore_name_scope=True)[0]


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
        ConfigError: Inside a function that XLA compiles.

    Example:
        logits = images @ tf.transpose(hvd.joint_batch(texts)) / temperature
        own = hvd.rank() * tf.shape(images)[0] + tf.range(tf.shape(images)[0])
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(own, logits)
    """
    rows = tf.convert_to_tensor(rows)
    if hvd.size() == 1:
        return rows
    if rows.dtype == tf.bfloat16:  # Horovod cannot gather bfloat16.
        return tf.cast(joint_batch(tf.cast(rows, tf.float32)), tf.bfloat16)
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

    # The lengths are constant if the number of rows is known while the step is traced.
    return gather(in_every_step(rows))


class _JointMoments:
    """Mixin before BatchNormalization: computes mean and variance over the batches of all ranks."""

    axis: int
    _reduction_axes: list[int]

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Overrides Keras's method. Keras passes inputs as float32 or float64 under any policy."""
        if hvd.size() == 1:
            return super()._moments(inputs, mask)  # type: ignore[misc]
        moments = local_moments(inputs, mask, self._reduction_axes)
        rows = _rows_of_all_ranks(tf.concat(moments, axis=0))
        mean, variance = combine(rows, inputs.shape[self.axis])
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)


@keras.saving.register_keras_serializable(package="hvtrain")
class SyncBatchNormalization(_JointMoments, keras.layers.BatchNormalization):
    """Batch normalization that trains with the mean and variance of the joint batch of all ranks.

    In training each call is collective, forward and backward: every rank must make the same calls in
    the same order. Batches may differ in size, and may be empty. In inference, and on a single rank,
    it is Keras's layer. Outputs, gradients and moving statistics are those of one process on the joint
    batch if gradients are averaged over the ranks (DistributedOptimizer) and each rank's loss is the
    mean over its batch (if batches are unequal, multiplied by its size x number of ranks / size of the
    joint batch).

    Arguments are those of keras.layers.BatchNormalization; fused comes first, as in Horovod's
    layer. Compile with jit_compile="auto" (the default, which leaves XLA out because of this layer)
    or False.

    Raises:
        ValueError: fused=True or None, or synchronized=True.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ValueError(
                f"fused={fused} is not supported: a fused kernel sees one rank only; leave fused out"
            )
        if kwargs.get("synchronized"):
            raise ValueError(
                "synchronized=True is for tf.distribute; this layer always synchronizes through Horovod; leave it out"
            )
        super().__init__(**kwargs)
        self.supports_jit = False


def synchronize(layer: keras.layers.BatchNormalization) -> None:
    """Makes a BatchNormalization layer, in place, train as SyncBatchNormalization does.

    The layer's class becomes a subclass of the same name, so a built model keeps its variables, and a
    saved model loads with the plain layer.
    """
    # Bypasses Keras's __setattr__, which tracks a layer's attributes.
    object.__setattr__(layer, "__class__", subclass_under_its_name(type(layer), _JointMoments))
    layer.supports_jit = False


def synchronized_layers(model: keras.Model) -> list[Any]:
    """Returns the layers that normalize over the batches of all ranks, of either kind above."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, _JointMoments)]


def local_moments(inputs: Any, mask: Any, axes: list[int]) -> tuple[Any, Any, Any]:
    """Returns mean, sum of squared deviations and count of this rank's batch, as vectors.

    All are zero for an empty batch. The first two have one value per channel. The count has a
    single value, or with a mask one per channel: a mask lacks only the last axis, so with channels
    first it may select different positions in each channel.

    Args:
        inputs: the batch.
        mask: True for elements that count, in the inputs' shape without the last axis; or None.
        axes: all axes except that of the channels.
    """
    if mask is None:
        total = tf.reduce_sum(inputs, axes)
        num_elements = tf.reduce_prod(
            tf.gather(tf.shape(inputs, out_type=tf.int64), axes), keepdims=True
        )
        count = tf.cast(num_elements, inputs.dtype)
    else:
        used = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
        total = tf.reduce_sum(tf.where(used, inputs, 0.0), axes)
        count = tf.reduce_sum(tf.cast(used, inputs.dtype), axes)

    mean = tf.math.divide_no_nan(total, count)
    differences = inputs - tf.reshape(
        mean, [1 if axis in axes else -1 for axis in range(len(inputs.shape))]
    )
    if mask is not None:
        differences = tf.where(used, differences, 0.0)
    return mean, tf.reduce_sum(tf.square(differences), axes), count


def combine(rows: Any, num_channels: int) -> tuple[Any, Any]:
    """Returns mean and (biased) variance of each channel, as float64, from all ranks' moments.

    Computing in float64 is cheap for so few values, and avoids further rounding errors.

    Args:
        rows: [ranks, ...], in each row a rank's means, sums of squared deviations and counts, as
            local_moments returned them.
        num_channels: number of the layer's channels.
    """
    means, deviations, counts = tf.split(
        tf.cast(rows, tf.float64), [num_channels, num_channels, -1], axis=1
    )
    count = tf.reduce_sum(counts, axis=0)
    mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, axis=0), count)
    deviation = tf.reduce_sum(deviations + counts * tf.square(means - mean), axis=0)
    return mean, tf.math.divide_no_nan(deviation, count)


@tf.custom_gradient
def _rows_of_all_ranks(row):
    """Returns a matrix [ranks, ...] of all ranks' rows.

    It is the sum of the ranks' matrices, each of which is zero except for the rank's own row. An
    allgather would fail once a rank has called hvd.join. Such a rank adds zeros to the sum, so its count
    is 0.
    """
    rank = hvd.rank()
    rows = tf.pad(row[tf.newaxis], [[rank, hvd.size() - rank - 1], [0, 0]])
    return _sum_over_ranks(rows), _own_row_of_sum


@tf.custom_gradient
def _own_row_of_sum(gradients):
    """Returns the gradient of _rows_of_all_ranks: this rank's row of the sum over the ranks.

    It is a sum, not a mean, because a rank's row affects the losses of all ranks. Each rank then
    has the gradient of the sum of all losses, and the optimizer's mean over the ranks is the
    gradient of their mean. Each of the two functions is the other's gradient, so higher derivatives
    are right too.
    """
    return _sum_over_ranks(gradients)[hvd.rank()], _rows_of_all_ranks


def _sum_over_ranks(tensor):
    # Not named after the layer, since a model that uses it twice would send two messages with the
    # same name. The backward pass does not use Horovod's registered gradient, whose name comes from
    # Keras's names: these may differ between ranks.
    total = hvd.allreduce(
        tensor, op=hvd.Sum, name=positional_name("sync_batch_norm"), ignore_name_scope=True
    )
    # A tf.function that is called twice in one graph sends each of its names twice. Both calls
    # write this counter, so they run in program order, and the same sum comes first on all ranks.
    with tf.control_dependencies([total]):
        counter("sync_batch_norm").assign_add(1)
    return total
