"""Texts of unlike lengths: a document in each example, and batches in which all ranks have the same bucket."""

import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hvtrain.config.make_plan import make_plan
from hvtrain.config.schema import TrainConfig
from hvtrain.core.topology import Topology, reduced
from hvtrain.data.pipeline.epochs import choose_boundaries
from hvtrain.data.sources.text import Text
from hvtrain.errors import ConfigError, DataError
from hvtrain.strategies.mirrored import MirroredStrategy
from hvtrain.strategies.parameter_server import ParameterServerStrategy
from hvtrain.tasks import Classification, Language
from hvtrain.training.run import training_batches
from hvtrain.training.setup import plan_run

LENGTH, SEED = 48, 5
RNG = np.random.default_rng(0)
TEXTS = [
    f"{i} " + " ".join(RNG.choice(["tree", "house", "river"], int(40 * RNG.random() ** 2)))
    for i in range(140)
]
STARS = [("bad", "fair", "good")[len(text) % 3] for text in TEXTS]
# Name -> batch sizes by rank, and data.uneven.
PLANS = {
    "one": ([6], "trim"),
    "trim": ([3, 3], "trim"),
    "pad": ([4, 4], "pad"),
    "unlike": ([6, 3, 3], "pad"),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.parquet"
    parquet.write_table(pa.table({"text": [*TEXTS, None], "stars": [*STARS, None]}), path)
    return str(path)


def texts(file, buckets=3, **options):
    options = {"vocabulary_size": 290, "length": LENGTH, "examples": "documents"} | options
    source = Text(file, "text", **options)
    source.bucket_by_length = buckets
    return source


def plan_of(source, name):
    batch_sizes, uneven = PLANS[name]
    shards = source.shard_sizes("train", len(batch_sizes), reduced(batch_sizes))
    return make_plan(TrainConfig(), 0.1, shards, "texts", batch_sizes, uneven)


def by_rank(source, plan, start_step, num_steps):
    """Each rank's batches."""
    weights = () if plan.is_resized else plan.weights
    places = [Topology(rank, plan.size, weights=weights) for rank in range(plan.size)]
    streams = [training_batches(source, plan, place, SEED, start_step) for place in places]
    return [list(stream.take(num_steps).as_numpy_iterator()) for stream in streams]


def rows_in(batches):
    """All rows of tokens, without what fills them up."""
    return [tuple(row[row != 0]) for inputs, *_ in batches for row in inputs]


def joined(ranks):
    return [tuple(np.concatenate(parts) for parts in zip(*batches)) for batches in zip(*ranks)]


@pytest.mark.parametrize("name", PLANS)
def test_all_ranks_have_the_same_bucket_in_each_step_and_each_example_once(file, name):
    source = texts(file)
    plan = plan_of(source, name)
    ranks = by_rank(source, plan, 0, 2 * plan.steps_per_epoch)
    boundaries = choose_boundaries(3, LENGTH)
    for batches in zip(*ranks):
        (length,) = {inputs.shape[1] for inputs, *_ in batches}
        assert length in boundaries
        assert all(parts[0].shape == part.shape for parts in batches for part in parts)
    first, second = (
        [row for batches in ranks for row in rows_in(batches[at : at + plan.steps_per_epoch])]
        for at in (0, plan.steps_per_epoch)
    )
    assert len(first) == plan.examples_per_epoch
    assert first != second, "another order in each epoch"
    rows = rows_in(source.evaluation("train", Topology(), 7).as_numpy_iterator())
    assert len(set(first)) == len(first) and set(first) <= set(rows)


def test_less_is_filled_up_and_without_buckets_the_order_is_random(file):
    source, without = texts(file), texts(file, buckets=0)
    plan = plan_of(source, "trim")
    filled, whole = (
        [parts[0].shape[1] for parts in by_rank(source, plan, 0, plan.steps_per_epoch)[0]]
        for source in (source, without)
    )
    assert set(whole) == {LENGTH}
    assert sum(filled) < 0.8 * sum(whole)
    assert sorted(filled) != filled, "steps are shuffled"


@pytest.mark.parametrize("name", PLANS)
def test_a_stream_that_begins_later_and_other_ranks_read_the_same(file, name):
    source = texts(file)
    plan = plan_of(source, name)
    at = plan.steps_per_epoch - 2
    before = by_rank(source, plan, 0, at + 4)
    later = by_rank(source, plan, at, 4)
    for rank, batches in enumerate(later):
        for ours, expected in zip(batches, before[rank][at:], strict=True):
            assert all(np.array_equal(*pair) for pair in zip(ours, expected))
    # The shortest step of "pad" has two examples.
    for num_ranks in {1, 2, 3} - {plan.size, 3 if name == "pad" else 0}:
        others = joined(by_rank(source, plan.on(num_ranks), at, 4))
        for ours, expected in zip(others, joined(later), strict=True):
            assert all(np.array_equal(*pair) for pair in zip(ours, expected)), num_ranks


def test_each_boundary_is_half_of_the_next_unless_they_are_given():
    assert choose_boundaries(4, 256) == [32, 64, 128, 256]
    assert choose_boundaries(99, 5) == [1, 2, 3, 5]
    assert choose_boundaries(0, 64) == choose_boundaries(1, 64) == [64]
    assert choose_boundaries([16, 99], 64) == [16, 64]


@pytest.mark.parametrize("boundaries", [[], [32, 16], [0, 16], [16, 16]])
def test_boundaries_that_do_not_rise_are_refused(file, boundaries):
    with pytest.raises(
        ConfigError,
        match=r"data.bucket_by_length=\[.*\] must ascend from at least 1; give, for example, \[64,128",
    ):
        next(texts(file, boundaries).evaluation("test", Topology(), 2).as_numpy_iterator())


def test_a_document_is_an_example_with_its_next_tokens(file):
    source = texts(file, validation_share=0.2)
    Language().prepare(source)
    assert sum(source.num_examples(split) for split in source.SPLITS) == len(TEXTS)
    assert Language().unit(source) == ("tokens", round(source.lengths("train").mean()))
    for inputs, targets, weights in source.evaluation("test", Topology(), 4).as_numpy_iterator():
        for row, target, weight in zip(inputs, targets, weights):
            number = int(weight.sum())
            assert weight.tolist() == [1.0] * number + [0.0] * (len(row) - number)
            assert (target[: number - 1] == row[1:number]).all() and (target[:number] != 0).all()
            assert (row[number + 1 :] == 0).all()
            text = source.text_of([*row[:number], target[number - 1]])
            assert any(whole.startswith(text) for whole in TEXTS)
            assert text in TEXTS or number == LENGTH, "cut at dataset.length alone"


def test_filled_up_positions_are_never_hidden(file):
    source = texts(file, objective="masked", masked_share=0.5)
    plan = plan_of(source, "trim")
    batches = by_rank(source, plan, 0, 5)[0] + list(
        source.evaluation("test", Topology(), 5).as_numpy_iterator()
    )
    for shown, tokens, weights in batches:
        assert (weights[tokens == 0] == 0).all() and (shown[tokens == 0] == 0).all()
        assert 0.2 < weights[tokens != 0].mean() < 0.8


def test_how_many_texts_are_cut_is_said(tmp_path):
    path = tmp_path / "texts.jsonl"
    texts = ["a b c d e f g h", *["a b"] * 9]
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    options = {"vocabulary_size": 270, "length": 8, "examples": "documents"}
    source = Text(str(path), "text", **options)
    assert source.num_examples("train") == 8
    assert source.description()["text"][-1] == "1 text(s) cut at dataset.length=8 tokens"


def test_paragraphs_are_examples(tmp_path):
    # Empty lines as programs of Windows write them, and others.
    text = "\n\n".join(TEXTS[:9]) + "\n \n" + "\r\n\r\n".join(TEXTS[9:])
    (tmp_path / "a.txt").write_bytes(text.encode())
    source = Text(
        str(tmp_path / "a.txt"), vocabulary_size=290, length=LENGTH, examples="paragraphs"
    )
    assert sum(source.num_examples(split) for split in source.SPLITS) == len(TEXTS)


def test_labels_are_classes(file, tmp_path):
    source = texts(file, label="stars", examples="windows")
    Classification().prepare(source)
    assert (
        source.facts()["class_names"] == ["bad", "fair", "good"]
        and source.facts()["num_classes"] == 3
    )
    by_text = dict(zip(TEXTS, STARS))
    read = {
        source.text_of(row[row != 0]): source.class_names[number]
        for inputs, classes in source.evaluation("train", Topology(), 4).as_numpy_iterator()
        for row, number in zip(inputs, classes)
    }
    whole = read.keys() & by_text.keys()
    assert len(whole) > 50 and {text: read[text] for text in whole} == {
        text: by_text[text] for text in whole
    }
    lines = tmp_path / "texts.jsonl"
    lines.write_text(
        "".join(json.dumps({"text": text, "n": len(text) % 2 + 4}) + "\n" for text in TEXTS)
    )
    numbered = texts(str(lines), label="n")
    assert numbered.facts()["class_names"] == ["4", "5"]


def test_labels_that_do_not_do_are_refused(file, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"dataset.label=n is not a column of texts.parquet; choose one of ",
    ):
        texts(file, label="n").num_examples("train")
    with pytest.raises(
        ConfigError, match=r"dataset.label=n needs a table .* which dataset.file=None is not"
    ):
        Text(label="n").num_examples("train")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(
        ConfigError,
        match=r"dataset.label=n needs a table or a .jsonl file, which dataset.file=.* is not",
    ):
        texts(str(tmp_path / "a.txt"), label="n").num_examples("train")
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"text": TEXTS, "stars": [None, *STARS[1:]]}), path)
    with pytest.raises(
        DataError, match=r"t.parquet: 1 of \d+ texts have no stars; fill the column, or leave"
    ):
        texts(str(path), label="stars").num_examples("train")
    with pytest.raises(
        ConfigError, match=r"dataset.examples=lines is not one of windows, documents, paragraphs"
    ):
        Text(examples="lines")


@pytest.mark.parametrize("strategy", [MirroredStrategy(2), ParameterServerStrategy()])
def test_strategies_that_need_batches_of_one_length_are_refused(file, strategy):
    config = SimpleNamespace(data=SimpleNamespace(bucket_by_length=3))
    with pytest.raises(
        ConfigError, match="bucket_by_length gives batches of different lengths, and this str"
    ):
        plan_run(config, texts(file), strategy)


def test_batches_that_are_joined_have_one_length(file):
    source = texts(file)
    widths = {batch[0].shape[1] for batch in source.spread("train", 1, 4)}
    assert len(widths) == 1 and source.bucket_by_length == 3
