"""Checks that all ranks reduce the same gradients, of the same weights.

Horovod does not compare the tensors of a grouped reduction: sums over different shapes read past the
end of a buffer, and a gradient that one rank lacks makes the others wait forever. If the ranks keep
training from different weights, because the script forgot the broadcast, the first of them logs a warning.
"""

import atexit
import hashlib
import logging
import re
import threading
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import tensorflow as tf

from hvtrain.errors import RankError
from hvtrain.keras.in_graph import tf_variable
from hvtrain.keras.table_rows import rows_of

log = logging.getLogger(__name__)
T = TypeVar("T")

_ADVICE = {
    "gradient": "build the same model, loss and optimizers",
    "tensor": "give tensors of the same types and shapes",
}

# If no broadcast has come after this many steps, it was forgotten. Horovod's own examples broadcast
# after the first step, so different weights in that step are not a fault yet.
STEPS_WITHOUT_BROADCAST = 3
POLL_SECONDS = 0.5

# One event for each running watch for a broadcast; setting it ends the watch.
_watches: list[threading.Event] = []
# Structures that all ranks are known to share: (process set's ranks, reduction's name, digest).
_compared: set[tuple[str, str, str]] = set()


def forget_comparisons() -> None:
    """Makes each reduction compare again, because other ranks may have joined (every rank)."""
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
    a step is traced, or in the first eager step. Tracing a step again, for a batch of another size,
    sends nothing. The message has the same name for all reductions, so that a rank that steps with
    another optimizer is compared with the others too. Only the layer and the weight in a variable's name
    are compared, without the numbers that Keras adds (dense_1): these depend on what else a rank has
    built, and the model's name depends on whether the rank loaded it.

    Args:
        reduction: name of the reduction, the same on all ranks.
        settings: a line that describes the settings of the reduction.
        gradients: tensors, IndexedSlices, TensorSpecs or None.
        variables: each gradient's variable, or None.
        process_set: the ranks that compare.
        noun: "gradient" or "tensor", for the message.
        num_steps: a function that returns the number of steps whose gradients were reduced. If it is
            given and the ranks' weights differ, a warning is logged unless a broadcast follows.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            return  # A TensorFlow 1 graph cannot exchange anything while it is built.

        pairs = zip_longest(gradients, variables[: len(gradients)])
        lines = [f"{settings}, name={reduction}", *(describe(*pair) for pair in pairs)]
        structure = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        # By process set, since the ranks of one must not wait for ranks that are only in another.
        key = (str(getattr(process_set, "ranks", None)), reduction, structure)
        if key in _compared:
            return

        # The weights' digest is sent along, so it costs no message of its own.
        options = {"name": "hvtrain_compared_before_the_first_step", "process_set": process_set}
        weights = weights_digest(variables) if num_steps else None
        structures, all_weights = zip(*hvd.allgather_object((structure, weights), **options))
        if len(set(structures)) > 1:
            # The ranks send whole lines only for the error message.
            lines_by_rank = hvd.allgather_object(lines, **options)
            raise RankError(difference(lines_by_rank, ranks_of(process_set), noun))
        _compared.add(key)
        is_first = process_set.rank() == 0
        if num_steps and is_first and None not in all_weights and len(set(all_weights)) > 1:
            watch_for_broadcast(num_steps)


def weights_digest(variables: Sequence[Any]) -> str | None:
    """Returns a digest of the variables' values on this rank; None if one of them cannot be read."""
    digest = hashlib.sha256()
    for variable in variables:
        value = tf_variable(variable)
        if rows_of(variable):
            continue  # Each rank has different rows.
        if not isinstance(value, tf.Variable):
            return None
        try:
            digest.update(value.numpy().tobytes())
        # The variable is not initialized yet, or belongs to a graph, where it has no value.
        except (tf.errors.OpError, NotImplementedError, AttributeError):
            return None
    return digest.hexdigest()


def watch_for_broadcast(num_steps: Callable[[], int]) -> None:
    """Starts a thread that warns if no broadcast follows; called on one of the ranks that train together.

    Args:
        num_steps: a function that returns the number of steps whose gradients were reduced.
    """
    ended = threading.Event()

    def warn_if_due():
        if not ended.is_set() and num_steps() >= STEPS_WITHOUT_BROADCAST:
            ended.set()
            log.warning(
                "the ranks train from different weights, and nothing has made them equal; call "
                "hvd.broadcast_variables(model.variables, 0), or use hvd.BroadcastGlobalVariablesCallback(0)"
            )

    def poll():
        while not ended.wait(POLL_SECONDS):
            warn_if_due()

    def at_exit():
        # A short program may end between two polls.
        warn_if_due()
        ended.set()
        # A thread that returns from TensorFlow while Python exits would abort the process.
        thread.join(2 * POLL_SECONDS)

    thread = threading.Thread(target=poll, name="hvtrain forgotten broadcast", daemon=True)
    _watches.append(ended)
    thread.start()
    atexit.register(at_exit)


def end_broadcast_watches() -> None:
    """Ends all watches for a broadcast; called after a broadcast or a comparison of weights."""
    while _watches:
        _watches.pop().set()


def describe(gradient: Any, variable: Any) -> str:
    """Returns one line with the names of layer and weight, and the type and shape of the gradient.

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
        description = (
            f"{gradient.dtype.name} rows of {_dimensions(gradient.values.shape[1:])}, sparse"
        )
    else:
        description = f"{gradient.dtype.name} {_dimensions(gradient.shape)}"
    return f"{name} {description}".strip()


def difference(
    lines_by_rank: Sequence[Sequence[str]], ranks: Sequence[int], noun: str = "gradient"
) -> str:
    """Returns the error message about the first rank whose lines differ from those of ranks[0].

    Args:
        lines_by_rank: for each rank, a line for the settings and one for each gradient.
        ranks: the numbers of these ranks, in the same order.
        noun: "gradient" or "tensor".

    >>> difference([["op=Sum", "a float32 [2]"], ["op=Sum", "a float32 [3]"]], [0, 4]).partition(";")[0]
    'cannot reduce the gradients of ranks 0 and 4: gradient 0 is a float32 [2] on rank 0, a float32 [3] on rank 4'
    """
    first_lines = lines_by_rank[0]
    other, other_lines = next(
        (rank, lines) for rank, lines in zip(ranks, lines_by_rank) if lines != first_lines
    )
    line, first, second = first_difference(first_lines, other_lines)
    subject = f"{noun} {line - 1} is" if line else "the reduction is set to"
    return (
        f"cannot reduce the {noun}s of ranks {ranks[0]} and {other}: {subject} {first} on rank {ranks[0]}, "
        f"{second} on rank {other}; {_ADVICE[noun]}, in the same order, on every rank"
    )


def first_difference(first: Sequence[T], second: Sequence[T]) -> tuple[int, T | str, T | str]:
    """Returns the first position at which two sequences differ, and what each holds there.

    >>> first_difference("ab", "abc")
    (2, 'missing', 'c')
    """
    pairs = zip_longest(first, second, fillvalue="missing")
    return next((position, *pair) for position, pair in enumerate(pairs) if pair[0] != pair[1])


def ranks_of(process_set: Any) -> Sequence[int]:
    """Returns the numbers of the ranks in a process set; the set of all ranks may not list them."""
    return getattr(process_set, "ranks", None) or range(process_set.size())


def _dimensions(shape: tf.TensorShape) -> str:
    return "of any shape" if shape.rank is None else str(shape.as_list())
