"""Names and counters of operations between ranks inside a graph: the same names on all ranks, counts of what ran."""

import tensorflow as tf

_counters: dict[str, tf.Variable] = {}


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
    """This process's counter of operations of that kind, which the graph increments."""
    if kind not in _counters:
        _counters[kind] = new_counter()
    return _counters[kind]


def new_counter() -> tf.Variable:
    """A counter on the CPU, so that reading it waits for no GPU."""
    with tf.init_scope(), tf.device("/CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="num_reductions")
