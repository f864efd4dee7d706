"""A user's package: a model whose forward pass waits on one rank, as on a slower machine."""

import time

import keras
import tensorflow as tf

import hvtrain.keras as hvd


class Pause(keras.layers.Layer):
    """Waits for so many seconds for each example of a training batch, on one rank, after so many batches."""

    def __init__(self, rank, seconds, after, **options):
        super().__init__(**options)
        self.rank = rank
        self.seconds = seconds
        self.after = after

    def call(self, inputs, training=False):
        if not training or hvd.rank() != self.rank:
            return inputs
        paused = tf.numpy_function(self._wait, [inputs], inputs.dtype)
        return tf.ensure_shape(paused, inputs.shape)

    def _wait(self, inputs):
        self.after -= 1
        if self.after < 0:
            time.sleep(self.seconds * len(inputs))
        return inputs


def model(image_shape, num_classes, rank, seconds, after=0, **_):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            Pause(rank, seconds, after),
            keras.layers.Flatten(),
            keras.layers.Dense(num_classes),
        ]
    )
