"""What predictions of each task look like as columns."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from pyarrow import parquet

from hvtrain.core.topology import Topology
from hvtrain.data import from_arrays
from hvtrain.data.sources.built_in import digits_traits
from hvtrain.errors import CheckpointError, ConfigError, DataError
from hvtrain.finished.finished_run import checkpoint_path
from hvtrain.finished.inputs import input_examples, tables_in
from hvtrain.finished.outputs import predict_rows, split_columns, writer_for
from hvtrain.system.files import write_json
from hvtrain.tasks import Binary, Classification, Multilabel, Regression

ODDS = np.log(3.0)  # The logit of a probability of 3/4.


def test_labels_have_their_names():
    rows = split_columns(
        Multilabel().columns(np.array([[ODDS, -ODDS, 0.1, -0.1]], np.float32), digits_traits())
    )
    assert {name: rows[name][0] for name in ("even", "prime", "above four", "with a loop")} == {
        "even": 1, "prime": 0, "above four": 1, "with a loop": 0,
    }  # fmt: skip
    assert rows["p.even"][0] == pytest.approx(0.75) and rows["p.prime"][0] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("names", "columns"), [("ab", ["p.a", "p.b"]), ("aa", ["p.0", "p.1"]), ("abc", ["p.0", "p.1"])]
)
def test_each_class_has_a_column(names, columns):
    source = SimpleNamespace(facts=lambda: {"class_names": list(names)})
    rows = Classification().columns(np.array([[ODDS, 0.0]], np.float32), source)
    assert list(rows)[3:] == columns and rows[columns[0]] == pytest.approx([0.75])


def test_one_of_two_has_the_probability_of_the_second():
    source = SimpleNamespace(facts=lambda: {"class_names": ["no", "yes"]})
    rows = split_columns(Binary().columns(np.array([[ODDS], [-ODDS]], np.float32), source))
    assert rows["class"].tolist() == [1, 0] and rows["probability"] == pytest.approx([0.75, 0.25])
    assert rows["name"].tolist() == ["yes", "no"]


def test_numbers_are_taken_as_they_are():
    outputs = np.array([[1.0, 2.0]], np.float32)
    assert split_columns(Regression().columns(outputs, digits_traits())) == {
        "prediction.0": [1.0],
        "prediction.1": [2.0],
    }
    assert list(
        split_columns(Regression().columns({"price": outputs[:, :1]}, digits_traits()))
    ) == ["price"]


def test_a_label_with_the_name_of_another_column_keeps_apart():
    source = SimpleNamespace(facts=lambda: {"label_names": ["target", "x"]})
    run = SimpleNamespace(task=Multilabel(), source=source)
    rows = predict_rows(
        run, (np.zeros((1, 2)), {"target": np.array([7])}), lambda inputs: np.array([[ODDS, -ODDS]])
    )
    assert rows["target"] == [7] and rows["prediction.target"] == [1] and rows["x"] == [0]


def run_of(source):
    """What input_examples() needs of a run of one rank."""
    return SimpleNamespace(
        source=source,
        task=SimpleNamespace(targets_are_masks=False),
        strategy=SimpleNamespace(topology=Topology()),
        config=SimpleNamespace(train=SimpleNamespace(evaluation_batch_size=8)),
    )


def test_pictures_get_the_size_of_the_arrays_that_were_trained_on(tmp_path):
    arrays = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 1)).astype(np.uint8)
    source = from_arrays(arrays, np.arange(6) % 2, standardize="scale")
    Image.fromarray(arrays[0].repeat(2, axis=0).repeat(2, axis=1)[..., 0]).save(tmp_path / "1.png")
    (tmp_path / "2.heic").touch()
    examples = input_examples(run_of(source), tmp_path)
    assert examples.note == "; left out 1 file(s) of other kinds"
    ((images, columns),) = examples.batches()
    assert columns["file"].tolist() == ["1.png"]
    np.testing.assert_allclose(images[0] * 255, arrays[0], atol=1e-4)


def test_whole_numbers_of_a_model_keep_their_digits():
    run = SimpleNamespace(task=Regression(), source=None)
    rows = predict_rows(run, (np.zeros((1, 2)), {}), lambda inputs: {"id": np.array([2**24 + 1])})
    assert rows["id"].tolist() == [2**24 + 1]


def table_of(path, text, **spec):
    """The first batch of a CSV file, for a model that takes these columns."""
    path.write_text(text)

    class Unchanged:
        @property
        def shape(self):
            return {name: tf.TensorSpec((1,), kind) for name, kind in spec.items()}

        def __call__(self, rows):
            return rows

    return next(input_examples(run_of(SimpleNamespace(preprocessing=Unchanged)), path).batches())[0]


def test_numbers_that_name_something_are_names(tmp_path):
    """Without a letter in any row, CSV makes numbers of them; the table that was trained on had made names."""
    rows = table_of(
        tmp_path / "rows.csv", "zone,size\n12,1.5\n7,2\n", zone=tf.string, size=tf.float32
    )
    assert rows["zone"].numpy().tolist() == [[b"12"], [b"7"]] and rows["size"].numpy().tolist() == [
        [1.5],
        [2.0],
    ]


def test_a_category_is_the_text_that_stands_there_whatever_other_rows_hold(tmp_path):
    for more in ("", "a,b\n"):
        rows = table_of(
            tmp_path / "rows.csv", f"zip,flag\n00501,true\n{more}", zip=tf.string, flag=tf.string
        )
        assert (rows["zip"].numpy()[0], rows["flag"].numpy()[0]) == ([b"00501"], [b"true"])


def test_gaps_in_a_table_are_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"rows.csv: row 1 has no size \(rows without it: 1\); fill or drop them"
    ):
        table_of(tmp_path / "rows.csv", "zone,size\na,1.5\nb,\n", zone=tf.string, size=tf.float32)


def test_fractions_are_no_integers(tmp_path):
    with pytest.raises(
        DataError, match=r"rows.csv: row 1 has 1.7 as size, which takes integers; fix it"
    ):
        table_of(tmp_path / "rows.csv", "size\n1\n1.7\n", size=tf.int64)


def test_masks_of_resized_images_say_so(tmp_path):
    (tmp_path / "a.png").touch()
    source = SimpleNamespace(
        preprocessing=lambda: SimpleNamespace(shape=(None, None, 3)),
        image_shape=(8, 8, 3),
        sizing=None,
    )
    for has_masks, note in (
        (True, "; masks of images cropped to the aspect ratio, resized to [8, 8, 3]"),
        (False, ""),
    ):
        run = SimpleNamespace(source=source, task=SimpleNamespace(targets_are_masks=has_masks))
        assert input_examples(run, tmp_path).note.partition(" (")[0] == note


@pytest.mark.parametrize("has_masks", [False, True])
def test_an_output_that_is_read_too_is_refused(tmp_path, has_masks):
    read = tmp_path / ("pictures" if has_masks else "rows.csv")
    read.mkdir() if has_masks else read.touch()
    (tmp_path / "link").symlink_to(read)
    other = tmp_path / ("link" if has_masks else "link.csv")
    if not has_masks:
        (tmp_path / "link").rename(other)
    for output in (read, other):
        with pytest.raises(
            ConfigError, match=f"--output {output} is also an input; choose another name"
        ):
            writer_for(output, has_masks, [None, {"file": ["none", str(read)]}])


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (
            np.zeros((2, 5), np.int32),
            r"has rows of 5 tokens, and the model takes up to 4; cut them",
        ),
        (
            np.full((2, 3), 9, np.int32),
            r"has the token 9, and the model knows 0 ... 8; fix the file",
        ),
        (np.full((2, 3), -1, np.int32), r"has the token -1, and the model knows 0 ... 8"),
    ],
)
def test_tokens_that_the_model_does_not_take_are_refused(tokens, problem, tmp_path):
    """On a GPU a lookup out of range gives zeros without a word."""
    np.save(tmp_path / "tokens.npy", tokens)
    run = SimpleNamespace(
        source=SimpleNamespace(
            facts=lambda: {"length": 4, "vocabulary_size": 9},
            preprocessing=lambda: SimpleNamespace(shape=tf.TensorSpec([None], tf.int32)),
        ),
        strategy=SimpleNamespace(topology=Topology()),
        config=SimpleNamespace(train=SimpleNamespace(evaluation_batch_size=2)),
    )
    with pytest.raises(DataError, match=problem):
        list(input_examples(run, tmp_path / "tokens.npy").batches())


def test_an_output_in_a_folder_of_tables_is_an_input(tmp_path, monkeypatch):
    """As a folder, as a pattern, and below the home folder; the run's own settings may name others."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows").mkdir()
    table = tmp_path / "rows" / "monday.csv"
    table.write_text("a,b\n")
    for named in (str(tmp_path / "rows"), str(tmp_path / "*/*.csv"), "~/rows/monday.csv"):
        inputs = tables_in([None, {"target": "b", "file": named, "other": ""}])
        with pytest.raises(ConfigError, match="is also an input; choose another name"):
            writer_for(table, False, [inputs])
    assert tables_in(["s3://bucket/rows.csv", "b", None]) == []


def test_masks_do_not_go_among_other_files(tmp_path):
    (tmp_path / "a.png").touch()
    with pytest.raises(ConfigError, match="is not empty; choose another folder"):
        writer_for(tmp_path, has_masks=True)


def test_an_output_that_is_a_link_stays_one(tmp_path):
    (tmp_path / "link.csv").symlink_to(tmp_path / "there.csv")
    writer = writer_for(tmp_path / "link.csv", has_masks=False)
    writer.add({"example": np.arange(2), "day": np.array(["2024-01-01", "NaT"], "M8[ns]")})
    writer.close()
    assert (tmp_path / "link.csv").is_symlink() and (
        tmp_path / "there.csv"
    ).read_text() == "example,day\n0,2024-01-01 00:00:00\n1,\n"


def test_batches_share_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr("hvtrain.finished.outputs.ROW_GROUP_BYTES", 100)
    writer = writer_for(tmp_path / "p.parquet", has_masks=False)
    for batch in range(10):
        writer.add({"example": np.arange(4 * batch, 4 * batch + 4)})
    writer.close()
    file = parquet.ParquetFile(tmp_path / "p.parquet")
    assert file.num_row_groups == 3 and file.read()["example"].to_pylist() == list(range(40))


def test_an_output_that_is_a_folder_is_refused_before_the_work(tmp_path):
    (tmp_path / "p.csv").mkdir()
    with pytest.raises(ConfigError, match=r"p.csv is a folder; name a file in it"):
        writer_for(tmp_path / "p.csv", has_masks=False)


def test_the_best_checkpoint_of_another_host_is_taken_once_it_has_been_copied(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    write_json(folder / "best.json", {"step": 8, "metric": "loss", "value": 1.0, "host": "s2"})
    finished = SimpleNamespace(folder=tmp_path, arguments={})
    with pytest.raises(CheckpointError, match="is on host s2; copy step-00000008 to "):
        checkpoint_path(finished)
    (folder / "step-00000008").mkdir()
    assert checkpoint_path(finished) == (folder / "step-00000008", False)
