"""Horovod's collectives for Keras 3: on values, Keras variables and whole models.

Every rank, or every rank of the process set, must enter each of them. Values travel as tensors. Only shapes and types
of variables are pickled, by Horovod, between ranks of one job.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvtrain.core.buckets import in_buckets
from hvtrain.errors import RankError
from hvtrain.keras import reduction, unlike_weights
from hvtrain.keras.gradients import compare_structure
from hvtrain.keras.in_graph import positional_name
from hvtrain.keras.variables import is_seed

CHUNK_BYTES = 64 << 20

# Types of Horovod's broadcast kernel (horovod/tensorflow/mpi_ops.cc).
_BROADCAST_TYPES = "uint8 int8 uint16 int16 int32 int64 float16 float32 float64 bool".split()  # noqa: SIM905


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
    """The value reduced over all ranks (default: Average), as a tensor. Differentiable under a gradient tape."""
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


def allgather(value: Any, name: str | None = None, process_set: Any = hvd.global_process_set) -> Any:
    """All ranks' values, concatenated along the first dimension, as a tensor. Only that dimension may differ.

    Under a tape its gradient is Horovod's: the mean over the ranks of their gradients with respect to this rank's rows.
    """
    return hvd.allgather(tf.convert_to_tensor(value), name=name, process_set=process_set)


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: Any = hvd.global_process_set) -> Any:
    """The value of root_rank, on every rank, as a tensor. Shapes must be the same on all ranks."""
    return hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=name, process_set=process_set)


def reducescatter(
    value: Any, name: str | None = None, op: int = hvd.Average, process_set: Any = hvd.global_process_set
) -> Any:
    """This rank's slice, along the first dimension, of the value reduced over all ranks (default: Average)."""
    return hvd.reducescatter(tf.convert_to_tensor(value), op=op, name=name, process_set=process_set)


def grouped_allreduce(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Horovod's grouped_allreduce. Raises RankError if the ranks' tensors differ in number, type or shape."""
    return _of_group(hvd.grouped_allreduce, tensors, args, kwargs)


def grouped_allgather(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Horovod's grouped_allgather. Raises RankError if they differ in number, type, or a dimension but the first."""
    return _of_group(hvd.grouped_allgather, tensors, args, kwargs, has_own_length=True)


def grouped_reducescatter(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Horovod's grouped_reducescatter. Raises RankError if the ranks' tensors differ in number, type or shape."""
    return _of_group(hvd.grouped_reducescatter, tensors, args, kwargs)


def _of_group(
    collective: Callable[..., Any], tensors: Sequence[Any], args: Any, kwargs: Any, has_own_length: bool = False
) -> Any:
    """Calls Horovod's collective, after the ranks have compared the types and shapes of their tensors.

    Horovod compares tensors that travel alone, but not those of a group, and would read foreign memory.
    has_own_length: the first dimension may differ.
    """
    tensors = [one if isinstance(one, tf.IndexedSlices) else tf.convert_to_tensor(one) for one in tensors]
    given = inspect.signature(collective).bind(tensors, *args, **kwargs).arguments
    process_set = given.get("process_set", hvd.global_process_set)
    if process_set.size() > 1:
        kinds = [tf.TensorSpec([None, *one.shape[1:]], one.dtype) if has_own_length else one for one in tensors]
        settings = f"{collective.__name__}, op={given.get('op')}"
        compare_structure(collective.__name__, settings, kinds, [None] * len(kinds), process_set, "tensor")
    return collective(tensors, *args, **kwargs)


def broadcast_global_variables(root_rank: int) -> Any:
    """The operation that broadcasts all global variables of the current tf.compat.v1 graph.

    Raises RuntimeError in eager mode, as Horovod does: TensorFlow 2 keeps no list of all variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables finds no global variables in TensorFlow 2; use broadcast_model(model) "
            "or BroadcastGlobalVariablesCallback(0)"
        )
    return hvd.broadcast_global_variables(root_rank)


@tf.autograph.experimental.do_not_convert
def broadcast_variables(variables: Iterable[Any], root_rank: int) -> Any:
    """Sets Keras or TensorFlow variables, in the same order on every rank, to the values of root_rank.

    Inside a tf.function it does so in the graph; in a TensorFlow 1 graph it returns the operation. Seeds of dropout and
    the like, which `model.variables` holds too, stay each rank's own: see broadcast_model.

    They are matched by position and packed into few messages: names that Keras generates (dense_1, sgd_3) may differ
    between ranks, and Horovod, which pairs tensors by name, would then wait forever.
    Raises RankError if ranks hold variables of different number, shape or type, and ValueError if there are none, as in
    a model that is not built.
    """
    variables = list(variables)
    unlike_weights.made_equal()
    tensors = [v.value if isinstance(v, keras.Variable) else v for v in variables if not is_seed(v)]
    if hvd.size() > 1:
        with tf.init_scope():
            if tf.executing_eagerly():
                _compare_kinds([(tuple(tensor.shape), tensor.dtype.name) for tensor in tensors])
    if not variables:
        raise ValueError(
            "there are no variables to broadcast, as in a model that is not built yet, and ranks would train apart; "
            "begin the model with a keras.Input, or call model.build(input_shape) before"
        )
    if hvd.size() == 1:
        return None
    by_type: dict[tf.DType, list[Any]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    assigned = []
    for dtype, same in by_type.items():
        sent_as = dtype if dtype.name in _BROADCAST_TYPES else tf.uint8  # Others travel as their bytes.
        values = [tensor if sent_as == dtype else tf.bitcast(tensor, sent_as) for tensor in same]
        sizes = [value.shape.num_elements() for value in values]
        for bucket in in_buckets([size * sent_as.size for size in sizes], CHUNK_BYTES, CHUNK_BYTES):
            packed = tf.concat([tf.reshape(values[i], [-1]) for i in bucket], axis=0)
            received = hvd.broadcast(packed, root_rank, name=positional_name("broadcast"), ignore_name_scope=True)
            for i, part in zip(bucket, tf.split(received, [sizes[i] for i in bucket])):
                part = tf.reshape(part, values[i].shape)
                assigned.append(same[i].assign(part if sent_as == dtype else tf.bitcast(part, dtype)))
    return None if tf.executing_eagerly() else tf.group(assigned)


def _compare_kinds(kinds: list[tuple[tuple[int, ...], str]]) -> None:
    for rank, others in enumerate(hvd.allgather_object(kinds, name="hvtrain.broadcast.kinds")):
        if others != kinds:
            at = next(i for i in range(max(len(kinds), len(others))) if kinds[i : i + 1] != others[i : i + 1])
            raise RankError(
                f"ranks {hvd.rank()} and {rank} hold different variables at position {at}: "
                f"{kinds[at : at + 1]} and {others[at : at + 1]}; build the same model and optimizer on all ranks"
            )


def broadcast_model(model: keras.Model, root_rank: int = 0) -> None:
    """Sets weights, optimizer slots, iterations and learning rate to those of root_rank.

    Builds the optimizer first, so that its slots exist. Each rank keeps its own seeds of dropout and the like: with the
    same masks on all ranks, training would be less random than in one process on the joint batch.
    """
    optimizer = getattr(model, "optimizer", None)  # A model that was not compiled has none.
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    broadcast_variables(model.weights, root_rank)
    if optimizer is not None:
        broadcast_variables(optimizer.variables, root_rank)


def steps_per_epoch(num_batches: int) -> int:
    """The smallest number of batches that a rank holds: what every rank can pass to fit (every rank)."""
    return int(hvd.allreduce(tf.constant(num_batches), op=hvd.Min, name="hvtrain.steps_per_epoch"))


def join(*args: Any, **kwargs: Any) -> Any:
    """Horovod's join: takes part in the other ranks' reductions, with zeros, until all ranks have joined (every rank).

    Raises ValueError after sparse gradients, which are gathered: zeros cannot stand in for rows.
    """
    if reduction.gathers_rows and hvd.size() > 1:
        raise ValueError(
            "join cannot stand in for this rank's sparse gradients, which the others go on to gather; pass "
            "sparse_as_dense=True to the DistributedOptimizer or the tape, or the same number of steps on every rank"
        )
    return hvd.join(*args, **kwargs)


def sum_arrays(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Element-wise sums over all ranks, as float64, in one message; shapes must be the same on all ranks."""
    if hvd.size() == 1 or not arrays:
        return [np.asarray(array, np.float64) for array in arrays]
    flat = np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])
    with tf.device("/CPU:0"):
        total = hvd.allreduce(tf.constant(flat), op=hvd.Sum, name="hvtrain.sum").numpy()
    ends = np.cumsum([np.size(array) for array in arrays])
    return [part.reshape(np.shape(array)) for part, array in zip(np.split(total, ends[:-1]), arrays)]
