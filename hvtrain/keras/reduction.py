"""The mean of the gradients over all ranks, counted inside the graph. DistributedOptimizer calls it.

A Python counter inside a tf.function counts traces; ours is a variable that the graph itself increments,
after the reduced values are there, so it says what really ran.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

# Horovod's kernels for dense tensors (horovod/tensorflow/mpi_ops.cc, attribute T); others travel as float32.
_KERNEL_TYPES = (tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64)


# Horovod pairs tensors of different ranks by name. Names made from Keras's would differ where one rank has
# built more models than another; the order in which a program makes its optimizers does not.
_numbers = itertools.count()


class Reducer:
    """Reduces lists of gradients over the ranks; calling it is collective (every rank).

    Dense gradients travel in groups, one for each type and part, so that they are fused into few messages;
    an IndexedSlices goes by itself as an allgather of its rows; None stays None, at the same position.
    """

    def __init__(
        self,
        op: int = hvd.Average,
        compression: Any = hvd.Compression.none,
        sparse_as_dense: bool = False,
        num_groups: int = 1,
        predivide_factor: float = 1.0,
        scale: float = 1.0,
        device_dense: str = "",
        device_sparse: str = "",
        process_set: Any = None,
    ) -> None:
        self.op = op
        self.compression = compression
        self.sparse_as_dense = sparse_as_dense
        self.num_groups = max(1, num_groups)
        self.predivide_factor = predivide_factor
        self.scale = scale
        self.device_dense = device_dense
        self.device_sparse = device_sparse
        self.process_set = process_set or hvd.global_process_set
        self._name = f"hvtrain_gradients_{next(_numbers)}"
        with tf.init_scope(), tf.device("/CPU:0"):
            self._count = tf.Variable(0, dtype=tf.int64, trainable=False, name="num_reductions")

    @property
    def num_reductions(self) -> int:
        """Reductions that ran so far on this rank."""
        return int(self._count.numpy())

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients reduced over the ranks, in the same order; unchanged when there is one rank."""
        reduced = list(gradients)
        if self.process_set.size() == 1:
            return reduced
        if self.sparse_as_dense:
            reduced = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in reduced]
        dense = [i for i, g in enumerate(reduced) if g is not None and not isinstance(g, tf.IndexedSlices)]
        sparse = [i for i, g in enumerate(reduced) if isinstance(g, tf.IndexedSlices)]
        for number, group in enumerate(self._groups(reduced, dense)):
            values = self._reduce_group([reduced[i] for i in group], f"{self._name}_{number}")
            for index, value in zip(group, values):
                reduced[index] = value
        for index in sparse:
            reduced[index] = self._reduce_sparse(reduced[index], f"{self._name}_sparse_{index}")
        if dense or sparse:
            done = [reduced[i] for i in dense] + [reduced[i].values for i in sparse]
            with tf.control_dependencies(done):
                self._count.assign_add(1)
        return reduced

    def _groups(self, gradients: list[Any], dense: list[int]) -> list[list[int]]:
        """Positions of the dense gradients, by type and then cut into num_groups runs of equal length."""
        groups = []
        for dtype in dict.fromkeys(gradients[i].dtype for i in dense):
            same = [i for i in dense if gradients[i].dtype == dtype]
            length = -(-len(same) // self.num_groups)
            groups += [same[start : start + length] for start in range(0, len(same), length)]
        return groups

    def _reduce_group(self, tensors: list[Any], name: str) -> list[Any]:
        dtype = tensors[0].dtype
        if dtype not in _KERNEL_TYPES:
            tensors = [tf.cast(tensor, tf.float32) for tensor in tensors]
        values = hvd.grouped_allreduce(
            tensors,
            op=self.op,
            compression=self.compression,
            prescale_factor=1.0 / self.predivide_factor,
            postscale_factor=self.predivide_factor * self.scale,
            process_set=self.process_set,
            device_dense=self.device_dense,
            name=name,
            ignore_name_scope=True,
        )
        return [value if value.dtype == dtype else tf.cast(value, dtype) for value in values]

    def _reduce_sparse(self, slices: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        if self.op not in (hvd.Average, hvd.Sum):
            raise ValueError("only Average and Sum reduce IndexedSlices; pass sparse_as_dense=True for other ops")
        with tf.device(self.device_sparse):
            options = {"process_set": self.process_set, "ignore_name_scope": True}
            values = hvd.allgather(slices.values, name=f"{name}_values", **options)
            indices = hvd.allgather(slices.indices, name=f"{name}_indices", **options)
        factor = self.scale / (self.process_set.size() if self.op == hvd.Average else 1)
        return tf.IndexedSlices(values * factor, indices, slices.dense_shape)
