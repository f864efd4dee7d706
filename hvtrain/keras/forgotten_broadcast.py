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

import numpy as np
import tensorflow as tf

from hvtrain.keras.in_graph import tf_variable

log = logging.getLogger(__name__)

STEPS_WITHOUT_BROADCAST = 3
"""A broadcast that has not come after so many steps was forgotten."""
SECONDS_BETWEEN_LOOKS = 0.5

# Each ends a watch.
_watches: list[threading.Event] = []


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


def watch(num_steps: Callable[[], int]) -> None:
    """Warns if no broadcast follows (one rank of those that train together).

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


def made_equal() -> None:
    """Ends all watches: a broadcast, or a comparison, has been called."""
    while _watches:
        _watches.pop().set()
