"""strategy.shard_optimizer=true: whole runs on real ranks, against the same runs without it."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from launching import many_runs

pytestmark = pytest.mark.distributed

# Averages stay whole, and the best checkpoint is loaded from them.
WORDS = [
    "model=mlp",
    "dataset=digits",
    "optimizer=adam",
    "train.ema=0.9",
    "dataset.num_validation=100",
]
PLAIN = [*WORDS, "train.deterministic=true"]
SHARDED = [*PLAIN, "strategy.shard_optimizer=true"]
RUNS = {
    "plain": [*PLAIN, "train.epochs=2"],
    "sharded begun": [*SHARDED, "train.epochs=1", "run.dir={folder}/to_plain"],
    "sharded to plain": [*PLAIN, "train.epochs=2", "run.dir={folder}/to_plain"],
    "plain begun": [*PLAIN, "train.epochs=1", "run.dir={folder}/to_sharded"],
    "plain to sharded": [*SHARDED, "train.epochs=2", "run.dir={folder}/to_sharded"],
    "schedule free": [*SHARDED, "optimizer._target_=keras.optimizers.ScheduleFreeAdamW"],
}
STEPS = 20
"""Of an epoch: 1,337 examples in batches of 2 x 32."""


def state(folder, step):
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / "state.safetensors")


def run_all(num_ranks, runs, folder):
    settings = {
        name: [word.replace("{folder}", str(folder)) for word in words]
        for name, words in runs.items()
    }
    ranks, output = many_runs("mpirun", num_ranks, settings, folder)
    for results in ranks:
        errors = {name: result["error"] for name, result in results.items() if "error" in result}
        assert errors.keys() <= {"schedule free"}, errors
    return ranks, output


def assert_same_arrays(first, second, step):
    expected = state(first, step)
    arrays = state(second, step)
    assert expected.keys() == arrays.keys()
    assert any("velocity" in name for name in expected)
    for name, array in expected.items():
        assert np.array_equal(array, arrays[name]), name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, what each rank saw of RUNS, output)."""
    folder = tmp_path_factory.mktemp("sharded")
    return folder, *run_all(2, RUNS, folder)


@pytest.mark.parametrize("resumed", ["to_plain", "to_sharded"])
def test_a_checkpoint_holds_whole_slots_that_a_run_with_or_without_sharding_goes_on_from(
    runs, resumed
):
    folder, *_ = runs
    assert_same_arrays(folder / "plain", folder / resumed, 2 * STEPS)


def test_the_summary_and_the_proof_say_what_is_sent(runs):
    folder, _, output = runs
    line = "sharded optimizer (each step also all-gathers the weights: half the traffic of an all-reduce)"
    assert line in " ".join(output.split())
    results = [
        json.loads((folder / name / "result.json").read_text()) for name in ("plain", "to_sharded")
    ]
    plain, sharded = (result["proof"]["sent_bytes"] for result in results)
    assert sharded == 1.5 * plain


def test_an_optimizer_that_cannot_be_divided_is_refused_in_one_line(runs):
    _, ranks, _ = runs
    for results in ranks:
        line = "strategy=horovod: shard=True: slots of ScheduleFreeAdamW are copies of the weights"
        assert line in results["schedule free"]["error"]


@pytest.mark.nightly
def test_a_run_goes_on_on_other_numbers_of_ranks(tmp_path):
    """4 ranks, then 2, then 3, each against the run without sharding."""
    for epoch, num_ranks in enumerate((4, 2, 3), start=1):
        more = [f"train.epochs={epoch}", "checkpoint.keep=1"]
        settings = {
            "plain": [*PLAIN, *more, f"run.dir={tmp_path}/plain"],
            "sharded": [*SHARDED, *more, f"run.dir={tmp_path}/sharded"],
        }
        run_all(num_ranks, settings, tmp_path)
    (last,) = (tmp_path / "plain" / "checkpoints").glob("step-*")
    assert_same_arrays(
        tmp_path / "plain", tmp_path / "sharded", int(last.name.removeprefix("step-"))
    )
