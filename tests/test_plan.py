"""Arithmetic of a run, in numbers."""

import itertools

import pytest

from hvtrain.config import TrainConfig
from hvtrain.errors import ConfigError
from hvtrain.plan import Share, make_plan, size_of_each_rank


def plan(shards, batch_sizes=None, uneven="trim", **train):
    return make_plan(TrainConfig(**train), 0.1, shards, "toys", batch_sizes, uneven)


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


@pytest.mark.parametrize("examples", range(23, 93))
def test_a_padded_share_deals_each_example_once_and_leaves_no_step_empty(examples):
    steps = max(3, -(-examples // 4))
    if steps > examples:
        pytest.skip("fewer examples than steps are refused")
    share = Share(4, steps, examples)
    begins = [share.begin(step) for step in range(steps + 1)]
    sizes = [after - before for before, after in itertools.pairwise(begins)]
    assert (begins[0], begins[-1]) == (0, examples)
    assert all(1 <= size <= 4 for size in sizes)
    assert sorted(sizes, reverse=True) == sizes, "full batches first"


def test_trimmed_epochs_leave_out_what_fills_no_batch():
    made = plan([719, 718], batch_size=32)
    assert (made.steps_per_epoch, made.examples_per_epoch, made.num_examples) == (22, 1408, 1437)
    assert made.is_even


def test_padded_epochs_use_every_example():
    made = plan([719, 718], batch_size=32, uneven="pad")
    assert (made.steps_per_epoch, made.examples_per_epoch, made.num_examples) == (23, 1437, 1437)
    assert not made.is_even
    assert [made.weight(rank, 3) for rank in (0, 1)] == [1.0, 1.0]
    assert [made.weight(rank, 22) for rank in (0, 1)] == [2 * 15 / 29, 2 * 14 / 29]


def test_uneven_shards_can_be_refused():
    assert plan([64, 64], uneven="error").is_even
    with pytest.raises(ConfigError, match=r"uneven=error and 29 of 1437 training examples of toys fill no batch"):
        plan([719, 718], uneven="error")
    with pytest.raises(ConfigError, match=r"a rank holds 2 of 1002 .* an epoch takes 32 steps; spread the files"):
        plan([1000, 2], batch_sizes=[32, 1], uneven="pad")


def test_unlike_ranks_weigh_by_their_examples():
    made = plan([900, 300], batch_sizes=[48, 16], batch_size=[48, 16])
    assert (made.global_batch, made.steps_per_epoch) == (64, 18)
    assert [made.weight(rank, 0) for rank in (0, 1)] == [1.5, 0.5]
    assert not made.is_even


def test_batch_sizes_by_rank_and_by_host():
    hosts = ["a", "a", "b"]
    assert size_of_each_rank(8, hosts) == [8, 8, 8]
    assert size_of_each_rank([8, 4], hosts) == [8, 8, 4]
    assert size_of_each_rank([8, 4, 2], hosts) == [8, 4, 2]
    with pytest.raises(ConfigError, match=r"\[8, 4, 2, 1\] has 4 numbers for 3 ranks on 2 hosts; give one number"):
        size_of_each_rank([8, 4, 2, 1], hosts)
