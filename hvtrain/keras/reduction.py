"""Reduces gradients over all ranks, and counts the reductions inside the graph.

DistributedOptimizer and DistributedGradientTape use a Reducer. A Python counter inside a tf.function
would count traces, so the counter is a variable, which the graph increments once the reduced values
have arrived.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvtrain.errors import RankError
from hvtrain.keras.compression import CompressedReduction, Compression, sent_bytes
from hvtrain.keras.gradients import (
    are_finite,
    expect_rows,
    gather_rows,
    group_by_message,
    is_overwritten,
    map_values,
    merge_rows,
    variable_id,
)
from hvtrain.keras.in_graph import SharedFlag, new_counter, refuse_xla
from hvtrain.keras.process import check_adasum
from hvtrain.keras.same_gradients import compare_structure
from hvtrain.keras.table_rows import rows_of, whole_spec, with_nan
from hvtrain.keras.wire_formats import WireFormat
from hvtrain.step.step_timing import StepMarks

# Types of dense tensors that Horovod's kernels take (mpi_ops.cc, attribute T). Others are sent as float32.
_KERNEL_TYPES = (tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64)
_OP_NAMES = {hvd.Average: "Average", hvd.Sum: "Sum", hvd.Adasum: "Adasum"}

# Horovod pairs the tensors of different ranks by name. Names derived from Keras's differ once one
# rank has built more models than another, but all ranks' optimizers take their first steps in the
# same order. Each process set has its own count, since ranks outside of it do not take these steps.
_numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)


def restart_numbering() -> None:
    """Numbers new optimizers from 0 again (every rank, once no older optimizer is in use)."""
    _numbers.clear()


@dataclass(eq=False)
class Reducer:
    """Reduces lists of gradients over the ranks.

    A call is collective: every rank of the process set makes it, in the same order.

    Dense gradients are sent in groups, one fused message each. The rows of IndexedSlices are gathered.
    None stays None, at the same position. Gradients of local variables are not exchanged, but divided
    by the number of ranks if scale_local_gradients is true (horovod#3695). Gradients of sharded tables
    already come from all ranks: the backward pass of the lookup exchanged them.

    Args:
        groups: number of groups for each type, or lists of variables whose gradients are sent
            together; the gradients of other variables are then sent one by one.
        bucket_bytes: without groups, the size of a group, the last variables first: their gradients
            are ready first, and are reduced while others are still computed (Li et al. 2020,
            "PyTorch Distributed", section 3.2).
        scale: factor that multiplies the result.
        message_name: prefix of the messages' names; chosen at the first step if empty.

    The other arguments are those of DistributedOptimizer.

    Raises:
        ValueError: for arguments that exclude each other or are out of range.
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
    # Reductions that have run on this rank.
    count: tf.Variable = field(default_factory=new_counter)
    # Bytes of dense gradients that this rank sends in a step; 0 until a step is traced.
    sent_bytes: float = 0.0
    # Number of calls from Python: one for each step that is traced or runs eagerly.
    num_calls: int = 0
    # True if the ranks gather parts of the weights after the step; see sharded_optimizer.py.
    gathers_weights: bool = False
    # True if all ranks skip a step in which a local variable's gradient overflows on one of them.
    shares_overflow: bool = False
    # The stop flag. It is reduced with the first group, or in a separate message with a WireFormat
    # or if all gradients are sparse.
    flag: SharedFlag | None = None
    # If True, rows of a sparse gradient with the same index are replaced by their sum. GPUs add
    # such rows in no fixed order, so the last digits would differ between ranks.
    sums_duplicates: bool = field(
        default_factory=lambda: bool(tf.config.list_logical_devices("GPU"))
    )
    # Marks when gradients are ready and when they are reduced, in steps traced after it is set.
    marks: StepMarks | None = None
    # A NoiseScale, which measures the norms of dense gradients in steps traced after it is set.
    noise: Any = None

    def __post_init__(self) -> None:
        self.process_set = self.process_set or hvd.global_process_set
        self._divides_losses = False
        # Variables whose gradients stay on their rank, by variable_id.
        self.local_ids: set[int] = set()
        self.compressed: CompressedReduction | None = None

        if self.predivide_factor != 1.0 and self.op != hvd.Average:
            raise ValueError("gradient_predivide_factor needs op=Average; leave one of the two out")
        if self.op not in _OP_NAMES:
            raise ValueError(
                f"op={self.op!r} cannot reduce gradients; choose hvd.Average, hvd.Sum or hvd.Adasum"
            )
        if self.op == hvd.Adasum:
            check_adasum(self.process_set, self.device_dense)
        if isinstance(self.compression, WireFormat):
            if self.op == hvd.Adasum or self.predivide_factor != 1.0:
                raise ValueError(
                    f"Compression.{self.compression.name} averages gradients itself, so it works with neither "
                    "op=Adasum nor gradient_predivide_factor; leave these out, or choose another compression"
                )
            self.compressed = CompressedReduction(self.compression, self.process_set)
        groups = self.groups
        is_number = isinstance(groups, int) and groups > 0
        if not (groups is None or isinstance(groups, list) or is_number):
            raise ValueError(
                f"groups={groups!r} is neither a number above 0 nor a list of lists of variables"
            )

    @property
    def name(self) -> str:
        """The prefix of the messages' names, the same on all ranks.

        The number is taken at the first step, so that an optimizer that only one rank creates, and
        never steps, takes none.
        """
        if not self.message_name:
            set_id = self.process_set.process_set_id
            infix = f"of_set_{set_id}_" if set_id else ""
            self.message_name = f"hvtrain_gradients_{infix}{next(_numbers[set_id])}"
        return self.message_name

    @property
    def is_alone(self) -> bool:
        """True if there is no rank to exchange with, as on ranks outside of the process set."""
        return not self.process_set.included() or self.process_set.size() == 1

    def divide_losses(self) -> None:
        """Switches to averaging by dividing losses by the number of ranks and summing gradients.

        This saves a pass over the gradients. Only for steps whose loss goes through scale_loss, as
        in Keras's own train_step. It has no effect with compression, in which smaller values would
        lose digits.
        """
        if (
            self.op == hvd.Average
            and self.predivide_factor == 1.0
            and self.compression is Compression.none
        ):
            self.op = hvd.Sum
            self._divides_losses = True

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the loss to differentiate on this rank."""
        if self.is_alone or not self._divides_losses:
            return loss
        return loss / tf.cast(self.process_set.size(), loss.dtype)

    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any] | None = None
    ) -> list[Any]:
        """Returns the gradients reduced over the ranks, in the same order.

        Args:
            gradients: tensors, IndexedSlices or None.
            variables: one for each gradient; needed if some are local, sharded or in `groups`.

        Raises:
            RankError: if the ranks would not reduce the same gradients; see compare_structure.
            ValueError: if XLA compiles the step, or a gradient is complex.
        """
        self.num_calls += 1
        reduced = list(gradients)
        if self.is_alone:
            return [self._rescale(gradient, averages=False) for gradient in reduced]
        refuse_xla("a reduction between ranks")

        # Without variables the ranks compare only types and shapes.
        variables = list(variables or [None] * len(reduced))
        is_local = [variable_id(variable) in self.local_ids for variable in variables]
        if self.compressed:
            self.compressed.prepare(variables)
        present = [i for i, gradient in enumerate(reduced) if gradient is not None]
        tables = [i for i in present if rows_of(variables[i])]
        for i, gradient in enumerate(reduced):
            if i in tables:
                # All ranks have already sent their gradients for this rank's rows.
                expect_rows(self.op)
                reduced[i] = self._rescale(merge_rows(gradient), averages=self.op == hvd.Average)
                continue
            if is_local[i]:
                reduced[i] = self._rescale(gradient, averages=self.scale_local_gradients)
            if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
                reduced[i] = tf.convert_to_tensor(reduced[i])
        exchanged = [i for i, stays in enumerate(is_local) if not stays]
        compared = [whole_spec(variables[i]) if i in tables else reduced[i] for i in exchanged]
        self._compare(compared, [variables[i] for i in exchanged])

        shared = [i for i in present if not is_local[i] and i not in tables]
        if any(reduced[i].dtype.is_complex for i in shared):
            raise ValueError(
                "Horovod cannot reduce complex gradients; keep real and imaginary parts in two variables"
            )
        sparse = [i for i in shared if isinstance(reduced[i], tf.IndexedSlices)]
        overwriting = [i for i in shared if is_overwritten(variables[i])]
        dense = [i for i in shared if i not in sparse + overwriting]
        groups = group_by_message(dense, reduced, variables, self.groups, self.bucket_bytes)
        own = [i for i in present if i in tables or (is_local[i] and self.shares_overflow)]
        if own:
            self._share_overflow(reduced, own, dense)
        self.sent_bytes = sent_bytes(
            [reduced[i] for i in dense], self.compression, self.process_set.size()
        )

        ready = self.marks.ready([reduced[i] for i in shared]) if self.marks else None
        done = self._reduce_dense(reduced, groups, variables)
        if overwriting:
            reduced = self.maxima(reduced, variables)
        for i in sparse:
            reduced[i] = self._reduce_sparse(reduced[i], f"{self.name}_sparse_{i}")

        done += tf.nest.flatten([reduced[i] for i in shared + tables], expand_composites=True)
        if done:
            with tf.control_dependencies(done):
                self.count.assign_add(1)
        if self.marks and ready is not None:
            # Only the last group waits for the time mark; the others may be applied meanwhile.
            last = groups[-1] if groups else []
            for i, value in zip(last, self.marks.reduced(done, ready, [reduced[i] for i in last])):
                reduced[i] = value
        return reduced

    def maxima(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns all gradients; those that overwrite their variables are replaced by maxima over the ranks.

        Such gradients are float8's scales and histories of absolute maxima, which for the joint batch
        are the maxima over the ranks.
        """
        gradients = list(gradients)
        pairs = zip(gradients, variables)
        positions = [i for i, (g, v) in enumerate(pairs) if g is not None and is_overwritten(v)]
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
        groups = self.groups
        lengths = [len(group) for group in groups] if isinstance(groups, list) else groups
        compression = getattr(self.compression, "__name__", self.compression)
        settings = (
            f"op={_OP_NAMES[self.op]}, compression={compression}, groups={lengths}, bucket_bytes={self.bucket_bytes}, "
            f"scale={self.scale:g}, predivide_factor={self.predivide_factor:g}, stop_flag={self.flag is not None}, "
            f"shard={self.gathers_weights}"
        )
        message_name = self.message_name
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
            # Other ranks may have given this number to another optimizer. Next time all take a new
            # one.
            self.message_name = message_name
            raise

    def _share_overflow(self, gradients: list[Any], own: list[int], dense: list[int]) -> None:
        """Tells all ranks, with a NaN, if one of the gradients that stay on this rank is not finite.

        The first dense gradient carries the NaN to the other ranks; without a dense gradient, the NaN
        is sent in its own message.
        """
        poison = tf.where(are_finite([gradients[i] for i in own]), 0.0, float("nan"))
        if not dense:
            (poison,) = self._reduce_group([poison], f"{self.name}_finite")
        carrier = dense[0] if dense else own[0]
        gradients[carrier] = with_nan(gradients[carrier], poison)

    def _reduce_dense(
        self, gradients: list[Any], groups: list[list[int]], variables: list[Any]
    ) -> list[Any]:
        """Reduces the groups in place, and the flag.

        Returns the operations that update the flag and the state of the compression.
        """
        done = []
        norms = []
        # How many times larger than the mean the result is.
        factor = self.scale * (self.process_set.size() if self.op == hvd.Sum else 1)
        # The flag is one more element of a message that is sent anyway, unless a WireFormat could
        # round it to 0.
        flag = self.flag if groups and not self.compressed else None
        for number, group in enumerate(groups):
            tensors = [gradients[i] for i in group]
            name = f"{self.name}_{number}"
            if self.compressed:
                means = self.compressed(tensors, [variables[i] for i in group], name)
                values = [mean * tf.cast(factor, mean.dtype) for mean in means]
            elif flag and number == 0:
                values = self._reduce_group([*tensors, flag.own(tensors[0].dtype)], name)
                done.append(flag.update(values.pop()))
            else:
                values = self._reduce_group(tensors, name)
            if self.noise:
                norms.append(
                    [self.noise.half_squared_norm(part, self.count) for part in (tensors, values)]
                )
            for i, value in zip(group, values):
                gradients[i] = value
        if self.noise and groups:
            self.noise.update(norms, factor, self.count)
        if not flag:
            done += self._reduce_flag()
        if self.compressed:
            done += self.compressed.end_step()
        return done

    def _reduce_sparse(self, gradient: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        expect_rows(self.op)
        with tf.device(self.device_sparse):
            rows = gather_rows(gradient, name, self.process_set)
        if self.sums_duplicates:
            rows = merge_rows(rows)
        # The optimizer adds up the gathered rows, so each is divided by the number of ranks.
        return self._rescale(rows, averages=self.op == hvd.Average)

    def _reduce_flag(self) -> list[Any]:
        """Reduces the flag, if any, in its own message; returns the operation that updates it."""
        if not self.flag:
            return []
        (value,) = self._reduce_group([self.flag.own(tf.float32)], f"{self.name}_flag")
        return [self.flag.update(value)]

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
            # Name scopes come from Keras's names, which may differ between ranks.
            "ignore_name_scope": True,
        }
        if self.op == hvd.Adasum:
            # In Horovod 0.28.1, grouped_allreduce fails with Adasum: a variable is unbound
            # (horovod/tensorflow/__init__.py).
            values = [
                hvd.allreduce(tensor, name=f"{name}_{i}", **options)
                for i, tensor in enumerate(tensors)
            ]
        else:
            values = hvd.grouped_allreduce(tensors, name=name, **options)
        return [tf.cast(value, dtype) for value in values]

    def _rescale(self, gradient: Any, averages: bool) -> Any:
        """Multiplies a gradient by the scale; if `averages`, also divides it by the number of ranks."""
        factor = self.scale
        if averages:
            factor /= self.process_set.size()
        if factor == 1.0:
            return gradient
        return map_values(lambda values: values * tf.cast(factor, values.dtype), gradient)
