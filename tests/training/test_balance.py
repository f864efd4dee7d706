"""train.balance: a rank that is slower than the others gets smaller batches, and the result is that of one process."""

import json
import re

import pytest

from hvtrain.training.callbacks.balance import balanced_sizes
from launching import many_runs
from run_folders import cut_off, distance, saved

SLOW = ["model._target_=unlike.model", "+model.rank=1", "+model.seconds=0.006"]
RUN = [
    *SLOW,
    "dataset=digits",
    "optimizer=momentum",
    "train.epochs=4",
    "checkpoint.keep=9",
    "train.balance=true",
]


def test_the_last_rank_to_end_ends_as_early_as_possible():
    assert balanced_sizes([10, 10], [1.0, 1.0]) == [10, 10]
    sizes = balanced_sizes([32, 16, 64], [0.3, 0.1, 1.0])
    assert sum(sizes) == 112
    each = [0.3 / 32, 0.1 / 16, 1.0 / 64]
    slowest = max(size * seconds for size, seconds in zip(sizes, each))
    # Any other batches would be one example more for some rank, and each ends later with one more.
    assert all((size + 1) * seconds >= slowest for size, seconds in zip(sizes, each))
    assert min(balanced_sizes([2, 2], [1e-6, 1.0])) == 1


@pytest.fixture(scope="module")
def balanced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("balanced")
    runs = {
        "balanced": RUN,
        # Rank 1 becomes slow after two epochs of 22 steps, by more than a busy machine makes both slow.
        "slower": [*RUN[:-1], "+model.after=44"],
        "deterministic": [*RUN, "train.deterministic=true"],
        "local": [*RUN, "strategy=local_sgd"],
    }
    results, output = many_runs("gloo", 2, runs, folder)
    return folder, results, output


@pytest.mark.distributed
def test_batches_follow_the_speed_from_the_second_epoch_on(balanced):
    folder, results, output = balanced
    record = results[0]["balanced"]["record"]
    assert "rank 1 (" in output and "times as long for an example as rank 0 (compute)" in output, (
        output
    )
    after = json.loads(
        (folder / "balanced" / "checkpoints" / "step-00000022" / "meta.json").read_text()
    )
    fast, slow = after["batch_sizes"]
    assert fast + slow == record["global_batch"] == 64 and fast > 40


@pytest.mark.distributed
def test_a_rank_that_becomes_slow_is_named_once(balanced):
    *_, output = balanced
    lines = re.findall(r"slower +epoch (\d): a step takes .*; rank 1 \(.*\) computes for", output)
    # A busy machine may make other epochs slow, too; the fourth is as slow as the third.
    assert "3" in lines and "4" not in lines, output


@pytest.mark.distributed
def test_the_weights_are_those_of_one_process(balanced, tmp_path):
    folder, *_ = balanced
    first = min(int(path.name[5:]) for path in (folder / "balanced" / "checkpoints").glob("step-*"))
    cut_off(folder / "balanced", tmp_path / "balanced", first)
    results, output = many_runs("mpirun", 1, {"balanced": RUN}, tmp_path)
    assert "record" in results[0]["balanced"], output
    assert distance(saved(tmp_path / "balanced")[1], saved(folder / "balanced")[1]) < 1e-5
    assert distance(saved(folder / "balanced", first)[1], saved(folder / "balanced")[1]) > 1e-3


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "obstacle"),
    [("deterministic", "train.deterministic=true"), ("local", "a strategy whose ranks")],
)
def test_what_excludes_it_is_refused(balanced, name, obstacle):
    for rank in balanced[1]:
        assert f"train.balance=true cannot be combined with {obstacle}" in rank[name]["error"]
