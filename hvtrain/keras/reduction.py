"""Reduces gradients over all ranks, counted inside the graph. DistributedOptimizer and the tape call it.

A Python counter inside a tf.function counts traces. This one is a variable that the graph increments after the reduced
values have arrived, so it counts what ran.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvtrain.errors import RankError
from hvtrain.keras.adasum import check_adasum
from hvtrain.keras.gradients import compare_structure, map_values, sum_duplicates
from hvtrain.keras.grouping import in_groups
from hvtrain.keras.in_graph import SharedFlag, is_compiled_by_xla, new_counter
from hvtrain.keras.variables import overwrites, variable_id
from hvtrain.step.step_timing import StepMarks

# Horovod's kernels for dense tensors (horovod/tensorflow/mpi_ops.cc, attribute T); others travel as float32.
_KERNEL_TYPES = (tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64)
_OP_NAMES = {hvd.Average: "Average", hvd.Sum: "Sum", hvd.Adasum: "Adasum"}

# Horovod pairs tensors of different ranks by name. Names made from Keras's differ once one rank has built more models
# than another; the order in which a program's optimizers take their first steps does not. Each process set has its own
# numbers, since ranks outside of it do not step.
_numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
gathers_rows = False
"""True once this process has reduced sparse gradients."""


def restart_numbering() -> None:
    """Numbers new optimizers from 0, as a rank that just started does (every rank; none may use older ones)."""
    _numbers.clear()


@dataclass(eq=False)
class Reducer:
    """Reduces lists of gradients over the ranks. Calling it is collective (every rank of the process set).

    Dense gradients travel in groups, so that they are fused into few messages: for each type num_groups of them, or as
    `groups`, lists of variables, says (the remaining gradients each on their own). With bucket_bytes the groups are
    those of in_buckets, the last variables first: their gradients are ready first, and are reduced while others are
    computed (Li et al. 2020, "PyTorch Distributed", section 3.2). IndexedSlices are gathered by rows; None stays None,
    at the same position. Gradients of local variables are not exchanged, only divided by the number of ranks if
    scale_local_gradients is true (horovod#3695).
    """

    op: int = hvd.Average
    compression: Any = hvd.Compression.none
    sparse_as_dense: bool = False
    groups: int | list[list[Any]] | None = None
    bucket_bytes: int = 0
    predivide_factor: float = 1.0
    scale: float = 1.0
    device_dense: str = ""
    device_sparse: str = ""
    process_set: Any = None
    scale_local_gradients: bool = True
    given_name: str = ""
    count: tf.Variable = field(default_factory=new_counter)
    """Reductions that this rank has run."""
    num_calls: int = 0
    """Calls from Python: one for each step that is traced or runs eagerly."""
    flag: SharedFlag | None = None
    """Travels with the first group, or by itself if all gradients are sparse."""
    sums_duplicates: bool = field(default_factory=lambda: bool(tf.config.list_logical_devices("GPU")))
    """Rows of sparse gradients with the same index become their sum, as on GPUs, which would add them to a weight in an
    order that changes: weights of different ranks would differ in their last digits."""
    marks: StepMarks | None = None
    """Timer of the steps traced from now on: when gradients were ready, and when they were reduced."""

    def __post_init__(self) -> None:
        self.process_set = self.process_set or hvd.global_process_set
        self._check_arguments()
        self._divides_losses = False
        self._local: set[int] = set()

    def _check_arguments(self) -> None:
        """Raises ValueError for arguments that exclude each other, before a step could hang on them."""
        if self.predivide_factor != 1.0 and self.op != hvd.Average:
            raise ValueError("gradient_predivide_factor needs op=Average; leave one of the two out")
        if self.op not in _OP_NAMES:
            raise ValueError("gradients are reduced by Average, Sum or Adasum; choose one of these as op")
        if self.op == hvd.Adasum:
            check_adasum(self.process_set, self.device_dense)
        groups = self.groups
        if not (groups is None or isinstance(groups, list) or (isinstance(groups, int) and groups > 0)):
            raise ValueError(f"groups={groups!r} is neither a number above 0 nor a list of lists of variables")

    @property
    def name(self) -> str:
        """The same on all ranks. Drawn at the first step, so that an optimizer that only one rank makes takes none."""
        if not self.given_name:
            of_set = self.process_set.process_set_id
            place = f"of_set_{of_set}_" if of_set else ""
            self.given_name = f"hvtrain_gradients_{place}{next(_numbers[of_set])}"
        return self.given_name

    @property
    def is_alone(self) -> bool:
        """True if there is no other rank to exchange with: one rank, or a rank outside the process set."""
        return not self.process_set.included() or self.process_set.size() == 1

    @property
    def averages(self) -> bool:
        """True if reducing twice gives what reducing once does."""
        return self.op == hvd.Average and self.scale == 1.0

    @property
    def names_variables(self) -> bool:
        """True if some variables have a way of their own."""
        return bool(self._local) or isinstance(self.groups, list)

    def register_local(self, variables: Iterable[Any]) -> None:
        """Keeps the gradients of these variables on their rank."""
        self._local.update(map(variable_id, variables))

    def divide_losses(self) -> None:
        """Takes the mean by dividing each rank's loss, one number, by the number of ranks; gradients are then summed.

        For steps whose loss goes through scale_loss, as in Keras's own train_step. Has no effect if values are
        compressed on the wire, where smaller ones would lose digits.
        """
        if self.op == hvd.Average and self.predivide_factor == 1.0 and self.compression is hvd.Compression.none:
            self.op, self._divides_losses = hvd.Sum, True

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss to differentiate on this rank."""
        if self.is_alone or not self._divides_losses:
            return loss
        return loss / tf.cast(self.process_set.size(), loss.dtype)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any] | None = None) -> list[Any]:
        """The gradients reduced over the ranks, in the same order; unchanged if there is one rank.

        variables, one for each gradient, are needed if some are local or grouped by variables.
        Raises RankError if ranks would not reduce the same gradients, see compare_structure.
        """
        self.num_calls += 1
        reduced = list(gradients)
        if self.is_alone:
            return reduced
        if is_compiled_by_xla():
            raise ValueError(
                "XLA compiles this step, and cannot compile a reduction between ranks; pass jit_compile=False to "
                "model.compile (on GPUs Keras compiles by default), or reduce outside tf.function(jit_compile=True)"
            )
        variables = list(variables or [None] * len(reduced))
        ids = [variable_id(variable) for variable in variables]
        exchanged = [i for i, key in enumerate(ids) if key not in self._local]
        for i, gradient in enumerate(reduced):
            if i not in exchanged and gradient is not None:
                reduced[i] = self._scale_local(gradient)
            if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
                reduced[i] = tf.convert_to_tensor(reduced[i])
        structure = [reduced[i] for i in exchanged], [variables[i] for i in exchanged]
        is_first = not self.given_name
        try:
            compare_structure(
                self.name, self._settings(), *structure, self.process_set, num_steps=lambda: int(self.count.numpy())
            )
        except RankError:
            # Other ranks have drawn this number for another optimizer. All draw a new one at their next step.
            if is_first:
                self.given_name = ""
            raise
        shared = [i for i in exchanged if reduced[i] is not None]
        sparse = [i for i in shared if isinstance(reduced[i], tf.IndexedSlices)]
        overwriting = [i for i in shared if overwrites(variables[i])]
        dense = [i for i in shared if i not in [*sparse, *overwriting]]
        wanted = self.groups
        named = [set(map(variable_id, group)) for group in wanted] if isinstance(wanted, list) else wanted
        groups = in_groups(reduced, dense, ids, named, self.bucket_bytes)
        ready = self.marks.ready([reduced[i] for i in shared]) if self.marks else None
        done = []
        for number, group in enumerate(groups):
            tensors = [reduced[i] for i in group]
            if self.flag and number == 0:
                tensors.append(self.flag.own(tensors[0].dtype))
            values = self._reduce_group(tensors, f"{self.name}_{number}")
            if self.flag and number == 0:
                done.append(self.flag.update(values.pop()))
            for i, value in zip(group, values):
                reduced[i] = value
        if self.flag and not groups:
            (value,) = self._reduce_group([self.flag.own(tf.float32)], f"{self.name}_flag")
            done.append(self.flag.update(value))
        if overwriting:
            reduced = self.maxima(reduced, variables)
        for i in sparse:
            reduced[i] = self._reduce_sparse(reduced[i], f"{self.name}_sparse_{i}")
        done += [reduced[i].values if i in sparse else reduced[i] for i in shared]
        if shared:
            with tf.control_dependencies(done):
                self.count.assign_add(1)
        if self.marks and ready is not None:
            # Only the last group waits for the clock: the others may be applied while it is on its way.
            last = groups[-1] if groups else []
            for i, value in zip(last, self.marks.reduced(done, ready, [reduced[i] for i in last])):
                reduced[i] = value
        return reduced

    def maxima(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients, those that become the values of their variables replaced by the largest of all ranks.

        These are the scales of float8 and the histories of largest absolute values that they come from, so those of
        the joint batch are the maxima over its parts.
        """
        found = list(gradients)
        at = [i for i, variable in enumerate(variables) if overwrites(variable) and found[i] is not None]
        if at and not self.is_alone:
            options = {"op": hvd.Max, "process_set": self.process_set, "ignore_name_scope": True}
            values = hvd.grouped_allreduce([found[i] for i in at], name=f"{self.name}_maxima", **options)
            for i, value in zip(at, values):
                found[i] = value
        return found

    def _settings(self) -> str:
        """The settings that must be the same on all ranks for their messages to match."""
        groups = self.groups if isinstance(self.groups, int | None) else [len(group) for group in self.groups]
        compression = getattr(self.compression, "__name__", type(self.compression).__name__)
        return (
            f"op={_OP_NAMES[self.op]}, compression={compression}, groups={groups}, bucket_bytes={self.bucket_bytes}, "
            f"scale={self.scale:g}, predivide_factor={self.predivide_factor:g}, stop_flag={self.flag is not None}"
        )

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
            # Horovod's grouped_allreduce fails on Adasum (an unbound name in horovod/tensorflow/__init__.py).
            values = [hvd.allreduce(tensor, name=f"{name}_{i}", **options) for i, tensor in enumerate(tensors)]
        else:
            values = hvd.grouped_allreduce(tensors, name=name, **options)
        return [value if value.dtype == dtype else tf.cast(value, dtype) for value in values]

    def _reduce_sparse(self, slices: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        global gathers_rows
        gathers_rows = True
        if self.op not in (hvd.Average, hvd.Sum):
            raise ValueError("only Average and Sum reduce IndexedSlices; pass sparse_as_dense=True for other ops")
        with tf.device(self.device_sparse):
            options = {"process_set": self.process_set, "ignore_name_scope": True}
            values = hvd.allgather(slices.values, name=f"{name}_values", **options)
            indices = hvd.allgather(slices.indices, name=f"{name}_indices", **options)
        factor = self.scale / (self.process_set.size() if self.op == hvd.Average else 1)
        if self.sums_duplicates:
            values, indices = sum_duplicates(values, indices)
        return tf.IndexedSlices(values * factor, indices, slices.dense_shape)

    def _scale_local(self, gradient: Any) -> Any:
        factor = self.scale / (self.process_set.size() if self.scale_local_gradients else 1)
        return map_values(lambda values: values * tf.cast(factor, values.dtype), gradient)
