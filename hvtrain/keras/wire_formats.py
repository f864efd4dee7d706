"""Wire formats for gradients: bfloat16, int8 and PowerSGD, in addition to Horovod's fp16.

Horovod's all-reduce can only carry types that it can add. BFloat16 and Int8 move bytes instead:
each rank receives its slice of every rank's gradients (alltoall), decodes and averages them, and
sends the mean to all ranks (allgather). That is the traffic of a ring all-reduce, in narrower
numbers. Two ranks swap their bytes. PowerSGD reduces two thin matrices instead of a large one.

In each format all ranks decode the same values, so their weights stay equal to the last bit.
"""

from abc import ABC, abstractmethod
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

Tensors = list[tf.Tensor]

# Number of values that share a scale in Int8. An outlier costs precision only within its block.
BLOCK = 1024
# Two ranks send long messages in pieces of this many blocks; the last piece may be almost twice as long.
PIECE_BLOCKS = 4096


class WireFormat(ABC):
    """A format for sending gradients that Horovod's Compressor cannot express.

    A Compressor only changes tensors before and after an all-reduce. A WireFormat chooses the
    collectives itself, and may need errors and projections of the previous step, which
    compression.py keeps.
    """

    # The value of the setting strategy.compression that selects the format.
    name: str
    # True if each rank adds its compression error to its next gradient (error feedback, Karimireddy
    # et al. 2019). The error is then not lost, but arrives in a later step.
    keeps_errors = False
    # Number of steps at the start of training in which gradients are sent uncompressed.
    whole_steps = 0

    def projection_shape(self, shape: tf.TensorShape) -> tuple[int, int] | None:
        """Returns the shape of the matrix to keep between steps for a variable of this shape, or None."""
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
            projections: for each tensor a variable of projection_shape, or None; empty if the
                format keeps no errors.
            name: prefix of the messages' names.
            process_set: the ranks that take part, at least two.

        Returns:
            Means and errors, in the tensors' shapes and type. A returned mean plus the errors'
            mean over the ranks is the exact mean.
        """

    @abstractmethod
    def sent_bytes(self, tensors: Tensors, num_ranks: int) -> float:
        """Returns the bytes that a rank sends to reduce these tensors. Unknown sizes count as 0."""


class ByteFormat(WireFormat):
    """A format that encodes blocks of BLOCK values as bytes, which Horovod can move but not add."""

    # Size of an encoded block in bytes.
    block_bytes: int

    @abstractmethod
    def encode(self, blocks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Encodes floats [n, BLOCK] as uint8 [n, ...].

        Returns:
            The bytes, and the floats that decode() makes of them.
        """

    @abstractmethod
    def decode(self, encoded: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Decodes the bytes of encode() to floats [n, BLOCK] of this type."""

    def reduce(
        self, tensors: Tensors, projections: list[Any], name: str, process_set: Any
    ) -> tuple[Tensors, Tensors]:
        num_ranks = process_set.size()
        if num_ranks > 2:
            # Each rank averages one slice. All slices have the same number of blocks.
            blocks = _pack(tensors, num_ranks)
            means, errors = self._average_slices(blocks, name, process_set)
        else:
            # Two ranks swap everything, which takes the same number of bytes and rounds only once.
            blocks = _pack(tensors, 1)
            means, errors = self._swap_pieces(blocks, name, process_set)
        return _unpack(means, tensors), _unpack(errors, tensors)

    def _average_slices(self, blocks: tf.Tensor, name: str, process_set: Any) -> Tensors:
        """Returns the mean of the ranks' blocks, and this rank's errors."""
        dtype = blocks.dtype
        num_ranks = process_set.size()
        options = {"process_set": process_set, "ignore_name_scope": True}
        encoded, own = self.encode(blocks)
        errors = blocks - own
        received = tf.split(hvd.alltoall(encoded, name=f"{name}_pieces", **options), num_ranks)
        # Summed in the order of the ranks, so that the result does not depend on which rank sums.
        mean_slice = tf.add_n([self.decode(part, dtype) for part in received]) / num_ranks
        encoded_slice, decoded_slice = self.encode(mean_slice)
        gathered = hvd.allgather(encoded_slice, name=f"{name}_bytes", **options)
        means = self.decode(gathered, dtype)

        # Only this rank knows the second rounding error, that of the mean in its slice. It adds the
        # error to its next gradient, times num_ranks because the next mean divides by that.
        slice_error = num_ranks * (mean_slice - decoded_slice)
        slice_blocks = tf.shape(mean_slice)[0]
        blocks_before = process_set.rank() * slice_blocks
        blocks_after = tf.shape(blocks)[0] - blocks_before - slice_blocks
        errors += tf.pad(slice_error, [[blocks_before, blocks_after], [0, 0]])
        return [means, errors]

    def _swap_pieces(self, blocks: tf.Tensor, name: str, process_set: Any) -> Tensors:
        """Returns the mean of two ranks' blocks, and this rank's errors.

        While a piece is on its way, others are encoded and decoded.
        """
        num_pieces = (blocks.shape[0] or 0) // PIECE_BLOCKS
        pieces = [blocks]
        # In eager mode, tf.split refuses -1 as the only size.
        if num_pieces > 1:
            pieces = tf.split(blocks, [PIECE_BLOCKS] * (num_pieces - 1) + [-1])
        results = [
            self._mean_of_two(piece, f"{name}_{number}", process_set)
            for number, piece in enumerate(pieces)
        ]
        return [tf.concat(parts, axis=0) for parts in zip(*results)]

    def _mean_of_two(self, blocks: tf.Tensor, name: str, process_set: Any) -> Tensors:
        """Returns the mean of two ranks' blocks, and this rank's errors, for a single piece."""
        encoded, own = self.encode(blocks)
        other = self.decode(swap(encoded, f"{name}_bytes", process_set), blocks.dtype)
        return [(own + other) / 2, blocks - own]

    def sent_bytes(self, tensors: Tensors, num_ranks: int) -> float:
        blocks = sum(tensor.shape.num_elements() or 0 for tensor in tensors) / BLOCK
        return ring_bytes(blocks * self.block_bytes, num_ranks)


class BFloat16(ByteFormat):
    """Sends gradients as bfloat16: half the bytes of float32, with the same range.

    Each rank's gradients are rounded before the sum; with three ranks or more, the mean is rounded
    too.
    """

    name = "bf16"
    block_bytes = 2 * BLOCK

    def encode(self, blocks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rounded = tf.cast(blocks, tf.bfloat16)
        return tf.bitcast(rounded, tf.uint8), tf.cast(rounded, blocks.dtype)

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
        # Two reductions take half the time of one over tf.abs(), whose result TensorFlow would
        # write to memory.
        highest = tf.reduce_max(blocks, axis=1, keepdims=True)
        lowest = tf.reduce_min(blocks, axis=1, keepdims=True)
        scale = tf.cast(tf.maximum(highest, -lowest) / 127, tf.float32)
        # A block of zeros has the scale 0, and its levels are 0 too.
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

    A gradient M [m, n] is approximated by P Q^T, found by one step of power iteration from the
    previous step's Q: P = M Q, averaged over the ranks and made orthonormal; then Q = M^T P,
    averaged. Each rank keeps the error M - P Q^T. Vectors are sent uncompressed, and so are matrices
    that would hardly get smaller.

    Args:
        rank: number of columns of P and Q. A higher rank approximates better and costs more bytes.
        whole_steps: number of steps at the start of training in which gradients are sent
            uncompressed. Gradients change fastest then, so the previous step's Q is a poor start.

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
        """Returns the shape of Q, or None if the tensor is sent uncompressed."""
        num_elements = shape.num_elements()
        if not num_elements or shape.rank < 2:
            return None
        # The last axis of a dense or convolutional kernel is the output axis.
        num_columns = shape[-1]
        num_rows = num_elements // num_columns
        # P and Q must have less than half of the matrix's values.
        is_smaller = 2 * (num_rows + num_columns) * self.rank < num_elements
        return (num_columns, self.rank) if is_smaller else None

    def reduce(
        self, tensors: Tensors, projections: list[Any], name: str, process_set: Any
    ) -> tuple[Tensors, Tensors]:
        low_rank = [i for i, projection in enumerate(projections) if projection is not None]
        whole = [i for i, projection in enumerate(projections) if projection is None]
        matrices = [tf.reshape(tensors[i], [-1, projections[i].shape[0]]) for i in low_rank]
        products = [
            matrix @ tf.cast(projections[i], matrix.dtype) for i, matrix in zip(low_rank, matrices)
        ]
        # The first message also carries the tensors that are sent uncompressed.
        sent = [*products, *(tensors[i] for i in whole)]
        averaged = average(sent, f"{name}_p", process_set)
        bases = [tf.linalg.qr(product).q for product in averaged[: len(low_rank)]]
        own_coefficients = [
            tf.matmul(matrix, base, transpose_a=True) for matrix, base in zip(matrices, bases)
        ]
        coefficients = average(own_coefficients, f"{name}_q", process_set)

        means_by_index = dict(zip(whole, averaged[len(low_rank) :]))
        for i, base, coefficient in zip(low_rank, bases, coefficients):
            approximation = tf.matmul(base, coefficient, transpose_b=True)
            means_by_index[i] = tf.reshape(approximation, tf.shape(tensors[i]))
            # A step that overflows must not leave NaNs as the next step's start. A step without
            # gradients must not leave zeros, with which P would stay columns of the identity forever.
            sizes = tf.reduce_sum(tf.abs(coefficient), axis=0)
            is_usable = tf.math.is_finite(sizes) & (sizes > 0)
            projection = projections[i]
            next_start = tf.where(is_usable, tf.cast(coefficient, projection.dtype), projection)
            projection.assign(next_start)
        means = [means_by_index[i] for i in range(len(tensors))]
        errors = [
            tf.zeros_like(tensor) if projection is None else tensor - mean
            for tensor, projection, mean in zip(tensors, projections, means)
        ]
        return means, errors

    def sent_bytes(self, tensors: Tensors, num_ranks: int) -> float:
        num_bytes = 0
        for tensor in tensors:
            num_values = tensor.shape.num_elements() or 0
            projection_shape = self.projection_shape(tensor.shape)
            if projection_shape:
                num_columns, rank = projection_shape
                num_values = rank * (num_values // num_columns + num_columns)
            # All other types are sent as float32: see CompressedReduction.
            num_bytes += num_values * (8 if tensor.dtype == tf.float64 else 4)
        return ring_bytes(num_bytes, num_ranks)


def average(tensors: Tensors, name: str, process_set: Any) -> Tensors:
    """Returns the means over the ranks, in one message (every rank)."""
    options = {"op": hvd.Average, "process_set": process_set, "ignore_name_scope": True}
    return hvd.grouped_allreduce(tensors, name=name, **options) if tensors else []


def swap(encoded: tf.Tensor, name: str, process_set: Any) -> tf.Tensor:
    """Swaps uint8 tensors between two ranks: returns the other rank's tensor (every rank).

    On a single rank, returns the tensor unchanged.
    """
    options = {"name": name, "process_set": process_set, "ignore_name_scope": True}
    num_ranks = process_set.size()
    if hvd.mpi_enabled() or hvd.nccl_built() or num_ranks == 1:
        gathered = tf.split(hvd.allgather(encoded, **options), num_ranks)
        return gathered[num_ranks - 1 - process_set.rank()]
    # Between two hosts, Gloo's allgather uses half of the link's bandwidth, and its all-reduce all of
    # it. Bytes wrap around, so the sum less this rank's bytes is the other rank's.
    return hvd.allreduce(encoded, op=hvd.Sum, **options) - encoded


def ring_bytes(num_bytes: float, num_ranks: int) -> float:
    """Returns the bytes that a rank sends in a ring all-reduce (Patarasuk and Yuan 2009).

    >>> ring_bytes(100.0, 2), ring_bytes(100.0, 4)
    (100.0, 150.0)
    """
    return num_bytes * 2 * (num_ranks - 1) / num_ranks


def _pack(tensors: Tensors, num_slices: int) -> tf.Tensor:
    """Packs tensors into blocks [n, BLOCK], zero-padded so that n is a multiple of num_slices."""
    size = tf.add_n([tf.size(tensor) for tensor in tensors])
    padding = tf.zeros([-size % (num_slices * BLOCK)], tensors[0].dtype)
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    return tf.reshape(tf.concat([*flat, padding], axis=0), [-1, BLOCK])


def _unpack(blocks: tf.Tensor, like: Tensors) -> Tensors:
    """Splits blocks into tensors with the shapes of `like`, and drops the padding."""
    sizes = [tf.size(tensor) for tensor in like]
    padding = tf.size(blocks) - tf.add_n(sizes)
    # tf.split copies nothing if the parts are aligned in memory.
    parts = tf.split(tf.reshape(blocks, [-1]), [*sizes, padding])
    return [tf.reshape(part, tf.shape(tensor)) for part, tensor in zip(parts, like)]
