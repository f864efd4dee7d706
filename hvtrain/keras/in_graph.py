"""Names and counters for operations between ranks inside a graph, and a flag that the ranks share."""

from types import SimpleNamespace
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hvtrain.errors import ConfigError
from hvtrain.step.step_timing import host_variable

# A value of model.stop_training that ends only the epoch resumed after an elastic
# reset. It is not a request to stop training.
END_OF_EPOCH = "end of the epoch that began before the reset"

_counters = SimpleNamespace()


def positional_name(operation: str) -> str:
    """Returns a name with the operation's number among those of its kind in the outermost graph being traced.

    Horovod pairs the tensors of different ranks by name. Names derived from Keras's differ once one rank
    has built more layers or models than another. The position in the graph is the same on all ranks and
    in each trace, even if one rank traces more often. Eager operations run one at a time, so they can
    share a name.
    """
    if tf.executing_eagerly():
        return f"hvtrain_{operation}"
    graph = tf.compat.v1.get_default_graph()
    # Bodies of loops and branches are function graphs too. The outermost function graph is the one
    # whose outer graph is not itself a function graph, and so has no outer graph.
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    # The graph holds the counter, so each trace counts from 0.
    number = getattr(graph, f"_hvtrain_{operation}", 0)
    setattr(graph, f"_hvtrain_{operation}", number + 1)
    return f"hvtrain_{operation}_{number}"


def counter(operation: str) -> tf.Variable:
    """Returns this process's counter of operations of one kind; graphs increment it.

    A TensorFlow 1 graph has its own counter, because it cannot use an eager variable.
    """
    with tf.init_scope():
        owner = _counters if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    attribute = f"_hvtrain_{operation}_counter"
    if not hasattr(owner, attribute):
        setattr(owner, attribute, new_counter())
    return getattr(owner, attribute)


def in_every_step(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the same tensor [n, ...], to be exchanged in each step even if it is constant.

    This prevents constant folding: TensorFlow runs operations on constants once, while it optimizes a
    graph. A rank whose batches all have one size would then send nothing in later steps, and a rank that
    traces a step again would send once more, so ranks would wait for each other. The result is a slice
    that begins at a variable, which is always 0, so it is not a constant. Only int32 tensors, which are in
    host memory even on a GPU, are copied.
    """
    return tf.convert_to_tensor(tensor)[counter("constants") :]


def new_counter() -> tf.Variable:
    """Creates a counter on the CPU, so that reading it waits for no GPU."""
    return host_variable(0, tf.int64, "num_reductions")


def refuse_xla(exchange: str) -> None:
    """Raises ConfigError while a tf.function(jit_compile=True) is traced, because XLA cannot compile an exchange.

    Args:
        exchange: a noun phrase for the exchange between ranks, for the message.
    """
    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ConfigError(
            f"XLA compiles this step, and cannot compile {exchange}; set train.jit_compile=false in a run, pass "
            "jit_compile=False to model.compile (on GPUs Keras compiles by default), or make the exchange outside "
            "tf.function(jit_compile=True)"
        )


def tf_variable(variable: Any) -> Any:
    """Returns the TensorFlow variable inside a Keras variable; anything else unchanged."""
    return variable.value if isinstance(variable, keras.Variable) else variable


class SharedFlag:
    """An event like threading.Event, shared by all ranks without an extra message.

    If one rank left the training loop alone, the others would wait for it forever. So a rank only sets
    its own flag, which is reduced in the same message as the next gradients, and every rank reads the
    same result after the same step.
    """

    def __init__(self) -> None:
        self._own = host_variable([0.0], tf.float32, "own_flag")
        self._reduced = host_variable([0.0], tf.float32, "reduced_flag")

    def set(self) -> None:
        """Sets this rank's flag; the other ranks see it after the next reduction."""
        self._own.assign([1.0])

    def is_set(self) -> bool:
        """Returns True if any rank's flag was set at the last reduction. The result is the same on every rank."""
        flag = self._own if hvd.size() == 1 else self._reduced
        return bool(flag.numpy()[0] > 0)

    def clear(self) -> None:
        """Clears the flag (every rank, at the same step)."""
        self._own.assign([0.0])
        self._reduced.assign([0.0])

    def own(self, dtype: tf.DType) -> tf.Tensor:
        """Returns this rank's flag in the graph, as a tensor [1] to reduce together with gradients."""
        return tf.cast(self._own.read_value(), dtype)

    def update(self, reduced: tf.Tensor) -> tf.Tensor:
        """Stores the reduced flag, in the graph.

        Whether it was reduced by mean, sum or Adasum, it is above 0 if any rank's flag is set.
        """
        return self._reduced.assign(tf.cast(reduced, tf.float32))
