"""Says so once if ranks train on from unlike weights, because the script forgot the broadcast.

Horovod's own loops broadcast after the first step, so unlike weights in that step are no fault yet.
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

log = logging.getLogger(__name__)

STEPS_WITHOUT_BROADCAST = 3
"""After so many steps no broadcast is on its way."""
SECONDS_BETWEEN_LOOKS = 0.5


def digest_of(variables: Sequence[Any]) -> str | None:
    """A digest of the variables' values on this rank; None if they are none, or cannot be read."""
    digest = hashlib.sha256()
    for variable in variables:
        value = _inner(variable)
        if not isinstance(value, tf.Variable):
            return None
        try:
            digest.update(np.ascontiguousarray(value.numpy()).tobytes())
        except (tf.errors.OpError, NotImplementedError, AttributeError):
            return None
    return digest.hexdigest()


def watch(variables: Sequence[Any], num_steps: Callable[[], int], process_set: Any) -> None:
    """Warns, on the first of these ranks, if they go on without a broadcast (every rank of the set).

    num_steps: how many steps have reduced gradients of these variables.
    """
    largest, name = difference(variables, process_set)
    if process_set.rank() == 0:
        where = f"largest difference {largest:.2g}, in {name}"
        _Watch(f"the ranks train from unlike weights ({where}), and nothing has made them equal", num_steps).begin()


def difference(variables: Sequence[Any], process_set: Any) -> tuple[float, str]:
    """The largest difference between ranks, and the variable in which it is (every rank of the set)."""
    found = []
    for index, variable in enumerate(variables):
        value = tf.cast(_inner(variable), tf.float32)
        options = {"process_set": process_set, "name": f"hvtrain.unlike_weights.{index}"}
        both = hvd.allreduce(tf.stack([value, -value]), op=hvd.Max, **options)
        gap = float(tf.reduce_max(both[0] + both[1])) if value.shape.num_elements() else 0.0
        found.append((gap, getattr(variable, "path", None) or variable.name))
    return max(found)


def _inner(variable: Any) -> Any:
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)


def made_equal() -> None:
    """Ends all watches: a broadcast, or a comparison, has been called."""
    for one in list(_watches):
        one.end()


class _Watch:
    def __init__(self, text: str, num_steps: Callable[[], int]) -> None:
        self._text, self._num_steps = text, num_steps
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="hvtrain unlike weights", daemon=True)

    def begin(self) -> None:
        _watches.append(self)
        self._thread.start()
        # A thread that comes back from TensorFlow as Python ends would abort the process.
        atexit.register(self._at_exit)

    def end(self) -> None:
        self._ended.set()
        if self in _watches:
            _watches.remove(self)

    def _look(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LOOKS):
            self._say()

    def _say(self) -> None:
        if not self._ended.is_set() and self._num_steps() >= STEPS_WITHOUT_BROADCAST:
            self.end()
            advice = "call hvd.broadcast_variables(model.variables, 0), or use hvd.BroadcastGlobalVariablesCallback(0)"
            log.warning("%s; %s", self._text, advice)

    def _at_exit(self) -> None:
        self._say()
        self.end()
        self._thread.join(2 * SECONDS_BETWEEN_LOOKS)


_watches: list[_Watch] = []
