"""Compression of gradients on the wire: bfloat16, int8 and PowerSGD, beside Horovod's fp16.

Horovod's all-reduce adds what it carries, so it carries only types that add up. BFloat16 and Int8
move bytes instead: each rank gets its piece of all ranks' gradients (alltoall), adds it in float32,
and sends the result to all (allgather). That is the traffic of a ring all-reduce, in narrower
numbers. PowerSGD reduces two thin matrices in place of a large one.

With each of them all ranks decode the same values, so their weights stay equal to the last bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compressor, FP16Compressor, NoneCompressor  # noqa: F401

from hvtrain.keras.gradients import are_finite, variable_id

BLOCK = 1024
"""Values of int8 that share a scale: 4 bytes for 1,024, and a large gradient spoils few others."""


class WireFormat(ABC):
    """How the gradients of one message travel, where Horovod's Compressor does not suffice."""

    name: str
    """The setting strategy.compression that chooses it."""
    keeps_errors = False
    """True if what a rank loses by compression is added to its next gradient (error feedback,
    Karimireddy et al. 2019). Over the steps nothing is lost then; it only arrives later."""
    whole_steps = 0
    """First steps in which gradients travel as they are."""

    def projection_shape(self, shape: tf.TensorShape) -> tuple[int, int] | None:
        """Returns the shape of what is kept for a variable from step to step; None: nothing."""
        return None

    def __repr__(self) -> str:
        return self.name

    @abstractmethod
    def reduce(
        self,
        tensors: list[tf.Tensor],
        projections: list[Any],
        name: str,
        process_set: Any,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns means over the ranks, and what this rank lost (every rank).

        Args:
            tensors: float32 or float64, all of one type, of any shapes.
            projections: a variable for each tensor, of projection_shape, or None.
            name: beginning of the messages' names.
            process_set: the ranks; at least two.

        Returns:
            Means and losses, in the tensors' shapes and type. The mean of the losses over the ranks
            is what the means lack.
        """

    @abstractmethod
    def sent_bytes(self, shapes: list[tf.TensorShape], num_ranks: int) -> float:
        """Returns the bytes that a rank sends to reduce tensors of these shapes."""


class ByteFormat(WireFormat):
    """Blocks of BLOCK values, encoded to bytes that Horovod moves and cannot add."""

    block_bytes: int
    """Bytes of an encoded block."""

    @abstractmethod
    def encode(self, blocks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Encodes floats [n, BLOCK] to integers [n, ...].

        Returns:
            The integers, and the floats that decode() makes of them.
        """

    @abstractmethod
    def decode(self, encoded: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Decodes what encode() made, to [n, BLOCK] of a type."""

    def reduce(
        self,
        tensors: list[tf.Tensor],
        projections: list[Any],
        name: str,
        process_set: Any,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        dtype = tensors[0].dtype
        num_ranks = process_set.size()
        options = {"process_set": process_set, "ignore_name_scope": True}
        # Between more than two ranks each has a piece of its own, of as many blocks as the others'.
        num_pieces = 1 if num_ranks == 2 else num_ranks
        blocks = _packed(tensors, num_pieces)
        encoded, own = self.encode(blocks)
        losses = blocks - own

        # Between two ranks both ways cost the same bytes, and this one rounds but once.
        if num_ranks == 2:
            received = tf.split(hvd.allgather(encoded, name=f"{name}_bytes", **options), 2)
            other = self.decode(received[1 - process_set.rank()], dtype)
            return _unpacked((own + other) / 2, tensors), _unpacked(losses, tensors)

        received = tf.split(hvd.alltoall(encoded, name=f"{name}_pieces", **options), num_ranks)
        # In the ranks' order, so that the sum does not depend on who has the piece.
        piece = tf.add_n([self.decode(part, dtype) for part in received]) / num_ranks
        encoded_piece, own_piece = self.encode(piece)
        gathered = hvd.allgather(encoded_piece, name=f"{name}_bytes", **options)
        means = self.decode(gathered, dtype)

        # This rank alone knows what its piece has lost, which its next gradient brings: a share of
        # 1 / num_ranks of the next mean.
        lost = num_ranks * (piece - own_piece)
        length = tf.shape(piece)[0]
        before = process_set.rank() * length
        after = tf.shape(blocks)[0] - before - length
        losses += tf.pad(lost, [[before, after], [0, 0]])
        return _unpacked(means, tensors), _unpacked(losses, tensors)

    def sent_bytes(self, shapes: list[tf.TensorShape], num_ranks: int) -> float:
        blocks = sum(shape.num_elements() for shape in shapes) / BLOCK
        return ring_bytes(blocks * self.block_bytes, num_ranks)


class BFloat16(ByteFormat):
    """Gradients travel as bfloat16: half the bytes of float32, with its range.

    Each rank's gradients are rounded before the sum and, with three ranks or more, the mean once
    after it.
    """

    name = "bf16"
    block_bytes = 2 * BLOCK

    def encode(self, blocks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rounded = tf.cast(blocks, tf.bfloat16)
        return tf.bitcast(rounded, tf.uint16), tf.cast(rounded, blocks.dtype)

    def decode(self, encoded: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(tf.bitcast(encoded, tf.bfloat16), dtype)


class Int8(ByteFormat):
    """Gradients travel as int8 with a float32 scale per 1,024 values: 0.251 of float32's bytes.

    Rounding to 255 levels loses more than training forgives, so each rank keeps its errors.
    """

    name = "int8"
    block_bytes = BLOCK + 4
    keeps_errors = True

    def encode(self, blocks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns uint8 [n, BLOCK + 4], the values, then their scale; and the decoded floats.

        A block with a value that is not finite is decoded as NaN, so that every rank sees it.
        """
        # Two reductions take half the time of one over tf.abs(), which would be written to memory.
        highest = tf.reduce_max(blocks, axis=1, keepdims=True)
        lowest = tf.reduce_min(blocks, axis=1, keepdims=True)
        scale = tf.cast(tf.maximum(highest, -lowest) / 127, tf.float32)
        # Zeros in place of 0 / 0.
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
    """Gradients travel as matrices of a low rank (Vogels et al. 2019, arXiv:1905.13727).

    A gradient M [m, n] is replaced by P Q^T. One step of a power iteration from the last step's Q
    finds them: P = M Q, averaged over the ranks and made orthonormal; then Q = M^T P, averaged.
    Each rank keeps what its gradient has beyond P Q^T. Vectors, and matrices that would hardly get
    smaller, travel whole.

    Args:
        rank: columns of P and Q. More are closer to the gradient, and more bytes.
        whole_steps: first steps in which gradients travel as they are. They change most then, and
            the last step's Q tells least of them.
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
        """Returns the shape of Q, or None if the tensor travels whole."""
        num_elements = shape.num_elements()
        if shape.rank < 2 or not num_elements:
            return None
        # A kernel's last axis is its outputs, for dense and convolutional layers.
        num_columns = shape[-1]
        num_rows = num_elements // num_columns
        is_smaller = 2 * (num_rows + num_columns) * self.rank < num_elements
        return (num_columns, self.rank) if is_smaller else None

    def reduce(
        self,
        tensors: list[tf.Tensor],
        projections: list[Any],
        name: str,
        process_set: Any,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        def mean(values: list[tf.Tensor], suffix: str) -> list[tf.Tensor]:
            if not values:
                return []
            return hvd.grouped_allreduce(
                values, name=f"{name}_{suffix}", op=hvd.Average, process_set=process_set, ignore_name_scope=True
            )

        low = [i for i, projection in enumerate(projections) if projection is not None]
        whole = [i for i, projection in enumerate(projections) if projection is None]
        matrices = [tf.reshape(tensors[i], [-1, projections[i].shape[0]]) for i in low]
        products = [matrix @ tf.cast(projections[i], matrix.dtype) for i, matrix in zip(low, matrices)]
        # What travels whole goes with the first message.
        averaged = mean([*products, *(tensors[i] for i in whole)], "p")
        bases = [tf.linalg.qr(product).q for product in averaged[: len(low)]]
        coefficients = mean([tf.matmul(matrix, base, transpose_a=True) for matrix, base in zip(matrices, bases)], "q")

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
            num_elements = shape.num_elements()
            if projection is None:
                num_values += num_elements
            else:
                num_values += self.rank * (num_elements // projection[0] + projection[0])
        return ring_bytes(4 * num_values, num_ranks)


class CompressedReduction:
    """Reduces gradients in a wire format, with what it keeps from step to step.

    Args:
        wire: the wire format.
        process_set: the ranks that reduce.
    """

    def __init__(self, wire: WireFormat, process_set: Any) -> None:
        self.wire = wire
        self.process_set = process_set
        self.memory: dict[str, tf.Variable] = {}
        """What is kept, by name: see `prepare`. Empty for one rank."""
        self._positions: dict[int, int] = {}

    def prepare(self, variables: Sequence[Any]) -> None:
        """Creates what is kept for the gradients of these variables, once.

        These are `sum/error/0000`, `same/projection/0000` and so on, by the variables' positions,
        and `same/steps`. A name begins with the rule by which a run on another number of ranks
        takes it over: see resume.memories_on.
        """
        is_alone = not self.process_set.included() or self.process_set.size() == 1
        if is_alone or self.memory or not self.wire.keeps_errors:
            return
        if any(variable is None for variable in variables):
            raise ValueError(
                f"Compression.{self.wire.name} keeps an error for each variable; pass the variables with their "
                "gradients"
            )
        self._positions = {variable_id(variable): i for i, variable in enumerate(variables)}
        with tf.init_scope():
            self.memory["same/steps"] = tf.Variable(0, dtype=tf.int64, trainable=False, name="wire_steps")
            for i, variable in enumerate(variables):
                dtype = tf.as_dtype(variable.dtype)
                self.memory[f"sum/error/{i:04d}"] = tf.Variable(tf.zeros(variable.shape, dtype), trainable=False)
                shape = self.wire.projection_shape(tf.TensorShape(variable.shape))
                if shape:
                    # From the position alone, so that all ranks draw the same.
                    drawn = tf.random.stateless_normal(shape, seed=[i, len(variables)], dtype=dtype)
                    self.memory[f"same/projection/{i:04d}"] = tf.Variable(drawn, trainable=False)

    def __call__(self, gradients: list[Any], variables: list[Any], name: str) -> list[Any]:
        """Returns the means of dense gradients of one type over the ranks (every rank)."""
        dtype = gradients[0].dtype
        tensors = gradients if dtype == tf.float64 else [tf.cast(gradient, tf.float32) for gradient in gradients]
        if not self.wire.keeps_errors:
            means, _ = self.wire.reduce(tensors, [], name, self.process_set)
            return [tf.cast(mean, dtype) for mean in means]

        positions = [self._positions[variable_id(variable)] for variable in variables]
        errors = [self.memory[f"sum/error/{i:04d}"] for i in positions]
        projections = [self.memory.get(f"same/projection/{i:04d}") for i in positions]
        tensors = [tensor + tf.cast(error, tensor.dtype) for tensor, error in zip(tensors, errors)]

        def compressed() -> tuple[list[Any], list[Any]]:
            return self.wire.reduce(tensors, projections, name, self.process_set)

        def whole() -> tuple[list[Any], list[Any]]:
            options = {"op": hvd.Average, "process_set": self.process_set, "ignore_name_scope": True}
            means = hvd.grouped_allreduce(tensors, name=f"{name}_whole", **options)
            return means, [tf.zeros_like(tensor) for tensor in tensors]

        if self.wire.whole_steps:
            means, losses = tf.cond(self.memory["same/steps"] < self.wire.whole_steps, whole, compressed)
        else:
            means, losses = compressed()

        def keep() -> tf.Tensor:
            for error, loss in zip(errors, losses):
                error.assign(tf.cast(loss, error.dtype))
            return tf.constant(True)

        # All ranks see the same values. A step with an overflow changes nothing, errors neither. A
        # condition, and not tf.where(), which would take a tenth of the compression's time.
        tf.cond(are_finite(means), keep, lambda: tf.constant(False))
        return [tf.cast(mean, dtype) for mean in means]

    def end_step(self) -> list[Any]:
        """Counts a step, after its last message; returns the operations."""
        return [self.memory["same/steps"].assign_add(1)] if self.memory else []


def sent_bytes(tensors: list[Any], compression: Any, num_ranks: int) -> float:
    """Returns the bytes that a rank sends to reduce dense tensors. A size known at run time counts 0."""
    if isinstance(compression, WireFormat):
        return compression.sent_bytes([tensor.shape for tensor in tensors], num_ranks)
    item_bytes = [2 if compression is Compression.fp16 else tensor.dtype.size for tensor in tensors]
    num_bytes = sum(size * (tensor.shape.num_elements() or 0) for size, tensor in zip(item_bytes, tensors))
    return ring_bytes(num_bytes, num_ranks)


def ring_bytes(num_bytes: float, num_ranks: int) -> float:
    """Returns what a rank sends in a ring all-reduce (Patarasuk and Yuan 2009).

    >>> ring_bytes(100.0, 2), ring_bytes(100.0, 4)
    (100.0, 150.0)
    """
    return num_bytes * 2 * (num_ranks - 1) / num_ranks


def _packed(tensors: list[tf.Tensor], num_pieces: int) -> tf.Tensor:
    """Joins tensors to blocks [n, BLOCK], padded with zeros to equal pieces."""
    size = tf.add_n([tf.size(tensor) for tensor in tensors])
    padding = tf.zeros([-size % (num_pieces * BLOCK)], tensors[0].dtype)
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    return tf.reshape(tf.concat([*flat, padding], axis=0), [-1, BLOCK])


def _unpacked(blocks: tf.Tensor, like: list[tf.Tensor]) -> list[tf.Tensor]:
    """Cuts blocks into tensors of these shapes; the padding is left out."""
    sizes = [tf.size(tensor) for tensor in like]
    padding = tf.size(blocks) - tf.add_n(sizes)
    # A split shares the memory of what it cuts, where the parts are aligned.
    parts = tf.split(tf.reshape(blocks, [-1]), [*sizes, padding])
    return [tf.reshape(part, tf.shape(tensor)) for part, tensor in zip(parts, like)]


class Compression(hvd.Compression):
    """Types of gradients on the wire: none, fp16, bf16, int8 and powersgd(rank)."""

    bf16 = BFloat16()
    int8 = Int8()
    powersgd = PowerSGD
