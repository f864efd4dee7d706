"""Which checkpoint a run goes on from, and what each rank finds in it."""

from pathlib import Path

import keras
import numpy as np
import pytest

from hvtrain.checkpoint import Checkpoint, snapshot
from hvtrain.errors import CheckpointError
from hvtrain.resuming import find, states_on
from hvtrain.saving import write
from hvtrain.strategies.base import Strategy

META = {"num_ranks": 2, "batch_size": 32, "batch_sizes": [32, 32], "epoch": 1, "step_in_epoch": 2}


def rank_state(rank):
    return {
        "seed/0000": np.array([7, rank]),
        "metric/0000": np.float32(rank + 1),
        "metric/0001": np.full(3, 10.0**rank),
        "rate/factor": np.float32(0.1),
    }


def test_each_rank_keeps_its_own_state_and_the_chief_takes_the_sums_of_those_that_are_gone():
    states = [rank_state(rank) for rank in range(4)]
    chief, other = states_on(2, states)
    assert other is states[1]
    assert chief["metric/0000"] == 1 + 3 + 4
    assert chief["metric/0001"].tolist() == [1 + 100 + 1000] * 3
    assert chief["seed/0000"].tolist() == [7, 0]
    assert chief["metric/0000"].dtype == np.float32


def test_a_new_rank_has_counted_nothing_and_has_the_learning_rate_of_the_others():
    before = [rank_state(0), rank_state(1)]
    *kept, new = states_on(3, before)
    assert [ours is theirs for ours, theirs in zip(kept, before, strict=True)] == [True, True]
    assert new == {"rate/factor": np.float32(0.1)}


@pytest.fixture(scope="module")
def model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_what_is_in_memory_is_taken_unless_the_disk_is_newer(model, tmp_path):
    held = Checkpoint(Path("step-00000024"), 24, {**META, "step": 24}, {})
    assert find(tmp_path, Strategy()) is None
    assert find(tmp_path, Strategy(), held).name == "step-00000024 in memory"
    for step, name in ((20, "step-00000024 in memory"), (24, "step-00000024 in memory"), (28, "step-00000028")):
        write(tmp_path / "checkpoints", step, snapshot(model, []), META)
        found = find(tmp_path, Strategy(), held)
        assert found.name == name
        assert found.step == found.whole.step == found.meta["step"]
    assert find(tmp_path, Strategy()).name == "step-00000028"


def test_a_checkpoint_of_no_run_is_refused(model, tmp_path):
    write(tmp_path / "checkpoints", 3, snapshot(model, []), {"epoch": 1})
    with pytest.raises(
        CheckpointError, match="step-00000003 lacks num_ranks, batch_size, batch_sizes, step_in_epoch and"
    ):
        find(tmp_path, Strategy())
