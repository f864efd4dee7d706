"""Names, counters and a flag of operations between ranks inside a graph: the same names on all ranks."""

from types import SimpleNamespace

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

_counters = SimpleNamespace()


def positional_name(kind: str) -> str:
    """A name from the position among operations of this kind in the outermost graph that is being traced.

    Horovod pairs tensors of different ranks by name. Names made from Keras's differ once one rank has built more layers
    or models than another. The position in the graph is the same on all ranks and in each trace, even on a rank that
    traces more often. Eager operations run one after the other and can share a name.
    """
    if tf.executing_eagerly():
        return f"hvtrain_{kind}"
    graph = tf.compat.v1.get_default_graph()
    # Bodies of loops and branches are function graphs too; the graph outside the outermost one has no outer graph.
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    number = getattr(graph, f"_hvtrain_{kind}", 0)
    setattr(graph, f"_hvtrain_{kind}", number + 1)
    return f"hvtrain_{kind}_{number}"


def counter(kind: str) -> tf.Variable:
    """This process's counter of operations of that kind, which graphs increment; a TensorFlow 1 graph has its own."""
    with tf.init_scope():
        owner = _counters if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if not hasattr(owner, f"_hvtrain_{kind}_counter"):
        setattr(owner, f"_hvtrain_{kind}_counter", new_counter())
    return getattr(owner, f"_hvtrain_{kind}_counter")


def is_compiled_by_xla() -> bool:
    """True while a tf.function(jit_compile=True) is traced here."""
    return not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def new_counter() -> tf.Variable:
    """A counter on the CPU, so that reading it waits for no GPU."""
    with tf.init_scope(), tf.device("/CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="num_reductions")


class SharedFlag:
    """Like threading.Event, over all ranks, without a message of its own; every rank holds one.

    A rank that leaves the training loop alone makes the others wait forever. So it only sets its flag, which travels
    in one message with the next gradients, and every rank reads the same result after the same step.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("/CPU:0"):
            self._own = tf.Variable([0.0], trainable=False, name="own_flag")
            self._reduced = tf.Variable([0.0], trainable=False, name="reduced_flag")

    def set(self) -> None:
        """Sets this rank's flag; the other ranks see it after the next reduction."""
        self._own.assign([1.0])

    def is_set(self) -> bool:
        """True if any rank's flag was set at the last reduction; the same on every rank."""
        return bool((self._own if hvd.size() == 1 else self._reduced).numpy()[0] > 0)

    def clear(self) -> None:
        """Clears the flag (every rank, at the same step)."""
        for variable in (self._own, self._reduced):
            variable.assign([0.0])

    def own(self, dtype: tf.DType) -> tf.Tensor:
        """This rank's flag as a tensor [1], to be reduced beside gradients of that dtype. In the graph."""
        return tf.cast(self._own.read_value(), dtype)

    def update(self, reduced: tf.Tensor) -> tf.Tensor:
        """Takes the reduced flag: mean, sum and Adasum are all above 0 if one rank's flag is. In the graph."""
        return self._reduced.assign(tf.cast(reduced, tf.float32))
