"""A user's own package whose parts hang, fail or take long, on one rank and at one step."""

import os
import time

import keras
import tensorflow as tf

from hvtrain.data.sources.built_in import digits

FOREVER = 100_000


def data(rank=0, batch=-1, seconds=FOREVER, evaluation_seconds=0.0):
    """The digits; from that batch on, reading on that rank takes so long, and each batch of an evaluation on all."""
    source = digits()
    streams, evaluations = source.training, source.evaluation

    def training(request):
        batches = streams(request)
        if request.topology.rank != rank or batch < 0:
            return batches

        def late(number, pair):
            def wait(number):
                time.sleep(seconds if number >= batch else 0)
                return number

            with tf.control_dependencies([tf.numpy_function(wait, [number], tf.int64)]):
                return tf.nest.map_structure(tf.identity, pair)

        return batches.enumerate().map(late)

    def evaluation(*args):
        def wait(images):
            time.sleep(evaluation_seconds)
            return images

        def late(images, labels):
            waited = tf.numpy_function(wait, [images], images.dtype)
            return tf.ensure_shape(waited, images.shape), labels

        return evaluations(*args).map(late) if evaluation_seconds else evaluations(*args)

    source.training, source.evaluation = training, evaluation
    return source


class Acts(keras.callbacks.Callback):
    """After one step of the run, on one rank: hangs, raises, or dies."""

    def __init__(self, rank, step, what="hang", seconds=FOREVER):
        super().__init__()
        self.rank, self.step, self.what, self.seconds = rank, step, what, seconds
        self.done = 0

    def on_train_batch_end(self, batch, logs=None):
        self.done += 1
        if self.done == self.step and _rank() == self.rank:
            if self.what == "raise":
                raise RuntimeError("a leaf fell off")
            if self.what == "memory":
                raise MemoryError("no room for a leaf")
            if self.what == "nccl":
                raise tf.errors.UnknownError(
                    None, None, "ncclAllReduce failed: unhandled system error\n\t [[Horovod]]"
                )
            if self.what == "die":
                os.kill(os.getpid(), 9)
            if self.what == "stop":
                os.kill(os.getpid(), 19)
            if self.what == "grip":
                _grip(self.seconds)
            time.sleep(self.seconds)


def _grip(seconds):
    """Holds Python's lock: no other thread of this process runs Python."""
    import ctypes

    ctypes.PyDLL(None).usleep(int(seconds * 1e6) & 0xFFFFFFFF)


def _rank():
    return int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
