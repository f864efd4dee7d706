"""The variables of a run on the parameter servers. The coordinator's model is a copy, which callbacks see and save."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.checkpoint.store import rate_factor

_MISSING = object()


class ServerState:
    """Variables on the parameter servers for all that a step reads or changes.

    TensorFlow places them on the servers in turn. `push` and `pull` copy between them and the model, so that
    callbacks, checkpoints and evaluation deal with an ordinary model.

    Args:
        model: built and compiled, with all metrics built.
        replicas: makes the variables.
    """

    def __init__(self, model: keras.Model, replicas: tf.distribute.ParameterServerStrategy) -> None:
        self.model = model
        factor = rate_factor(model)
        small = [*model.metrics_variables, model.optimizer._iterations, *([] if factor is None else [factor])]
        everything = [*small, *model.variables, *model.optimizer.variables]
        self.variables = list({id(variable): variable for variable in everything}.values())
        with replicas.scope():
            self.remote = [
                tf.Variable(variable.value.read_value(), trainable=variable.trainable, name=variable.name)
                for variable in self.variables
            ]
        self._known: list[np.ndarray | None] = [variable.numpy() for variable in self.variables]
        self._num_small = len(small)
        self._readers: dict[int, Callable[[], Any]] = {}

    def pull(self, everything: bool) -> None:
        """Copies to the model what the servers hold; without everything only metrics and counters."""
        count = len(self.variables) if everything else self._num_small
        for at, value in enumerate(self._read(count)):
            self.variables[at].value.assign(value)
            self._known[at] = value.numpy()

    def push(self) -> None:
        """Copies to the servers what changed in the model since the last pull."""
        for at, (variable, known) in enumerate(zip(self.variables, self._known)):
            own = variable.numpy()
            if known is None or own.tobytes() != known.tobytes():
                self.remote[at].assign(own)
                self._known[at] = np.array(own)

    def _read(self, count: int) -> list[tf.Tensor]:
        """The first `count` variables of the servers, on this process's CPU."""
        if count not in self._readers:
            read = tf.function(lambda: [tf.identity(one) for one in self.remote[:count]], autograph=False)
            self._readers[count] = read.get_concrete_function()
        return self._readers[count]()

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Makes the model and its optimizer use the servers' variables, for tracing functions."""
        optimizer = self.model.optimizer
        with ExitStack() as stack:
            for variable, remote in zip(self.variables, self.remote):
                stack.enter_context(replaced(variable, "_value", remote))
            indices = {optimizer._var_key(one): at for at, one in enumerate(optimizer._trainable_variables)}
            stack.enter_context(replaced(optimizer, "_trainable_variables_indices", indices))
            stack.enter_context(replaced(optimizer, "update_step", on_its_server(optimizer.update_step)))
            # Keras reads the counter and writes it back, and increments of other workers in between would be lost.
            counter = optimizer._iterations
            stack.enter_context(replaced(counter, "assign_add", lambda by: counter.value.assign_add(by)))
            yield


def on_its_server(update_step: Callable[..., Any]) -> Callable[..., Any]:
    """update_step, run on the server that holds the variable, so that its slots do not travel."""

    def update(gradient: Any, variable: Any, learning_rate: Any) -> Any:
        with tf.device(variable.device):
            return update_step(gradient, variable, learning_rate)

    return update


@contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of the object for a while, without what Keras does when one is set."""
    own = vars(thing)
    before = own.get(name, _MISSING)
    own[name] = value
    try:
        yield
    finally:
        if before is _MISSING:
            del own[name]
        else:
            own[name] = before
