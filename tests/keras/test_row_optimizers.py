"""Optimizers of an embedding's rows, against their formulas in NumPy; in one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvtrain.keras.optimizers import LazyAdam, RowwiseAdagrad
from hvtrain.step.joint_loss import subclass_under_its_name

ROWS, COLUMNS, STEPS = 9, 4, 6
RATE = 0.1
TABLE = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype("float32")


def batches():
    """Ids of a batch, which repeat, and a gradient for each; row 8 is never looked up, row 7 only at first."""
    random = np.random.default_rng(1)
    for step in range(STEPS):
        ids = random.integers(0, 7, 5)
        ids[:2] = ids[2] if step else 7
        yield ids, random.normal(size=(5, COLUMNS)).astype("float32")


def trained(optimizer, sparse=True):
    """The table after the steps, which run in a graph; and the optimizer."""
    table = keras.Variable(TABLE)

    @tf.function
    def step(ids, values):
        gradient = tf.IndexedSlices(values, ids, dense_shape=table.shape)
        optimizer.apply([gradient if sparse else tf.convert_to_tensor(gradient)], [table])

    for ids, values in batches():
        step(ids, values)
    return table.numpy()


def lazy_adam(beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    table, momentum, velocity = (
        TABLE.astype(float),
        np.zeros_like(TABLE, float),
        np.zeros_like(TABLE, float),
    )
    for step, (ids, values) in enumerate(batches(), 1):
        for row in set(ids):
            gradient = values[ids == row].sum(axis=0)
            momentum[row] = beta_1 * momentum[row] + (1 - beta_1) * gradient
            velocity[row] = beta_2 * velocity[row] + (1 - beta_2) * gradient**2
            rate = RATE * np.sqrt(1 - beta_2**step) / (1 - beta_1**step)
            table[row] -= rate * momentum[row] / (np.sqrt(velocity[row]) + epsilon)
    return table


def rowwise_adagrad(epsilon=1e-8):
    table, sums = TABLE.astype(float), np.zeros(ROWS)
    for ids, values in batches():
        for row in set(ids):
            gradient = values[ids == row].sum(axis=0)
            sums[row] += np.mean(gradient**2)
            table[row] -= RATE * gradient / (np.sqrt(sums[row]) + epsilon)
    return table


@pytest.mark.parametrize(
    ("kind", "formula"), [(LazyAdam, lazy_adam), (RowwiseAdagrad, rowwise_adagrad)]
)
def test_the_rows_of_a_batch_get_the_step_of_the_formula_and_no_other_row_moves(kind, formula):
    table = trained(kind(RATE))
    np.testing.assert_allclose(table, formula(), rtol=0, atol=1e-5)
    assert np.array_equal(table[8], TABLE[8])


def test_kerass_adam_moves_rows_that_no_batch_looks_up():
    """The control: row 7 goes on after its only step, so the formula of LazyAdam does not hold."""
    assert np.abs(trained(keras.optimizers.Adam(RATE)) - lazy_adam())[7].max() > 0.1


def test_a_dense_gradient_gets_adams_step_to_the_bit():
    assert np.array_equal(
        trained(LazyAdam(RATE), sparse=False), trained(keras.optimizers.Adam(RATE), sparse=False)
    )


def test_adagrad_takes_dense_gradients_of_any_shape():
    dense = trained(RowwiseAdagrad(RATE), sparse=False)
    np.testing.assert_allclose(dense, rowwise_adagrad(), rtol=0, atol=2e-6)
    variables = [keras.Variable(np.ones(shape, "float32")) for shape in ((), (3,), (2, 3, 2))]
    optimizer = RowwiseAdagrad(RATE)
    optimizer.apply([tf.fill(variable.shape, 2.0) for variable in variables], variables)
    for variable in variables:
        np.testing.assert_allclose(variable.numpy(), 1 - RATE, rtol=1e-6)
    assert [tuple(slot.shape) for slot in optimizer._sums] == [(), (3,), (2,)]


def test_amsgrad_is_refused_and_settings_survive_a_copy():
    with pytest.raises(ValueError, match="LazyAdam has no amsgrad"):
        LazyAdam(amsgrad=True)
    for optimizer in (LazyAdam(0.2, beta_1=0.8), RowwiseAdagrad(0.2, epsilon=0.5)):
        plain = type(optimizer)
        # DistributedOptimizer gives it such a class, which a saved model must not need.
        optimizer.__class__ = subclass_under_its_name(plain)
        saved = keras.saving.serialize_keras_object(optimizer)
        copy = keras.saving.deserialize_keras_object(saved)
        assert type(copy) is plain and copy.get_config() == optimizer.get_config()
