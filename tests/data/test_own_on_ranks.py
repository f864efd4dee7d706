"""Pipelines of a user's own on two real ranks."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from launching import ROOT, many_runs, train

# By default test_data_own.py holds their streams, and how they go on.
pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

KINDS = ["shuffled", "batches"]


def words(kind, *more):
    own = [
        "dataset._target_=pipelines.data",
        f"+dataset.how={kind}",
        "model._target_=pipelines.model",
    ]
    return [*own, "train.batch_size=4", "train.epochs=3", "optimizer.learning_rate=0.05", *more]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    saved = ["checkpoint.every_steps=5", "train.validate_every_epochs=null"]
    runs = {}
    for kind in KINDS:  # 7 steps an epoch, so the second start begins in the middle of the second.
        runs |= {kind: words(kind, *saved), f"{kind} in two": words(kind, *saved, "train.steps=10")}
        runs |= {f"{kind} in two/again": words(kind, *saved)}
    runs["ignoring"] = words("ignoring", "+dataset.number=61")
    runs["short"] = words("short", "+dataset.number=61")
    folder = tmp_path_factory.mktemp("own")
    return many_runs("mpirun", 2, runs, folder)[0], folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_in_the_middle_of_an_epoch_with_the_same_bits(ran, kind):
    found, folder = ran
    for name in (kind, f"{kind} in two", f"{kind} in two/again"):
        assert "record" in found[0][name], found[0][name]
    record = found[0][f"{kind} in two/again"]["record"]
    assert (record["first_step"], record["num_steps"]) == (10, 21)
    assert found[0][kind]["record"]["proof"]["examples_each_epoch"] == [56, 56, 56]
    whole, resumed = (
        load_file(folder / run / "checkpoints/step-00000021/state.safetensors")
        for run in (kind, f"{kind} in two")
    )
    assert whole.keys() == resumed.keys()
    assert all(np.array_equal(whole[name], resumed[name], equal_nan=True) for name in whole)


@pytest.mark.parametrize("kind", KINDS)
def test_they_learn_and_are_tested(ran, kind):
    assert ran[0][0][kind]["record"]["metrics"]["test_accuracy"] > 0.9


def test_a_function_that_ignores_its_shard_is_stopped_on_all_ranks(ran):
    said = "DataError: ranks 0 and 1 read the same first batch of pipelines.ignoring; each must read its own"
    for rank in ran[0]:
        assert rank["ignoring"]["error"].startswith(said)


def test_a_shard_that_is_known_to_be_short_is_stopped_on_all_ranks(ran):
    for rank in ran[0]:
        assert (
            "pipelines.short(shard=1, num_shards=2) gives 9 example(s), but the run needs 28; "
            in rank["short"]["error"]
        )
        assert rank["short"]["error"].startswith("DataError: rank 1 on ")


def test_a_shard_that_ends_early_in_training_ends_all_ranks(tmp_path):
    own = [
        "--config-dir",
        str(ROOT / "tests/support/own/conf"),
        "dataset=leaves",
        *words("short_unseen"),
    ]
    more = ["+dataset.number=61", "model=tiny", f"run.dir={tmp_path / 'run'}"]
    path = f"{ROOT / 'tests/support/own'}:{ROOT}"
    code, output = train("gloo", 2, *own, *more, cwd=tmp_path, PYTHONPATH=path)
    message = "pipelines.short_unseen(shard=1, num_shards=2) gives 9 example(s), but the run needs 28; each shard must"
    assert code == 2 and "Traceback" not in output, output
    ours = [
        line
        for line in output.splitlines()
        if f": {message}" in line and "hvtrain: rank 1 on" in line
    ]
    assert len(ours) == 1, output
