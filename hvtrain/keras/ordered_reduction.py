"""Sums the gradients of a step's parts in a fixed order, whichever rank computed which part.

A ring all-reduce adds floating-point numbers in an order that depends on the number of ranks, and so
do the last bits of its result. Here each rank receives its slice of every part's gradients, adds the
slices in the order of the parts, and sends the result to all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvtrain.keras.reduction import Reducer
from hvtrain.keras.same_gradients import compare_structure


@dataclass(eq=False)
class OrderedReducer(Reducer):
    """Averages gradients over parts; every rank computes the same number of parts.

    Attributes:
        parts: for each of this rank's parts, in order, its gradients, followed by other tensors to
            average over all parts. Set before each call; if it is empty, the gradients passed to
            the call are the only part.
        others: the means of those other tensors, set by each call.
    """

    parts: list[list[Any]] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)

    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any] | None = None
    ) -> list[Any]:
        """Returns the gradients' means over all parts (every rank).

        Args:
            gradients: one for each variable, or None. If `parts` is set, the values come from `parts`, and
                this list only shows which variables have a gradient.
            variables: one for each gradient.
        """
        self.num_calls += 1
        reduced = list(gradients)
        present = [i for i, gradient in enumerate(reduced) if gradient is not None]
        parts = self.parts or [reduced]
        positions = [*present, *range(len(reduced), len(parts[0]))]
        # Sparse gradients become dense.
        own = [[tf.convert_to_tensor(part[i]) for i in positions] for part in parts]
        size = self.process_set.size()
        if not self.is_alone:
            settings = f"ordered, parts_per_rank={len(own)}, stop_flag={self.flag is not None}"
            compare_structure(self.name, settings, reduced, list(variables or ()), self.process_set)
            # A rank sends the other ranks' slices of its parts, and then the mean of its own slice to each
            # of them.
            num_elements = sum(value.shape.num_elements() or 0 for value in own[0])
            part_bytes = num_elements * _message_type(own[0]).size
            self.sent_bytes = part_bytes * (len(own) + 1) * (size - 1) / size

        ready = self.marks.ready([value for part in own for value in part]) if self.marks else None
        means = ordered_means(own, self.name, self.process_set)
        done = list(means)
        if not self.is_alone:
            done += self._reduce_flag()
            with tf.control_dependencies(done):
                self.count.assign_add(1)
        if self.marks and ready is not None:
            # Only the first tensor waits for the time mark; the others may be used meanwhile.
            means[:1] = self.marks.reduced(done, ready, means[:1])

        for i, mean in zip(present, means):
            reduced[i] = mean
        self.others = means[len(present) :]
        return reduced


def ordered_means(parts: list[list[tf.Tensor]], name: str, process_set: Any) -> list[tf.Tensor]:
    """Returns the means over all parts (every rank).

    Parts are added in the order of the ranks, and of the parts within each rank.

    Args:
        parts: for each of this rank's parts, a list of tensors. The lists of all ranks have the
            same shapes.
        name: prefix of the messages' names.
        process_set: the ranks that take part.
    """
    first_part = parts[0]
    size = process_set.size()
    dtype = _message_type(first_part)
    flat = [
        tf.concat([tf.reshape(tf.cast(value, dtype), [-1]) for value in part], axis=0)
        for part in parts
    ]
    length = tf.size(flat[0])
    # [parts, ranks, slice], padded to slices of equal length: each rank sums one slice.
    stacked = tf.reshape(
        tf.pad(tf.stack(flat), [[0, 0], [0, -length % size]]), [len(parts), size, -1]
    )
    slices = tf.reshape(tf.transpose(stacked, [1, 0, 2]), [size * len(parts), -1])
    options = {"process_set": process_set, "ignore_name_scope": True}
    if size > 1:
        slices, _ = hvd.alltoall(slices, [len(parts)] * size, name=f"{name}_parts", **options)

    values = tf.unstack(tf.ensure_shape(slices, [size * len(parts), None]))
    # Added one by one, in this order.
    mean = reduce(tf.add, values) / len(values)
    if size > 1:
        mean = hvd.allgather(mean, name=f"{name}_means", **options)
    pieces = tf.split(mean[:length], [tf.size(value) for value in first_part])
    return [
        tf.cast(tf.reshape(piece, tf.shape(value)), value.dtype)
        for piece, value in zip(pieces, first_part)
    ]


def _message_type(part: list[tf.Tensor]) -> tf.DType:
    """Returns the type of the message that holds all of a part: a single float64 tensor widens the others."""
    has_float64 = any(value.dtype == tf.float64 for value in part)
    return tf.float64 if has_float64 else tf.float32
