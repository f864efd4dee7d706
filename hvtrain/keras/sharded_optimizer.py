"""Optimizers whose slots are sharded over the ranks, as in stage 1 of ZeRO.

See Rajbhandari et al. 2020 (arXiv:1910.02054). Gradients are reduced and clipped as usual. Each
rank then updates only its part of the weights, the only part for which it keeps slots, and the
ranks gather the updated parts. The result is bit-identical to that without sharding, with any
compression and on any number of ranks.

Reduce-scatter instead of all-reduce would send a third less, but was slower (docs/networks.md).
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Ftrl,
    Lion,
    Nadam,
    RMSprop,
)

from hvtrain.core.buckets import in_buckets
from hvtrain.keras import gradients, reduction
from hvtrain.keras.wire_formats import ring_bytes
from hvtrain.step.joint_loss import overridden_steps, subclass_under_its_name
from hvtrain.step.step_timing import host_variable

# These update each element independently, so variables may be cut anywhere. Others, such as LAMB,
# need norms or products of whole variables.
ELEMENTWISE = (SGD, RMSprop, Adam, AdamW, Nadam, Adamax, Adagrad, Adadelta, Ftrl, Lion)
# Slots of Keras's base class that stay whole: gradients are accumulated before they are reduced,
# and averages of the weights are used for validation, and become the weights at the end.
WHOLE_SLOTS = ("gradient_accumulator", "average")

# Size of the messages of gather_weights. A message of several variables may be almost twice as
# large (see in_buckets), which still fits into the 32 bits in which MPI counts its bytes.
GATHERED_BYTES = 512 << 20


def shard_slots(optimizer: keras.optimizers.Optimizer, reducer: reduction.Reducer) -> None:
    """Makes an optimizer, in place, keep slots only for this rank's part of the weights.

    Args:
        optimizer: the one that updates the weights, inside any LossScaleOptimizer; not built yet.
        reducer: reduces its gradients.

    Raises:
        ValueError: the optimizer is already built, or its step cannot be divided.
    """
    kind = type(optimizer)
    overridden = overridden_steps(kind)
    if overridden:
        raise ValueError(
            f"shard=True divides Keras's own step, but {kind.__name__} overrides {', '.join(overridden)}; choose an "
            "optimizer that updates each variable in update_step"
        )
    if isinstance(optimizer, keras.optimizers.ScheduleFreeAdamW):
        raise ValueError(
            f"shard=True: slots of {kind.__name__} are copies of the weights from before the broadcast; choose another "
            "optimizer"
        )
    if optimizer.built:
        raise ValueError(
            f"shard=True needs an optimizer that is not built yet, but this {kind.__name__} has whole slots; create "
            "a new one from its config, and restore the slots with scatter_slots"
        )
    # Bypasses Keras's __setattr__, as make_distributed does.
    object.__setattr__(optimizer, "_hvtrain_reducer", reducer)
    if not issubclass(kind, Sharded):
        optimizer.__class__ = subclass_under_its_name(
            kind, Sharded, _cuts_anywhere=kind in ELEMENTWISE
        )


class Part(NamedTuple):
    """This rank's part of a variable."""

    variable: Any
    # The variable itself, if all of it is this rank's, or a new one for some of its elements,
    # possibly none.
    own: Any
    # Position of the first of these elements in the flattened variable.
    begin: int
    # The ranks that share the variable.
    process_set: Any = None

    @property
    def size(self) -> int:
        return math.prod(self.own.shape)

    def cut(self, tensor: Any) -> Any:
        """Returns this part of the variable's value or gradient, in the shape of `own`."""
        if self.own is self.variable:
            return tensor
        if not self.size or not isinstance(tensor, tf.IndexedSlices):
            flat = tf.reshape(tf.convert_to_tensor(tensor), [-1])
            return tf.reshape(flat[self.begin : self.begin + self.size], self.own.shape)
        # Each row is split into single elements, since a part may begin within a row. Rows with the
        # same index are not summed: Keras's Adam squares each of them, so the result would differ.
        row_size = math.prod(self.variable.shape[1:])
        # As int64, since a large table has more elements than int32 can count.
        rows = tf.cast(tensor.indices, tf.int64)[:, None]
        elements = rows * row_size + tf.range(row_size, dtype=tf.int64)
        indices = tf.reshape(elements, [-1]) - self.begin
        is_own = (indices >= 0) & (indices < self.size)
        values = tf.boolean_mask(tf.reshape(tensor.values, [-1, *self.own.shape[1:]]), is_own)
        return tf.IndexedSlices(
            values, tf.boolean_mask(indices, is_own), tf.constant(list(self.own.shape))
        )

    def gather(self, slot: Any, folder: Path | None = None) -> np.ndarray | None:
        """Returns the whole slot on the set's first rank, and None on the others (every rank).

        `folder` has no effect here; Rows.gather needs it.
        """
        flat = self._join(tf.reshape(tf.convert_to_tensor(slot), [-1]))
        # A slot without a reference variable is whole on each rank, or empty on ranks that have no
        # part of its variable.
        shape = max(hvd.allgather_object(tuple(self.variable.shape), process_set=self.process_set))
        if self.process_set.rank() != 0:
            return None
        return flat.numpy()[: math.prod(shape)].reshape(shape)

    def scatter(self, slot: Any, whole: np.ndarray | None) -> None:
        """Sets this rank's part of a slot from the whole array on the set's first rank (every rank)."""
        own: Any = []
        if whole is not None and self.process_set.rank() == 0:
            own = np.ravel(whole)
        flat = self._join(tf.constant(own, slot.dtype))
        slot.assign(tf.reshape(flat[self.begin : self.begin + math.prod(slot.shape)], slot.shape))

    def _join(self, own: tf.Tensor) -> tf.Tensor:
        """Joins the ranks' values [n], in the order of the ranks (every rank)."""
        # As bytes, since Horovod cannot gather bfloat16.
        joined = hvd.allgather(
            tf.bitcast(own, tf.uint8), name="hvtrain.slots", process_set=self.process_set
        )
        return tf.bitcast(joined, own.dtype)


def make_parts(variables: Sequence[Any], process_set: Any, cuts_anywhere: bool) -> list[Part]:
    """Returns this rank's part of each variable. Laid end to end, the parts are in rank order."""
    rank = process_set.rank()
    sizes = [math.prod(variable.shape) for variable in variables]
    borders = part_borders(sizes, process_set.size(), cuts_anywhere)
    parts = []
    offset = 0
    for variable, size in zip(variables, sizes):
        # The rank's borders, as positions in this variable; its part is empty if both are at the same end.
        begin, end = (min(max(border - offset, 0), size) for border in borders[rank : rank + 2])
        own = variable if end - begin == size else _make_part_variable(variable, end - begin)
        parts.append(Part(variable, own, begin, process_set))
        offset += size
    return parts


def part_borders(sizes: Sequence[int], num_ranks: int, cuts_anywhere: bool) -> list[int]:
    """Divides tensors laid end to end; returns the num_ranks + 1 borders of the ranks' parts.

    Args:
        sizes: numbers of elements of the tensors.
        num_ranks: number of ranks.
        cuts_anywhere: False: parts begin and end only at the ends of tensors.

    >>> part_borders([7, 2, 3], 2, cuts_anywhere=True), part_borders([7, 2, 3], 2, cuts_anywhere=False)
    ([0, 6, 12], [0, 7, 12])
    """
    ends = list(accumulate(sizes, initial=0))
    even = [ends[-1] * rank // num_ranks for rank in range(num_ranks + 1)]
    if cuts_anywhere:
        return even
    return [min(ends, key=lambda end: abs(end - border)) for border in even]


def _make_part_variable(variable: Any, size: int) -> Any:
    """Creates a variable for `size` elements of another one, with the same type and number of axes."""
    num_axes = len(variable.shape)
    # An empty part has size 0 along every axis, so that its slots are empty too, whichever axes they use.
    shape = (size, *[1] * (num_axes - 1)) if size else [0] * max(num_axes, 1)
    # Slots are named after the part. A TensorFlow variable has no path; its name looks like one and
    # ends in ":0".
    path = getattr(variable, "path", variable.name).replace(":", "_")
    part = keras.Variable("zeros", shape=shape, dtype=variable.dtype, name=path.rpartition("/")[2])
    part._path = path
    part.overwrite_with_gradient = gradients.is_overwritten(variable)
    return part


def gather_weights(parts: Sequence[Part], reducer: reduction.Reducer) -> None:
    """Assembles whole variables from all ranks' parts, in make_parts's order (every rank)."""
    types = [tf.as_dtype(part.variable.dtype) for part in parts]
    shapes = [[*part.variable.shape, dtype.size] for part, dtype in zip(parts, types)]
    sizes = [math.prod(shape) for shape in shapes]
    options = {"process_set": reducer.process_set, "ignore_name_scope": True}
    for number, message in enumerate(in_buckets(sizes, GATHERED_BYTES, GATHERED_BYTES)):
        # Sent as bytes, so that one message can hold several types.
        own = [tf.reshape(tf.bitcast(parts[i].own, tf.uint8), [-1]) for i in message]
        name = f"{reducer.name}_weights{number}"
        gathered = hvd.allgather(tf.concat(own, axis=0), name=name, **options)
        for i, value in zip(message, tf.split(gathered, [sizes[i] for i in message])):
            parts[i].variable.assign(tf.bitcast(tf.reshape(value, shapes[i]), types[i]))
    # An all-gather is the second half of a ring all-reduce.
    reducer.sent_bytes += ring_bytes(sum(sizes), reducer.process_set.size()) / 2


class Sharded:
    """Mixin before an optimizer's class: shards its slots over the ranks if there are several."""

    _cuts_anywhere: bool
    _hvtrain_reducer: reduction.Reducer
    _hvtrain_parts: Sequence[Part] = ()
    _hvtrain_received: tf.Variable
    built: bool
    variables: list[Any]

    def build(self, variables: Any) -> None:
        if self.built or self._hvtrain_reducer.is_alone:
            super().build(variables)  # type: ignore[misc]
            return
        parts = make_parts(variables, self._hvtrain_reducer.process_set, self._cuts_anywhere)
        object.__setattr__(self, "_hvtrain_parts", parts)
        object.__setattr__(self, "_hvtrain_received", host_variable(0.0, tf.float32, "received"))
        # Makes hvd.join refuse to run: it sends zeros, which cannot stand in for a rank's weights.
        gradients.exchanges_rows = True
        super().build([part.own for part in parts])  # type: ignore[misc]

        # To all other code this looks like an optimizer of whole variables.
        vars(self)["_trainable_variables"] = list(variables)
        for position, variable in enumerate(variables):
            self._trainable_variables_indices[self._var_key(variable)] = position  # type: ignore[attr-defined]
        for slot in self.variables:
            # Marks slots that were made without a reference variable, such as Adafactor's rows and
            # columns.
            if (
                len(slot.shape)
                and not hasattr(slot, "rank_part")
                and not slot.name.endswith(WHOLE_SLOTS)
            ):
                slot.rank_part = Part(slot, slot, 0, self._hvtrain_reducer.process_set)

    def add_variable_from_reference(
        self, reference_variable: Any, name: Any = None, initializer: Any = "zeros"
    ) -> Any:
        add = super().add_variable_from_reference  # type: ignore[misc]
        part = next((part for part in self._hvtrain_parts if part.own is reference_variable), None)
        if part is None or name in WHOLE_SLOTS:
            return add(part.variable if part else reference_variable, name, initializer)
        slot = add(reference_variable, name, initializer)
        slot.rank_part = part
        return slot

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        update = super()._backend_update_step  # type: ignore[misc]
        if not self._hvtrain_parts:
            update(grads, trainable_variables, learning_rate)
            return
        # Each rank needs only the gradients of its own variables. But from a nested function, such
        # as fit's, TensorFlow prunes operations whose values are unused. The ranks would then run
        # different reductions, and wait forever. So every gradient is used once.
        values = tf.nest.flatten(list(grads), expand_composites=True)
        elements = [tf.cast(tf.reshape(value, [-1])[:1], tf.float32) for value in values]
        self._hvtrain_received.assign(tf.reduce_sum(tf.concat(elements, axis=0)))

        index_of = self._get_variable_index  # type: ignore[attr-defined]
        positions = [index_of(variable) for variable in trainable_variables]
        pairs = [(self._hvtrain_parts[i], gradient) for i, gradient in zip(positions, grads)]
        # A rank that has no part of these variables steps on an empty one, so that it counts the
        # step too.
        own = [pair for pair in pairs if pair[0].size] or pairs[:1]
        for part, _ in own:
            # Copied in each step, since the weights may have changed, for example by a broadcast.
            if part.own is not part.variable:
                part.own.assign(part.cut(part.variable))
        update(
            [part.cut(gradient) for part, gradient in own],
            [part.own for part, _ in own],
            learning_rate,
        )
        # In the order of make_parts, whatever the order of this step's variables.
        gather_weights([self._hvtrain_parts[i] for i in sorted(positions)], self._hvtrain_reducer)


def gather_slots(optimizer: Any) -> dict[int, np.ndarray]:
    """Returns the whole sharded slots on rank 0, and an empty dict on the others (every rank).

    Keys are positions in `optimizer.variables`; variables without a key are equal on all ranks. The dict
    is empty for an optimizer that is not sharded.
    """
    slots = {}
    for position, slot in _rank_slots(optimizer):
        whole = slot.rank_part.gather(slot)
        if whole is not None:
            slots[position] = whole
    return slots


def scatter_slots(optimizer: Any, slots: dict[int, np.ndarray]) -> None:
    """Distributes the slots that gather_slots returned, on any number of ranks (every rank).

    Args:
        optimizer: a built optimizer.
        slots: what gather_slots returned; read on rank 0 only.
    """
    for position, slot in _rank_slots(optimizer):
        slot.rank_part.scatter(slot, slots.get(position))


def _rank_slots(optimizer: Any) -> Iterator[tuple[int, Any]]:
    """Yields the slots of which this rank has a part, with their positions."""
    for position, slot in enumerate(optimizer.variables):
        if hasattr(slot, "rank_part"):
            yield position, slot
