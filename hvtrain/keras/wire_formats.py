"""Formats of gradients on the wire: bfloat16, int8 and PowerSGD, in addition to Horovod's fp16.

Horovod's all-reduce can only carry types that it can add. BFloat16 and Int8 move bytes instead: each
rank receives its slice of every rank's gradients (alltoall), adds the slices in float32, and sends
the mean to all ranks (allgather). That is the traffic of a ring all-reduce, in narrower numbers.
PowerSGD reduces two thin matrices in place of a large one.

In each format all ranks decode the same values, so their weights stay equal to the last bit.
"""

from abc import ABC, abstractmethod
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

Tensors = list[tf.Tensor]

# Number of values that share a scale in Int8; an outlier costs only these their precision.
BLOCK = 1024


class WireFormat(ABC):
    """A format in which a message's gradients are sent, for what Horovod's Compressor cannot do."""

    # The value of the setting strategy.compression that selects the format.
    name: str
    # True if each rank adds its compression error to its next gradient (error feedback, Karimireddy
    # et al. 2019). Over the steps nothing is then lost; it only arrives later.
    keeps_errors = False
    # Number of first steps in which gradients are sent uncompressed.
    whole_steps = 0

    def projection_shape(self, shape: tf.TensorShape) -> tuple[int, int] | None:
        """Returns the shape of the matrix kept for a variable between steps, or None."""
        return None

    def __repr__(self) -> str:
        return self.name

    @abstractmethod
    def reduce(
        self, tensors: Tensors, projections: list[Any], name: str, process_set: Any
    ) -> tuple[Tensors, Tensors]:
        """Returns the means over the ranks, and this rank's errors (every rank).

        Args:
            tensors: float32 or float64, all of the same type, of any shapes.
            projections: for each tensor a variable of projection_shape, or None; empty if the format keeps no errors.
            name: prefix of the messages' names.
            process_set: the ranks that take part, at least two.

        Returns:
            Means and errors, in the tensors' shapes and type. The exact means are these means plus
            the ranks' mean errors.
        """

    @abstractmethod
    def sent_bytes(self, shapes: list[tf.TensorShape], num_ranks: int) -> float:
        """Returns the bytes that a rank sends to reduce tensors of these shapes; unknown sizes count as 0."""


class ByteFormat(WireFormat):
    """A format that encodes blocks of BLOCK values as bytes, which Horovod can move but not add."""

    # Size of an encoded block in bytes.
    block_bytes: int

    @abstractmethod
    def encode(self, blocks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Encodes floats [n, BLOCK] as integers [n, ...].

        Returns:
            The integers, and the floats that decode() makes of them.
        """

    @abstractmethod
    def decode(self, encoded: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Decodes the integers of encode() to floats [n, BLOCK] of this type."""

    def reduce(
        self, tensors: Tensors, projections: list[Any], name: str, process_set: Any
    ) -> tuple[Tensors, Tensors]:
        dtype = tensors[0].dtype
        num_ranks = process_set.size()
        options = {"process_set": process_set, "ignore_name_scope": True}
        # With three ranks or more, each sums one slice; all slices have the same number of blocks.
        num_pieces = 1 if num_ranks == 2 else num_ranks
        blocks = _packed(tensors, num_pieces)
        encoded, own = self.encode(blocks)
        losses = blocks - own

        # Two ranks exchange everything, which takes the same number of bytes and rounds only once.
        if num_ranks == 2:
            received = tf.split(hvd.allgather(encoded, name=f"{name}_bytes", **options), 2)
            other = self.decode(received[1 - process_set.rank()], dtype)
            return _unpacked((own + other) / 2, tensors), _unpacked(losses, tensors)

        received = tf.split(hvd.alltoall(encoded, name=f"{name}_pieces", **options), num_ranks)
        # Summed in the order of the ranks, so that the result does
        # not depend on which rank does it.
        piece = tf.add_n([self.decode(part, dtype) for part in received]) / num_ranks
        encoded_piece, own_piece = self.encode(piece)
        gathered = hvd.allgather(encoded_piece, name=f"{name}_bytes", **options)
        means = self.decode(gathered, dtype)

        # Only this rank knows the second rounding error, that of the mean in its slice. It adds the
        # error to its next gradient, times num_ranks because the next mean divides by that.
        lost = num_ranks * (piece - own_piece)
        length = tf.shape(piece)[0]
        before = process_set.rank() * length
        after = tf.shape(blocks)[0] - before - length
        losses += tf.pad(lost, [[before, after], [0, 0]])
        return _unpacked(means, tensors), _unpacked(losses, tensors)

    def sent_bytes(self, shapes: list[tf.TensorShape], num_ranks: int) -> float:
        blocks = sum(shape.num_elements() or 0 for shape in shapes) / BLOCK
        return ring_bytes(blocks * self.block_bytes, num_ranks)


class BFloat16(ByteFormat):
    """Sends gradients as bfloat16: half the bytes of float32, with the same range.

    Each rank's gradients are rounded before the sum; with three ranks or more the mean is rounded once more.
    """

    name = "bf16"
    block_bytes = 2 * BLOCK

    def encode(self, blocks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rounded = tf.cast(blocks, tf.bfloat16)
        return tf.bitcast(rounded, tf.uint16), tf.cast(rounded, blocks.dtype)

    def decode(self, encoded: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(tf.bitcast(encoded, tf.bfloat16), dtype)


class Int8(ByteFormat):
    """Sends gradients as int8 with a float32 scale per 1,024 values: 0.251 of float32's bytes.

    Rounding to 255 levels would hurt training, so each rank keeps its errors (error feedback).
    """

    name = "int8"
    block_bytes = BLOCK + 4
    keeps_errors = True

    def encode(self, blocks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns uint8 [n, BLOCK + 4], the values followed by their scale, and the decoded floats.

        A block with a non-finite value is decoded as NaN, so that every rank sees it.
        """
        # Two reductions take half the time of one over tf.abs(), whose result
        # TensorFlow would write to memory.
        highest = tf.reduce_max(blocks, axis=1, keepdims=True)
        lowest = tf.reduce_min(blocks, axis=1, keepdims=True)
        scale = tf.cast(tf.maximum(highest, -lowest) / 127, tf.float32)
        # A block of zeros has the scale 0.
        levels = tf.round(tf.math.divide_no_nan(blocks, tf.cast(scale, blocks.dtype)))
        values = tf.bitcast(tf.cast(levels, tf.int8), tf.uint8)
        scale_bytes = tf.reshape(tf.bitcast(scale, tf.uint8), [-1, 4])
        decoded = tf.cast(tf.cast(levels, tf.float32) * scale, blocks.dtype)
        return tf.concat([values, scale_bytes], axis=1), decoded

    def decode(self, encoded: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        values = tf.cast(tf.bitcast(encoded[:, :BLOCK], tf.int8), tf.float32)
        scale = tf.reshape(tf.bitcast(encoded[:, BLOCK:], tf.float32), [-1, 1])
        return tf.cast(values * scale, dtype)


class PowerSGD(WireFormat):
    """Sends gradients as low-rank matrices (Vogels et al. 2019, arXiv:1905.13727).

    A gradient M [m, n] is approximated by P Q^T, found by one step of power iteration from the last
    step's Q: P = M Q, averaged over the ranks and made orthonormal; then Q = M^T P, averaged. Each
    rank keeps the error M - P Q^T. Vectors, and matrices that would hardly get smaller, are sent whole.

    Args:
        rank: number of columns of P and Q. A higher rank approximates better and costs more bytes.
        whole_steps: number of first steps in which gradients are sent uncompressed. Gradients
            change fastest then, so the last step's Q is a poor start.

    Raises:
        ValueError: if rank is below 1, or whole_steps below 0.
    """

    name = "powersgd"
    keeps_errors = True

    def __init__(self, rank: int = 4, whole_steps: int = 100) -> None:
        if rank < 1 or whole_steps < 0:
            raise ValueError(
                f"PowerSGD with rank={rank} and whole_steps={whole_steps} is out of range; rank must be at least 1 and "
                "whole_steps at least 0"
            )
        self.rank = rank
        self.whole_steps = whole_steps

    def __repr__(self) -> str:
        return f"powersgd(rank={self.rank}, whole_steps={self.whole_steps})"

    def projection_shape(self, shape: tf.TensorShape) -> tuple[int, int] | None:
        """Returns the shape of Q, or None if the tensor is sent whole."""
        num_elements = shape.num_elements()
        if not num_elements or shape.rank < 2:
            return None
        # The last axis of a kernel, dense or convolutional, is that of the outputs.
        num_columns = shape[-1]
        num_rows = num_elements // num_columns
        is_smaller = 2 * (num_rows + num_columns) * self.rank < num_elements
        return (num_columns, self.rank) if is_smaller else None

    def reduce(
        self, tensors: Tensors, projections: list[Any], name: str, process_set: Any
    ) -> tuple[Tensors, Tensors]:
        low = [i for i, projection in enumerate(projections) if projection is not None]
        whole = [i for i, projection in enumerate(projections) if projection is None]
        matrices = [tf.reshape(tensors[i], [-1, projections[i].shape[0]]) for i in low]
        products = [
            matrix @ tf.cast(projections[i], matrix.dtype) for i, matrix in zip(low, matrices)
        ]
        # Tensors that are sent whole are added to the first message.
        sent = [*products, *(tensors[i] for i in whole)]
        averaged = average(sent, f"{name}_p", process_set)
        bases = [tf.linalg.qr(product).q for product in averaged[: len(low)]]
        own = [tf.matmul(matrix, base, transpose_a=True) for matrix, base in zip(matrices, bases)]
        coefficients = average(own, f"{name}_q", process_set)

        means = dict(zip(whole, averaged[len(low) :]))
        for i, base, coefficient in zip(low, bases, coefficients):
            approximation = tf.matmul(base, coefficient, transpose_b=True)
            means[i] = tf.reshape(approximation, tf.shape(tensors[i]))
            is_finite = tf.reduce_all(tf.math.is_finite(coefficient))
            kept = tf.where(is_finite, tf.cast(coefficient, projections[i].dtype), projections[i])
            projections[i].assign(kept)
        ordered = [means[i] for i in range(len(tensors))]
        losses = [
            tf.zeros_like(tensor) if projection is None else tensor - value
            for tensor, projection, value in zip(tensors, projections, ordered)
        ]
        return ordered, losses

    def sent_bytes(self, shapes: list[tf.TensorShape], num_ranks: int) -> float:
        num_values = 0
        for shape in shapes:
            projection = self.projection_shape(shape)
            num_elements = shape.num_elements() or 0
            if projection is None:
                num_values += num_elements
            else:
                num_values += self.rank * (num_elements // projection[0] + projection[0])
        return ring_bytes(4 * num_values, num_ranks)


def average(tensors: Tensors, name: str, process_set: Any) -> Tensors:
    """Returns the means over the ranks, in one message (every rank)."""
    options = {"op": hvd.Average, "process_set": process_set, "ignore_name_scope": True}
    return hvd.grouped_allreduce(tensors, name=name, **options) if tensors else []


def ring_bytes(num_bytes: float, num_ranks: int) -> float:
    """Returns the bytes that a rank sends in a ring all-reduce (Patarasuk and Yuan 2009).

    >>> ring_bytes(100.0, 2), ring_bytes(100.0, 4)
    (100.0, 150.0)
    """
    return num_bytes * 2 * (num_ranks - 1) / num_ranks


def _packed(tensors: Tensors, num_pieces: int) -> tf.Tensor:
    """Packs tensors into blocks [n, BLOCK], padded with zeros so that n is a multiple of num_pieces."""
    size = tf.add_n([tf.size(tensor) for tensor in tensors])
    padding = tf.zeros([-size % (num_pieces * BLOCK)], tensors[0].dtype)
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    return tf.reshape(tf.concat([*flat, padding], axis=0), [-1, BLOCK])


def _unpacked(blocks: tf.Tensor, like: Tensors) -> Tensors:
    """Splits blocks into tensors of the shapes of `like`, without the padding."""
    sizes = [tf.size(tensor) for tensor in like]
    padding = tf.size(blocks) - tf.add_n(sizes)
    # Where the parts are aligned, tf.split copies nothing.
    parts = tf.split(tf.reshape(blocks, [-1]), [*sizes, padding])
    return [tf.reshape(part, tf.shape(tensor)) for part, tensor in zip(parts, like)]
