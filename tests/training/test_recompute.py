"""guard.recompute_every: a rank that computes wrongly is named, whatever of its computation is wrong."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import tensorflow as tf

from hvtrain.errors import ConfigError
from hvtrain.strategies.base import Strategy
from hvtrain.tasks import Retrieval, Segmentation
from hvtrain.training.callbacks.recompute import Recompute, digest_of, judge
from launching import many_runs
from run_folders import saved

# 14 steps an epoch.
PLAIN = [
    "model._target_=flawed.model",
    "dataset=digits",
    "train.epochs=2",
    "guard.every=0",
]
RUN = [*PLAIN, "guard.recompute_every=3"]
# Steps 1, 4, 7, 10, 13, ... are computed again, and rank 13 // 3 % 3 = 1 has its turn in the check after the faults.
# Before it a layer has been called for 13 steps and 4 checks.
RUNS = {
    "plain": PLAIN,
    "sound": RUN,
    "activation": [*RUN, "+model.rank=2", "+model.first_call=15"],
    "sent": [
        *RUN,
        "+model.rank=1",
        "+model.first_call=17",
        "+model.last_call=17",
        "+model.of_gradient=true",
    ],
    "weight": [*RUN, "+callbacks.flip={_target_: flawed.FlipBit, rank: 0, step: 11}"],
    "compiled": [*RUN, "train.jit_compile=true"],
    # The loss scale doubles in step 4, which is computed again.
    "half": [
        *RUN,
        "train.precision=mixed_float16",
        "train.steps=8",
        "+callbacks.grow={_target_: flawed.GrowScale, step: 3}",
    ],
}
AT_FAULT = {"activation": 2, "sent": 1, "weight": 0}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    results, output = many_runs("gloo", 3, RUNS, folder)
    return folder, results, output


@pytest.mark.distributed
def test_a_sound_run_has_the_weights_that_it_has_without(runs):
    folder, results, output = runs
    assert results[0]["sound"]["record"]["num_steps"] == 28
    assert "recomputed 10 gradients on all ranks, with relative differences up to" in output
    plain, sound = saved(folder / "plain")[1], saved(folder / "sound")[1]
    assert all(np.array_equal(plain[name], sound[name]) for name in plain)


@pytest.mark.distributed
@pytest.mark.parametrize("name", AT_FAULT)
def test_the_rank_at_fault_is_named_in_the_next_check(runs, name):
    for rank in runs[1]:
        error = rank[name]["error"]
        assert f"rank {AT_FAULT[name]} (" in error and "computes wrong gradients" in error, error
        assert "gradient of step 13, " in error


@pytest.mark.distributed
def test_a_loss_scale_that_changes_accuses_nobody(runs):
    _, results, output = runs
    assert results[0]["half"]["record"]["num_steps"] == 8
    assert "recomputed 3 gradients on all ranks" in output
    assert "the loss scale is 128" in output


@pytest.mark.distributed
def test_what_excludes_it_is_refused(runs):
    for rank in runs[1]:
        assert (
            "cannot be combined with train.jit_compile=true; leave one of the two out"
            in rank["compiled"]["error"]
        )


def test_losses_over_the_joint_batch_are_refused():
    """On the same batch everywhere their gradient is another one, and the check would accuse a sound rank."""
    context = MagicMock()
    context.run.strategy = Strategy()
    context.run.config.train = SimpleNamespace(jit_compile=False, sync_batch_norm=False)
    context.model.weights = []
    for task in (Retrieval(), SimpleNamespace(loss={"pair": Retrieval().loss, "size": "mse"})):
        context.run.task = task
        with pytest.raises(ConfigError, match=r"combined with a model or task whose step sends"):
            Recompute(context)
    context.run.task = Segmentation()
    callback = Recompute(context)
    # As joint_loss sets it while the step is traced, here for an ignored label.
    divides = SimpleNamespace(denominator=4.0)
    for loss in (divides, {"size": SimpleNamespace(denominator=None), "kind": divides}):
        callback.set_model(SimpleNamespace(loss=loss))
        with pytest.raises(
            ConfigError, match=r"combined with a loss whose divisor depends on the batches"
        ):
            callback.on_train_batch_begin(0, None)


def test_gradients_that_overflow_are_alike():
    """What stays finite in them, and whether a sum is infinite or NaN, depends on the order of operations."""
    sent, again = (
        digest_of([tf.constant(values), tf.ones(2)]).numpy()
        for values in ([np.inf, 1.0], [np.nan, -np.inf])
    )
    assert judge(0, sent, [again, sent, again], 1e-5).ranks == []
    finite = digest_of([tf.ones(2), tf.ones(2)]).numpy()
    assert judge(0, sent, [sent, sent, finite], 1e-5).ranks == [2]


def test_two_ranks_that_disagree_are_both_named():
    digest = np.array([[1.0, 0.5, 7.0]])
    wrong = np.array([[1.0, 0.6, 8.0]])
    assert judge(0, digest, [digest, digest], 1e-5).ranks == []
    assert judge(0, digest, [digest, wrong], 1e-5).ranks == [0, 1]
    # What rank 1 sent is not what both compute now.
    assert judge(1, wrong, [digest, digest], 1e-5).ranks == [1]
    rounded = np.array([[1.0, 0.5 + 1e-7, 8.0]])
    assert judge(0, digest, [digest, rounded], 1e-5) == ([], 0, pytest.approx(1e-7))
    assert judge(2, digest, [digest, np.full([1, 3], np.nan), digest], 1e-5).ranks == [1]
