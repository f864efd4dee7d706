"""strategy=virtual_ranks: the same bits on 1, 2 and 3 ranks, also if a run goes on with another number of them."""

import keras
import numpy as np
import pytest

from hvtrain.core.step_plan import Share, StepPlan
from hvtrain.errors import ConfigError
from hvtrain.keras.over_ranks import SyncBatchNormalization, synchronize
from hvtrain.strategies.virtual_ranks import VirtualRanksStrategy
from launching import many_runs
from run_folders import cut_off, distance, saved

pytestmark = pytest.mark.distributed

DIGITS = [
    "model._target_=mixed.model",
    "dataset=digits",
    "dataset.shift_pixels=1",
    "train.epochs=2",
]
# 29 steps an epoch.
VIRTUAL = [*DIGITS, "train.batch_size=8", "strategy=virtual_ranks", "strategy.virtual_ranks=6"]
SAVED = ["checkpoint.every_steps=10", "checkpoint.keep=9"]
SMOOTH = [*DIGITS, "+model.drop=0.0", "optimizer=momentum"]
ON_TWO = {
    "virtual": [*VIRTUAL, *SAVED],
    # As many parts as ranks: another sum of the same gradients.
    "parts": [*SMOOTH, "strategy=virtual_ranks", "strategy.virtual_ranks=2"],
    "horovod": SMOOTH,
    "five": [*DIGITS, "strategy=virtual_ranks", "strategy.virtual_ranks=5"],
    "padded": [*VIRTUAL, "data.uneven=pad"],
    "accumulated": [*VIRTUAL, "train.accumulate=2"],
    "noise": [*VIRTUAL, "profile.noise_scale_every=2"],
}
CUT = 40  # In the second epoch.
REFUSED = {
    "five": "strategy.virtual_ranks=5 is not a multiple of the 2 ranks",
    "padded": "needs batches of one size in all steps",
    "accumulated": "strategy=virtual_ranks and train.accumulate exclude each other",
    "noise": "profile.noise_scale_every: the gradient noise scale needs ranks that average whole gradients",
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    results, output = many_runs("mpirun", 2, ON_TWO, folder)
    assert {name for name, result in results[0].items() if "error" in result} == {*REFUSED}, output
    return folder, results


def differences(ours, others):
    """Names of weights, slots and moving statistics whose bits differ."""
    names = [name for name in others if name.startswith(("model/", "optimizer/"))]
    assert names == [name for name in ours if name.startswith(("model/", "optimizer/"))]
    return [name for name in names if not np.array_equal(ours[name], others[name])]


@pytest.mark.parametrize(("launcher", "size"), [("gloo", 3), ("mpirun", 1)])
def test_any_number_of_ranks_gives_the_same_bits(two, tmp_path, launcher, size):
    """A run from its beginning, and one that was begun on two ranks and goes on from the middle of an epoch."""
    for name in ("resumed", "other parts"):
        cut_off(two[0] / "virtual", tmp_path / name, CUT)
    runs = {name: [*VIRTUAL, *SAVED] for name in ("begun", "resumed")}
    other_parts = [*VIRTUAL, "strategy.virtual_ranks=3"]
    results, output = many_runs(launcher, size, {**runs, "other parts": other_parts}, tmp_path)
    assert all("record" in results[0][name] for name in runs), output
    assert "began with steps of 6 parts, and now they have 3" in results[0]["other parts"]["error"]
    step, on_two = saved(two[0] / "virtual")
    for name in runs:
        assert saved(tmp_path / name)[0] == step == 58
        assert differences(saved(tmp_path / name)[1], on_two) == []
    assert differences(saved(two[0] / "virtual", CUT)[1], on_two), (
        "the last steps change what is compared"
    )
    assert (
        results[0]["begun"]["record"]["test_accuracy"]
        == two[1][0]["virtual"]["record"]["test_accuracy"]
    )


def test_parts_of_as_many_ranks_give_what_horovod_gives(two):
    folder, results = two
    assert results[0]["virtual"]["record"]["num_replicas"] == 2, "parts are computed in turn"
    (_, parts), (_, horovod) = saved(folder / "parts"), saved(folder / "horovod")
    names = [name for name in horovod if "moving" not in name]
    assert (
        distance({name: parts[name] for name in names}, {name: horovod[name] for name in names})
        < 1e-4
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_excludes_it_is_refused(two, name):
    for rank in two[1]:
        assert REFUSED[name] in rank[name]["error"]


def test_tuning_is_refused():
    with pytest.raises(
        ConfigError, match=r"strategy=virtual_ranks and comm.tune=true exclude each other"
    ):
        VirtualRanksStrategy(6).expect_restart()


@pytest.mark.parametrize("by_setting", [True, False])
def test_synchronized_batch_norm_is_refused(by_setting):
    layer = keras.layers.BatchNormalization() if by_setting else SyncBatchNormalization()
    model = keras.Sequential([keras.Input((2,)), layer])
    if by_setting:  # As train.sync_batch_norm=true does on several ranks.
        synchronize(layer)
    with pytest.raises(
        ConfigError, match=r"strategy=virtual_ranks and train.sync_batch_norm exclude"
    ):
        VirtualRanksStrategy(2).prepare(model)


def test_batches_of_different_sizes_are_refused():
    plan = StepPlan((Share(8, 3), Share(4, 3)), 3, 0.1, 1.0)
    with pytest.raises(ConfigError, match="strategy=virtual_ranks needs parts of one size"):
        VirtualRanksStrategy(2).check_plan(plan)
