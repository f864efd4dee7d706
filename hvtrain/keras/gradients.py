"""Checks gradients for non-finite values, sums their sparse rows, and groups them into messages."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvtrain.core.buckets import in_buckets
from hvtrain.keras.in_graph import in_every_step, tf_variable

NOT_FINITE = "hvtrain: the gradient is not finite"

# True once this process has exchanged rows or parts of weights, for which
# hvd.join's zeros cannot stand in.
exchanges_rows = False


class FiniteCheck:
    """Fails a step on all ranks, before it changes weights, if its gradients are not finite.

    NaN and infinity survive the sum over the ranks, so every rank sees them in the result, and the ranks
    need no message to agree. Only when a step fails do they tell each other whose own gradients were at
    fault; at_fault, int32 [ranks], keeps the result. The step fails on every rank with
    tf.errors.InvalidArgumentError, whose message contains NOT_FINITE.
    """

    def __init__(self) -> None:
        # If True, every update waits until the check has passed. A GPU would be idle meanwhile, so on GPUs
        # the update does not wait: non-finite gradients are replaced by zeros, and the step still fails.
        self.waits = not tf.config.list_logical_devices("GPU")
        with tf.init_scope(), tf.device("/CPU:0"):
            # Shape [None], because the number of ranks changes in an elastic job.
            no_faults = tf.zeros([self.num_processes], tf.int32)
            self.at_fault = tf.Variable(no_faults, trainable=False, name="at_fault", shape=[None])
        with tf.init_scope():
            # Half the squared norm of the last step's gradients, as tf.nn.l2_loss computes it.
            self._half_squares = tf.Variable(0.0, trainable=False, name="gradient_norm")

    @property
    def norm(self) -> float:
        """The norm of the last step's gradients. Repeated rows of sparse gradients count separately."""
        return math.sqrt(2 * max(float(self._half_squares.numpy()), 0.0))

    def __call__(
        self,
        own: Sequence[Any],
        reduced: Sequence[Any],
        excused: Any = False,
        loss_scale: Any = 1.0,
        waits: bool = False,
    ) -> list[Any]:
        """Returns the gradients in `reduced`, and fails the step if they are not finite.

        Args:
            own: this rank's gradients before the reduction.
            reduced: the reduced gradients, the same on all ranks.
            excused: a boolean, the same on all ranks; True lets non-finite gradients pass.
            loss_scale: the scale of the loss; the norm is that of the unscaled gradients. None: keeps the
                last step's norm, as for gradients that are only accumulated.
            waits: on GPUs too, wait until the check has passed, so that no value is replaced by zero.
        """

        def fail():
            faults = self.faults(own)
            with tf.control_dependencies([self.at_fault.assign(faults)]):
                return tf.debugging.Assert(False, [NOT_FINITE, "by rank:", faults])

        # One pass gives both the norm and the check. A second pass over the values is needed only if
        # the sum of squares is not finite, since the square of a finite value may be infinite.
        halves = [tf.cast(tf.nn.l2_loss(value), tf.float32) for value in _values(reduced)]
        half_squares = tf.add_n([tf.zeros([]), *halves])
        all_finite = tf.cond(
            tf.math.is_finite(half_squares), lambda: True, lambda: are_finite(reduced)
        )
        if loss_scale is not None:
            self._half_squares.assign(half_squares / loss_scale**2)
        passes = tf.logical_or(all_finite, excused)
        # In a branch, so that the exchange costs nothing in a step that passes.
        check = tf.cond(passes, tf.no_op, fail)

        def zeros_if_failed(values):
            return tf.where(passes, values, tf.zeros_like(values))

        if not (waits or self.waits):
            return [map_values(zeros_if_failed, gradient) for gradient in reduced]
        with tf.control_dependencies([check]):
            return [map_values(tf.identity, gradient) for gradient in reduced]

    @property
    def num_processes(self) -> int:
        return hvd.size() if hvd.is_initialized() else 1

    def faults(self, own: Sequence[Any]) -> tf.Tensor:
        """Returns int32 [ranks], 1 for ranks whose own gradients are not finite (every rank)."""
        if self.num_processes == 1:
            return tf.constant([1])  # The fault may also be in another replica of this process.
        fault = tf.cast(~are_finite(own), tf.int32)
        return hvd.allgather(fault[None], name="hvtrain_at_fault", ignore_name_scope=True)


def are_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns a boolean tensor, True if all values are finite.

    Takes a single pass: a tensor's sum is not finite if one of its values is not. Finite values whose sum
    overflows count as non-finite too.
    """
    sums = [tf.cast(tf.reduce_sum(value), tf.float32) for value in _values(gradients)]
    return tf.math.is_finite(tf.add_n([tf.zeros([]), *sums]))


def _values(gradients: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the gradients' values, with half precision cast to float32, so that sums do not overflow."""
    values = [
        g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None
    ]
    return [tf.cast(value, tf.float32) if value.dtype.size < 4 else value for value in values]


def sum_duplicates(values: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums the rows that have the same index; returns the sums and the distinct indices.

    Runs on the CPU, which sums in order, so the result is bit-identical on all ranks.

    Args:
        values: rows [n, ...].
        indices: their indices [n].

    >>> values, indices = sum_duplicates(tf.constant([[1.0], [2.0], [3.0]]), tf.constant([7, 4, 7]))
    >>> values.numpy().tolist(), indices.numpy().tolist()
    ([[4.0], [2.0]], [7, 4])
    """
    with tf.device("/CPU:0"):
        unique, positions = tf.unique(indices)
        return tf.math.unsorted_segment_sum(values, positions, tf.size(unique)), unique


def expect_rows(op: int) -> None:
    """Sets exchanges_rows to True. Raises ValueError for an op that cannot reduce rows."""
    global exchanges_rows
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError(
            "only op=Average and op=Sum can reduce IndexedSlices; choose one of these, or pass sparse_as_dense=True "
            "and shard no table"
        )
    exchanges_rows = True


def gather_rows(slices: tf.IndexedSlices, name: str, process_set: Any) -> tf.IndexedSlices:
    """Returns the rows of all ranks, in the order of the ranks (every rank)."""
    options = {"process_set": process_set, "ignore_name_scope": True}
    dtype = slices.values.dtype
    # Horovod cannot gather bfloat16.
    sent = tf.cast(in_every_step(slices.values), tf.float32 if dtype == tf.bfloat16 else dtype)
    values = hvd.allgather(sent, name=f"{name}_values", **options)
    # The indices may be constant too, as those of a position embedding are.
    indices = hvd.allgather(in_every_step(slices.indices), name=f"{name}_indices", **options)
    return tf.IndexedSlices(tf.cast(values, dtype), indices, slices.dense_shape)


def merge_rows(gradient: Any) -> Any:
    """Returns a sparse gradient with each row once, as the sum of its duplicates; a dense one unchanged."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    values, rows = sum_duplicates(gradient.values, gradient.indices)
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def map_values(function: Callable[[Any], Any], gradient: Any) -> Any:
    """Applies a function to a gradient, or to the values of IndexedSlices; None stays None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def is_overwritten(variable: Any) -> bool:
    """Returns True if Keras overwrites this variable with its gradient, as it does for float8."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def variable_id(variable: Any) -> int:
    """Returns an id that is the same for a Keras variable and the TensorFlow variable inside it."""
    return id(tf_variable(variable))


def group_by_message(
    dense: list[int],
    gradients: list[Any],
    variables: list[Any],
    groups: int | list[list[Any]] | None,
    bucket_bytes: int,
) -> list[list[int]]:
    """Groups the positions of dense gradients by message; all gradients in a group have the same type.

    groups and bucket_bytes are as in reduction.Reducer.
    """
    parts = [dense]
    if isinstance(groups, list):
        parts = []
        rest = dense
        for group in groups:
            ids = {variable_id(variable) for variable in group}
            # A variable counts only in the first group that names it, or its gradient would be reduced twice.
            parts.append([i for i in rest if variable_id(variables[i]) in ids])
            rest = [i for i in rest if i not in parts[-1]]
        parts += [[i] for i in rest]
    elif bucket_bytes and groups is None:
        last_first = dense[::-1]
        # A shape that is only known at run time counts as 0 bytes.
        sizes = [
            (gradients[i].shape.num_elements() or 0) * gradients[i].dtype.size for i in last_first
        ]
        parts = [
            [last_first[position] for position in bucket]
            for bucket in in_buckets(sizes, bucket_bytes)
        ]

    num_groups = groups if isinstance(groups, int) else 1
    messages = []
    for part in parts:
        for dtype in dict.fromkeys(gradients[i].dtype for i in part):
            same_type = [i for i in part if gradients[i].dtype == dtype]
            length = math.ceil(len(same_type) / num_groups)
            messages += [
                same_type[start : start + length] for start in range(0, len(same_type), length)
            ]
    return messages
