"""Warns once if ranks train on from different weights, because the script forgot the broadcast.

Horovod's own loops broadcast after the first step, so different weights in that step are no fault
yet. A thread watches the steps that follow; it sends nothing.
"""

import atexit
import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvtrain.keras.in_graph import tf_variable

log = logging.getLogger(__name__)

STEPS_WITHOUT_BROADCAST = 3
"""A broadcast that has not come after so many steps was forgotten."""
SECONDS_BETWEEN_LOOKS = 0.5


def digest_of(variables: Sequence[Any]) -> str | None:
    """Returns a digest of this rank's values; None if one of them cannot be read."""
    digest = hashlib.sha256()
    for variable in variables:
        value = tf_variable(variable)
        if not isinstance(value, tf.Variable):
            return None
        try:
            digest.update(np.ascontiguousarray(value.numpy()).tobytes())
        # Not initialized yet, or in a graph, where a variable has no value.
        except (tf.errors.OpError, NotImplementedError, AttributeError):
            return None
    return digest.hexdigest()


def watch(variables: Sequence[Any], num_steps: Callable[[], int], process_set: Any) -> None:
    """Warns, on the first rank of the set, if no broadcast follows (every rank of the set).

    Args:
        variables: variables that differ between the ranks.
        num_steps: a function that returns the number of steps that have reduced gradients of these
            variables.
        process_set: the ranks that hold them.
    """
    gap, name = _largest_difference(variables, process_set)
    if process_set.rank() == 0:
        message = (
            f"the ranks train from different weights (largest difference {gap:.2g}, in {name}), and nothing has made "
            "them equal; call hvd.broadcast_variables(model.variables, 0), or use "
            "hvd.BroadcastGlobalVariablesCallback(0)"
        )
        _Watch(message, num_steps).begin()


def made_equal() -> None:
    """Ends all watches: a broadcast, or a comparison, has been called."""
    for watch in list(_watches):
        watch.end()


def _largest_difference(variables: Sequence[Any], process_set: Any) -> tuple[float, str]:
    """Returns the largest difference between ranks and its variable (every rank of the set)."""
    differences = []
    for index, variable in enumerate(variables):
        value = tf.cast(tf_variable(variable), tf.float32)
        # The maxima of the values and of their negations: their sum is maximum - minimum.
        extremes = hvd.allreduce(
            tf.stack([value, -value]),
            op=hvd.Max,
            name=f"hvtrain.unlike_weights.{index}",
            process_set=process_set,
        )
        gap = float(tf.reduce_max(extremes[0] + extremes[1])) if value.shape.num_elements() else 0.0
        differences.append((gap, getattr(variable, "path", None) or variable.name))
    return max(differences)


class _Watch:
    """Counts steps in a thread, and warns if there were too many before it was ended."""

    def __init__(self, message: str, num_steps: Callable[[], int]) -> None:
        self._message = message
        self._num_steps = num_steps
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvtrain forgotten broadcast", daemon=True)

    def begin(self) -> None:
        _watches.append(self)
        self._thread.start()
        # A thread that comes back from TensorFlow as Python ends would abort the process.
        atexit.register(self._at_exit)

    def end(self) -> None:
        self._ended.set()
        if self in _watches:
            _watches.remove(self)

    def _run(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LOOKS):
            self._warn_if_due()

    def _warn_if_due(self) -> None:
        if not self._ended.is_set() and self._num_steps() >= STEPS_WITHOUT_BROADCAST:
            self.end()
            log.warning("%s", self._message)

    def _at_exit(self) -> None:
        # A short program may end between two looks.
        self._warn_if_due()
        self.end()
        self._thread.join(2 * SECONDS_BETWEEN_LOOKS)


_watches: list[_Watch] = []
