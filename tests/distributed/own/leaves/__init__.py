"""A user's own package: a model, a data set, and ways in which either can fail on one rank."""

import os

import keras
import numpy as np

from hvtrain.data import from_arrays
from hvtrain.strategies.horovod import HorovodStrategy


def tiny(image_shape, num_classes, units=8, fail_on_rank=None):
    inputs = keras.Input(image_shape, name="image")
    features = keras.layers.Dense(units, activation="relu", name="hidden")(keras.layers.Flatten(name="flat")(inputs))
    features = FailsAtStep(fail_on_rank, name="fails")(features) if fail_on_rank is not None else features
    return keras.Model(inputs, keras.layers.Dense(num_classes, name="logits")(features), name="tiny")


def leaves(num_examples=400, num_test=51, num_validation=0, fail_on_rank=None):
    """Leaves whose brightest corner is their class."""
    if fail_on_rank is not None and fail_on_rank == _rank():
        raise RuntimeError("leaves are wet on this rank")
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 4, num_examples + num_test)
    images = rng.integers(0, 120, (len(labels), 6, 6, 1)).astype("uint8")
    images[np.arange(len(labels)), np.array([0, 0, 5, 5])[labels], np.array([0, 5, 0, 5])[labels]] = 255
    split = num_examples
    return from_arrays(
        images[:split], labels[:split], images[split:], labels[split:], name="leaves", num_validation=num_validation
    )


class FailsAtStep(keras.layers.Layer):
    """Raises on one rank in the middle of the training."""

    def __init__(self, rank, **kwargs):
        super().__init__(**kwargs)
        self.rank = rank
        self.calls = 0

    def call(self, inputs):
        import tensorflow as tf

        def fail(values):
            self.calls += 1
            if self.calls > 5 and self.rank == _rank():
                raise RuntimeError("a leaf fell off")
            return values

        outputs = tf.numpy_function(fail, [inputs], tf.float32)
        return inputs + tf.stop_gradient(tf.reshape(outputs, tf.shape(inputs)) - inputs)


class ForgetsToReduce(HorovodStrategy):
    """What Horovod's own optimizer does on Keras 3."""

    def distribute(self, optimizer, check_finite=False):
        return optimizer


def _rank():
    return int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
