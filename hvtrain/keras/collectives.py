"""Horovod's collectives for Keras 3: on values, Keras variables and whole models.

Every rank, or every rank of the process set, must enter each of them. Values travel as tensors. Only shapes and types
of variables, and variables of types that Horovod's kernels lack, are pickled, by Horovod, between ranks of one job.
"""

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvtrain.core.buckets import in_buckets
from hvtrain.errors import RankError

CHUNK_BYTES = 64 << 20

# Types of Horovod's broadcast kernel (horovod/tensorflow/mpi_ops.cc); variables of other types are pickled.
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


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Sets Keras or TensorFlow variables, in the same order on every rank, to the values of root_rank.

    They are matched by position and packed into few messages: names that Keras generates (dense_1, sgd_3) may differ
    between ranks, and Horovod, which pairs tensors by name, would then wait forever.
    Raises RankError if ranks hold variables of different number, shape or type.
    """
    if hvd.size() == 1:
        return
    tensors = [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]
    kinds = [(tuple(tensor.shape), tensor.dtype.name) for tensor in tensors]
    for rank, others in enumerate(hvd.allgather_object(kinds, name="hvtrain.broadcast.kinds")):
        if others != kinds:
            at = next(i for i in range(max(len(kinds), len(others))) if kinds[i : i + 1] != others[i : i + 1])
            raise RankError(
                f"ranks {hvd.rank()} and {rank} hold different variables at position {at}: "
                f"{kinds[at : at + 1]} and {others[at : at + 1]}; build the same model and optimizer on all ranks"
            )
    by_type: dict[tf.DType, list[Any]] = {}
    for tensor in tensors:
        if tensor.dtype.name in _BROADCAST_TYPES:
            by_type.setdefault(tensor.dtype, []).append(tensor)
    for dtype, same in by_type.items():
        sizes = [tensor.shape.num_elements() for tensor in same]
        for bucket in in_buckets([size * dtype.size for size in sizes], CHUNK_BYTES, CHUNK_BYTES):
            packed = tf.concat([tf.reshape(same[i], [-1]) for i in bucket], axis=0)
            received = hvd.broadcast(packed, root_rank, name=f"hvtrain.broadcast.{dtype.name}.{bucket[0]}")
            for i, part in zip(bucket, tf.split(received, [sizes[i] for i in bucket])):
                same[i].assign(tf.reshape(part, same[i].shape))
    other = [tensor for tensor in tensors if tensor.dtype.name not in _BROADCAST_TYPES]
    if other:
        values = hvd.broadcast_object([tensor.numpy() for tensor in other], root_rank, name="hvtrain.variables")
        for tensor, value in zip(other, values):
            tensor.assign(value)


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


def sum_arrays(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Element-wise sums over all ranks, as float64, in one message; shapes must be the same on all ranks."""
    if hvd.size() == 1 or not arrays:
        return [np.asarray(array, np.float64) for array in arrays]
    flat = np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])
    with tf.device("/CPU:0"):
        total = hvd.allreduce(tf.constant(flat), op=hvd.Sum, name="hvtrain.sum").numpy()
    ends = np.cumsum([np.size(array) for array in arrays])
    return [part.reshape(np.shape(array)) for part, array in zip(np.split(total, ends[:-1]), arrays)]
