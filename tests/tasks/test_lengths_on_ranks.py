"""Batches by length on real ranks: exact against one process, resumed with the same bits, and what is refused."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from launching import many_runs
from run_results import different, error, record, state
from tiers import mostly_nightly, with_nightly

pytestmark = pytest.mark.distributed

TEXTS = [f"{i}: " + " ".join(f"{i * j % 17:04b}" for j in range(i % 12)) for i in range(101)]
STARS = [("bad", "fair", "good")[len(text) % 3] for text in TEXTS]
TEXT = [
    "dataset=text",
    "dataset.file=texts.parquet",
    "dataset.column=text",
    "dataset.vocabulary_size=280",
]
MODEL = ["model=transformer", "model.blocks=1", "model.width=16", "train.batch_size=8"]
BUCKETS = [
    *TEXT,
    *MODEL,
    "dataset.length=32",
    "dataset.examples=documents",
    "data.bucket_by_length=3",
]
# Without dropout and zeros among the first weights; see texts.transformer.
JOINT = [*BUCKETS, "model._target_=texts.transformer", "model.dropout=0", "optimizer=momentum",
         "optimizer.learning_rate=0.05", "train.epochs=2"]  # fmt: skip
KINDS = {
    "joint causal": ["task=language"],
    "joint masked": ["task=language", "dataset.objective=masked", "data.uneven=pad"],
    "joint label": ["task=classification", "dataset.label=stars"],
}
BY_DEFAULT = "joint causal"
SAVED = [
    *BUCKETS,
    "task=language",
    "checkpoint.every_steps=1",
    "checkpoint.keep=99",
    "train.epochs=2",
]
RUNS = {
    "whole": SAVED,
    "cut": [*SAVED, "train.steps=8"],
    "cut/again": SAVED,
    "images": ["data.bucket_by_length=3"],
    "packed": [*BUCKETS, "task=language", "dataset.examples=windows"],
}


def start(num_ranks, runs, folder):
    parquet.write_table(pa.table({"text": TEXTS, "stars": STARS}), folder / "texts.parquet")
    return many_runs("mpirun", num_ranks, runs, folder)[0]


@pytest.fixture(scope="module")
def two_ranks(request, tmp_path_factory):
    """(what each rank saw, folder)."""
    kinds = KINDS if with_nightly(request) else [BY_DEFAULT]
    folder = tmp_path_factory.mktemp("lengths")
    return start(2, {**RUNS, **{name: [*JOINT, *KINDS[name]] for name in kinds}}, folder), folder


@pytest.mark.parametrize("name", mostly_nightly(list(KINDS), BY_DEFAULT))
def test_ranks_equal_keras_in_one_process_on_the_joint_batches(two_ranks, name):
    """To 1e-6 in all weights. The mean of the ranks' means differs: tokens are the weight of the mean."""
    check(two_ranks[0], name)


@pytest.mark.release
def test_so_do_three_ranks(tmp_path_factory):
    ranks = start(
        3, {name: [*JOINT, *more] for name, more in KINDS.items()}, tmp_path_factory.mktemp("three")
    )
    for name in KINDS:
        check(ranks, name)


def check(ranks, name):
    for rank in ranks:
        result = rank[name]
        if name == "joint label":  # The mean is over texts, of which each rank has as many.
            assert result["exact"] < 2e-6
        else:
            assert result["exact"] < 1e-6 < 1e-3 < result["uncorrected"]
        for metric, (ours, expected) in [*result["metrics"].items(), *result["tested"].items()]:
            assert ours == pytest.approx(expected, rel=1e-5), metric


def test_a_run_goes_on_in_the_middle_of_an_epoch_with_the_same_bits(two_ranks):
    """Of 5 steps an epoch; what was trained, and what validation and test say."""
    ranks, folder = two_ranks
    whole, again = record(ranks, "whole"), record(ranks, "cut/again")
    assert (again["first_step"], again["num_steps"]) == (8, 10)
    assert different(state(folder / "whole", 10), state(folder / "cut", 10)) == []
    assert whole["metrics"] == again["metrics"]
    assert whole["metrics"]["test_perplexity"] == pytest.approx(
        np.exp(whole["metrics"]["test_loss"])
    )
    assert whole["per_second"]["tokens"] > 8 * whole["examples_per_second"], (
        "its own tokens, nothing filled up"
    )
    assert whole["per_second"]["tokens"] < 28 * whole["examples_per_second"]


@pytest.mark.parametrize(("name", "source"), [("images", "leaves"), ("packed", "texts")])
def test_examples_of_one_length_are_refused(two_ranks, name, source):
    assert error(two_ranks[0], name) == (
        f"ConfigError: data.bucket_by_length=3 needs examples of different lengths, and {source} gives none; "
        "choose dataset=text dataset.examples=documents, or leave the setting out"
    )
