"""Text as rows of tokens: where it comes from, how it is cut, and what a model is to predict."""

import numpy as np
import pyarrow as pa
import pytest
import sentencepiece
import tensorflow as tf
from pyarrow import csv, parquet

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest, manifest
from hvtrain.data.formats.documents import (
    cut,
    deal,
    python_documentation,
    read_documents,
    read_labelled,
    train_tokenizer,
)
from hvtrain.data.sources.text import WHOLE_DOCUMENTS, Text
from hvtrain.errors import ConfigError, DataError
from hvtrain.tasks import Language

RANDOM = np.random.default_rng(0)
WORDS = ["tree", "house", "river", "stone", "bird", "gräbt", "läuft", "the", "a", "one"]
DOCUMENTS = [f"{number}: " + " ".join(RANDOM.choice(WORDS, 60)) + ".\n" for number in range(40)]
LENGTHS = list(map(len, DOCUMENTS))
SMALL = {"vocabulary_size": 320, "length": 16}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "tales.parquet"
    parquet.write_table(pa.table({"title": list(map(str, range(40))), "tale": DOCUMENTS}), path)
    return str(path)


def tales(file, **options):
    return Text(file, "tale", **{**SMALL, **options})


def examples(source, split):
    return [
        np.concatenate(part)
        for part in zip(*source.evaluation(split, Topology(), 7).as_numpy_iterator())
    ]


def test_any_text_comes_back_and_the_same_text_gives_the_same_tokenizer():
    first, second = (train_tokenizer(DOCUMENTS, 320) for _ in range(2))
    assert first.model == second.model and first.model != train_tokenizer(DOCUMENTS, 321).model
    for text in (
        *DOCUMENTS,
        "  two spaces\n\n\tat the end  ",
        "ein Ochse — 牛 🐂",
        "</s> <unk>\r\n",
    ):
        tokens = first.encode(text)
        assert first.decode(tokens) == text
        assert {0, first.end}.isdisjoint(tokens), "nothing is unknown, and no text holds the end"
    assert first.decode([*first.encode("a tree"), first.end, first.size]) == "a tree", (
        "the mask has no text"
    )


def test_padding_has_no_text(file):
    source = tales(file, examples="paragraphs")
    Language().prepare(source)
    row = [*source.tokens_of("a tree"), source.tokenizer.end, 0, 0]
    assert source.text_of(row) == "a tree"


def test_the_targets_are_the_next_tokens(file):
    source = tales(file)
    Language().prepare(source)
    assert source.facts() == {
        "input_shape": (16,),
        "vocabulary_size": 320,
        "length": 16,
        "causal": True,
    }
    assert source.element_spec == (tf.TensorSpec((16,), tf.int32),) * 2
    inputs, targets = examples(source, "train")
    flat = np.append(inputs, targets[-1, -1])
    np.testing.assert_array_equal(flat[1:], targets.ravel())
    train = [DOCUMENTS[number] for number in deal(LENGTHS, 0.1, 0.1)["train"]]
    text = source.text_of(flat)
    assert "".join(train).startswith(text) and len(text) > sum(map(len, train)) - 100
    assert (flat == source.tokenizer.end).sum() in (len(train) - 1, len(train))
    assert source.preprocessing().inputs().dtype == "int32"


def test_whole_documents_are_for_one_split():
    parts = deal(LENGTHS, validation=0.2, test=0.1)
    assert sorted(number for numbers in parts.values() for number in numbers) == list(range(40))
    assert [len(parts[split]) for split in ("train", "validation", "test")] == [28, 8, 4]
    assert parts["train"] != list(range(28)), "chosen at random"
    assert parts == deal(LENGTHS, validation=0.2, test=0.1)
    assert all(deal([100_000, *LENGTHS[:20]], 0.1, 0.1).values()), "whatever their lengths"


def test_few_documents_are_cut_as_one_text(tmp_path):
    few = DOCUMENTS[: WHOLE_DOCUMENTS - 1]
    parts = cut(few, validation=0.2, test=0.1)
    assert "".join(text for texts in parts.values() for text in texts) == "".join(few)
    assert len("".join(parts["test"])) == pytest.approx(0.1 * len("".join(few)), abs=1)
    assert cut(["ab", "cd"], 0, 0) == {"train": ["ab", "cd"]}

    parquet.write_table(pa.table({"tale": few}), tmp_path / "few.parquet")
    source = tales(str(tmp_path / "few.parquet"))
    inputs, targets = examples(source, "train")
    train = "".join(cut(few, 0.1, 0.1)["train"])
    assert train.startswith(source.text_of(np.append(inputs, targets[-1, -1])))


def test_ranks_share_the_rows_and_have_one_tokenizer(file):
    sources = [tales(file) for _ in range(2)]
    assert (
        sources[0].assets()
        == sources[1].assets()
        == {"tokenizer.model": sources[0].tokenizer.model}
    )
    assert sources[0].manifest() == sources[1].manifest()
    count = sources[0].num_examples("train")
    seen = []
    for rank, source in enumerate(sources):
        stream = source.training(
            StreamRequest(Topology(rank, 2), count // 2, seed=1, start_step=0, steps_per_epoch=1)
        )
        seen += [row.tobytes() for row in next(stream.as_numpy_iterator())[0]]
    assert len(set(seen)) == count // 2 * 2
    other = manifest.differences(sources[0].manifest(), tales(file, vocabulary_size=330).manifest())
    assert any(line.startswith("tokenizer is ") for line in other)


def test_hidden_tokens_are_those_that_count(file):
    source = tales(file, objective="masked", masked_share=0.3)
    Language().prepare(source)
    mask = source.tokenizer.size
    assert source.facts()["vocabulary_size"] == mask + 1 and not source.facts()["causal"]
    shown, tokens, weights = examples(source, "train")
    assert (weights.mean(), (shown != tokens).mean()) == pytest.approx((0.3, 0.27), abs=0.03)
    again, *_ = examples(source, "train")
    assert (again == shown).all(), "evaluation hides the same tokens each time"
    request = StreamRequest(Topology(), len(tokens), seed=1, start_step=0, steps_per_epoch=1)
    shown, targets, weights = next(source.training(request).as_numpy_iterator())
    assert sorted(map(bytes, targets)) == sorted(map(bytes, tokens))
    hidden = weights == 1
    assert set(np.unique(weights)) == {0, 1}
    assert hidden.mean() == pytest.approx(0.3, abs=0.03)
    assert (shown[~hidden] == targets[~hidden]).all()
    assert (shown[hidden] == mask).mean() == pytest.approx(0.8, abs=0.05)
    assert (shown[hidden] == targets[hidden]).mean() == pytest.approx(0.1, abs=0.05)
    assert (shown == mask).sum() == (shown[hidden] == mask).sum()


def test_tokens_are_hidden_anew_in_training_and_alike_in_evaluation(file):
    def batches(start, number):
        source = tales(file, objective="masked")
        request = StreamRequest(Topology(1, 2), 4, seed=5, start_step=start, steps_per_epoch=2)
        return [*source.training(request).take(number).as_numpy_iterator()]

    whole = batches(0, 5)
    for one, other in zip(whole[3:], batches(3, 2)):
        assert all(np.array_equal(*pair) for pair in zip(one, other)), (
            "a pure function of seed, rank and step"
        )
    rows: dict[bytes, set[bytes]] = {}
    for shown, tokens, _ in batches(0, 40):
        for row, original in zip(shown, tokens):
            rows.setdefault(original.tobytes(), set()).add(row.tobytes())
    assert max(map(len, rows.values())) > 3
    first, second = (examples(tales(file, objective="masked"), "test") for _ in range(2))
    assert all(np.array_equal(*pair) for pair in zip(first, second))
    assert 0 < first[2].mean() < 0.3
    joined = [
        next(
            tales(file, objective="masked")
            .evaluation("test", Topology(rank, 2), 99)
            .as_numpy_iterator()
        )
        for rank in range(2)
    ]
    everyone = np.concatenate([shown for shown, *_ in joined])
    assert sorted(map(bytes, everyone)) == sorted(map(bytes, first[0])), (
        "whatever the number of ranks"
    )


def test_texts_from_files_folders_and_tables(tmp_path):
    (tmp_path / ".other").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / ".other")
    (tmp_path / "a.txt").write_bytes(b"eins\r\n")
    (tmp_path / "b/c.txt").write_text("zwölf", encoding="utf-8-sig")
    (tmp_path / "empty.txt").write_text(" \n")
    assert read_documents(str(tmp_path), None) == ["eins\r\n", "zwölf"]
    assert read_documents(str(tmp_path / "a.txt"), None) == ["eins\r\n"]
    csv.write_csv(pa.table({"n": [1, 2, 3], "text": ["two\nlines", None, "x"]}), tmp_path / "t.csv")
    assert read_documents(str(tmp_path / "t.csv"), "text") == ["two\nlines", "x"]


def test_python_brings_a_text():
    documents = python_documentation()
    assert sum(map(len, documents)) > 300_000
    paragraphs = [paragraph for document in documents for paragraph in document.split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs), (
        "nothing of the test part is in the training part"
    )
    source = Text()
    counts = [source.num_examples(split) for split in source.SPLITS]
    assert counts[0] > 600 and min(counts) > 50
    assert source.origin.startswith("pydoc_data.topics of Python 3.")


def test_a_tokenizer_of_ones_own(file, tmp_path):
    path = tmp_path / "own.model"
    path.write_bytes(train_tokenizer(DOCUMENTS, 300).model)
    source = tales(file, tokenizer=str(path))
    assert source.facts()["vocabulary_size"] == 300
    assert source.assets() == {"tokenizer.model": path.read_bytes()}


def test_a_tokenizer_that_does_not_do_is_refused(file, tmp_path):
    path = tmp_path / "own.model"
    with pytest.raises(
        DataError, match=r"dataset.tokenizer=.*own.model cannot be used: .*No such file"
    ):
        tales(file, tokenizer=str(path)).num_examples("train")
    for content in (b"nothing", b""):
        path.write_bytes(content)
        with pytest.raises(
            DataError,
            match=r"dataset.tokenizer=.*own.model cannot be used: .*; give a sentencepiece .model file",
        ):
            tales(file, tokenizer=str(path)).num_examples("train")
    with path.open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(DOCUMENTS),
            model_writer=model,
            vocab_size=40,
            eos_id=-1,
            minloglevel=3,
        )
    with pytest.raises(
        DataError,
        match=r"own.model cannot be used: no token marks the end of a text; give a sentencepiece .model",
    ):
        tales(file, tokenizer=str(path)).num_examples("train")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"column": None},
            r"dataset.column=null is not a column of tales.parquet; choose one of title, tale$",
        ),
        (
            {"column": "tail"},
            r"dataset.column=tail is not a column of tales.parquet; choose one of title, tale$",
        ),
        ({"objective": "next"}, r"dataset.objective=next is not one of causal, masked"),
        ({"length": 1}, r"dataset.length=1 is out of range; it must be at least 2"),
        (
            {"length": 99999},
            r"length=99999 does not fit the [\d,]+ tokens of tales, train; lower it, give more",
        ),
        (
            {"length": 1000},
            r"of tales, validation; lower it, give more text, or change dataset.validation_share",
        ),
        ({"test_share": 1.0}, r"dataset.test_share=1.0: each must be 0 or more, and their sum"),
        ({"masked_share": 0}, r"dataset.masked_share=0 is not between 0 and 1"),
        (
            {"test_share": 0.5, "validation_share": 0.5},
            r"dataset.validation_share=0.5 and dataset.test_share=0.5: each must be 0 or more",
        ),
        (
            {"vocabulary_size": 9999},
            r"vocabulary_size=9999 does not suit .*: Vocabulary size too high .* value <= \d+",
        ),
        (
            {"vocabulary_size": 99},
            r"vocabulary_size=99 does not suit .* smaller than required_chars. 99 vs \d+. Increase",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(file, options, said):
    with pytest.raises(ConfigError, match=said):
        Text(**{"file": file, "column": "tale", **SMALL, **options}).num_examples("train")


def test_files_that_are_no_text_are_named(tmp_path):
    with pytest.raises(
        DataError,
        match=r"nowhere.txt cannot be read: .*No such file or directory.*; give a text file",
    ):
        read_documents("nowhere.txt", None)
    with pytest.raises(
        DataError, match=r"dataset.file=.* holds no text; give a text file, a folder of .txt files"
    ):
        read_documents(str(tmp_path), None)
    (tmp_path / "t.csv").write_text("tale,mood\n ,happy\n")
    with pytest.raises(DataError, match=r"t.csv holds no text"):
        read_labelled(str(tmp_path / "t.csv"), "tale", "mood")
    (tmp_path / "latin.txt").write_bytes("früh".encode("latin-1"))
    with pytest.raises(
        DataError,
        match=r"latin.txt cannot be read: 'utf-8' .* in position 2: .*; give a text file in UTF-8",
    ):
        read_documents(str(tmp_path), None)
    (tmp_path / "t.parquet").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"t.parquet cannot be read: .*; fix the file"):
        read_documents(str(tmp_path / "t.parquet"), "text")
    parquet.write_table(pa.table({"text": [1, 2]}), tmp_path / "t.parquet")
    with pytest.raises(
        DataError, match=r"t.parquet: the column text holds int64; a column of text is needed"
    ):
        read_documents(str(tmp_path / "t.parquet"), "text")
