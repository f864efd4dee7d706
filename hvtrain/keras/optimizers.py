"""Optimizers that update only those rows of an embedding table that a batch has looked up.

The gradient of an embedding has a row for each id of the batch (IndexedSlices). Keras's own Adam and
Adagrad treat it as a gradient of the whole table: in each step they update all slots and rows, which
for Adam takes as long as reading and writing the table three times.
"""

from typing import Any

import keras
import tensorflow as tf

from hvtrain.keras.gradients import sum_duplicates
from hvtrain.keras.in_graph import tf_variable


@keras.saving.register_keras_serializable(package="hvtrain")
class LazyAdam(keras.optimizers.Adam):
    """Adam (Kingma and Ba 2014) in which a row's moments change only in steps that look the row up.

    A row in the batch takes Adam's step, with the bias correction of the optimizer's step count. All
    other rows keep their weights and moments; Adam would move them by their decaying momentum. Dense
    gradients are applied exactly as in Adam. The gradients of repeated ids are summed first.

    Args:
        learning_rate: a number or a schedule.
        options: those of keras.optimizers.Adam, such as beta_1, beta_2 and epsilon, except amsgrad.

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
        rate = (
            tf.cast(learning_rate, table.dtype)
            * tf.sqrt(1 - self.beta_2**step)
            / (1 - self.beta_1**step)
        )

        momentum = tf.gather(momentums, rows)
        momentum += (values - momentum) * (1 - self.beta_1)
        velocity = tf.gather(velocities, rows)
        velocity += (tf.square(values) - velocity) * (1 - self.beta_2)
        momentums.scatter_update(tf.IndexedSlices(momentum, rows))
        velocities.scatter_update(tf.IndexedSlices(velocity, rows))
        table.scatter_sub(
            tf.IndexedSlices(rate * momentum / (tf.sqrt(velocity) + self.epsilon), rows)
        )


@keras.saving.register_keras_serializable(package="hvtrain")
class RowwiseAdagrad(keras.optimizers.Optimizer):
    """Adagrad (Duchi et al. 2011) with one slot value for each row of a table, not for each weight.

    A row's value accumulates the mean of its squared gradients, as in the recommendation models of
    Naumov et al. 2019 (arXiv:1906.00091). Every variable of two or more dimensions has a value for each
    index of its first dimension; a vector has one for each weight. The gradients of repeated ids are
    summed first.

    Args:
        learning_rate: a number or a schedule.
        epsilon: added to the square root of a slot value.
        options: those of keras.optimizers.Optimizer.
    """

    def __init__(self, learning_rate: Any = 0.01, epsilon: float = 1e-8, **options: Any) -> None:
        super().__init__(learning_rate=learning_rate, **options)
        self.epsilon = epsilon

    def build(self, variables: list[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        # Scalars and vectors are passed as reference variables: with shard=True, a scalar slot
        # without a reference would not be marked as one that only some ranks have.
        self._sums = [
            self.add_variable_from_reference(variable, "sum")
            if len(variable.shape) < 2
            else self.add_variable(
                variable.shape[:1], dtype=variable.dtype, name=f"{slot_prefix(variable)}_sum"
            )
            for variable in variables
        ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        table = tf_variable(variable)
        sums = tf_variable(self._sums[self._get_variable_index(variable)])
        rate = tf.cast(learning_rate, table.dtype)
        if not isinstance(gradient, tf.IndexedSlices):
            values = tf.cast(gradient, table.dtype)
            sums.assign_add(_mean_squares(values))
            table.assign_sub(rate * self._scale_rows(values, sums))
            return

        values, rows = sum_duplicates(tf.cast(gradient.values, table.dtype), gradient.indices)
        sums.scatter_add(tf.IndexedSlices(_mean_squares(values), rows))
        scaled = self._scale_rows(values, tf.gather(sums, rows))
        table.scatter_sub(tf.IndexedSlices(rate * scaled, rows))

    def _scale_rows(self, values: tf.Tensor, sums: Any) -> tf.Tensor:
        """Divides each row by the square root of its accumulated sum."""
        divisors = tf.sqrt(sums) + self.epsilon
        for _ in values.shape[1:]:
            divisors = divisors[..., tf.newaxis]
        return values / divisors

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "epsilon": self.epsilon}


def _mean_squares(values: tf.Tensor) -> tf.Tensor:
    """Returns the mean square of each row, [rows]; for a vector, the square of each element."""
    return tf.reduce_mean(tf.square(values), axis=list(range(1, len(values.shape))))


def slot_prefix(variable: Any) -> str:
    """Returns the prefix that Keras gives the names of a variable's slots."""
    return getattr(variable, "path", variable.name).replace("/", "_").replace(":", "_")


def row_slots(optimizer: Any, table: Any) -> list[Any]:
    """Returns the slots of a built optimizer that have a row for each row of a table."""
    prefix = f"{slot_prefix(table)}_"
    return [
        slot
        for slot in optimizer.variables
        if slot.name.startswith(prefix) and slot.shape[:1] == table.shape[:1]
    ]
