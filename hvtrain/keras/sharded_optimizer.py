"""Optimizers whose slots are sharded over the ranks: stage 1 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).

Gradients are reduced and clipped as without it. Each rank then updates its part of the weights, for
which alone it keeps slots, and the ranks gather the parts. So a step has the bits of the step
without it, with any compression and any number of ranks.

Reduce-scatter in place of the all-reduce would send a third less, and took longer (docs/networks.md).
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

from hvtrain.keras import gradients, reduction
from hvtrain.keras.compression import ring_bytes
from hvtrain.keras.gradients import overwrites
from hvtrain.step.joint_loss import overridden_steps, subclass_under_its_name

_optimizers = keras.optimizers
# Their steps treat each element by itself, so a variable may be cut anywhere. Others, such as LAMB,
# take norms or products of whole variables.
ELEMENTWISE = (
    *(_optimizers.SGD, _optimizers.RMSprop, _optimizers.Adam, _optimizers.AdamW, _optimizers.Nadam),
    *(_optimizers.Adamax, _optimizers.Adagrad, _optimizers.Adadelta, _optimizers.Ftrl, _optimizers.Lion),
)
# Slots that Keras's base class makes, which stay whole. Gradients are accumulated before they are
# reduced; averages of the weights are validated, and become the weights at the end.
_WHOLE_SLOTS = ("gradient_accumulator", "average")


def shard_slots(optimizer: keras.optimizers.Optimizer, reducer: reduction.Reducer) -> None:
    """Makes an optimizer that is not built yet keep the slots of this rank's part, in place.

    Args:
        optimizer: the optimizer that updates the weights, inside of any loss scale.
        reducer: reduces its gradients.

    Raises:
        ValueError: the optimizer is built, or steps in a way that cannot be divided.
    """
    kind = type(optimizer)
    overridden = overridden_steps(kind)
    if overridden:
        raise ValueError(
            f"shard=True divides Keras's own step, and {kind.__name__} overrides {', '.join(overridden)}; choose an "
            "optimizer that updates each variable in update_step"
        )
    if isinstance(optimizer, keras.optimizers.ScheduleFreeAdamW):
        raise ValueError(
            f"shard=True: slots of {kind.__name__} begin as the weights, before these are broadcast; choose another "
            "optimizer"
        )
    if optimizer.built:
        raise ValueError(
            f"shard=True needs an optimizer that is not built yet, and this {kind.__name__} has whole slots; make a "
            "new one of its config, and pass the slots to scatter_slots"
        )
    # Bypasses Keras's __setattr__, as make_distributed does.
    object.__setattr__(optimizer, "_hvtrain_reducer", reducer)
    if not issubclass(kind, Sharded):
        optimizer.__class__ = subclass_under_its_name(kind, Sharded, _cuts_anywhere=kind in ELEMENTWISE)


class Part(NamedTuple):
    """This rank's part of a variable."""

    variable: Any
    own: Any
    """The variable itself, or a copy of some of its elements, which may be none."""
    begin: int
    """The first of them."""
    process_set: Any = None
    """The ranks that have the other parts."""

    @property
    def size(self) -> int:
        return math.prod(self.own.shape)

    def cut(self, tensor: Any) -> Any:
        """Returns this part of the variable's value or gradient."""
        if self.own is self.variable:
            return tensor
        if not self.size or not isinstance(tensor, tf.IndexedSlices):
            flat = tf.reshape(tf.convert_to_tensor(tensor), [-1])
            return tf.reshape(flat[self.begin : self.begin + self.size], self.own.shape)
        # Rows become slices of one element each, for a part may begin within a row. Their sum would
        # be another gradient: Keras's Adam squares each of the rows that have the same index.
        row_size = math.prod(self.variable.shape[1:])
        indices = tensor.indices[:, None] * row_size + tf.range(row_size, dtype=tensor.indices.dtype)
        indices = tf.reshape(indices, [-1]) - self.begin
        is_own = (indices >= 0) & (indices < self.size)
        values = tf.boolean_mask(tf.reshape(tensor.values, [-1, *self.own.shape[1:]]), is_own)
        return tf.IndexedSlices(values, tf.boolean_mask(indices, is_own), tf.constant(list(self.own.shape)))

    def gather(self, slot: Any, folder: Path | None = None) -> np.ndarray | None:
        """Returns a slot of the variable whole, on the first rank, and None elsewhere (every rank)."""
        own = tf.reshape(tf.convert_to_tensor(slot), [-1])
        flat = hvd.allgather(own, name="hvtrain.slots", process_set=self.process_set)
        # Of a slot that was made without a reference the other ranks have none, or each a copy.
        shape = max(hvd.allgather_object(tuple(self.variable.shape), process_set=self.process_set))
        return flat.numpy()[: math.prod(shape)].reshape(shape) if self.process_set.rank() == 0 else None

    def scatter(self, slot: Any, whole: np.ndarray | None) -> None:
        """Sets this rank's part of a slot to that of the first rank's whole (every rank)."""
        own: Any = [] if whole is None or self.process_set.rank() else np.ravel(whole)
        flat = hvd.allgather(tf.constant(own, slot.dtype), name="hvtrain.slots", process_set=self.process_set)
        slot.assign(tf.reshape(flat[self.begin : self.begin + math.prod(slot.shape)], slot.shape))


def make_parts(variables: Sequence[Any], process_set: Any, cuts_anywhere: bool) -> list[Part]:
    """Returns this rank's part of each variable; the ranks' parts follow each other in the variables' order."""
    rank = process_set.rank()
    sizes = [math.prod(variable.shape) for variable in variables]
    borders = part_borders(sizes, process_set.size(), cuts_anywhere)
    parts = []
    offset = 0
    for variable, size in zip(variables, sizes):
        begin, end = (min(max(border - offset, 0), size) for border in borders[rank : rank + 2])
        own = variable if end - begin == size else _copy(variable, end - begin)
        parts.append(Part(variable, own, begin, process_set))
        offset += size
    return parts


def part_borders(sizes: Sequence[int], num_ranks: int, cuts_anywhere: bool) -> list[int]:
    """Returns where the ranks' parts begin and end in tensors of these sizes, laid end to end.

    >>> part_borders([7, 2, 3], 2, cuts_anywhere=True), part_borders([7, 2, 3], 2, cuts_anywhere=False)
    ([0, 6, 12], [0, 7, 12])
    """
    ends = list(accumulate(sizes, initial=0))
    even = [ends[-1] * rank // num_ranks for rank in range(num_ranks + 1)]
    if cuts_anywhere:
        return even
    return [min(ends, key=lambda end: abs(end - border)) for border in even]


def _copy(variable: Any, size: int) -> Any:
    """Creates a variable for so many elements of another one, with its type and number of axes."""
    num_axes = len(variable.shape)
    # Along each axis no element, so that no slot has one, whichever axes it takes.
    shape = (size, *[1] * (num_axes - 1)) if size else [0] * max(num_axes, 1)
    # Slots are named after it. A TensorFlow variable has a name like a path, that ends in ":0".
    path = getattr(variable, "path", variable.name).replace(":", "_")
    copy = keras.Variable("zeros", shape=shape, dtype=variable.dtype, name=path.rpartition("/")[2])
    copy._path = path
    copy.overwrite_with_gradient = overwrites(variable)
    return copy


def gather_weights(parts: Sequence[Part], reducer: reduction.Reducer) -> None:
    """Sets whole variables to the parts of all ranks (every rank)."""
    # As bytes, so that one message holds any types; the ranks' parts follow each other.
    packed = tf.concat([tf.reshape(tf.bitcast(part.own, tf.uint8), [-1]) for part in parts], axis=0)
    options = {"process_set": reducer.process_set, "ignore_name_scope": True}
    gathered = hvd.allgather(packed, name=f"{reducer.name}_weights", **options)
    types = [tf.as_dtype(part.variable.dtype) for part in parts]
    shapes = [[*part.variable.shape, dtype.size] for part, dtype in zip(parts, types)]
    values = tf.split(gathered, [math.prod(shape) for shape in shapes])
    for part, dtype, shape, value in zip(parts, types, shapes, values):
        part.variable.assign(tf.bitcast(tf.reshape(value, shape), dtype))
    # Half of an all-reduce, which ends with such a gathering.
    reducer.sent_bytes += ring_bytes(sum(map(math.prod, shapes)), reducer.process_set.size()) / 2


class Sharded:
    """Mixin before the class of the optimizer that updates the weights. On one rank it changes nothing."""

    _cuts_anywhere: bool
    _hvtrain_reducer: reduction.Reducer
    _hvtrain_parts: Sequence[Part] = ()
    _hvtrain_received: tf.Variable
    built: bool
    variables: list[Any]

    def build(self, variables: Any) -> None:
        process_set = self._hvtrain_reducer.process_set
        if self.built or self._hvtrain_reducer.is_alone:
            super().build(variables)  # type: ignore[misc]
            return
        parts = make_parts(variables, process_set, self._cuts_anywhere)
        object.__setattr__(self, "_hvtrain_parts", parts)
        with tf.init_scope(), tf.device("/CPU:0"):
            object.__setattr__(self, "_hvtrain_received", tf.Variable(0.0, trainable=False, name="received"))
        # Zeros of a rank that has joined stand in for no weights.
        gradients.exchanges_rows = True
        super().build([part.own for part in parts])  # type: ignore[misc]

        # To everyone else it is an optimizer of whole variables.
        vars(self)["_trainable_variables"] = list(variables)
        for position, variable in enumerate(variables):
            self._trainable_variables_indices[self._var_key(variable)] = position  # type: ignore[attr-defined]
        for slot in self.variables:
            # Adafactor's rows and columns are made without a reference.
            if len(slot.shape) and not hasattr(slot, "rank_part") and not slot.name.endswith(_WHOLE_SLOTS):
                slot.rank_part = Part(slot, slot, 0, self._hvtrain_reducer.process_set)

    def add_variable_from_reference(self, reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
        add = super().add_variable_from_reference  # type: ignore[misc]
        part = next((part for part in self._hvtrain_parts if part.own is reference_variable), None)
        if part is None or name in _WHOLE_SLOTS:
            return add(part.variable if part else reference_variable, name, initializer)
        slot = add(reference_variable, name, initializer)
        slot.rank_part = part
        return slot

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        update = super()._backend_update_step  # type: ignore[misc]
        if not self._hvtrain_parts:
            update(grads, trainable_variables, learning_rate)
            return
        # Each rank updates other variables, and TensorFlow leaves out of a nested function, such as
        # that of fit, messages whose values nothing uses: the ranks waited for each other for ever.
        values = tf.nest.flatten(list(grads), expand_composites=True)
        elements = [tf.cast(tf.reshape(value, [-1])[:1], tf.float32) for value in values]
        self._hvtrain_received.assign(tf.reduce_sum(tf.concat(elements, axis=0)))

        positions = map(self._get_variable_index, trainable_variables)  # type: ignore[attr-defined]
        parts = [self._hvtrain_parts[position] for position in positions]
        pairs = list(zip(parts, grads))
        # A rank without a part of them takes an empty one: its optimizer counts steps too.
        own = [pair for pair in pairs if pair[0].size] or pairs[:1]
        for part, _ in own:
            # Others, such as a broadcast, may have set the weights.
            if part.own is not part.variable:
                part.own.assign(part.cut(part.variable))
        update([part.cut(gradient) for part, gradient in own], [part.own for part, _ in own], learning_rate)
        gather_weights(parts, self._hvtrain_reducer)


def gather_slots(optimizer: Any) -> dict[int, np.ndarray]:
    """Returns the slots that are sharded over the ranks, whole, on rank 0, and nothing elsewhere (every rank).

    By their positions in `optimizer.variables`, whose other variables are equal on all ranks. Empty
    for an optimizer that is not sharded.
    """
    slots = {}
    for position, slot in _rank_slots(optimizer):
        whole = slot.rank_part.gather(slot)
        if whole is not None:
            slots[position] = whole
    return slots


def scatter_slots(optimizer: Any, slots: dict[int, np.ndarray]) -> None:
    """Gives each rank its part of slots that gather_slots returned, on any number of ranks (every rank).

    Args:
        optimizer: a built optimizer.
        slots: on rank 0; those of other ranks are not read.
    """
    for position, slot in _rank_slots(optimizer):
        slot.rank_part.scatter(slot, slots.get(position))


def _rank_slots(optimizer: Any) -> Iterator[tuple[int, Any]]:
    """Yields the slots of which this rank has a part, with their positions."""
    for position, slot in enumerate(optimizer.variables):
        if hasattr(slot, "rank_part"):
            yield position, slot
