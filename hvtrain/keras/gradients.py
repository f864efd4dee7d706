"""Checks of gradients: do all ranks reduce the same ones, of the same weights, and is the result finite?

Horovod does not compare the tensors of a grouped reduction: sums over different shapes read past
the end of a buffer, and a gradient that one rank lacks makes the others wait forever. Ranks that
train on from different weights, because the script forgot the broadcast, are warned once.
"""

import atexit
import hashlib
import logging
import re
import threading
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvtrain.errors import RankError
from hvtrain.keras.in_graph import tf_variable
from hvtrain.keras.table_rows import rows_of

log = logging.getLogger(__name__)

_ADVICE = {
    "gradient": "build the same model, loss and optimizers",
    "tensor": "give tensors of the same types and shapes",
}
NOT_FINITE = "hvtrain: the gradient is not finite"

# A broadcast that has not come after so many steps was forgotten. Horovod's own loops broadcast
# after the first step, so different weights in that step are no fault yet.
STEPS_WITHOUT_BROADCAST = 3
SECONDS_BETWEEN_LOOKS = 0.5

# True once this process has exchanged rows of embeddings, which hvd.join cannot stand in for.
exchanges_rows = False

# Each ends a watch for a broadcast.
_watches: list[threading.Event] = []
# Names of reductions, and digests of the structures that all ranks were found to share.
_compared: set[tuple[str, str]] = set()


def forget_comparisons() -> None:
    """Makes the next reductions compare again, because other ranks may have joined (every rank)."""
    _compared.clear()


@tf.autograph.experimental.do_not_convert  # AutoGraph would convert pickling too, and warn.
def compare_structure(
    reduction: str,
    settings: str,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    process_set: Any,
    noun: str = "gradient",
    num_steps: Callable[[], int] | None = None,
) -> None:
    """Raises RankError on all ranks unless they will reduce the same gradients (every rank).

    The ranks exchange one digest for each structure that is new to a reduction of this name: while
    a step is traced, or in the first eager step. A step traced again, for a batch of another size,
    sends nothing. All reductions share the name of that message, so that a rank that steps with
    another optimizer meets the others there. Only the names of layer and weight are compared,
    without the numbers that Keras adds (dense_1): numbers depend on what else a rank has built, and
    the model's name on whether the rank loaded it.

    Args:
        reduction: name of the reduction, the same on all ranks.
        settings: a line that says how it reduces.
        gradients: tensors, IndexedSlices, TensorSpecs or None.
        variables: one for each gradient, or None.
        process_set: the ranks that compare.
        noun: "gradient" or "tensor", for the message.
        num_steps: a function that returns the number of steps that the reduction has done. If
            given, ranks whose weights differ are watched, and warned if no broadcast follows.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            return  # A TensorFlow 1 graph cannot exchange anything while it is built.

        pairs = zip_longest(gradients, variables[: len(gradients)])
        lines = [f"{settings}, name={reduction}", *(describe(*pair) for pair in pairs)]
        structure = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        if (reduction, structure) in _compared:
            return

        # The weights' digest travels along, so that it costs no message of its own.
        options = {"name": "hvtrain_compared_before_the_first_step", "process_set": process_set}
        weights = weights_digest(variables) if num_steps else None
        structures, all_weights = zip(*hvd.allgather_object((structure, weights), **options))
        if len(set(structures)) > 1:
            # Only now do the ranks send whole lines, for the message.
            lines_by_rank = hvd.allgather_object(lines, **options)
            ranks = getattr(process_set, "ranks", None) or range(len(lines_by_rank))
            raise RankError(difference(lines_by_rank, ranks, noun))
        _compared.add((reduction, structure))
        is_first = process_set.rank() == 0
        if num_steps and is_first and None not in all_weights and len(set(all_weights)) > 1:
            watch_for_broadcast(num_steps)


def weights_digest(variables: Sequence[Any]) -> str | None:
    """Returns a digest of this rank's values; None if one of them cannot be read."""
    digest = hashlib.sha256()
    for variable in variables:
        value = tf_variable(variable)
        if rows_of(variable):
            continue  # Each rank has other rows.
        if not isinstance(value, tf.Variable):
            return None
        try:
            digest.update(np.ascontiguousarray(value.numpy()).tobytes())
        # Not initialized yet, or in a graph, where a variable has no value.
        except (tf.errors.OpError, NotImplementedError, AttributeError):
            return None
    return digest.hexdigest()


def watch_for_broadcast(num_steps: Callable[[], int]) -> None:
    """Warns if no broadcast follows (one rank of those that train together). Sends nothing.

    Args:
        num_steps: a function that returns the number of steps that have reduced gradients.
    """
    ended = threading.Event()

    def warn_if_due() -> None:
        if not ended.is_set() and num_steps() >= STEPS_WITHOUT_BROADCAST:
            ended.set()
            log.warning(
                "the ranks train from different weights, and nothing has made them equal; call "
                "hvd.broadcast_variables(model.variables, 0), or use hvd.BroadcastGlobalVariablesCallback(0)"
            )

    def look() -> None:
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            warn_if_due()

    def at_exit() -> None:
        # A short program may end between two looks.
        warn_if_due()
        ended.set()
        # A thread that comes back from TensorFlow as Python ends would abort the process.
        thread.join(2 * SECONDS_BETWEEN_LOOKS)

    thread = threading.Thread(target=look, name="hvtrain forgotten broadcast", daemon=True)
    _watches.append(ended)
    thread.start()
    atexit.register(at_exit)


def weights_made_equal() -> None:
    """Ends all watches: a broadcast, or a comparison, has been called."""
    while _watches:
        _watches.pop().set()


def describe(gradient: Any, variable: Any) -> str:
    """Returns one line with the names of layer and weight, and the gradient's type and shape.

    >>> describe(tf.zeros([2, 3]), tf.Variable(tf.zeros([2, 3]), name="model_1/dense_4/kernel"))
    'dense/kernel float32 [2, 3]'
    """
    name = getattr(variable, "path", None)
    if not name and not isinstance(variable, tf.Tensor):
        name = getattr(variable, "name", None)
    # Layer and weight, without Keras's numbers and the ":0" of TensorFlow's names.
    name = "/".join(re.sub(r"(_\d+|:\d+)(?=/|$)", "", name or "").split("/")[-2:])
    if gradient is None:
        description = "without a gradient"
    elif isinstance(gradient, tf.IndexedSlices):
        description = f"{gradient.dtype.name} rows of {_dimensions(gradient.values.shape[1:])}, sparse"
    else:
        description = f"{gradient.dtype.name} {_dimensions(gradient.shape)}"
    return f"{name} {description}".strip()


def difference(lines_by_rank: Sequence[Sequence[str]], ranks: Sequence[int], noun: str = "gradient") -> str:
    """Returns an error message on the first rank that differs from the first one.

    Args:
        lines_by_rank: for each of the ranks one line for the settings and one for each gradient.

    >>> difference([["op=Sum", "a float32 [2]"], ["op=Sum", "a float32 [3]"]], [0, 4]).partition(";")[0]
    'cannot reduce the gradients of ranks 0 and 4: gradient 0 is a float32 [2] on rank 0, a float32 [3] on rank 4'
    """
    first_lines = lines_by_rank[0]
    other, other_lines = next((rank, lines) for rank, lines in zip(ranks, lines_by_rank) if lines != first_lines)
    pairs = enumerate(zip_longest(first_lines, other_lines, fillvalue="missing"))
    line, (first, second) = next((line, pair) for line, pair in pairs if pair[0] != pair[1])
    subject = f"{noun} {line - 1} is" if line else "the reduction is set to"
    return (
        f"cannot reduce the {noun}s of ranks {ranks[0]} and {other}: {subject} {first} on rank {ranks[0]}, "
        f"{second} on rank {other}; {_ADVICE[noun]}, in the same order, on every rank"
    )


def _dimensions(shape: tf.TensorShape) -> str:
    return "of any shape" if shape.rank is None else str(shape.as_list())


class FiniteCheck:
    """Fails a step on all ranks, before it changes weights, if its gradients are not finite.

    Remembers the ranks at fault. NaN and infinity survive the sum over the ranks, so every rank
    sees them in the result and no message is needed to agree. Only then do the ranks exchange whose
    own gradient it was. The step fails on every rank with tf.errors.InvalidArgumentError, whose
    message holds NOT_FINITE.
    """

    def __init__(self) -> None:
        # True if the update begins only once the check has passed. A GPU would stand idle
        # meanwhile. There the update begins at once, with zeros instead of gradients that are not
        # finite, and the step fails all the same.
        self.waits = not tf.config.list_logical_devices("GPU")
        with tf.init_scope(), tf.device("/CPU:0"):
            # Shape [None]: the number of ranks changes in an elastic job.
            no_faults = tf.zeros([self.num_processes], tf.int32)
            self.at_fault = tf.Variable(no_faults, trainable=False, name="at_fault", shape=[None])

    def __call__(self, own: Sequence[Any], reduced: Sequence[Any], excused: Any = False) -> list[Any]:
        """Returns the gradients in `reduced`, once they are known to be finite.

        Args:
            own: this rank's gradients before the reduction.
            reduced: the reduced gradients, the same on all ranks.
            excused: a condition, the same on all ranks, under which non-finite gradients pass.
        """

        def fail() -> tf.Operation:
            faults = self.faults(own)
            with tf.control_dependencies([self.at_fault.assign(faults)]):
                return tf.debugging.Assert(False, [NOT_FINITE, "by rank:", faults])

        is_fine = tf.logical_or(are_finite(reduced), excused)
        # The exchange is in a branch, so it costs nothing in a step that is fine.
        passed = tf.cond(is_fine, tf.no_op, fail)

        def zeros_unless_fine(values: tf.Tensor) -> tf.Tensor:
            return tf.where(is_fine, values, tf.zeros_like(values))

        if not self.waits:
            return [map_values(zeros_unless_fine, gradient) for gradient in reduced]
        with tf.control_dependencies([passed]):
            return [map_values(tf.identity, gradient) for gradient in reduced]

    @property
    def num_processes(self) -> int:
        return int(hvd.size()) if hvd.is_initialized() else 1

    def faults(self, own: Sequence[Any]) -> tf.Tensor:
        """Returns int32 [ranks], 1 for ranks whose own gradients are not finite (every rank)."""
        if self.num_processes == 1:
            return tf.constant([1])  # Also if they are of another replica in this process.
        fault = tf.cast(tf.logical_not(are_finite(own)), tf.int32)
        return hvd.allgather(fault[None], name="hvtrain_at_fault", ignore_name_scope=True)


def are_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns a boolean tensor, true if all values are finite.

    One pass: a tensor's sum is not finite if one of its values is not.
    """
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    if not values:
        return tf.constant(True)
    # Half precision would overflow in the sum.
    values = [tf.cast(value, tf.float32) if value.dtype.size < 4 else value for value in values]
    sums = [tf.cast(tf.reduce_sum(value), tf.float32) for value in values]
    return tf.math.is_finite(tf.add_n(sums))


def sum_duplicates(values: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums the rows that have the same index; returns the sums and their indices, each once.

    The same bits on every rank, since the CPU sums in order.

    >>> values, indices = sum_duplicates(tf.constant([[1.0], [2.0], [3.0]]), tf.constant([7, 4, 7]))
    >>> values.numpy().tolist(), indices.numpy().tolist()
    ([[4.0], [2.0]], [7, 4])
    """
    with tf.device("/CPU:0"):
        unique, positions = tf.unique(indices)
        return tf.math.unsorted_segment_sum(values, positions, tf.size(unique)), unique


def expect_rows(op: int) -> None:
    """Notes that rows are exchanged. Raises ValueError for an op that cannot reduce them."""
    global exchanges_rows
    exchanges_rows = True
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError(
            "only Average and Sum reduce IndexedSlices; pass sparse_as_dense=True for other ops, and shard no table"
        )


def gather_rows(slices: tf.IndexedSlices, name: str, process_set: Any) -> tf.IndexedSlices:
    """Returns the rows of all ranks, in their order (every rank)."""
    options = {"process_set": process_set, "ignore_name_scope": True}
    values = hvd.allgather(slices.values, name=f"{name}_values", **options)
    indices = hvd.allgather(slices.indices, name=f"{name}_indices", **options)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def merge_rows(gradient: Any) -> Any:
    """Returns each row once, with the sum of its values; a dense gradient as it is."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    values, rows = sum_duplicates(gradient.values, gradient.indices)
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def map_values(function: Callable[[Any], Any], gradient: Any) -> Any:
    """Applies a function to a gradient, or to the values of IndexedSlices; None stays None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def overwrites(variable: Any) -> bool:
    """Returns True if Keras sets this variable to its gradient, as it does for float8."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def variable_id(variable: Any) -> int:
    """Returns the same number for a Keras variable and for the TensorFlow variable inside it."""
    return id(tf_variable(variable))
