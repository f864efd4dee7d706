"""The learning rate as a function of the step, in numbers, on Python floats and in Keras."""

import math

import pytest

from hvtrain.core.schedule import Constant, Cosine, Polynomial, Schedule, Step
from hvtrain.errors import ConfigError

RUN = {"base": 0.1, "peak": 0.8, "steps_per_epoch": 10, "num_steps": 110, "warmup_epochs": 1.0}
SCHEDULES = [
    Constant(**RUN),
    Step(**RUN, at_epochs=[3, 6], factor=0.1),
    Cosine(**RUN, final_fraction=0.05),
    Polynomial(**RUN, power=2.0),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
def test_warmup_climbs_in_a_straight_line_from_base_to_peak(schedule: Schedule):
    assert schedule(0) == pytest.approx(0.1)
    assert schedule(5) == pytest.approx(0.45)
    assert schedule(10) == pytest.approx(0.8)


def test_where_they_end():
    constant, step, cosine, polynomial = SCHEDULES
    assert constant(109) == pytest.approx(0.8)
    assert [step(29), step(30), step(60), step(200)] == pytest.approx([0.8, 0.08, 0.008, 0.008])
    assert cosine(60) == pytest.approx(0.8 * (0.05 + 0.95 * 0.5))
    assert cosine(110) == cosine(500) == pytest.approx(0.04)
    assert polynomial(60) == pytest.approx(0.2)
    assert polynomial(110) == pytest.approx(0.0)


def test_without_warmup_the_first_rate_is_the_peak():
    assert Cosine(base=0.1, peak=0.8, steps_per_epoch=10, num_steps=100)(0) == pytest.approx(0.8)


def test_warmup_begins_at_a_rate_of_its_own_below_the_peak():
    assert [Constant(**RUN, warmup_from=0.2)(step) for step in (0, 5, 10)] == pytest.approx(
        [0.2, 0.5, 0.8]
    )
    assert [Constant(**RUN, warmup_from=3.0)(step) for step in (0, 5, 10)] == pytest.approx(
        [0.8, 0.8, 0.8]
    )
    with pytest.raises(
        ConfigError,
        match=r"^schedule\.warmup_from=-0.1 is not a learning rate; it must be at least 0",
    ):
        Constant(**RUN, warmup_from=-0.1)


@pytest.mark.parametrize("epochs", [-1, math.inf, math.nan])
def test_impossible_warmup(epochs):
    with pytest.raises(ConfigError, match=r"schedule\.warmup_epochs"):
        Constant(**{**RUN, "warmup_epochs": epochs})


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
def test_the_graph_computes_the_same(schedule: Schedule):
    import keras
    import tensorflow as tf

    from hvtrain.training.setup import LearningRate

    rate = LearningRate(schedule)
    optimizer = keras.optimizers.SGD(rate)
    rate.follow(optimizer)
    in_graph = tf.function(lambda: optimizer.learning_rate)
    for step in (0, 1, 9, 10, 11, 30, 60, 109, 110, 300):
        optimizer.iterations.assign(step)
        assert float(in_graph()) == pytest.approx(schedule(step), rel=1e-5, abs=1e-8)
    # What a callback such as ReduceLROnPlateau does: the rate of now, from which the schedule goes on.
    optimizer.iterations.assign(30)
    optimizer.learning_rate = schedule(30) / 2
    for step in (30, 60, 109):
        optimizer.iterations.assign(step)
        assert float(in_graph()) == pytest.approx(schedule(step) / 2, rel=1e-5, abs=1e-8)
