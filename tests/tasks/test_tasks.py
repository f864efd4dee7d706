"""What a task takes and refuses; several ranks' metrics are in tests/training."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvtrain.data.sources.digits import digits
from hvtrain.errors import ConfigError
from hvtrain.tasks import Classification
from hvtrain.tasks.task import rank_weighted


class Largest(keras.metrics.Metric):
    """The largest logit, of which the sum over ranks is not that of all examples."""

    def __init__(self, name="largest", **more):
        super().__init__(name=name, **more)
        self.value = self.add_weight(shape=(), initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self):
        return self.value


class Own(keras.losses.Loss):
    """A loss of one's own, with an argument that its configuration leaves out."""

    def __init__(self, factor):
        super().__init__(name="own")
        self.factor = factor

    def call(self, y_true, y_pred):
        return self.factor * keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)


@pytest.mark.parametrize(
    "metric",
    [
        keras.metrics.SparseCategoricalAccuracy(),
        keras.metrics.SparseTopKCategoricalAccuracy(3),
        keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
        keras.metrics.MeanIoU(10, sparse_y_pred=False),
    ],
    ids=lambda metric: type(metric).__name__,
)
def test_a_metric_whose_state_adds_up(metric):
    Classification(metrics={"found": metric}).check_metrics(digits())


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (
            Largest(),
            "task.metrics.found cannot be exact over ranks: the state of Largest is no sum over examples",
        ),
        (
            keras.metrics.AUC(),
            r"task.metrics.found cannot take targets of shape \(32,\) and outputs of \(32, 10\), as C",
        ),
    ],
    ids=["a maximum", "another shape"],
)
def test_a_metric_that_would_be_wrong_is_refused(metric, said):
    with pytest.raises(ConfigError, match=said):
        Classification(metrics={"found": metric}).check_metrics(digits())


@pytest.mark.parametrize(
    ("loss", "metrics", "said"),
    [
        ("mse", {}, "task.loss is a str; it must be a keras Loss"),
        (None, {"a": "accuracy"}, "task.metrics.a is a str; it must be a keras Metric"),
        (None, {"a": None}, "task.metrics.a is null; it must be a keras Metric"),
    ],
)
def test_what_is_no_loss_or_metric_is_refused(loss, metrics, said):
    with pytest.raises(ConfigError, match=said):
        Classification(loss, metrics)


@pytest.mark.parametrize("loss", [keras.losses.SparseCategoricalCrossentropy(from_logits=True), Own(2.0)])
def test_a_rank_weight_changes_the_gradient_alone(loss):
    logits, targets = tf.Variable(np.eye(3, 4, dtype=np.float32)), np.array([0, 1, 3])
    weighted = rank_weighted(loss)
    with tf.GradientTape(persistent=True) as tape:
        plain, value = loss(targets, logits), weighted(targets, logits, np.full(3, 1.5, np.float32))
    assert float(value) == float(plain)
    np.testing.assert_allclose(tape.gradient(value, logits), 1.5 * tape.gradient(plain, logits), rtol=1e-6)
    assert type(weighted).__name__ == type(loss).__name__, "as a saved model names it"
    assert float(weighted(targets, logits)) == float(plain)


def test_models_have_metrics_of_their_own():
    task, models = Classification(), [keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)]) for _ in range(2)]
    for model in models:
        task.compile(model, keras.optimizers.SGD())
    x, y = np.ones((4, 2), np.float32), np.zeros(4, np.int32)
    models[0].train_on_batch(x, y)
    assert models[1].evaluate(x, y, verbose=0, return_dict=True).keys() == {"loss", "accuracy"}
    assert not set(map(id, models[0].metrics_variables)) & set(map(id, models[1].metrics_variables))
