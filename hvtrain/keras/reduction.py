"""Reduces gradients over all ranks, and counts the reductions inside the graph.

DistributedOptimizer and DistributedGradientTape call it. A Python counter inside a tf.function
counts traces. Here the counter is a variable that the graph increments once the reduced values have
arrived, so it counts the reductions that ran.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvtrain.core.buckets import in_buckets
from hvtrain.errors import RankError
from hvtrain.keras.compression import CompressedReduction, Compression, WireFormat, sent_bytes
from hvtrain.keras.gradients import (
    are_finite,
    compare_structure,
    expect_rows,
    gather_rows,
    map_values,
    merge_rows,
    overwrites,
    variable_id,
)
from hvtrain.keras.in_graph import SharedFlag, is_compiled_by_xla, new_counter
from hvtrain.keras.process import check_adasum
from hvtrain.keras.table_rows import rows_of, whole_spec
from hvtrain.step.step_timing import StepMarks

if TYPE_CHECKING:
    from hvtrain.keras.noise_scale import NoiseScale

# Types of Horovod's kernels for dense tensors (horovod/tensorflow/mpi_ops.cc, attribute T). Others
# travel as float32.
_KERNEL_TYPES = (tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64)
_OP_NAMES = {hvd.Average: "Average", hvd.Sum: "Sum", hvd.Adasum: "Adasum"}

# Horovod pairs tensors of different ranks by name. Names made from Keras's differ once one rank has
# built more models than another; the order in which a program's optimizers take their first steps
# does not. Each process set has its own numbers, since ranks outside of it do not step.
_numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)


def restart_numbering() -> None:
    """Numbers new optimizers from 0, as a rank that just started does.

    Every rank calls it at the same point, and uses no older optimizer afterwards.
    """
    _numbers.clear()


@dataclass(eq=False)
class Reducer:
    """Reduces lists of gradients over the ranks.

    A call is collective: every rank of the process set makes it, in the same order.

    Dense gradients travel in groups, which are fused into few messages. IndexedSlices are gathered
    by rows. None stays None, at the same position. Gradients of local variables are not exchanged,
    only divided by the number of ranks if scale_local_gradients is true (horovod#3695). Those of
    sharded tables have come from all ranks already.

    Args:
        groups: number of groups for each type, or lists of variables whose gradients travel
            together; the gradients of other variables then travel alone.
        bucket_bytes: without groups, the size of a group, the last variables first: their gradients
            are ready first, and are reduced while others are computed (Li et al. 2020, "PyTorch
            Distributed", section 3.2).
        scale: factor by which the result is multiplied.
        message_name: beginning of its messages' names; drawn at the first step if empty.

    The other arguments are those of DistributedOptimizer.

    Raises:
        ValueError: for arguments that exclude each other, before a step could hang on them.
    """

    op: int = hvd.Average
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    groups: int | list[list[Any]] | None = None
    bucket_bytes: int = 0
    predivide_factor: float = 1.0
    scale: float = 1.0
    device_dense: str = ""
    device_sparse: str = ""
    process_set: Any = None
    scale_local_gradients: bool = True
    message_name: str = ""
    # Reductions that this rank has run.
    count: tf.Variable = field(default_factory=new_counter)
    # Bytes of dense gradients that this rank sends in a step. Known once a step is traced.
    sent_bytes: float = 0.0
    # Calls from Python: one for each step that is traced or runs eagerly.
    num_calls: int = 0
    # True if the ranks gather parts of the weights afterwards, see sharded_optimizer.py.
    gathers_weights: bool = False
    # Travels with the first group, or by itself if all gradients are sparse.
    flag: SharedFlag | None = None
    # Replaces rows of a sparse gradient that have the same index by their sum. Needed on GPUs,
    # which add such rows to a weight in an order that changes, so that weights of different ranks
    # would differ in their last digits.
    sums_duplicates: bool = field(default_factory=lambda: bool(tf.config.list_logical_devices("GPU")))
    # Notes when gradients are ready and when they are reduced, in steps traced from now on.
    marks: StepMarks | None = None
    # Takes the norms of dense gradients, in steps traced from now on.
    noise: "NoiseScale | None" = None

    def __post_init__(self) -> None:
        self.process_set = self.process_set or hvd.global_process_set
        self._divides_losses = False
        self._local: set[int] = set()
        self.compressed: CompressedReduction | None = None

        if self.predivide_factor != 1.0 and self.op != hvd.Average:
            raise ValueError("gradient_predivide_factor needs op=Average; leave one of the two out")
        if self.op not in _OP_NAMES:
            raise ValueError("gradients are reduced by Average, Sum or Adasum; choose one of these as op")
        if self.op == hvd.Adasum:
            check_adasum(self.process_set, self.device_dense)
        if isinstance(self.compression, WireFormat):
            if self.op == hvd.Adasum or self.predivide_factor != 1.0:
                raise ValueError(
                    f"Compression.{self.compression.name} averages gradients by itself, so it works with neither "
                    "op=Adasum nor gradient_predivide_factor; leave one of the two out"
                )
            self.compressed = CompressedReduction(self.compression, self.process_set)
        groups = self.groups
        if not (groups is None or isinstance(groups, list) or (isinstance(groups, int) and groups > 0)):
            raise ValueError(f"groups={groups!r} is neither a number above 0 nor a list of lists of variables")

    @property
    def name(self) -> str:
        """The beginning of its messages' names, the same on all ranks.

        Drawn at the first step, so that an optimizer that only one rank makes and never steps takes
        no number.
        """
        if not self.message_name:
            set_id = self.process_set.process_set_id
            infix = f"of_set_{set_id}_" if set_id else ""
            self.message_name = f"hvtrain_gradients_{infix}{next(_numbers[set_id])}"
        return self.message_name

    @property
    def is_alone(self) -> bool:
        """True for one rank, or a rank outside the process set: no other to exchange with."""
        return not self.process_set.included() or self.process_set.size() == 1

    @property
    def averages(self) -> bool:
        """True if reducing twice gives what reducing once does."""
        return self.op == hvd.Average and self.scale == 1.0

    @property
    def names_variables(self) -> bool:
        """True if it refers to variables, which a copy of the optimizer would not have."""
        return bool(self._local) or isinstance(self.groups, list)

    def register_local(self, variables: Iterable[Any]) -> None:
        """Keeps the gradients of these variables on their rank."""
        self._local.update(map(variable_id, variables))

    def divide_losses(self) -> None:
        """Sums gradients of losses that are divided by the number of ranks, instead of averaging.

        The same mean, without a pass over the gradients. For steps whose loss goes through
        scale_loss, as in Keras's own train_step. Has no effect if values are compressed on the
        wire, where smaller ones would lose digits.
        """
        if self.op == hvd.Average and self.predivide_factor == 1.0 and self.compression is Compression.none:
            self.op = hvd.Sum
            self._divides_losses = True

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the loss to differentiate on this rank."""
        if self.is_alone or not self._divides_losses:
            return loss
        return loss / tf.cast(self.process_set.size(), loss.dtype)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any] | None = None) -> list[Any]:
        """Returns the gradients reduced over the ranks, in the same order.

        Args:
            gradients: tensors, IndexedSlices or None.
            variables: one for each gradient; needed if some are local or grouped by variables.

        Raises:
            RankError: if ranks would not reduce the same gradients, see compare_structure.
            ValueError: if XLA compiles the step.
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

        # Without variables the ranks compare types and shapes alone.
        variables = list(variables or [None] * len(reduced))
        is_local = [variable_id(variable) in self._local for variable in variables]
        if self.compressed:
            self.compressed.prepare(variables)
        tables = [i for i, variable in enumerate(variables) if rows_of(variable) and reduced[i] is not None]
        for i, gradient in enumerate(reduced):
            if i in tables:
                # All ranks have sent what they have for this rank's rows.
                expect_rows(self.op)
                reduced[i] = self._scaled(merge_rows(gradient), averages=self.op == hvd.Average)
                continue
            if is_local[i] and gradient is not None:
                reduced[i] = self._scaled(gradient, averages=self.scale_local_gradients)
            if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
                reduced[i] = tf.convert_to_tensor(reduced[i])
        exchanged = [i for i in range(len(reduced)) if not is_local[i]]
        compared = [whole_spec(variables[i]) if i in tables else reduced[i] for i in exchanged]
        self._compare(compared, [variables[i] for i in exchanged])

        shared = [i for i in exchanged if reduced[i] is not None and i not in tables]
        sparse = [i for i in shared if isinstance(reduced[i], tf.IndexedSlices)]
        overwriting = [i for i in shared if overwrites(variables[i])]
        dense = [i for i in shared if i not in [*sparse, *overwriting]]
        groups = self._in_groups(dense, reduced, variables)
        if tables and dense:
            # All ranks have to see it, so it travels with the last message.
            poison = tf.where(are_finite([reduced[i] for i in tables]), 0.0, float("nan"))
            reduced[dense[0]] += tf.cast(poison, reduced[dense[0]].dtype)
        self.sent_bytes = sent_bytes([reduced[i] for i in dense], self.compression, self.process_set.size())

        ready = self.marks.ready([reduced[i] for i in shared]) if self.marks else None
        done = self._reduce_dense(reduced, groups, variables)
        if overwriting:
            reduced = self.maxima(reduced, variables)
        for i in sparse:
            expect_rows(self.op)
            with tf.device(self.device_sparse):
                reduced[i] = gather_rows(reduced[i], f"{self.name}_sparse_{i}", self.process_set)
            if self.sums_duplicates:
                reduced[i] = merge_rows(reduced[i])
            # The optimizer adds the rows of all ranks to the weights, so the mean is taken of each row.
            reduced[i] = self._scaled(reduced[i], averages=self.op == hvd.Average)

        done += tf.nest.flatten([reduced[i] for i in [*shared, *tables]], expand_composites=True)
        # Not counted before the values are there, so that the counter tells what ran.
        if done:
            with tf.control_dependencies(done):
                self.count.assign_add(1)
        if self.marks and ready is not None:
            # Only the last group waits for the clock; the others may be applied meanwhile.
            last = groups[-1] if groups else []
            for i, value in zip(last, self.marks.reduced(done, ready, [reduced[i] for i in last])):
                reduced[i] = value
        return reduced

    def maxima(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Replaces gradients that overwrite their variables by their maxima over the ranks.

        These are float8's scales and the histories of largest absolute values that they come from.
        Those of the joint batch are the maxima over its parts.
        """
        gradients = list(gradients)
        positions = [i for i, variable in enumerate(variables) if overwrites(variable) and gradients[i] is not None]
        if positions and not self.is_alone:
            values = hvd.grouped_allreduce(
                [gradients[i] for i in positions],
                name=f"{self.name}_maxima",
                op=hvd.Max,
                process_set=self.process_set,
                ignore_name_scope=True,
            )
            for i, value in zip(positions, values):
                gradients[i] = value
        return gradients

    def _compare(self, gradients: list[Any], variables: list[Any]) -> None:
        """Raises RankError unless all ranks will reduce the same gradients in the same way."""
        groups = [len(group) for group in self.groups] if isinstance(self.groups, list) else self.groups
        compression = getattr(self.compression, "__name__", self.compression)
        settings = (
            f"op={_OP_NAMES[self.op]}, compression={compression}, groups={groups}, bucket_bytes={self.bucket_bytes}, "
            f"scale={self.scale:g}, predivide_factor={self.predivide_factor:g}, stop_flag={self.flag is not None}, "
            f"shard={self.gathers_weights}"
        )
        is_first = not self.message_name
        try:
            compare_structure(
                self.name,
                settings,
                gradients,
                variables,
                self.process_set,
                num_steps=lambda: int(self.count.numpy()),
            )
        except RankError:
            # Other ranks drew this number for another optimizer. All draw again at their next step.
            if is_first:
                self.message_name = ""
            raise

    def _in_groups(self, dense: list[int], gradients: list[Any], variables: list[Any]) -> list[list[int]]:
        """Groups the positions of dense gradients by message; those of a group have one type."""
        parts = [dense]
        if isinstance(self.groups, list):
            ids = [variable_id(variable) for variable in variables]
            named = [{variable_id(variable) for variable in group} for group in self.groups]
            parts = [[i for i in dense if ids[i] in group] for group in named]
            parts += [[i] for i in dense if not any(ids[i] in group for group in named)]
        elif self.bucket_bytes and self.groups is None:
            last_first = dense[::-1]
            # A shape that is only known at run time counts as 0 bytes.
            sizes = [(gradients[i].shape.num_elements() or 0) * gradients[i].dtype.size for i in last_first]
            parts = [[last_first[position] for position in bucket] for bucket in in_buckets(sizes, self.bucket_bytes)]

        # All tensors of a message have one type.
        num_groups = self.groups if isinstance(self.groups, int) else 1
        groups = []
        for part in parts:
            for dtype in dict.fromkeys(gradients[i].dtype for i in part):
                same_type = [i for i in part if gradients[i].dtype == dtype]
                length = math.ceil(len(same_type) / num_groups)
                groups += [same_type[start : start + length] for start in range(0, len(same_type), length)]
        return groups

    def _reduce_dense(self, gradients: list[Any], groups: list[list[int]], variables: list[Any]) -> list[Any]:
        """Reduces the groups in place, and the flag with them; returns the flag's update."""
        done = []
        own_norms = []
        joint_norms = []
        values: list[Any] = []
        # One element more in a message that is sent anyway; among compressed ones it could get lost.
        flag = self.flag if groups and not self.compressed else None
        for number, group in enumerate(groups):
            tensors = [gradients[i] for i in group]
            name = f"{self.name}_{number}"
            if self.noise:
                own_norms.append(self.noise.squared_norm(tensors, self.count))
            if self.compressed:
                means = self.compressed(tensors, [variables[i] for i in group], name)
                factor = self.scale * (self.process_set.size() if self.op == hvd.Sum else 1)
                values = [mean * tf.cast(factor, mean.dtype) for mean in means]
            elif flag and number == 0:
                tensors.append(flag.own(tensors[0].dtype))
                values = self._reduce_group(tensors, name)
                done.append(flag.update(values.pop()))
            else:
                values = self._reduce_group(tensors, name)
            if self.noise:
                joint_norms.append(self.noise.squared_norm(values, self.count))
            for i, value in zip(group, values):
                gradients[i] = value
        if self.noise and groups:
            factor = self.scale * (self.process_set.size() if self.op == hvd.Sum else 1)
            self.noise.update(own_norms, joint_norms, factor, self.count)
        if self.flag and not flag:
            (value,) = self._reduce_group([self.flag.own(tf.float32)], f"{self.name}_flag")
            done.append(self.flag.update(value))
        if self.compressed:
            done += self.compressed.end_step()
        return done

    def _reduce_group(self, tensors: list[Any], name: str) -> list[Any]:
        dtype = tensors[0].dtype
        if dtype not in _KERNEL_TYPES:
            tensors = [tf.cast(tensor, tf.float32) for tensor in tensors]
        options = {
            "op": self.op,
            "compression": Compression.none if self.compressed else self.compression,
            "prescale_factor": 1.0 / self.predivide_factor,
            "postscale_factor": self.predivide_factor * self.scale,
            "process_set": self.process_set,
            "device_dense": self.device_dense,
            # Scopes are made of Keras's names, which may differ between ranks.
            "ignore_name_scope": True,
        }
        if self.op == hvd.Adasum:
            # Horovod's grouped_allreduce fails on Adasum, by an unbound name
            # (horovod/tensorflow/__init__.py).
            values = [hvd.allreduce(tensor, name=f"{name}_{i}", **options) for i, tensor in enumerate(tensors)]
        else:
            values = hvd.grouped_allreduce(tensors, name=name, **options)
        return [tf.cast(value, dtype) for value in values]

    def _scaled(self, gradient: Any, averages: bool) -> Any:
        """Multiplies a gradient by the scale; divides it by the number of ranks if it is to be averaged."""
        factor = self.scale
        if averages:
            factor /= self.process_set.size()
        return map_values(lambda values: values * tf.cast(factor, values.dtype), gradient)
