"""A user's package for strategies of tf.distribute: strategies that forget to reduce, and a step of one's own."""

from types import SimpleNamespace

import keras

from hvtrain.strategies.mirrored import MirroredStrategy, MultiWorkerMirroredStrategy


class _Forgets:
    """Every replica steps on the gradient of its own part of the batch."""

    def distribute(self, optimizer, check_finite=False):
        reducer = super().distribute(optimizer, check_finite)._hvtrain.reducer
        reducer.strategy = SimpleNamespace(num_computing=1)
        return optimizer


class ForgetfulWorkers(_Forgets, MultiWorkerMirroredStrategy):
    pass


class ForgetfulReplicas(_Forgets, MirroredStrategy):
    pass


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


class OneNumber(keras.losses.Loss):
    """Its call returns one number for the batch."""

    def __init__(self, from_logits=True, **options):
        super().__init__(**options)

    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_true - y_pred))


def model(input_spec, num_outputs, **_):
    inputs = keras.Input(tuple(input_spec.shape))
    return OwnStep(inputs, keras.layers.Dense(num_outputs)(inputs))
