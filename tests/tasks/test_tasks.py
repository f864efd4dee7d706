"""What a task takes and refuses; several ranks' metrics are in tests/training."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvtrain import compose
from hvtrain.config.instantiate import build
from hvtrain.data.source import Source
from hvtrain.data.sources.built_in import digits
from hvtrain.errors import ConfigError
from hvtrain.step.joint_loss import ExactLoss, joint_loss, scale_gradient
from hvtrain.tasks import (
    Binary,
    Classification,
    Custom,
    Language,
    Multilabel,
    Regression,
    Segmentation,
    Task,
)
from hvtrain.tasks.examples import draw_classes
from hvtrain.training.setup import check_model
from keras_metrics import OF_PROBABILITIES, REFUSED, TAKEN, metric_settings


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
        return self.factor * keras.losses.sparse_categorical_crossentropy(
            y_true, y_pred, from_logits=True
        )


def test_each_metric_of_keras_is_taken_or_refused_in_one_line():
    """tests/tasks/test_tasks_on_ranks.py shows that those that are taken are exact over ranks."""
    sources = {
        "multilabel": Given(spec("float32", 5), spec("float32", 3)),
        "classification": Given(IMAGE, spec("int32"), num_classes=3),
    }
    for kind, source in sources.items():
        task = build(compose([f"task={kind}", *metric_settings(kind)]), "task", Task)
        task.prepare(source)
        assert {type(metric).__name__ for metric in task.metrics.values()} >= TAKEN[kind].keys()

    refusals = [(name, [], message) for name, message in REFUSED.items()]
    for name, argument in OF_PROBABILITIES.items():
        message = rf"task.metrics.own \({name}\) needs probabilities"
        needed = [f"+task.metrics.own.{argument}=0.5"] if argument else []
        refusals.append((name, needed, message))
    for name, arguments, message in refusals:
        own = ["task=multilabel", f"+task.metrics.own._target_=keras.metrics.{name}", *arguments]
        with pytest.raises(ConfigError, match=message) as refused:
            build(compose(own), "task", Task).prepare(sources["multilabel"])
        assert "\n" not in str(refused.value)

    classes = {name for name, item in vars(keras.metrics).items() if isinstance(item, type)}
    assert classes == set().union(REFUSED, OF_PROBABILITIES, *TAKEN.values())


def test_a_score_of_one_output_needs_a_threshold():
    """Without one, Keras takes the largest of the outputs for yes, which is each example's only one."""
    source = Given(spec("float32", 5), spec("float32"))
    with pytest.raises(ConfigError, match=r"task.metrics.f1 takes the 1 largest of 1 output,"):
        Binary(metrics={"f1": keras.metrics.F1Score("macro")}).prepare(source)
    Binary(metrics={"f1": keras.metrics.F1Score("macro", 0.5)}).prepare(source)


def test_metrics_of_probabilities_take_a_tasks_logits():
    options = {
        "AUC": {},
        "Recall": {},
        "TruePositives": {},
        "BinaryIoU": {},
        "BinaryCrossentropy": {},
        "F1Score": {"average": "macro", "threshold": 0.5},
    }
    plain = {name: getattr(keras.metrics, name)(**given) for name, given in options.items()}
    # Three thresholds of probabilities.
    plain["coarse"] = keras.metrics.AUC(thresholds=[0.2, 0.5, 0.8])
    task = Multilabel(metrics=plain)
    task.prepare(Given(spec("float32", 5), spec("float32", 3)))
    targets, logits = draw_classes((3,), 2)
    logits = 3 * logits[..., 0]
    for name, metric in plain.items():
        expected = metric(targets.astype(np.float32), keras.ops.sigmoid(logits))
        actual = task.metrics[name](targets.astype(np.float32), logits)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, err_msg=name)
    with pytest.raises(ConfigError, match=r"task.metrics.a.thresholds=0.7 is a probability"):
        Multilabel(metrics={"a": keras.metrics.Precision(thresholds=0.7)}).prepare(
            Given(spec("float32", 5), spec("float32", 3))
        )


@pytest.mark.parametrize(
    ("name", "direction"), [("val_mse", -1), ("val_price_error", -1), ("score", 1)]
)
def test_the_name_of_a_models_own_metric_tells_its_direction(name, direction):
    assert Custom().sign(name) == direction


def test_the_only_output_gives_its_metrics_no_prefix():
    metrics = {"price": {"error": keras.metrics.MeanAbsoluteError()}}
    task = Custom({"price": keras.losses.MeanSquaredError()}, metrics)
    inputs = keras.Input((5,))
    model = keras.Model(inputs, {"price": keras.layers.Dense(1)(inputs)})
    source = Given(spec("float32", 5), {"price": spec("float32", 1)})
    task.check_outputs(model.output, "model", source)
    task.compile(model, keras.optimizers.SGD(), distribute_loss=lambda loss: loss)
    arrays = np.ones((4, 5)), {"price": np.ones((4, 1))}
    logs = model.evaluate(*arrays, verbose=0, return_dict=True)
    assert set(task.metric_names) == logs.keys() == {"loss", "error"}
    assert isinstance(model._loss_tracker, ExactLoss)


@pytest.mark.parametrize(
    ("loss", "arguments"),
    [(f"{__name__}.Plain", {}), (f"{__name__}.OfLogits", {"from_logits": True})],
    ids=["without from_logits", "with from_logits"],
)
def test_a_loss_of_ones_own_gets_the_arguments_that_it_declares(loss, arguments):
    task = build(compose(["task=segmentation", f"task.loss._target_={loss}"]), "task", Task)
    assert task.loss.arguments == arguments
    with pytest.raises(ConfigError, match="got an unexpected keyword argument 'gama'"):
        build(compose([f"task.loss._target_={loss}", "+task.loss.gama=1"]), "task", Task)


def test_a_model_of_ones_own_gets_no_settings_of_the_model_in_its_place():
    own = ["model=cnn", f"model._target_={__name__}.small"]
    facts = {"image_shape": (8, 8, 1), "num_outputs": 10}
    assert build(compose(own), "model", keras.Model, facts).output_shape == (None, 10)
    for settings, name in (
        ([*own, "model.dropout=0.3"], "dropout"),
        (["model=cnn", "+model.activation=relu"], "activation"),
    ):
        with pytest.raises(ConfigError, match=f"got an unexpected keyword argument '{name}'"):
            build(compose(settings), "model", keras.Model, facts)


class Plain(keras.losses.Loss):
    """A loss of a user, with arguments of Keras's base."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.arguments = arguments

    def call(self, y_true, y_pred):
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)


class OfLogits(Plain):
    def __init__(self, from_logits=False):
        super().__init__()
        self.arguments = {"from_logits": from_logits}


def small(image_shape):
    return keras.Sequential(
        [keras.Input(image_shape), keras.layers.Flatten(), keras.layers.Dense(10)]
    )


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            Largest(),
            "task.metrics.found cannot be exact over ranks: the state of Largest is not a finite sum over examples",
        ),
        (
            keras.metrics.SparseTopKCategoricalAccuracy(k=10),
            "task.metrics.found takes the 10 largest of 10 outputs, whatever they are",
        ),
        (
            keras.metrics.AUC(),
            r"task.metrics.found cannot take targets of shape \(32,\) and outputs of \(32, 10\), as this task",
        ),
        (
            keras.metrics.MeanMetricWrapper(small),
            "task.metrics.found cannot take targets .*: Could not locate function 'small'",
        ),
    ],
    ids=["a maximum", "always right", "another shape", "not to be copied"],
)
def test_a_metric_that_would_be_wrong_is_refused(metric, message):
    with pytest.raises(ConfigError, match=message):
        Classification(metrics={"found": metric}).prepare(digits())


@pytest.mark.parametrize(
    ("loss", "metrics", "message"),
    [
        ("mse", {}, "task.loss is of type str; it must be a keras Loss"),
        (
            None,
            {"step": keras.metrics.AUC()},
            "task.metrics.step is a column of history.csv; rename",
        ),
        (None, {"a": "accuracy"}, "task.metrics.a is of type str; it must be a keras Metric"),
        (None, {"a": None}, "task.metrics.a is null; it must be a keras Metric"),
    ],
)
def test_what_is_no_loss_or_metric_is_refused(loss, metrics, message):
    with pytest.raises(ConfigError, match=message):
        Classification(loss, metrics)


@pytest.mark.parametrize(
    ("task", "loss", "message"),
    [
        (
            "binary",
            "Dice",
            "task.loss is a Dice, which does not take logits, but this task's outputs",
        ),
        ("multilabel", "MeanSquaredError", "MeanSquaredError, which does not take logits"),
        (
            "classification",
            "CategoricalCrossentropy",
            r"task.loss cannot take targets of shape \(32,\) and outputs of \(32, 3\), as this task has them: ",
        ),
    ],
)
def test_a_loss_that_does_not_fit_is_refused_before_the_run(task, loss, message):
    settings = [f"task={task}", f"task.loss._target_=keras.losses.{loss}"]
    with pytest.raises(ConfigError, match=message) as refused:
        build(compose(settings), "task", Task).prepare(FITTING[task][1])
    assert "\n" not in str(refused.value)


def test_losses_that_take_logits_are_taken_as_such():
    for loss in ("BinaryFocalCrossentropy", "Hinge"):
        settings = ["task=binary", f"task.loss._target_=keras.losses.{loss}"]
        build(compose(settings), "task", Task).prepare(FITTING["binary"][1])
    with pytest.raises(ConfigError, match="BinaryCrossentropy, which does not take logits"):
        Binary(keras.losses.BinaryCrossentropy()).prepare(FITTING["binary"][1])


@pytest.mark.parametrize(
    "end",
    [
        keras.layers.Dense(1, "sigmoid"),
        keras.layers.Activation("softmax"),
        keras.layers.Softmax(),
        keras.ops.sigmoid,
        keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1, "sigmoid")]),
    ],
)
def test_a_model_that_ends_with_probabilities_is_refused(end):
    """Every example would be of class 1, since no probability is below 0."""
    inputs = keras.Input((5,))
    model = keras.Model(inputs, end(keras.layers.Dense(1)(inputs)))
    source = Given(spec("float32", 5), spec("int32"))
    message = r"m ends with a (sigmoid|softmax), and task=binary needs logits; leave the \1 out"
    with pytest.raises(ConfigError, match=message):
        check_model(model, "m", source, Binary())
    check_model(model, "m", source, Custom(keras.losses.BinaryCrossentropy()))
    check_model(keras.Model(inputs, keras.layers.Dense(1)(inputs)), "m", source, Binary())


class Subclassed(keras.Model):
    """A model whose call() ends with a function."""

    def __init__(self, end):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.end = end

    def call(self, inputs):
        return self.end(self.dense(keras.ops.sigmoid(inputs)))


def test_a_subclassed_model_that_ends_with_probabilities_is_refused():
    source = Given(spec("float32", 5), spec("int32"))
    for end in (keras.ops.sigmoid, keras.layers.Dense(1, "sigmoid"), keras.layers.Softmax()):
        with pytest.raises(ConfigError, match=r"m ends with a (sigmoid|softmax), and task=binary"):
            check_model(Subclassed(end), "m", source, Binary())
    check_model(Subclassed(keras.layers.Dense(1)), "m", source, Binary())


class Both(keras.layers.Layer):
    """Gives probabilities and logits."""

    activation = keras.activations.sigmoid

    def call(self, inputs):
        return keras.ops.sigmoid(inputs), 2.0 * inputs


def test_the_output_that_a_model_uses_decides():
    source = Given(spec("float32", 1), spec("int32"))
    inputs = keras.Input((1,))
    probabilities, logits = Both()(inputs)
    check_model(keras.Model(inputs, logits), "m", source, Binary())
    with pytest.raises(ConfigError, match="m ends with a sigmoid"):
        check_model(keras.Model(inputs, probabilities), "m", source, Binary())


@pytest.mark.parametrize(
    "loss", [keras.losses.SparseCategoricalCrossentropy(from_logits=True), Own(2.0)]
)
def test_a_batch_weight_changes_the_gradient_alone(loss):
    logits, targets = tf.Variable(np.eye(3, 4, dtype=np.float32)), np.array([0, 1, 3])
    joint = joint_loss(loss, lambda number: number, lambda: 1)
    with tf.GradientTape(persistent=True) as tape:
        plain, value = (
            loss(targets, logits),
            scale_gradient(joint(targets, logits), tf.constant(1.5)),
        )
    assert float(value) == float(plain)
    np.testing.assert_allclose(
        tape.gradient(value, logits), 1.5 * tape.gradient(plain, logits), rtol=1e-6
    )
    assert type(joint).__name__ == type(loss).__name__, "as a saved model names it"
    assert float(joint(targets, logits)) == float(plain)


def test_models_have_metrics_of_their_own():
    task, models = (
        Classification(),
        [keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)]) for _ in range(2)],
    )
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
    "multilabel": (
        Multilabel,
        Given(spec("float32", 5), spec("float32", 3)),
        (3,),
        np.array([[0, 1, 1], [0.5, 0, 0]]),
    ),
    "regression": (
        Regression,
        Given(spec("float32", 5), spec("float32")),
        (1,),
        np.array([0.0, np.nan]),
    ),
    "several numbers": (
        Regression,
        Given(spec("float32", 5), spec("float32", 2)),
        (2,),
        np.array([[0, 1], [0, np.inf]]),
    ),
    "classification": (
        Classification,
        Given(IMAGE, spec("int32"), num_classes=3),
        (3,),
        np.array([0, 2, 3]),
    ),
    "segmentation": (
        Segmentation,
        Given(IMAGE, spec("uint8", 8, 8), num_classes=3),
        (8, 8, 3),
        np.stack([np.full((8, 8), 255), np.full((8, 8), 3)]),
    ),
    "language": (
        Language,
        Given(spec("int32", 6), spec("int32", 6), vocabulary_size=9),
        (6, 9),
        np.array([[8], [9]]),
    ),
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
            r"of a class .*, and given gives float32 \(3,\)",
        ),
        (
            Classification,
            Given(IMAGE, spec("float32"), num_classes=3),
            r"given gives float32 numbers; choose task=regression or another data set",
        ),
        (
            Classification,
            Given(IMAGE, spec("int32")),
            "task=classification needs num_classes, which the data",
        ),
        (
            Binary,
            Given(IMAGE, spec("float32", 2)),
            r"one number, 0 or 1, and given gives float32 \(2,\)",
        ),
        (
            Multilabel,
            Given(IMAGE, spec("int32")),
            r"0 and 1, one for each label, and given gives int32 numbers",
        ),
        (
            Regression,
            Given(IMAGE, spec("int32")),
            r"as floats, and given gives int32 numbers",
        ),
        (
            Regression,
            Given(IMAGE, spec("int32"), class_names=["cat", "dog"]),
            r"gives one of 2 classes \(cat, dog\);",
        ),
        (
            Segmentation,
            Given(IMAGE, spec("uint8"), num_classes=3),
            r"whole numbers, and given gives uint8 numbers",
        ),
        (
            Segmentation,
            Given(IMAGE, spec("uint8", 4, 4), num_classes=3),
            r"images of \(8, 8\) and masks of \(4, 4\)",
        ),
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
    named = {
        task.best: task.sign(f"val_{task.best}")
        for task in (Classification(), Regression(), Language())
    }
    assert named == {"accuracy": 1, "mean_absolute_error": -1, "perplexity": -1}
    assert (
        Custom(keras.losses.MeanSquaredError(), {"r": keras.metrics.R2Score()}, best="r").sign(
            "val_r"
        )
        == 1
    )
    assert Language().results({"loss": np.log(7.0), "accuracy": 0.5})[
        "perplexity"
    ] == pytest.approx(7.0)


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
    with pytest.raises(
        ConfigError, match=r"outputs a, b, and model._target_=m gives no named outputs"
    ):
        task.check_outputs(keras.layers.Dense(1)(inputs), "model._target_=m", source)
    with pytest.raises(ConfigError, match=r"task\.loss_weights names c and task.loss has a, b"):
        Custom(two, loss_weights={"c": 1.0})
    assert Custom(two["a"], loss_weights={}).loss_weights is None


def test_label_smoothing_is_that_of_keras_and_of_training_alone():
    logits = tf.Variable(np.random.default_rng(0).normal(size=(5, 3)).astype("float32"))
    classes = np.array([0, 2, 1, 1, 0])
    smoothed = Classification(label_smoothing=0.1).soft_loss()
    expected = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)(
        np.eye(3)[classes], logits
    )
    with tf.GradientTape():
        assert float(smoothed(classes, logits)) == pytest.approx(float(expected), rel=1e-6)
        assert smoothed(np.eye(3)[classes], logits) == smoothed(classes, logits)
    plain = float(Classification().loss(classes, logits))
    assert float(smoothed(classes, logits)) == pytest.approx(plain, rel=1e-6)
    assert abs(plain - float(expected)) > 1e-3
    with pytest.raises(
        ConfigError, match=r"^task.label_smoothing=1 is out of range; it must be at least 0 and"
    ):
        Classification(label_smoothing=1)
    with pytest.raises(
        ConfigError,
        match=r"task.label_smoothing mixes classes, but task.loss is MeanSquaredError, which may",
    ):
        Classification(keras.losses.MeanSquaredError(), label_smoothing=0.1).soft_loss()


def test_mean_iou_takes_weights_and_more_pixels_than_int32():
    metric = Segmentation().default_metrics()["mean_iou"](num_classes=2)
    logits = np.array([[[[2.0, 1.0], [2.0, 1.0]]]])  # One image of two pixels, both of class 0.
    metric.update_state(np.array([[[0, 1]]]), logits, sample_weight=np.array([[[0.5, 0.25]]]))
    # Class 0: 0.5 of 0.75; class 1: 0 of 0.25.
    assert float(metric.result()) == pytest.approx(1 / 3)
    for _ in range(40):
        metric.total_cm.assign_add(metric.total_cm)
    assert float(metric.result()) == pytest.approx(1 / 3)
