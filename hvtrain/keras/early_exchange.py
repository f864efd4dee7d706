"""An exchange between ranks before TensorFlow initializes a device, for choosing devices and forming clusters."""

from typing import TypeVar

import horovod.tensorflow as hvd
import tensorflow as tf

T = TypeVar("T")


def exchange(value: T, name: str = "hvtrain.early_exchange") -> list[T]:
    """All ranks' values, by rank (every rank). Call it after init; TensorFlow's devices can be chosen afterwards.

    An eager collective would initialize TensorFlow's context with all GPUs and without a cluster, which is final. A
    session without GPUs initializes nothing.
    """
    if hvd.size() == 1:
        return [value]
    config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        return list(hvd.allgather_object(value, session=session, name=name))
