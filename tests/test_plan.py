"""Arithmetic of a run, in numbers."""

import pytest

from hvtrain.config import TrainConfig
from hvtrain.errors import ConfigError
from hvtrain.plan import make_plan


def plan(shards, **train):
    return make_plan(TrainConfig(**train), 0.1, shards, "toys")


def test_goyal_et_al():
    """ImageNet over 256 GPUs: batch 8,192, rate 0.1 x 256; the paper counts 0.1 for 256 images on 8 GPUs."""
    made = plan([1_281_167 // 256] * 256, batch_size=32, epochs=90)
    assert made.global_batch == 8192
    assert made.peak_learning_rate == pytest.approx(25.6)
    assert made.num_steps == 90 * (5004 // 32)


def test_steps_follow_the_smallest_shard():
    assert plan([65, 64, 63], batch_size=32).steps_per_epoch == 1


@pytest.mark.parametrize(("scale", "peak"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_learning_rate_scales(scale, peak):
    assert plan([100] * 4, learning_rate_scale=scale).peak_learning_rate == pytest.approx(peak)


def test_steps_count_instead_of_epochs():
    assert plan([100] * 4, steps=17).num_steps == 17
    assert plan([100] * 4, steps=17, epochs=3).num_epochs == 6
    assert plan([100] * 4, steps=20_000, divide_steps_by_size=True).num_steps == 5_000
    assert plan([100] * 4, steps=2, divide_steps_by_size=True).num_steps == 1


def test_more_ranks_than_examples():
    with pytest.raises(ConfigError, match=r"4 ranks are more than the 3 training examples of toys .* use at most 3"):
        plan([1, 1, 1, 0], batch_size=1)


def test_batch_larger_than_the_shard():
    with pytest.raises(ConfigError, match=r"batch_size=32 exceeds the 10 examples of a rank \(21 of toys over 2"):
        plan([11, 10])


@pytest.mark.parametrize("start", [0, 1, 9, 10, 11, 25, 34, 35])
def test_stretches_cover_each_step_once(start):
    made = plan([320, 320], steps=35)
    assert made.steps_per_epoch == 10
    covered = []
    for stretch in made.stretches(start):
        for epoch in range(stretch.initial_epoch, stretch.epochs):
            first = stretch.first_step + (epoch - stretch.initial_epoch) * stretch.steps_per_epoch
            covered += [(epoch, step) for step in range(first, first + stretch.steps_per_epoch)]
    assert covered == [(step // 10, step) for step in range(start, 35)]
