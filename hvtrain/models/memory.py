"""Estimates the memory and operations that a model needs, and implements train.remat, which saves memory.

Recomputing activations follows Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"
(arXiv:1604.06174).

keras.RematScope is not used: on TensorFlow it fails in a graph if a layer takes `training`, and a
layer with state, such as dropout or batch normalization, would update its state twice. It also keeps
the tensors that pass from each layer to the next.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import keras
import tensorflow as tf
from keras import Model, layers
from keras.src.backend import get_keras_mask, set_keras_mask

from hvtrain.checkpoint.model_state import seeds_of
from hvtrain.errors import ConfigError

# Layers whose output shares the memory of their input.
_VIEWS = (layers.Flatten, layers.Reshape, layers.Identity)
# Layers that use each weight once at each position of their input.
_TRANSPOSED = (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)
# Slots that a sharded optimizer keeps whole. A copy of sharded_optimizer.WHOLE_SLOTS, since
# importing that loads Horovod.
WHOLE_SLOTS = ("gradient_accumulator", "average")


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank, by purpose.

    Attributes:
        weight_bytes: All weights, including those that are not trained.
        gradient_bytes: Gradients that are reduced, which excludes those of sharded tables.
        slot_bytes: The optimizer's variables.
        activation_bytes: An estimate for one batch; None if a layer's output shape is unknown.
        elsewhere_bytes: Rows of sharded tables, and of their slots, that other ranks hold.
        whole_slot_bytes: The optimizer's variables that stay whole if it is sharded over the ranks.
    """

    weight_bytes: int
    gradient_bytes: int
    slot_bytes: int
    activation_bytes: int | None
    elsewhere_bytes: int = 0
    whole_slot_bytes: int = 0

    @property
    def checkpoint_bytes(self) -> int:
        return self.weight_bytes + self.slot_bytes + self.elsewhere_bytes


def footprint(model: Model, batch_size: int, num_ranks: int = 1) -> Footprint:
    """Returns the memory footprint of a compiled model whose optimizer is built.

    Activations are counted as the outputs of all layers, kept for the backward pass. This is an
    estimate: TensorFlow keeps fewer outputs of some layers, and needs more memory for others (workspace
    of convolutions, fragmentation). The other sizes are exact.

    Args:
        model: A compiled model that was built on one rank, so that its tables are whole.
        batch_size: Number of examples in the rank's batch.
        num_ranks: Number of ranks over which the rows of sharded tables will be spread.
    """
    weights_elsewhere = 0
    slots_elsewhere = 0
    gradient_bytes = num_bytes(model.trainable_variables)
    for layer in sharded_layers(model):
        table, *slots = layer.row_variables(model.optimizer)
        # Rank 0, which has the most rows, stands for all.
        fraction_elsewhere = 1 - math.ceil(layer.input_dim / num_ranks) / layer.input_dim
        weights_elsewhere += round(fraction_elsewhere * num_bytes([table]))
        slots_elsewhere += round(fraction_elsewhere * num_bytes(slots))
        gradient_bytes -= num_bytes([table])
    return Footprint(
        # Including moving statistics, which are not trained.
        weight_bytes=num_bytes(model.weights) - weights_elsewhere,
        gradient_bytes=gradient_bytes,
        slot_bytes=num_bytes(model.optimizer.variables) - slots_elsewhere,
        activation_bytes=_activation_bytes(model, batch_size),
        elsewhere_bytes=weights_elsewhere + slots_elsewhere,
        whole_slot_bytes=num_bytes(
            slot for slot in model.optimizer.variables if slot.name.endswith(WHOLE_SLOTS)
        ),
    )


def sharded_layers(model: Model) -> list[Any]:
    """Returns the layers whose tables are sharded if there are several ranks."""
    # Recognized by an attribute, because importing their class would import Horovod.
    return [layer for layer in model._flatten_layers() if hasattr(layer, "row_variables")]


def num_bytes(variables: Iterable[Any]) -> int:
    """Returns the total size of the variables in bytes."""
    return sum(
        math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables
    )


def innermost_layers(model: Any) -> list[Any]:
    """Returns a model's layers, each once, with nested models replaced by their own layers."""
    # A dict, because layers repeat: keras-hub's language models use the backbone's embedding again as the head.
    inner: dict[Any, None] = {}
    for layer in model.layers:
        inner |= dict.fromkeys(innermost_layers(layer) if isinstance(layer, Model) else [layer])
    return list(inner)


def example_shape(layer: Any) -> tuple[int, ...] | None:
    """Returns the shape of a layer's output for one example; None if it is not known."""
    with suppress(AttributeError, ValueError):
        # Raised for layers that were never called or called several times, or that have several outputs.
        shape = tuple(layer.output.shape[1:])
        return None if None in shape else shape
    return None


def _activation_bytes(model, batch_size: int) -> int | None:
    total = 0
    for layer in innermost_layers(model):
        # One layer of unknown shape makes the whole estimate worthless.
        shape = example_shape(layer)
        if shape is None:
            return None
        # A view has no memory of its own.
        if not isinstance(layer, _VIEWS):
            total += math.prod(shape) * tf.as_dtype(layer.compute_dtype).size

    return total * batch_size


def flops_per_example(model: Model) -> float | None:
    """Estimates the floating-point operations of a training step for one example.

    Each weight of a kernel is multiplied and added once at each position of its layer's output, and
    attention multiplies all pairs of positions. The backward pass computes twice as much as the
    forward pass: half of it for the gradients of weights, which frozen weights do not need, and half
    for those of inputs, which layers before the first trainable one do not need. Recomputation is not
    counted.

    Returns:
        The number of operations; None if a layer's output shape is unknown, or the model has no graph of Keras layers.

    >>> model = keras.Sequential([keras.Input((10, 3)), keras.layers.Dense(5)])
    >>> flops_per_example(model)  # 6 x 10 positions x 3 x 5
    900.0
    """
    total = 0
    is_trained = False
    for layer in innermost_layers(model):
        is_trained = is_trained or bool(layer.trainable_weights)
        # The operations of a multiplication and addition, forward and for the inputs' gradients.
        num_passes = 4 if is_trained else 2
        # Attention's biases have two axes, so the number of axes alone does not exclude them.
        kernels = sum(
            (num_passes + 2 * weight.trainable) * math.prod(weight.shape)
            for weight in layer.weights
            if len(weight.shape) > 1 and weight.name != "bias"
        )
        for node in layer._inbound_nodes if kernels else ():
            inputs = node.input_tensors[0]
            shape = node.outputs[0].shape[1:]
            positions = shape[:-1]
            if isinstance(layer, layers.Embedding) and not _is_floating(inputs):
                continue  # A lookup multiplies nothing.
            if isinstance(layer, layers.RNN | layers.Bidirectional):
                positions = inputs.shape[1:2]
            if isinstance(layer, _TRANSPOSED):
                positions = inputs.shape[1:-1]
            if None in shape or None in positions:
                return None
            total += math.prod(positions) * kernels
            if isinstance(layer, layers.MultiHeadAttention):
                # Two products of pairs of positions, whose gradients are those of two inputs each.
                attention = 6 if is_trained else 2
                total += attention * 2 * math.prod(positions) * math.prod(shape)
    return float(total) or None


@dataclass(frozen=True)
class Segment:
    """Consecutive layer calls, with the symbolic tensors that pass in and out.

    Attributes:
        nodes: Keras nodes, each a call of a layer.
        inputs: Tensors that these calls use and earlier segments made.
        outputs: Tensors that these calls make and later segments use.
    """

    nodes: Sequence[Any]
    inputs: Sequence[Any]
    outputs: Sequence[Any]


def recompute(model: Model) -> None:
    """Makes a built model keep only the tensors that pass between segments of its layers, and recompute the rest.

    The backward pass recomputes each segment with the same random numbers and without changing state
    again, so the values are the same. With n layers of similar size there are about sqrt(n) segments,
    and the activations of about 2 sqrt(n) layers in memory. Of nested models, only the one with the most
    layers is divided.

    Raises:
        ConfigError: the model is neither Functional nor Sequential, so Keras has no graph of its layers.
    """
    # A Sequential model wraps a Functional one.
    graphs = [getattr(layer, "_functional", None) or layer for layer in model._flatten_layers()]
    graphs = [graph for graph in graphs if hasattr(graph, "_nodes_by_depth")]
    if not graphs:
        raise ConfigError(
            f"train.remat=true needs a Functional or Sequential model, and {model.name} is of type "
            f"{type(model).__name__}; call its blocks through keras.remat, or leave the setting out"
        )

    graph = max(graphs, key=lambda graph: len(graph._nodes))
    segments = divide(graph)
    states = seeds_of(model)
    run_graph = graph._run_through_graph

    def run(inputs, operation_fn, call_fn=None):
        tensors = keras.tree.flatten(inputs)
        # Keras also runs the graph on symbolic inputs, for example to clone a model (with call_fn);
        # nothing is computed then.
        if not all(map(tf.is_tensor, tensors)):
            return run_graph(inputs, operation_fn, call_fn)

        # The values computed so far, by the id of their symbolic tensor.
        known = dict(zip(map(id, graph.inputs), tensors))
        for segment in segments:
            # Recomputing the last segment would save nothing, since its backward pass comes first.
            # Integer inputs have no gradient.
            if segment is segments[-1] or not any(map(_is_floating, segment.inputs)):
                _run(segment, known, operation_fn)
            else:
                _run_with_recompute(segment, known, operation_fn, states)

        outputs = [known[id(symbol)] for symbol in graph.outputs]
        return keras.tree.pack_sequence_as(graph._outputs_struct, outputs)

    # Keras calls this for each pass through the graph.
    graph._run_through_graph = run


def divide(graph: Any) -> list[Segment]:
    """Divides the n layer calls of a Functional model into about sqrt(n) segments of similar size.

    Segments end where few values are in use, such as between the blocks of a residual network.
    """
    # In the order in which Keras's own loop runs them, from the inputs to the outputs.
    nodes = [
        node
        for depth in sorted(graph._nodes_by_depth, reverse=True)
        for node in graph._nodes_by_depth[depth]
        if node.operation and not node.is_input
    ]

    last_use = {}
    for index, node in enumerate(nodes):
        last_use.update(dict.fromkeys(map(id, node.input_tensors), index))
    last_use.update(dict.fromkeys(map(id, graph.outputs), len(nodes)))

    # After each call: the number of elements that later calls still use, and the number in all
    # outputs so far.
    in_use = [0]
    totals = [0]
    live = {id(tensor): tensor for tensor in graph.inputs}
    for index, node in enumerate(nodes):
        live |= {id(tensor): tensor for tensor in node.outputs}
        # Drops tensors that no later call uses.
        live = {key: tensor for key, tensor in live.items() if last_use.get(key, -1) > index}
        in_use.append(sum(map(_elements, live.values())))
        totals.append(totals[-1] + sum(map(_elements, node.outputs)))

    # Each cut is where the fewest elements are in use, within half a segment of an even division.
    num_segments = math.isqrt(len(nodes))
    cuts = {0, len(nodes)}
    for number in range(1, num_segments):
        distances = [abs(total - totals[-1] * number / num_segments) for total in totals]
        half_segment = totals[-1] / num_segments / 2
        candidates = [index for index in range(1, len(nodes)) if distances[index] <= half_segment]
        if candidates:
            cuts.add(min(candidates, key=lambda index: (in_use[index], distances[index])))

    segments = []
    for begin, end in pairwise(sorted(cuts)):
        calls = nodes[begin:end]
        made = {id(tensor): tensor for node in calls for tensor in node.outputs}
        used = {id(tensor): tensor for node in calls for tensor in node.input_tensors}
        inputs = [tensor for key, tensor in used.items() if key not in made]
        outputs = [tensor for key, tensor in made.items() if last_use.get(key, -1) >= end]
        segments.append(Segment(calls, inputs, outputs))
    return segments


def _elements(tensor) -> int:
    return math.prod(extent or 1 for extent in tensor.shape)


def _is_floating(tensor) -> bool:
    return keras.backend.is_float_dtype(tensor.dtype)


def _run(segment: Segment, known: dict[int, Any], operation_fn: Callable[[Any], Any]) -> None:
    """Runs the segment's calls as Keras's own loop does, and adds their outputs to `known`, keyed by symbol id."""
    for node in segment.nodes:
        args, kwargs = node.arguments.fill_in(known)
        outputs = keras.tree.flatten(operation_fn(node.operation)(*args, **kwargs))
        known.update(zip(map(id, node.outputs), outputs))


def _run_with_recompute(
    segment: Segment, known: dict[int, Any], operation_fn: Callable[[Any], Any], states: list[Any]
) -> None:
    """Runs the segment like _run; its gradient runs it again, starting from the same states.

    Args:
        segment: the segment.
        known: the tensors computed so far, by the id of their symbolic tensor. The outputs are added.
        operation_fn: returns the function that calls a layer, as Keras passes it.
        states: variables that are not weights, such as the seeds of dropout. The second run must read
            the values that the first one read.
    """
    before = [(state, tf.identity(state.value)) for state in states]

    # Other tensors, such as masks and indices, have no gradient; they are kept, not recomputed.
    inputs = list(filter(_is_floating, segment.inputs))
    outputs = list(filter(_is_floating, segment.outputs))
    # Keras attaches a mask to a tensor object, and TensorFlow makes new objects for the tensors that
    # enter and leave the segment.
    masks = [get_keras_mask(known[id(symbol)]) for symbol in inputs]
    is_recomputing = False

    def forward(*tensors):
        nonlocal is_recomputing
        for tensor, mask in zip(tensors, masks):
            set_keras_mask(tensor, mask)
        local = known | dict(zip(map(id, inputs), tensors))

        # TensorFlow calls this function once for the forward pass and again for the gradient.
        if is_recomputing:
            # The scope intercepts assignments, so that moving statistics are updated only once.
            with keras.StatelessScope(state_mapping=before):
                _run(segment, local, operation_fn)
        else:
            _run(segment, local, operation_fn)
            _refuse_losses(segment)
            known.update({id(symbol): local[id(symbol)] for symbol in segment.outputs})

        is_recomputing = True
        return tuple(local[id(symbol)] for symbol in outputs)

    results = tf.recompute_grad(forward)(*(known[id(symbol)] for symbol in inputs))
    for symbol, result in zip(outputs, results):
        set_keras_mask(result, get_keras_mask(known[id(symbol)]))
        known[id(symbol)] = result


def _refuse_losses(segment: Segment) -> None:
    """Raises ConfigError if a layer adds a loss on its activations, whose gradient would be lost."""
    for node in segment.nodes:
        operation = node.operation
        # Operations such as a sum of two tensors are not layers, and have no losses.
        if isinstance(operation, layers.Layer) and any(
            layer._losses for layer in operation._flatten_layers()
        ):
            raise ConfigError(
                f"train.remat=true and a loss on activations of the layer {operation.name} "
                "(activity_regularizer or add_loss) exclude each other; leave one out"
            )
