"""Compression of gradients: the formats to choose from, and the state that they keep between steps.

The formats are defined in wire_formats.py. Error feedback (Karimireddy et al. 2019, arXiv:1901.09847)
keeps the error that a lossy format makes in a step, and adds it to the gradients of the next one.
"""

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compressor, FP16Compressor, NoneCompressor  # noqa: F401

from hvtrain.keras.gradients import are_finite, variable_id
from hvtrain.keras.table_rows import rows_of
from hvtrain.keras.wire_formats import BFloat16, Int8, PowerSGD, WireFormat, average, ring_bytes


class CompressedReduction:
    """Reduces gradients in a wire format, and holds its state: errors, projections and a step counter.

    Args:
        wire: the wire format.
        process_set: the ranks that reduce.
    """

    def __init__(self, wire: WireFormat, process_set: Any) -> None:
        self.wire = wire
        self.process_set = process_set
        # The state by name: see `prepare`. Empty on a single rank.
        self.memory: dict[str, tf.Variable] = {}
        self._positions: dict[int, int] = {}

    def prepare(self, variables: Sequence[Any]) -> None:
        """Creates the state for the gradients of these variables, once.

        Names are `sum/error/0000`, `same/projection/0000` and so on, numbered by the variables'
        positions, and `same/steps`. The first part of a name says how the ranks' values are
        combined if a run resumes on another number of ranks: see redistribute_memories in
        training/resume.py.

        Raises:
            ValueError: if the format keeps errors and a variable is None.
        """
        if self.memory or not variables or not self.wire.keeps_errors:
            return
        if any(variable is None for variable in variables):
            raise ValueError(
                f"Compression.{self.wire.name} keeps an error for each variable; pass the variables with their "
                "gradients"
            )
        self._positions = {variable_id(variable): i for i, variable in enumerate(variables)}
        with tf.init_scope():
            self.memory["same/steps"] = tf.Variable(0, dtype=tf.int64, trainable=False)
            for i, variable in enumerate(variables):
                if rows_of(variable):
                    continue  # Gradients of sharded tables are not compressed.
                dtype = tf.as_dtype(variable.dtype)
                self.memory[f"sum/error/{i:04d}"] = tf.Variable(
                    tf.zeros(variable.shape, dtype), trainable=False
                )
                shape = self.wire.projection_shape(tf.TensorShape(variable.shape))
                if shape:
                    # Seeded by the position alone, so that all ranks draw the same numbers.
                    drawn = tf.random.stateless_normal(shape, seed=[i, len(variables)], dtype=dtype)
                    self.memory[f"same/projection/{i:04d}"] = tf.Variable(drawn, trainable=False)

    def __call__(self, gradients: list[Any], variables: list[Any], name: str) -> list[Any]:
        """Returns the means over the ranks of dense gradients of the same type (every rank)."""
        dtype = gradients[0].dtype
        if dtype != tf.float64:
            gradients = [tf.cast(gradient, tf.float32) for gradient in gradients]
        if not self.wire.keeps_errors:
            means, _ = self.wire.reduce(gradients, [], name, self.process_set)
            return [tf.cast(mean, dtype) for mean in means]

        positions = [self._positions[variable_id(variable)] for variable in variables]
        errors = [self.memory[f"sum/error/{i:04d}"] for i in positions]
        projections = [self.memory.get(f"same/projection/{i:04d}") for i in positions]
        tensors = [
            gradient + tf.cast(error, gradient.dtype) for gradient, error in zip(gradients, errors)
        ]

        def compressed():
            return self.wire.reduce(tensors, projections, name, self.process_set)

        def uncompressed():
            means = average(tensors, f"{name}_whole", self.process_set)
            return means, [tf.zeros_like(tensor) for tensor in tensors]

        if self.wire.whole_steps:
            means, new_errors = tf.cond(
                self.memory["same/steps"] < self.wire.whole_steps, uncompressed, compressed
            )
        else:
            means, new_errors = compressed()

        def store_errors():
            for error, new_error in zip(errors, new_errors):
                error.assign(tf.cast(new_error, error.dtype))

        # A step that overflows must not change the errors. The means are the same on all ranks, so all
        # take the same branch. With tf.where() instead, compression would take a tenth longer.
        tf.cond(are_finite(means), store_errors, lambda: None)
        return [tf.cast(mean, dtype) for mean in means]

    def end_step(self) -> list[Any]:
        """Counts a step after its last message; returns the operations that do so."""
        return [self.memory["same/steps"].assign_add(1)] if self.memory else []


def sent_bytes(tensors: list[Any], compression: Any, num_ranks: int) -> float:
    """Returns the bytes that a rank sends to reduce dense tensors. Unknown sizes count as 0."""
    if isinstance(compression, WireFormat):
        return compression.sent_bytes(tensors, num_ranks)
    num_bytes = 0
    for tensor in tensors:
        # Horovod cannot add bfloat16, so it is sent as float32.
        item_bytes = 4 if tensor.dtype == tf.bfloat16 else tensor.dtype.size
        if compression is Compression.fp16:
            item_bytes = 2
        num_bytes += item_bytes * (tensor.shape.num_elements() or 0)
    return ring_bytes(num_bytes, num_ranks)


class Compression(hvd.Compression):
    """Formats in which gradients are sent: none, fp16, bf16, int8 and powersgd(rank)."""

    bf16 = BFloat16()
    int8 = Int8()
    powersgd = PowerSGD
