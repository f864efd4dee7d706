"""Optimizers that touch only those rows of an embedding table that a batch looked up.

The gradient of an embedding has a row for each id of the batch (IndexedSlices). Keras's own Adam and
Adagrad turn it into one of the whole table: all slots decay and all rows move in each step, which
takes as long as reading and writing the table three times.
"""

from typing import Any

import keras
import tensorflow as tf

from hvtrain.keras.gradients import sum_duplicates
from hvtrain.keras.in_graph import tf_variable


@keras.saving.register_keras_serializable(package="hvtrain")
class LazyAdam(keras.optimizers.Adam):
    """Adam (Kingma and Ba 2014) in which a row's moments change only in steps that look it up.

    For a row of the batch the step is Adam's, with the bias correction of the optimizer's step. Any
    other row keeps its weights and moments; Adam would move it on by its decaying momentum. Dense
    gradients get Adam's step, to the bit. Ids that repeat count as their sum.

    Args:
        learning_rate, beta_1, beta_2, epsilon, keyword arguments: those of keras.optimizers.Adam,
            but amsgrad.

    Raises:
        ValueError: for amsgrad=True.
    """

    def __init__(self, learning_rate: Any = 0.001, **options: Any) -> None:
        super().__init__(learning_rate, **options)
        if self.amsgrad:
            raise ValueError("LazyAdam has no amsgrad; leave it out, or use keras.optimizers.Adam")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)
            return

        table = tf_variable(variable)
        position = self._get_variable_index(variable)
        momentums = tf_variable(self._momentums[position])
        velocities = tf_variable(self._velocities[position])
        values, rows = sum_duplicates(tf.cast(gradient.values, table.dtype), gradient.indices)
        step = tf.cast(self.iterations + 1, table.dtype)
        rate = tf.cast(learning_rate, table.dtype) * tf.sqrt(1 - self.beta_2**step) / (1 - self.beta_1**step)

        momentum = tf.gather(momentums, rows)
        momentum += (values - momentum) * (1 - self.beta_1)
        velocity = tf.gather(velocities, rows)
        velocity += (tf.square(values) - velocity) * (1 - self.beta_2)
        momentums.scatter_update(tf.IndexedSlices(momentum, rows))
        velocities.scatter_update(tf.IndexedSlices(velocity, rows))
        table.scatter_sub(tf.IndexedSlices(rate * momentum / (tf.sqrt(velocity) + self.epsilon), rows))


@keras.saving.register_keras_serializable(package="hvtrain")
class RowwiseAdagrad(keras.optimizers.Optimizer):
    """Adagrad (Duchi et al. 2011) with one slot for each row of a table, in place of one for each weight.

    A row's slot adds the mean of its squared gradients, as in the recommendation models of Naumov
    et al. 2019 (arXiv:1906.00091). Every variable of two dimensions or more has such slots, by its
    first dimension; a vector has one for each weight. Ids that repeat count as their sum.

    Args:
        learning_rate: a number or a schedule.
        epsilon: is added to the root of a slot.
        options: those of keras.optimizers.Optimizer.
    """

    def __init__(self, learning_rate: Any = 0.01, epsilon: float = 1e-8, **options: Any) -> None:
        super().__init__(learning_rate=learning_rate, **options)
        self.epsilon = epsilon

    def build(self, variables: list[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self._sums = [
            self.add_variable(variable.shape[:1], dtype=variable.dtype, name=f"{slot_prefix(variable)}_sum")
            for variable in variables
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        table = tf_variable(variable)
        sums = tf_variable(self._sums[self._get_variable_index(variable)])
        rate = tf.cast(learning_rate, table.dtype)
        if not isinstance(gradient, tf.IndexedSlices):
            values = tf.cast(gradient, table.dtype)
            sums.assign_add(_mean_squares(values))
            table.assign_sub(rate * self._scaled(values, sums))
            return

        values, rows = sum_duplicates(tf.cast(gradient.values, table.dtype), gradient.indices)
        sums.scatter_add(tf.IndexedSlices(_mean_squares(values), rows))
        scaled = self._scaled(values, tf.gather(sums, rows))
        table.scatter_sub(tf.IndexedSlices(rate * scaled, rows))

    def _scaled(self, values: tf.Tensor, sums: Any) -> tf.Tensor:
        """Divides each row by the root of its sum."""
        divisors = tf.sqrt(sums) + self.epsilon
        for _ in values.shape[1:]:
            divisors = divisors[..., tf.newaxis]
        return values / divisors

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "epsilon": self.epsilon}


def _mean_squares(values: tf.Tensor) -> tf.Tensor:
    """Returns the mean of squares of each row, [rows]; of a vector the squares."""
    return tf.reduce_mean(tf.square(values), axis=list(range(1, len(values.shape))))


def slot_prefix(variable: Any) -> str:
    """Returns what Keras begins the names of a variable's slots with."""
    return getattr(variable, "path", variable.name).replace("/", "_").replace(":", "_")
