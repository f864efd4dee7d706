"""Horovod's collectives for Keras 3: on values, Keras variables and whole models.

Every rank of the process set must call each of them. Values are sent as tensors; Horovod pickles only
their shapes and types, and the objects of broadcast_object_fn, between the ranks of one job.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvtrain.core.buckets import in_buckets
from hvtrain.errors import RankError
from hvtrain.keras import gradients
from hvtrain.keras.in_graph import positional_name, tf_variable
from hvtrain.keras.same_gradients import (
    compare_structure,
    end_broadcast_watches,
    first_difference,
    ranks_of,
)
from hvtrain.keras.table_rows import distribute_whole

# A message of broadcast_variables is full once it has this many bytes.
CHUNK_BYTES = 64 << 20

# Types that Horovod's broadcast kernel takes
# (horovod/tensorflow/mpi_ops.cc). Others are sent as bytes.
_BROADCAST_TYPES = re.compile(r"u?int(8|16)|int(32|64)|float(16|32|64)|bool")


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = hvd.Compression.none,
    process_set: Any = hvd.global_process_set,
) -> Any:
    """Returns the value reduced over all ranks (default: Average), as a tensor.

    Differentiable under a gradient tape. Arguments are those of horovod.tensorflow.keras.

    Raises:
        TypeError: if the second argument is a bool: in horovod.tensorflow it is `average`, here `name`.
    """
    if isinstance(name, bool):
        raise TypeError(
            f"allreduce got {name} as its second argument, which is name in hvtrain.keras; pass average={name}"
        )
    return hvd.allreduce(
        tf.convert_to_tensor(value),
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
    )


def allgather(
    value: Any, name: str | None = None, process_set: Any = hvd.global_process_set
) -> Any:
    """Returns all ranks' values, concatenated along the first dimension, as a tensor.

    Only that dimension may differ between ranks. Under a gradient tape the gradient is Horovod's: the
    mean over the ranks of their gradients with respect to this rank's rows.
    """
    return hvd.allgather(tf.convert_to_tensor(value), name=name, process_set=process_set)


def broadcast(
    value: Any,
    root_rank: int,
    name: str | None = None,
    process_set: Any = hvd.global_process_set,
) -> Any:
    """Returns root_rank's value, as a tensor; all ranks must pass a value of the same shape."""
    return hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=name, process_set=process_set)


def reducescatter(
    value: Any,
    name: str | None = None,
    op: int = hvd.Average,
    process_set: Any = hvd.global_process_set,
) -> Any:
    """Returns this rank's slice, along the first dimension, of the value reduced over all ranks (default: Average)."""
    return hvd.reducescatter(tf.convert_to_tensor(value), op=op, name=name, process_set=process_set)


def _with_comparison(
    collective: Callable[..., Any], any_length: bool = False
) -> Callable[..., Any]:
    """Wraps a grouped collective of Horovod so that the ranks first compare types and shapes.

    Horovod checks tensors that are sent one by one, but not those of a group, where a mismatch reads
    past the end of a buffer. The wrapper raises RankError if their number, types or shapes differ.

    Args:
        collective: one of Horovod's grouped collectives.
        any_length: True if the first dimension may differ between ranks.
    """
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def compare_and_call(tensors, *args, **kwargs):
        tensors = [
            value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)
            for value in tensors
        ]
        # Horovod's three functions take process_set and op at different positions.
        arguments = signature.bind(tensors, *args, **kwargs).arguments
        process_set = arguments.get("process_set", hvd.global_process_set)
        specs = tensors
        if any_length:
            specs = [tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype) for tensor in tensors]
        settings = f"{collective.__name__}, op={arguments.get('op')}"
        compare_structure(collective.__name__, settings, specs, [], process_set, "tensor")
        return collective(tensors, *args, **kwargs)

    return compare_and_call


grouped_allreduce = _with_comparison(hvd.grouped_allreduce)
grouped_allgather = _with_comparison(hvd.grouped_allgather, any_length=True)
grouped_reducescatter = _with_comparison(hvd.grouped_reducescatter)


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns the operation that broadcasts all global variables of the current tf.compat.v1 graph.

    Raises:
        RuntimeError: in eager mode, as in Horovod: TensorFlow 2 keeps no list of all variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables finds no global variables in TensorFlow 2; use broadcast_model(model) "
            "or BroadcastGlobalVariablesCallback(0)"
        )
    return hvd.broadcast_global_variables(root_rank)


def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: Any = hvd.global_process_set,
) -> list[Any]:
    """Does what broadcast_variables does, and returns the new values.

    Args:
        name: accepted for compatibility with Horovod; no effect, since variables share messages.

    The other arguments and the errors are those of broadcast_variables.
    """
    variables = list(variables)
    done = broadcast_variables(variables, root_rank, process_set)
    # In a TensorFlow 1 graph nothing else makes the reads wait for the broadcast.
    with tf.control_dependencies([done] if done else []):
        return [tf_variable(variable).read_value() for variable in variables]


def broadcast_object_fn(root_rank: int = 0, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Returns a function that broadcasts root_rank's object (every rank). Arguments are those of Horovod."""
    # Horovod's own function needs tf.placeholder, which TensorFlow 2 does not have.
    return lambda value: hvd.broadcast_object(value, root_rank, *args, **kwargs)


@tf.autograph.experimental.do_not_convert  # As for compare_structure, AutoGraph would convert pickling too.
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: Any = hvd.global_process_set,
    inplace: bool = False,
) -> Any:
    """Sets Keras or TensorFlow variables to the values of root_rank.

    Every rank passes them in the same order. Inside a tf.function the broadcast becomes part of the
    graph; in a TensorFlow 1 graph the operation is returned. The seeds of dropout and other random
    layers, which are among `model.variables`, stay each rank's own: see broadcast_model.

    Variables are matched by position and packed into few messages. They are not matched by name, because
    the names that Keras generates (dense_1, sgd_3) may differ between ranks, and Horovod, which pairs
    tensors by name, would then wait forever. Sharded slots, of which each rank keeps a part, are skipped:
    see gather_slots.

    Args:
        variables: Keras or TensorFlow variables.
        root_rank: the rank, among all ranks, whose values are sent.
        process_set: the ranks that call this.
        inplace: accepted for compatibility with Horovod; no effect, since messages are always packed.

    Raises:
        RankError: if the number, shapes or types of the variables differ between ranks.
        ValueError: if there are no variables, as in a model that is not built.
    """
    variables = list(variables)
    end_broadcast_watches()
    tensors = [tf_variable(variable) for variable in variables if not _differs_by_rank(variable)]
    # In a tf.function the ranks compare once, while it is traced; a TensorFlow 1 graph cannot.
    with tf.init_scope():
        if tf.executing_eagerly():
            _compare_variables(
                [(tuple(tensor.shape), tensor.dtype.name) for tensor in tensors], process_set
            )
    # Raised only after the comparison, where the other ranks would otherwise wait for this rank.
    if not variables:
        raise ValueError(
            "there are no variables to broadcast, as in a model that is not built yet, and each rank "
            "would train alone; begin the model with a keras.Input, or call model.build(input_shape) first"
        )
    if process_set.size() == 1:
        return None

    # All values in a message have the same type.
    by_type: dict[tf.DType, list[Any]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    assigned = []
    for same_type in by_type.values():
        assigned += _broadcast_packed(same_type, root_rank, process_set)
    for tensor in tensors:
        # The anchor must be a copy of the weight's new value: see DiLoCo.
        if hasattr(tensor, "anchor"):
            tensor.anchor.assign(tensor)
    return None if tf.executing_eagerly() else tf.group(assigned)


def _differs_by_rank(variable: Any) -> bool:
    """Returns True for a Keras seed generator's state, and for a part of a sharded variable."""
    # The path of a Keras variable, or the name of a TensorFlow variable, which ends in ":0".
    name = getattr(variable, "path", None) or variable.name
    return hasattr(variable, "rank_part") or name.partition(":")[0].endswith("seed_generator_state")


def _compare_variables(own: list[tuple[tuple[int, ...], str]], process_set: Any) -> None:
    """Raises RankError unless these ranks hold variables of the same shapes and types."""
    by_rank = hvd.allgather_object(own, name="hvtrain.broadcast.kinds", process_set=process_set)
    for rank, other in zip(ranks_of(process_set), by_rank):
        if other != own:
            position, own_kind, other_kind = first_difference(own, other)
            raise RankError(
                f"ranks {hvd.rank()} and {rank} hold different variables at position {position}: "
                f"{own_kind} and {other_kind}; build the same model and optimizer on all ranks"
            )


def _broadcast_packed(variables: list[Any], root_rank: int, process_set: Any) -> list[Any]:
    """Broadcasts variables of the same type in few messages; returns the assignments."""
    dtype = variables[0].dtype
    is_sent_as_bytes = not _BROADCAST_TYPES.fullmatch(dtype.name)
    values = variables
    if is_sent_as_bytes:
        values = [tf.bitcast(variable, tf.uint8) for variable in variables]
    lengths = [value.shape.num_elements() for value in values]
    item_bytes = values[0].dtype.size

    # Messages are numbered separately for each process set: ranks outside of the set do not send
    # these, and their numbers for the messages of all ranks would otherwise differ.
    set_id = process_set.process_set_id
    operation = f"broadcast_in_set_{set_id}" if set_id else "broadcast"
    assigned = []
    # A variable of CHUNK_BYTES or more is sent alone.
    for bucket in in_buckets([length * item_bytes for length in lengths], CHUNK_BYTES, CHUNK_BYTES):
        packed = tf.concat([tf.reshape(values[i], [-1]) for i in bucket], axis=0)
        received = hvd.broadcast(
            packed,
            root_rank,
            name=positional_name(operation),
            ignore_name_scope=True,
            process_set=process_set,
        )
        for i, part in zip(bucket, tf.split(received, [lengths[i] for i in bucket])):
            part = tf.reshape(part, values[i].shape)
            assigned.append(
                variables[i].assign(tf.bitcast(part, dtype) if is_sent_as_bytes else part)
            )
    return assigned


def broadcast_model(model: keras.Model) -> None:
    """Sets weights, optimizer slots, iterations and learning rate to those of rank 0 (every rank).

    Builds the optimizer first, so that its slots exist. Each rank keeps its own rows of sharded tables,
    and its own dropout seeds: with the same masks on all ranks, training would be less random than in
    one process on the joint batch.
    """
    optimizer = built_optimizer(model)
    variables = list(model.weights)
    broadcast_variables(variables, 0)
    if optimizer is not None:
        broadcast_variables(optimizer.variables, 0)
        variables += optimizer.variables
        if hasattr(optimizer, "_hvtrain"):
            optimizer._hvtrain.on_weights_set()
    distribute_whole(variables)


def built_optimizer(model: keras.Model, optimizer: Any = None) -> Any:
    """Builds the optimizer (default: the model's) if needed, and returns it; None if the model is not compiled."""
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    return optimizer


def steps_per_epoch(num_batches: int) -> int:
    """Returns the smallest number of batches that any rank has (every rank).

    Give each rank that many: fit(dataset.take(n)), or fit(x[: n * batch_size], ...). fit's
    steps_per_epoch=n is enough only for data that repeat: if a rank has more batches, Keras begins the
    next epoch with the rest, and ends it once they are used up, so the numbers of steps differ.

    Raises:
        RankError: on all ranks, if a rank has no batch, or does not know their number (cardinality() of a
            tf.data.Dataset is then negative).
    """
    smallest = hvd.allreduce(tf.constant(num_batches), op=hvd.Min, name="hvtrain.steps_per_epoch")
    if smallest < 1:
        raise RankError(
            f"the smallest number of batches on any rank is {smallest}; give each rank data of at least one batch, "
            "and of a known length"
        )
    return int(smallest)


def join(*args: Any, **kwargs: Any) -> Any:
    """Contributes zeros to the other ranks' reductions until all have joined (every rank).

    Arguments and result are those of Horovod's join.

    Raises:
        ValueError: after sparse gradients, with sharded slots, or with LocalSGD or DiLoCo. Zeros cannot
            stand in for this rank's rows or weights.
    """
    if gradients.exchanges_rows and hvd.size() > 1:
        raise ValueError(
            "join cannot stand in for this rank's sparse gradients or its part of the weights, which the others will "
            "gather or average; pass sparse_as_dense=True, leave out shard=True and LocalSGD, or take the same number "
            "of steps on every rank"
        )
    return hvd.join(*args, **kwargs)


def sum_arrays(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the element-wise sums of arrays over all ranks, as float64 (every rank). Sends one message.

    Args:
        arrays: must have the same shapes on all ranks.
    """
    arrays = [np.asarray(array, np.float64) for array in arrays]
    if not arrays:
        return arrays
    packed = np.concatenate([array.ravel() for array in arrays])
    with tf.device("/CPU:0"):
        total = hvd.allreduce(tf.constant(packed), op=hvd.Sum, name="hvtrain.sum").numpy()
    ends = np.cumsum([array.size for array in arrays])
    return [part.reshape(array.shape) for part, array in zip(np.split(total, ends[:-1]), arrays)]


def assign_mean(variable: Any, ranks: Sequence[int] | None = None) -> None:
    """Sets a variable on all ranks to its mean over `ranks`, by default over all of them (every rank).

    The mean is computed in double precision, so that the mean of equal values is exactly that value.
    """
    if ranks is None:
        ranks = range(hvd.size())
    own = variable.numpy()
    (total,) = sum_arrays([own if hvd.rank() in ranks else np.zeros_like(own)])
    variable.assign((total / len(ranks)).astype(own.dtype))
