"""The mean of the gradients over all ranks, counted inside the graph. DistributedOptimizer and the tape call it.

A Python counter inside a tf.function counts traces; ours is a variable that the graph itself increments,
after the reduced values are there, so it says what really ran.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvtrain.core.buckets import in_buckets
from hvtrain.keras.arguments import check_arguments
from hvtrain.keras.ballot import Ballot
from hvtrain.keras.in_graph import new_counter
from hvtrain.keras.structure import compare_structure
from hvtrain.step_timing import StepMarks

# Horovod's kernels for dense tensors (horovod/tensorflow/mpi_ops.cc, attribute T); others travel as float32.
_KERNEL_TYPES = (tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64)


# Horovod pairs tensors of different ranks by name. Names made from Keras's would differ where one rank has
# built more models than another; the order in which a program makes its optimizers does not.
_numbers = itertools.count()


def number_anew() -> None:
    """Numbers the optimizers to come from 0, as a rank does that begins now (every rank; none uses older ones)."""
    global _numbers
    _numbers = itertools.count()


class Reducer:
    """Reduces lists of gradients over the ranks; calling it is collective (every rank of the process set).

    Dense gradients travel in groups, so that they are fused into few messages: one for each type and each of
    num_groups parts, or as `groups`, lists of variables, says (others then go by themselves). With bucket_bytes it is
    as many groups as in_buckets makes, the last variables first: their gradients are ready first, and are reduced
    while others are computed (Li et al. 2020, "PyTorch Distributed", section 3.2). An IndexedSlices
    goes as an allgather of its rows; None stays None, at the same position. Gradients of local variables are
    not exchanged, only divided by the number of ranks where scale_local_gradients is true (horovod#3695).
    """

    def __init__(
        self,
        op: int = hvd.Average,
        compression: Any = hvd.Compression.none,
        sparse_as_dense: bool = False,
        groups: int | list[list[Any]] | None = None,
        bucket_bytes: int = 0,
        predivide_factor: float = 1.0,
        scale: float = 1.0,
        device_dense: str = "",
        device_sparse: str = "",
        process_set: Any = None,
        scale_local_gradients: bool = True,
        name: str | None = None,
        count: tf.Variable | None = None,
    ) -> None:
        self.process_set = process_set or hvd.global_process_set
        check_arguments(op, predivide_factor, groups, self.process_set)
        self.op = op
        self.compression = compression
        self.sparse_as_dense = sparse_as_dense
        self.groups = groups
        self.bucket_bytes = bucket_bytes
        self.predivide_factor = predivide_factor
        self.scale = scale
        self.device_dense = device_dense
        self.device_sparse = device_sparse
        self.scale_local_gradients = scale_local_gradients
        self._divides_losses = False
        self.ballot: Ballot | None = None
        self._local: set[int] = set()
        self.name = name or f"hvtrain_gradients_{next(_numbers)}"
        self._count = new_counter() if count is None else count
        self.num_calls = 0
        """Calls from Python: one for each step that is traced, or that runs eagerly."""
        self.marks: StepMarks | None = None
        """What is traced from now on marks when gradients were ready, and when they were reduced."""

    @property
    def num_reductions(self) -> int:
        """Reductions that ran so far on this rank."""
        return int(self._count.numpy())

    @property
    def is_alone(self) -> bool:
        """True where there is nobody to exchange with: one rank, or a rank outside the process set."""
        return not self.process_set.included() or self.process_set.size() == 1

    def register_local(self, variables: Iterable[Any]) -> None:
        """Leaves the gradients of these variables on their rank."""
        self._local.update(identity(variable) for variable in variables)

    def divide_losses(self) -> None:
        """From now on the mean's division is that of each rank's loss, one number, and gradients are only summed.

        For steps whose loss goes through scale_loss, as in Keras's own train_step. Where values are compressed on the
        wire nothing changes: smaller ones would lose digits there.
        """
        if self.op == hvd.Average and self.predivide_factor == 1.0 and self.compression is hvd.Compression.none:
            self.op, self._divides_losses = hvd.Sum, True

    def share_of(self, loss: tf.Tensor) -> tf.Tensor:
        """What the gradients of this rank are to be those of."""
        if self.is_alone or not self._divides_losses:
            return loss
        return loss / tf.cast(self.process_set.size(), loss.dtype)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any] | None = None) -> list[Any]:
        """The gradients reduced over the ranks, in the same order; unchanged when there is one rank.

        variables, one for each gradient, are needed where some are local or grouped by variables.
        Raises RankError where ranks would not reduce the same gradients, see structure.compare_structure.
        """
        self.num_calls += 1
        reduced = list(gradients)
        if self.is_alone:
            return reduced
        keys = [identity(variable) for variable in variables or ()] or [-1] * len(reduced)
        for index in [i for i, key in enumerate(keys) if key in self._local and reduced[i] is not None]:
            reduced[index] = self._kept_local(reduced[index])
        if self.sparse_as_dense:
            reduced = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in reduced]
        exchanged = [i for i, key in enumerate(keys) if key not in self._local]
        named = list(variables or [None] * len(reduced))
        of_all = [reduced[i] for i in exchanged], [named[i] for i in exchanged]
        compare_structure(self.name, self._settings(), *of_all, self.process_set)
        shared = [i for i in exchanged if reduced[i] is not None]
        sparse = [i for i in shared if isinstance(reduced[i], tf.IndexedSlices)]
        dense = [i for i in shared if i not in sparse]
        ready = self.marks.ready([reduced[i] for i in shared]) if self.marks else None
        done = []
        groups = self._groups(reduced, dense, keys)
        for number, group in enumerate(groups):
            tensors = [reduced[i] for i in group]
            wishes = [self.ballot.wishes(tensors[0].dtype)] if self.ballot and number == 0 else []
            values = self._reduce_group([*tensors, *wishes], f"{self.name}_{number}")
            if self.ballot and wishes:
                done.append(self.ballot.count(values.pop()))
            for index, value in zip(group, values):
                reduced[index] = value
        for index in sparse:
            reduced[index] = self._reduce_sparse(reduced[index], f"{self.name}_sparse_{index}")
        done += [reduced[i] for i in dense] + [reduced[i].values for i in sparse]
        if done:
            with tf.control_dependencies(done):
                self._count.assign_add(1)
        if self.marks and ready is not None:
            # The others may be applied while the last ones are on their way.
            last = groups[-1] if groups else []
            for index, value in zip(last, self.marks.reduced(done, ready, [reduced[i] for i in last])):
                reduced[index] = value
        return reduced

    def _settings(self) -> str:
        """All that must be the same on all ranks for their messages to match."""
        groups = self.groups if isinstance(self.groups, int | None) else [len(group) for group in self.groups]
        op = {hvd.Average: "Average", hvd.Sum: "Sum", hvd.Adasum: "Adasum"}[self.op]
        factors = f"scale={self.scale:g}, predivide_factor={self.predivide_factor:g}, votes={self.ballot is not None}"
        compression = getattr(self.compression, "__name__", type(self.compression).__name__)
        messages = f"compression={compression}, groups={groups}, bucket_bytes={self.bucket_bytes}"
        return f"op={op}, {messages}, {factors}"

    def _groups(self, gradients: list[Any], dense: list[int], keys: list[int]) -> list[list[int]]:
        """Positions of the dense gradients that travel together; those of one group have one type."""
        parts = [dense]
        if isinstance(self.groups, list):
            wanted = [{identity(variable) for variable in group} for group in self.groups]
            named = [[i for i in dense if keys[i] in group] for group in wanted]
            parts = [*named, *([i] for i in dense if not any(keys[i] in group for group in wanted))]
        elif self.bucket_bytes and self.groups is None:
            last_first = dense[::-1]
            buckets = in_buckets([gradient_bytes(gradients[i]) for i in last_first], self.bucket_bytes)
            parts = [[last_first[position] for position in bucket] for bucket in buckets]
        groups = []
        for part in parts:
            for dtype in dict.fromkeys(gradients[i].dtype for i in part):
                same = [i for i in part if gradients[i].dtype == dtype]
                count = self.groups if isinstance(self.groups, int) else 1
                length = -(-len(same) // count)
                groups += [same[start : start + length] for start in range(0, len(same), length)]
        return groups

    def _reduce_group(self, tensors: list[Any], name: str) -> list[Any]:
        dtype = tensors[0].dtype
        if dtype not in _KERNEL_TYPES:
            tensors = [tf.cast(tensor, tf.float32) for tensor in tensors]
        options = {
            "op": self.op,
            "compression": self.compression,
            "prescale_factor": 1.0 / self.predivide_factor,
            "postscale_factor": self.predivide_factor * self.scale,
            "process_set": self.process_set,
            "device_dense": self.device_dense,
            "ignore_name_scope": True,
        }
        if self.op == hvd.Adasum:
            # Horovod's grouped one fails on Adasum (an unbound name in horovod/tensorflow/__init__.py).
            values = [hvd.allreduce(tensor, name=f"{name}_{i}", **options) for i, tensor in enumerate(tensors)]
        else:
            values = hvd.grouped_allreduce(tensors, name=name, **options)
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

    def _kept_local(self, gradient: Any) -> Any:
        factor = self.scale / (self.process_set.size() if self.scale_local_gradients else 1)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
        return gradient * tf.cast(factor, gradient.dtype)


def gradient_bytes(gradient: tf.Tensor) -> int:
    """0 where the shape is not known before it is there."""
    return (gradient.shape.num_elements() or 0) * gradient.dtype.size


def identity(variable: Any) -> int:
    """What makes a Keras variable and the TensorFlow variable inside it the same."""
    return id(getattr(variable, "value", variable) if not isinstance(variable, tf.Variable) else variable)
