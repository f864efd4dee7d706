"""What operations between ranks need inside a graph: a name that is the same on all ranks, and a count of what ran."""

from __future__ import annotations

import tensorflow as tf

_counters: dict[str, tf.Variable] = {}


def place_name(kind: str) -> str:
    """A name by the place among operations of this kind in the outermost graph that is being traced.

    Horovod pairs tensors of different ranks by name. A name from Keras's would differ where one rank has made
    more layers or models than another. The place in the graph is the same on all ranks, in each trace, on ranks
    that trace more often too. Operations outside of graphs run one after the other and can share a name.
    """
    if tf.executing_eagerly():
        return f"hvtrain_{kind}"
    graph = tf.compat.v1.get_default_graph()
    # Bodies of loops and branches are graphs of other classes; the graph around the outermost has no outer one.
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
    """On the CPU, so that reading it waits for no GPU."""
    with tf.init_scope(), tf.device("/CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="num_reductions")
