"""A user's package: models and callbacks that act as a defective device does, on one rank."""

import keras
import numpy as np
import tensorflow as tf

import hvtrain.keras as hvd


class Flaw(keras.layers.Layer):
    """Spoils an activation, or what is passed back, in training on one rank: from a call on, or in one call alone.

    A step is a call, and each gradient that is computed again is one too.
    """

    def __init__(self, rank, first_call, last_call, of_gradient, **options):
        super().__init__(**options)
        self.calls = range(first_call, last_call + 1)
        self.rank = rank
        self.of_gradient = of_gradient
        self.count = 0

    def call(self, inputs, training=False):
        if not training or hvd.rank() != self.rank:
            return inputs
        return self._flawed(inputs)

    def _spoiled(self, tensor):
        spoiled = tf.numpy_function(self._spoil, [tensor], tensor.dtype)
        return tf.ensure_shape(spoiled, tensor.shape)

    @tf.autograph.experimental.do_not_convert
    def _flawed(self, inputs):
        @tf.custom_gradient
        def same(tensor):
            if self.of_gradient:
                return tf.identity(tensor), self._spoiled
            return self._spoiled(tensor), tf.identity

        return same(inputs)

    def _spoil(self, values):
        self.count += 1
        if self.count in self.calls:
            values = np.array(values)
            bits = values.reshape(-1)[:1].view(np.int32)
            bits ^= 1 << 29  # A bit of the exponent.
        return values


class FlipBit(keras.callbacks.Callback):
    """Flips a bit of a weight of the last layer on one rank, after a step of the first epoch."""

    def __init__(self, rank, step):
        super().__init__()
        self.rank = rank
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self.step and hvd.rank() == self.rank:
            kernel = self.model.trainable_variables[2]
            values = kernel.numpy()
            bits = values.reshape(-1)[:1].view(np.int32)
            bits ^= 1 << 28
            kernel.assign(values)


class GrowScale(keras.callbacks.Callback):
    """Makes the loss scale double in the step after this one, as it does every 2,000 steps."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        if batch + 1 == self.step:
            optimizer.dynamic_scale.assign(64.0)  # With which nothing overflows.
            optimizer.step_counter.assign(optimizer.dynamic_growth_steps - 1)
        elif batch == self.step and hvd.rank() == 0:
            print(f"the loss scale is {float(optimizer.dynamic_scale):g}", flush=True)


def model(image_shape, num_classes, rank=-1, first_call=1, last_call=10**9, of_gradient=False, **_):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="relu"),
            Flaw(rank, first_call, last_call, of_gradient),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(num_classes),
        ]
    )
