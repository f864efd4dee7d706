"""The check of gradients before a step, and the norm that it computes on the way."""

import numpy as np
import pytest
import tensorflow as tf

from hvtrain.keras.gradients import NOT_FINITE, FiniteCheck

SPARSE = tf.IndexedSlices(tf.constant([[3.0], [4.0]]), tf.constant([0, 2]), tf.constant([5, 1]))


def test_the_norm_is_that_of_all_gradients_without_the_loss_scale():
    check = FiniteCheck()
    gradients = [
        tf.constant([1.0, 2.0]),
        None,
        SPARSE,
        tf.constant([0.5], tf.float16),
        tf.constant([2.0], tf.float64),
    ]
    graph = tf.function(lambda: check(gradients, gradients, loss_scale=tf.constant(4.0)))
    assert [None if part is None else part.dtype.name for part in graph()] == [
        "float32", None, "float32", "float16", "float64"
    ]  # fmt: skip
    assert check.norm == pytest.approx(np.sqrt(1 + 4 + 9 + 16 + 0.25 + 4) / 4)
    check([], [])
    assert check.norm == 0


def test_a_value_whose_square_overflows_is_finite_and_others_are_not():
    check = FiniteCheck()
    large = [tf.constant([1e30, 1.0])]
    assert check(large, large)[0].numpy().tolist() == pytest.approx([1e30, 1.0])
    for wrong in (float("nan"), float("inf")):
        gradients = [tf.constant([1.0]), tf.constant([wrong])]
        with pytest.raises(tf.errors.InvalidArgumentError, match=NOT_FINITE):
            check(gradients, gradients)
        assert len(check(gradients, gradients, excused=tf.constant(True))) == 2
