"""Optimizers that do part of the step by themselves, as people write them."""

import keras
import tensorflow as tf

SGD = keras.optimizers.SGD


class OwnApply(SGD):
    """Overrides apply and never calls Keras's."""

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        for gradient, variable in zip(grads, trainable_variables):
            variable.assign_sub(self.learning_rate * gradient)
        self.iterations.assign_add(1)


class OwnApplyGradients(SGD):
    """As in many a loop of the days of tf.keras."""

    def apply_gradients(self, grads_and_vars):
        for gradient, variable in grads_and_vars:
            variable.assign_sub(0.05 * gradient)
        self.iterations.assign_add(1)

    def apply(self, grads, trainable_variables=None):
        self.apply_gradients(zip(grads, trainable_variables))


class OwnBackendStep(SGD):
    """Overrides the part of the step that clips, decays and updates."""

    def _backend_apply_gradients(self, grads, trainable_variables):
        for gradient, variable in zip(grads, trainable_variables):
            variable.assign_sub(self.learning_rate * gradient)


class Normalized(SGD):
    """Makes each gradient one of length 1, then steps as Keras does."""

    def apply(self, grads, trainable_variables=None):
        super().apply(
            [gradient / (tf.norm(gradient) + 1e-12) for gradient in grads], trainable_variables
        )


class Delegates(SGD):
    """Leaves the step to another optimizer."""

    def __init__(self, other, **kwargs):
        super().__init__(**kwargs)
        self.other = other

    def build(self, variables):
        super().build(variables)
        self.other.build(variables)

    def apply(self, grads, trainable_variables=None):
        self.other.apply(grads, trainable_variables)


def multi():
    """Keras's own: the first kernel by Adam, all else by momentum."""
    optimizers = {".*d/kernel": keras.optimizers.Adam(0.003)}
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(SGD(0.05, momentum=0.9), optimizers)
    )
