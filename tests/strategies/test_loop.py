"""The loop is Keras's fit, step by step and bit by bit, with fewer calls of the graph."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvtrain import models
from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.core.step_plan import Share, StepPlan
from hvtrain.errors import ConfigError
from hvtrain.plan.forecast import forecast
from hvtrain.step.step_timing import Split, StepMarks, StepTimes
from hvtrain.strategies import loop
from hvtrain.strategies.base import Strategy
from hvtrain.training.callbacks import timeline

X, Y = np.random.default_rng(1).normal(size=(96, 6)).astype("float32"), np.arange(96) % 3
PLAN = StepPlan((Share(4, 12),), 36, 0.1, 1.0)


class Notes(keras.callbacks.Callback):
    """What it was told, and of what."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.told, self.logs, self.stop_after = [], [], stop_after

    def on_epoch_begin(self, epoch, logs=None):
        self.told.append(("epoch", epoch))

    def on_train_batch_begin(self, batch, logs=None):
        self.told.append(("begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.told.append(("end", batch))
        self.model.stop_training = batch == self.stop_after

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs))


class Uncompiled(keras.optimizers.SGD):
    """With an operation that XLA cannot compile, as a reduction is."""

    steps = 0

    def apply(self, grads, trainable_variables=None):
        def count(gradient):
            self.steps += 1
            return gradient

        first = tf.ensure_shape(tf.py_function(count, [grads[0]], grads[0].dtype), grads[0].shape)
        super().apply([first, *grads[1:]], trainable_variables)


class UncompiledLayer(keras.layers.Layer):
    """The same in the forward pass."""

    def call(self, x):
        return tf.ensure_shape(tf.py_function(lambda values: values, [x], x.dtype), x.shape)


def made():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(5, "relu"), keras.layers.Dense(3)]
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], jit_compile=False)
    return model


def batches(step):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).repeat().skip(step)


def single():
    strategy = Strategy()
    strategy.marks = StepMarks()
    return strategy


def trained(calls, callbacks=(), start_step=0):
    model = made()
    strategy = single()
    strategy.fit(model, batches, PLAN, start_step, list(callbacks), calls)
    return model, strategy.marks


def test_it_is_what_fit_does():
    """Weights with their moving average at the end, metrics of each epoch, and the number of steps, bit by bit."""
    expected = made()
    losses = expected.fit(
        batches(0), steps_per_epoch=12, epochs=3, shuffle=False, verbose=0
    ).history["loss"]
    for size in (1, 5, 50):
        notes = Notes()
        model, marks = trained(loop.CallSteps(size, [], lambda value: value), [notes])
        assert [
            np.array_equal(a, b) for a, b in zip(model.get_weights(), expected.get_weights())
        ] == [True] * 4
        assert [logs["loss"] for logs in notes.logs] == losses
        assert int(model.optimizer.iterations) == 36
        assert marks() == (36, 0, 0, 36)


@pytest.mark.parametrize("loss_scale", [False, True])
def test_xla_compiles_forward_and_backward_and_changes_no_result(loss_scale):
    """The optimizer, which may reduce, is no part of what XLA compiles."""
    weights = {}
    for by_xla in (False, True):
        model = made()
        optimizer = Uncompiled(0.1)
        model.compile(
            keras.optimizers.LossScaleOptimizer(optimizer) if loss_scale else optimizer,
            model.loss,
            metrics=["accuracy"],
            jit_compile=by_xla,
        )
        logs = Notes()
        single().fit(model, batches, PLAN, 0, [logs], loop.CallSteps(5, [], lambda value: value))
        assert optimizer.steps == 36
        weights[by_xla] = [
            *model.get_weights(),
            *([row[name] for name in ("loss", "accuracy")] for row in logs.logs),
        ]
    for plain, compiled in zip(weights[False], weights[True], strict=True):
        np.testing.assert_allclose(compiled, plain, atol=1e-6)


def test_what_xla_cannot_compile_is_told():
    """Were nothing compiled, it would train."""
    model = made()
    model.add(UncompiledLayer())
    model.compile("sgd", model.loss, jit_compile=True)
    with pytest.raises(tf.errors.OpError, match=r"(?s)EagerPyFunc.*XLA"):
        single().fit(model, batches, PLAN, 0, [], loop.CallSteps(5, [], lambda value: value))


def test_a_layer_that_says_so_is_refused_before_the_run(monkeypatch):
    """As SyncBatchNormalization does, whose forward pass reduces."""

    def network(image_shape, num_classes, **_):
        kept_out = UncompiledLayer(name="mine")
        kept_out.supports_jit = False
        return keras.Sequential(
            [
                keras.Input(image_shape),
                kept_out,
                keras.layers.Flatten(),
                keras.layers.Dense(num_classes),
            ]
        )

    monkeypatch.setattr(models, "mlp", network)
    config = from_dict(compose(["model=mlp", "train.jit_compile=true"]))
    with pytest.raises(
        ConfigError, match=r"train.jit_compile=true and the layer mine, which XLA cannot compile"
    ):
        forecast(config, 1, 1, None, None)


def test_callbacks_are_told_where_a_call_begins_and_ends():
    """5 steps to a call, something due after every 8 steps of the run, epochs of 12; from step 10 on."""
    notes = Notes()
    trained(loop.CallSteps(5, [8], lambda value: value), [notes], start_step=10)
    first = [("epoch", 0), ("begin", 10), ("end", 11)]
    second = [
        ("epoch", 1),
        ("begin", 0),
        ("end", 3),
        ("begin", 4),
        ("end", 8),
        ("begin", 9),
        ("end", 11),
    ]
    assert notes.told[:10] == first + second


def test_a_call_ends_with_a_change_of_weights_if_it_has_one():
    """Ranks stop at the end of a call, and differ in what they accumulate between two changes."""

    def ends(steps, accumulate):
        calls, step = loop.CallSteps(steps, [6], lambda value: value, accumulate), 0
        while step < 12:
            step += calls.next(step, 12)
            yield step

    assert list(ends(7, 4)) == [4, 6, 12]
    assert list(ends(3, 4)) == [3, 4, 6, 8, 11, 12]
    assert list(ends(7, 1)) == [6, 12]


def test_a_callback_stops_it():
    notes = Notes(stop_after=4)
    model, _ = trained(loop.CallSteps(5, [], lambda value: value), [notes])
    assert int(model.optimizer.iterations) == 5
    assert len(notes.logs) == 1, "the epoch that was begun is ended, for what must be saved"


def test_the_chief_says_how_many_steps_a_call_takes():
    asked = []
    calls = loop.CallSteps(None, [], lambda value: asked.append(value) or 7)
    for _ in range(loop.FIRST_TIMED_STEP + loop.TIMED_STEPS):
        assert calls.next(0, 100) == 1
        calls.record(0.01)
    assert asked == [20] and calls.next(0, 100) == 7
    calls.record(0.01)
    assert len(asked) == 1


def test_marks_tell_data_from_compute():
    """A data set that sleeps is seen as such; the step's own time is the rest."""

    def slow(image, label):
        tf.numpy_function(lambda: __import__("time").sleep(0.02), [], [])
        return image, label

    options = tf.data.Options()
    options.autotune.enabled = (
        False  # Its tuner may add a prefetch, and so begin a batch while a step computes.
    )
    strategy = single()
    data = batches(0).map(slow).with_options(options)
    strategy.fit(made(), lambda _: data, PLAN, 16, [], loop.CallSteps(4, [], lambda value: value))
    times = strategy.marks.times().mean()
    assert strategy.marks.times().steps == 20
    assert times.data >= 0.02 > times.compute > 0 and times.communication == 0


def test_split_names_the_rank_that_others_wait_for():
    ranks = [(StepTimes(1, 0.001, 0.010, 0.009), "s1"), (StepTimes(1, 0.001, 0.018, 0.001), "s2")]
    split = Split.of(ranks, steps_in_a_row=200, sees_exchange=True)
    assert split.efficiency == 0.75 and (split.slowest_rank, split.slowest_host) == (1, "s2")
    assert split.in_words(2) == (
        "a step: 20.00 ms = data 1.00, compute 14.00, communication 5.00 (efficiency 75%); slowest: rank 1 on s2, "
        "19.00 ms without communication"
    )
    assert Split.of(ranks, steps_in_a_row=3, sees_exchange=True).in_words(2) == (
        f"{split.in_words(2)}; too few steps in a row to judge by (3): the first waits for slower ranks"
    )


def test_a_timeline_in_words(tmp_path):
    """Two gradients in one message: their spans are one; a file that was not closed is read all the same."""
    spans = [("NEGOTIATE_ALLREDUCE", 0, 400), ("ALLREDUCE", 400, 900), ("GLOO_ALLREDUCE", 500, 800)]
    events = []
    for pid in (1, 2):
        for name, begin, end in spans:
            events.append(f'{{"ph": "B", "name": "{name}", "ts": {begin}, "pid": {pid}}}')
            if name != "ALLREDUCE":
                events.append(f'{{"ph": "E", "ts": {end}, "pid": {pid}}}')
        events.append(f'{{"ph": "E", "ts": 900, "pid": {pid}}}')
    (tmp_path / "horovod.json").write_text("[\n" + ",\n".join(events) + ",\n")
    lines = timeline.time_by_operation(tmp_path, 2)
    assert [line.split(None, 2) for line in lines[1:]] == [
        ["0.200", "ms", "waiting until all ranks have their gradients"],
        ["0.150", "ms", "transfer and sum"],
    ]
