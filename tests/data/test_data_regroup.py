"""Other ranks than those that a plan was made for read, step by step, the very batches of those."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from hvtrain.config.make_plan import make_plan
from hvtrain.config.schema import TrainConfig
from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology, reduced
from hvtrain.training.run import training_batches
from launching import ROOT
from tiers import mostly_nightly
from tiny_data import KINDS

sys.path.insert(0, str(ROOT / "tests/support/own"))
import pipelines

SEED = 5


def plan_for(source, batch_sizes, uneven="trim") -> StepPlan:
    shards = source.shard_sizes("train", len(batch_sizes), reduced(batch_sizes))
    return make_plan(TrainConfig(), 0.1, shards, "toys", batch_sizes, uneven)


def joint(source, plan, start_step, num_steps=9) -> list[tuple[np.ndarray, np.ndarray]]:
    """The batches of all ranks of a plan, one rank's behind the other's, by step."""
    weights = () if plan.is_resized else plan.weights
    places = [Topology(rank, plan.size, weights=weights) for rank in range(plan.size)]
    streams = [training_batches(source, plan, place, SEED, start_step) for place in places]
    steps = zip(*(stream.take(num_steps).as_numpy_iterator() for stream in streams))
    return [tuple(np.concatenate(parts) for parts in zip(*batches)) for batches in steps]


def same(ours, theirs) -> bool:
    return all(
        np.array_equal(a, b)
        for mine, others in zip(ours, theirs, strict=True)
        for a, b in zip(mine, others)
    )


@pytest.mark.parametrize(
    ("batch_sizes", "uneven"),
    [([3, 3], "trim"), ([3, 3], "pad"), ([6, 2], "trim"), ([2, 2, 2, 2], "pad")],
)
def test_the_joint_batches_are_those_of_the_ranks_before(batch_sizes, uneven, make_source):
    source = make_source("arrays", 34, shift_pixels=1, flip=True)
    plan = plan_for(source, batch_sizes, uneven)
    before = joint(source, plan, 2)
    assert not same(before, joint(source, plan, 3))
    for num_ranks in {1, 2, 3} - {len(batch_sizes)}:
        assert same(joint(source, plan.on(num_ranks), 2), before), num_ranks


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "arrays"])
def test_so_they_are_with_every_kind_of_source(kind, make_source):
    source = make_source(kind, 34, shift_pixels=1, flip=True)
    plan = plan_for(source, [4, 2, 2], "pad")
    at = plan.steps_per_epoch - 2
    assert same(joint(source, plan.on(2), at, 3), joint(source, plan, at, 3))


@pytest.mark.parametrize("how", mostly_nightly(["shuffled", "by_epoch", "batches"], "batches"))
def test_so_they_are_with_pipelines_of_the_users_own(how):
    source = pipelines.data(how)
    plan = plan_for(source, [3, 3])
    before = joint(source, plan, 2)
    assert same(joint(source, plan.on(3), 2), before)
    assert same(joint(source, plan.on(1), 2), before)


def test_the_epochs_go_on_behind_steps_of_another_plan(make_source):
    """A plan that took over after 7 steps of 1 epoch gives at step 7 + k what it would at k of its second epoch."""
    source = make_source("arrays", 31)
    plan = plan_for(source, [3, 3])
    later = plan.from_position(7, 1, 0)
    assert (plan.steps_per_epoch, later.shift) == (5, 2)
    assert same(joint(source, later, 8), joint(source, plan, 6))
    assert same(joint(source, later.on(3), 8), joint(source, plan, 6))


def test_batches_of_one_size_keep_a_shape_that_is_known(make_source):
    source = make_source("arrays", 31)
    plan = plan_for(source, [3, 3]).on(3)
    spec = training_batches(source, plan, Topology(1, 3), SEED, 0).element_spec
    assert spec == (tf.TensorSpec((2, 6, 6, 1), tf.float32), tf.TensorSpec((2,), tf.int32))


def test_what_is_needed_alone_is_read():
    source_plan = make_plan(TrainConfig(), 0.1, [40] * 4, "toys", [8] * 4)
    assert [source_plan.on(2).shares_of(rank) for rank in (0, 1)] == [range(2), range(2, 4)]
    assert [source_plan.on(3).shares_of(rank) for rank in (0, 1, 2)] == [
        range(2),
        range(1, 3),
        range(2, 4),
    ]
    assert [source_plan.on(8).shares_of(rank) for rank in (0, 1, 7)] == [
        range(1),
        range(1),
        range(3, 4),
    ]
