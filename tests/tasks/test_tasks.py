"""What a task takes and refuses; several ranks' metrics are in tests/training."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvtrain.data.source import Source
from hvtrain.data.sources.digits import digits
from hvtrain.errors import ConfigError
from hvtrain.step.joint_loss import joint_loss, weighted
from hvtrain.tasks import Binary, Classification, Custom, Language, Multilabel, Regression, Segmentation


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
    Classification(metrics={"found": metric}).prepare(digits())


@pytest.mark.parametrize(
    "metric",
    [keras.metrics.F1Score(threshold=0.5), keras.metrics.R2Score(), keras.metrics.MeanIoU(2)],
    ids=lambda metric: type(metric).__name__,
)
def test_a_metric_that_makes_its_variables_with_the_first_update(metric):
    Multilabel(metrics={"own": metric}).prepare(Given(spec("float32", 5), spec("float32", 3)))


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            Largest(),
            "task.metrics.found cannot be exact over ranks: the state of Largest is not a sum over examples",
        ),
        (
            keras.metrics.AUC(),
            r"task.metrics.found cannot take targets of shape \(32,\) and outputs of \(32, 10\), as C",
        ),
    ],
    ids=["a maximum", "another shape"],
)
def test_a_metric_that_would_be_wrong_is_refused(metric, message):
    with pytest.raises(ConfigError, match=message):
        Classification(metrics={"found": metric}).prepare(digits())


@pytest.mark.parametrize(
    ("loss", "metrics", "message"),
    [
        ("mse", {}, "task.loss is a str; it must be a keras Loss"),
        (None, {"a": "accuracy"}, "task.metrics.a is a str; it must be a keras Metric"),
        (None, {"a": None}, "task.metrics.a is null; it must be a keras Metric"),
    ],
)
def test_what_is_no_loss_or_metric_is_refused(loss, metrics, message):
    with pytest.raises(ConfigError, match=message):
        Classification(loss, metrics)


@pytest.mark.parametrize("loss", [keras.losses.SparseCategoricalCrossentropy(from_logits=True), Own(2.0)])
def test_a_batch_weight_changes_the_gradient_alone(loss):
    logits, targets = tf.Variable(np.eye(3, 4, dtype=np.float32)), np.array([0, 1, 3])
    joint = joint_loss(loss, lambda number: number, lambda: 1)
    with tf.GradientTape(persistent=True) as tape:
        plain, value = loss(targets, logits), weighted(joint(targets, logits), tf.constant(1.5))
    assert float(value) == float(plain)
    np.testing.assert_allclose(tape.gradient(value, logits), 1.5 * tape.gradient(plain, logits), rtol=1e-6)
    assert type(joint).__name__ == type(loss).__name__, "as a saved model names it"
    assert float(joint(targets, logits)) == float(plain)


def test_models_have_metrics_of_their_own():
    task, models = Classification(), [keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)]) for _ in range(2)]
    for model in models:
        task.compile(model, keras.optimizers.SGD())
    x, y = np.ones((4, 2), np.float32), np.zeros(4, np.int32)
    models[0].train_on_batch(x, y)
    assert models[1].evaluate(x, y, verbose=0, return_dict=True).keys() == {"loss", "accuracy"}
    assert not set(map(id, models[0].metrics_variables)) & set(map(id, models[1].metrics_variables))


def spec(kind, *shape):
    return tf.TensorSpec(shape, kind)


class Given(Source):
    """A source with elements of that kind, whose streams nobody opens."""

    name = "given"

    def __init__(self, inputs, targets, **facts):
        self.spec, self.own_facts = (inputs, targets), facts
        self.__dict__.update(facts)

    @property
    def element_spec(self):
        return self.spec

    def facts(self):
        return {**super().facts(), **self.own_facts}

    num_examples = training = evaluation = None


IMAGE = spec("float32", 8, 8, 3)
FITTING = {
    "binary": (Binary, Given(spec("float32", 5), spec("int32")), (1,), np.array([0, 1, 2])),
    "multilabel": (Multilabel, Given(spec("float32", 5), spec("float32", 3)), (3,), np.array([[0, 1, 1], [0.5, 0, 0]])),
    "regression": (Regression, Given(spec("float32", 5), spec("float32")), (1,), np.array([0.0, np.nan])),
    "several numbers": (
        Regression,
        Given(spec("float32", 5), spec("float32", 2)),
        (2,),
        np.array([[0, 1], [0, np.inf]]),
    ),
    "classification": (Classification, Given(IMAGE, spec("int32"), num_classes=3), (3,), np.array([0, 2, 3])),
    "segmentation": (
        Segmentation,
        Given(IMAGE, spec("uint8", 8, 8), num_classes=3),
        (8, 8, 3),
        np.stack([np.full((8, 8), 255), np.full((8, 8), 3)]),
    ),
    "language": (Language, Given(spec("int32", 6), spec("int32", 6), vocabulary_size=9), (6, 9), np.array([[8], [9]])),
}


@pytest.mark.parametrize("name", FITTING)
def test_a_task_knows_its_outputs_and_names_a_wrong_target(name):
    task, source, shape, targets = FITTING[name]
    task = task()
    task.prepare(source)
    assert task.output_shape(source) == shape
    assert task.facts(source) == {"num_outputs": shape[-1], "output_shape": shape}
    row, why = task.fault(targets, source)
    assert row == len(targets) - 1 and why
    assert task.fault(targets[:-1], source) is None


@pytest.mark.parametrize(
    ("task", "source", "message"),
    [
        (
            Classification,
            Given(IMAGE, spec("float32", 3), num_classes=3),
            r"of a class, and given gives float32 \(3,\)",
        ),
        (
            Classification,
            Given(IMAGE, spec("int32")),
            "task=classification needs num_classes, which the data",
        ),
        (Binary, Given(IMAGE, spec("float32", 2)), r"one number, 0 or 1, and given gives float32 \(2,\)"),
        (Multilabel, Given(IMAGE, spec("int32")), r"0 and 1, one for each label, and given gives int32 \(\)"),
        (Regression, Given(IMAGE, spec("int32")), r"as floats, and given gives int32 \(\)"),
        (Segmentation, Given(IMAGE, spec("uint8"), num_classes=3), r"whole numbers, and given gives uint8 \(\)"),
        (Segmentation, Given(IMAGE, spec("uint8", 4, 4), num_classes=3), r"images of \(8, 8\) and masks of \(4, 4\)"),
        (
            Language,
            Given(spec("int32", 6), spec("int32", 6)),
            "language needs vocabulary_size, which the data",
        ),
    ],
)
def test_a_task_refuses_targets_of_another_kind(task, source, message):
    with pytest.raises(ConfigError, match=message):
        task().prepare(source)


def test_predictions_in_the_terms_of_the_targets():
    logits = np.array([[0.1, 0.9], [0.7, -0.2]], np.float32)
    assert Classification().decode(logits).tolist() == [1, 0]
    assert Multilabel().decode(logits).tolist() == [[1, 1], [1, 0]]
    assert Regression().decode(logits) is logits


def test_best_metrics_and_their_direction():
    named = {task.best: task.sign(f"val_{task.best}") for task in (Classification(), Regression(), Language())}
    assert named == {"accuracy": 1, "mean_absolute_error": -1, "perplexity": -1}
    assert Custom(keras.losses.MeanSquaredError(), {"r": keras.metrics.R2Score()}, best="r").sign("val_r") == 1
    assert Language().results({"loss": np.log(7.0), "accuracy": 0.5})["perplexity"] == pytest.approx(7.0)


def test_losses_and_metrics_by_output():
    two = {"a": keras.losses.MeanSquaredError(), "b": keras.losses.MeanSquaredError()}
    task = Custom(two, {"b": {"mae": keras.metrics.MeanAbsoluteError()}}, loss_weights={"b": 3.0})
    assert task.metric_names == ["loss", "a_loss", "b_loss", "b_mae"]
    inputs = keras.Input((2,))
    model = keras.Model(inputs, {name: keras.layers.Dense(1)(inputs) for name in two})
    source = Given(spec("float32", 2), {name: spec("float32", 1) for name in two})
    task.prepare(source)
    task.check_outputs(model.output, "model._target_=m", source)
    task.compile(model, keras.optimizers.SGD())
    x, y = np.ones((4, 2), np.float32), {name: np.ones((4, 1), np.float32) for name in two}
    metrics = model.evaluate(x, y, verbose=0, return_dict=True)
    assert set(metrics) == set(task.metric_names)
    assert metrics["loss"] == pytest.approx(metrics["a_loss"] + 3 * metrics["b_loss"], rel=1e-5)
    with pytest.raises(ConfigError, match=r"outputs a, b, and model._target_=m gives no outputs by name"):
        task.check_outputs(keras.layers.Dense(1)(inputs), "model._target_=m", source)
    with pytest.raises(ConfigError, match=r"task\.loss_weights names c and task.loss has a, b"):
        Custom(two, loss_weights={"c": 1.0})
