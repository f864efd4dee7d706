"""Which value of a step is the first that is not finite, in networks of many kinds."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from hvtrain.errors import TrainingError
from hvtrain.keras.gradients import NOT_FINITE
from hvtrain.step.step_timing import StepTimes
from hvtrain.training.callbacks.epochs import Throughput
from hvtrain.training.callbacks.guard import Proof, explain_errors
from hvtrain.training.callbacks.repeated_step import (
    BACKWARD,
    BATCH,
    FORWARD,
    LOSS,
    WEIGHTS,
    first_not_finite,
)
from hvtrain.training.callbacks.run_context import PARTS, Goodput

BATCH_OF_TWO = tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([[0.5], [0.1]])


class Own(keras.Model):
    """A subclassed model with a layer of its own inside."""

    def __init__(self, function):
        super().__init__()
        self.inner, self.outer, self.function = (
            layers.Dense(2, name="inner"),
            layers.Dense(1, name="outer"),
            function,
        )

    def call(self, inputs):
        return self.outer(self.function(self.inner(inputs)))


@tf.custom_gradient
def blocks(values):
    """The same values, without a gradient that is a number."""
    return tf.identity(values), lambda upstream: upstream * np.float32("nan")


class Blocks(layers.Layer):
    def call(self, inputs):
        return blocks(inputs)


def functional(*inner):
    inputs = keras.Input([2])
    values = inputs
    for layer in inner:
        values = layer(values)
    return keras.Model(inputs, layers.Dense(1, name="last")(values))


def nested():
    inputs = keras.Input([2])
    part = keras.Sequential(
        [layers.Dense(2, name="first"), layers.Lambda(lambda x: x / 0.0, name="divides")]
    )
    return keras.Model(inputs, layers.Dense(1)(part(inputs)))


def compiled(model, loss="mse", optimizer="sgd", **options):
    model.compile(optimizer, loss, **options)
    model(BATCH_OF_TWO[0])
    model.optimizer.build(model.trainable_variables)
    return model


def origin(model, batch=BATCH_OF_TWO, **options):
    before = [weight.numpy() for weight in model.trainable_variables]
    origin = first_not_finite(model, batch, **options)
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, model.trainable_variables)), (
        "no weight has changed"
    )
    changed = [item for layer in model._flatten_layers() for item in (layer, model.optimizer)]
    assert not any({"call", "apply", "apply_gradients"} & set(vars(item)) for item in changed), (
        "as before"
    )
    return origin and (origin.phase, origin.description)


def test_finite_steps_have_no_such_value():
    assert origin(compiled(functional(layers.Dense(3)))) is None
    assert origin(compiled(Own(lambda x: x))) is None


@pytest.mark.parametrize(
    ("model", "description"),
    [
        (lambda: functional(lambda x: keras.ops.log(x - x)), "the output of log (Log)"),
        (nested, "the output of divides (Lambda)"),
        (lambda: functional(layers.Reshape([2, 1]), layers.LSTM(2), layers.Lambda(lambda x: x / 0.0, name="z")),
         "the output of z (Lambda)"),
        (lambda: Own(lambda x: x / 0.0), "the output of outer (Dense)"),
    ],
)  # fmt: skip
def test_the_first_output(model, description):
    assert origin(compiled(model())) == (FORWARD, description)


def test_the_batch_and_the_weights_come_before_the_layers():
    model, (inputs, targets) = compiled(functional(layers.Dense(2, name="a"))), BATCH_OF_TWO
    spoiled = tf.constant([[1.0, 2.0], [float("inf"), 0.0]])
    assert origin(model, (spoiled, targets)) == (
        BATCH,
        "the inputs of the batch, in example 1 of 2",
    )
    assert origin(model, (inputs, targets / 0.0)) == (
        BATCH,
        "the targets of the batch, in example 0 of 2",
    )
    model.get_layer("a").bias.assign([0.0, float("nan")])
    before = first_not_finite(model, BATCH_OF_TWO)
    assert (before.phase, before.description) == (WEIGHTS, "the weights before the step, in a/bias")


def test_a_loss_after_finite_outputs():
    model = compiled(functional(), loss=lambda y, outputs: keras.ops.mean(outputs) / 0.0)
    assert origin(model) == (LOSS, "the loss itself, after finite outputs of all layers")


def test_the_layer_whose_gradient_is_the_first_on_the_way_back():
    after = [layers.Dense(2, name="after"), layers.Dense(2, name="later")]
    model = compiled(functional(layers.Dense(2, name="before"), Blocks(name="blocks"), *after))
    assert origin(model) == (BACKWARD, "the gradient that blocks (Blocks) passes back")
    # No layer has it: it lies between two of them.
    inside = "the gradient that inner (Dense) receives from what follows it"
    assert origin(compiled(Own(blocks))) == (BACKWARD, inside)


def test_a_gradient_that_reaches_weights_alone():
    class Scaled(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(), initializer="zeros", name="scale")

        def call(self, inputs):
            return inputs + keras.ops.sqrt(self.scale)

    model = compiled(functional(Scaled(name="scaled")))
    assert origin(model) == (BACKWARD, "the gradient of scaled/scale")


def test_embeddings_and_masks():
    model = keras.Sequential(
        [
            keras.Input([2], dtype="int32"),
            layers.Embedding(9, 4, mask_zero=True),
            layers.LSTM(3),
            layers.Dense(1),
        ]
    )
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    batch = tf.constant([[1, 2], [3, 0]]), BATCH_OF_TWO[1]
    assert origin(model, batch) is None
    model.compile(
        model.optimizer, lambda y, outputs: keras.ops.mean(keras.ops.sqrt(outputs - outputs))
    )
    assert origin(model, batch)[0] == BACKWARD


def test_the_weight_of_a_batch_is_no_part_of_it():
    model = compiled(functional(layers.Dense(2)))
    step = model.train_step
    model.train_step = lambda data: step(data[0])
    spoiled = BATCH_OF_TWO[0] / 0.0, BATCH_OF_TWO[1]
    assert origin(model, (spoiled, tf.constant(1.0)), has_batch_weight=True)[0] == BATCH
    assert origin(model, (BATCH_OF_TWO, tf.constant(1.0)), has_batch_weight=True) is None


def test_a_mean_that_overflows_though_each_gradient_is_finite_is_explained():
    """As with strategy.compression=fp16 and a gradient of 1e5."""
    strategy = SimpleNamespace(
        marks=lambda: SimpleNamespace(arrived=2), sync_every=1, is_plain=True
    )
    context = SimpleNamespace(
        run=SimpleNamespace(strategy=strategy),
        model=SimpleNamespace(optimizer=keras.optimizers.SGD()),
        position=SimpleNamespace(start_step=3),
    )
    error = tf.errors.InvalidArgumentError(None, None, NOT_FINITE)
    message = r"gradient of step 3 is not finite in the mean over the ranks"
    with pytest.raises(TrainingError, match=message), explain_errors(context):
        raise error


@pytest.mark.parametrize(
    ("by_loss", "saw_begin", "counts"),
    [(384, False, [384]), (2.0**24, True, [2**24 + 7]), (2.0**24, False, [])],
    ids=["exact", "inexact", "inexact after a resume"],
)
def test_the_proof_counts_more_examples_than_float32_can(by_loss, saw_begin, counts):
    """A rank may see more than 16,777,216 rows of a table in an epoch."""
    marks = SimpleNamespace(num_examples=0)
    comm = SimpleNamespace(sum_arrays=lambda arrays: arrays)
    report = SimpleNamespace(examples_each_epoch=[])
    run = SimpleNamespace(
        strategy=SimpleNamespace(marks=marks, comm=comm),
        plan=SimpleNamespace(position=lambda step: (1, 0)),
        topology=SimpleNamespace(is_chief=True),
        config=SimpleNamespace(data=SimpleNamespace(one_batch=False)),
    )
    position = SimpleNamespace(step=5, in_epoch=0 if saw_begin else 3)
    proof = Proof(SimpleNamespace(run=run, position=position, weights=None, report=report))
    model = compiled(functional(layers.Dense(2)))
    proof.set_model(model)
    proof.on_epoch_begin(0, None)
    marks.num_examples = 2**24 + 7
    next(metric for metric in model.metrics if metric.name == "loss").count.assign(by_loss)
    proof.on_epoch_end(0, {})
    assert report.examples_each_epoch == counts


def test_goodput_knows_the_waits_of_an_epoch_that_does_not_end(tmp_path):
    """A process that is killed hourly may never see the end of an epoch of ImageNet."""
    marks = SimpleNamespace(timed=True, times=lambda: times)
    run = SimpleNamespace(
        strategy=SimpleNamespace(marks=marks, comm=None),
        plan=SimpleNamespace(examples_per_epoch=90, steps_per_epoch=9, num_steps=9),
        topology=SimpleNamespace(is_chief=False),
        folder=tmp_path,
    )
    position = SimpleNamespace(start_step=0, step=0, is_last=False)
    report = SimpleNamespace(goodput=Goodput(0.0, 0.0, dict.fromkeys(PARTS, 0.0)))
    context = SimpleNamespace(run=run, position=position, weights=None, report=report)
    throughput = Throughput(context)
    times = StepTimes(0, 0.0, 0.0, 0.0)
    throughput.on_epoch_begin(0, None)
    for step in (1, 2):
        throughput.on_train_batch_begin(step - 1, None)
        # The clock of the console's lines, whose interval is over.
        throughput._noted_at = 0.0
        position.step = step
        times = StepTimes(step, 3.0 * step, 1.0, 0.0)
        throughput.on_train_batch_end(step - 1, {})
    assert report.goodput.seconds["data"] == 3.0, (
        "of the second step, since the first one is the start's"
    )
