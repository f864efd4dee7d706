"""Columns of a table as features."""

from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyarrow import csv, parquet

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest
from hvtrain.data.sources.table import Table
from hvtrain.errors import ConfigError, DataError
from hvtrain.tasks import Classification, Regression
from hvtrain.training import saved_model

RANDOM = np.random.default_rng(0)
COLUMNS = {
    "age": RANDOM.integers(18, 90, 60),
    "city": RANDOM.choice(["Bonn", "Köln", "Ulm"], 60),
    "income": RANDOM.normal(3000, 800, 60),
    "plan": RANDOM.choice(["basic", "plus"], 60),
}


CODES = [("00501", "true"), ("10115", "false"), ("0501", "true")]


@pytest.fixture(scope="module", params=[".csv", ".parquet"])
def file(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / f"people{request.param}"
    write = csv.write_csv if request.param == ".csv" else parquet.write_table
    write(pa.table(COLUMNS), path)
    return str(path)


def test_columns_become_features_and_the_saved_model_takes_columns(file, tmp_path):
    source = Table(file, "plan", num_test=12)
    task = Classification()
    task.prepare(source)
    assert source.facts() == {
        "num_classes": 2,
        "class_names": ["basic", "plus"],
        "input_shape": (6,),
    }
    features, targets = next(
        source.training(StreamRequest(Topology(), 48, 1, 0, 1)).as_numpy_iterator()
    )
    assert features.shape == (48, 6) and set(targets) == {0, 1}
    assert sorted(features.std(axis=0).round(3) == 1)[-2:] == [True, True], (
        "age and income are normalized"
    )
    inputs = keras.Input((6,))
    saved_model.export(
        keras.Model(inputs, keras.layers.Dense(2)(inputs)), source, task, Topology(), tmp_path
    )
    loaded = keras.models.load_model(tmp_path / "model.keras")
    columns = {
        name: tf.constant(values[:5, None]) for name, values in COLUMNS.items() if name != "plan"
    }
    columns = {
        name: values if values.dtype == tf.string else tf.cast(values, tf.float32)
        for name, values in columns.items()
    }
    assert loaded.predict(columns, verbose=0).shape == (5, 2)
    assert saved_model.check_preprocessing(source.preprocessing(), source, Topology()) is None
    # A finished run does not need its table any more, which is read again once the shards are cut.
    source._loaded.clear()
    moved = Path(file).rename(tmp_path / "moved")
    assert saved_model.check_preprocessing(source.preprocessing(), source, Topology()) is None
    moved.rename(file)


def test_categories_of_a_csv_file_are_the_text_that_stands_there(tmp_path):
    """Whatever other rows hold: pyarrow takes a column that has only such words for numbers or booleans."""
    rows = [
        "zip,flag,age,y",
        *(f"{code},{flag},{age},{age % 2}" for age, (code, flag) in enumerate(CODES * 4)),
    ]
    (tmp_path / "people.csv").write_text("\n".join(rows))
    source = Table(
        str(tmp_path / "people.csv"),
        "y",
        features={"zip": "string_categorical", "flag": "string_categorical"},
        num_test=4,
    )
    raw = source.raw_examples("train", Topology(), 20)
    assert {(row["zip"][0], row["flag"][0]) for row in raw} == set(CODES)


def test_ranks_share_the_features_and_split_the_rows(file):
    parts = []
    for rank in range(2):
        source = Table(file, "income", num_test=10, num_validation=10)
        assert source.num_examples("validation") == 10
        stream = source.training(StreamRequest(Topology(rank, 2), 20, 1, 0, 1))
        parts.append(next(stream.as_numpy_iterator()))
    targets = np.concatenate([targets for _, targets in parts])
    assert len(set(targets)) == 40 and set(targets) < set(COLUMNS["income"].astype(np.float32))
    Regression().prepare(source)
    joint = np.concatenate([features for features, _ in parts])
    assert np.abs(joint.mean(axis=0)).min() < 1e-6, "normalized over the rows of both ranks"


def test_bins_of_large_numbers_hold_equally_many(tmp_path):
    """Milliseconds since 1970, of which float32 makes multiples of 131,072."""
    times = 1_700_000_000_000 + 1000 * np.arange(64)
    parquet.write_table(pa.table({"x": times, "y": ["a", "b"] * 32}), tmp_path / "t.parquet")
    source = Table(
        str(tmp_path / "t.parquet"), "y", num_test=0, features={"x": "float_discretized"}
    )
    assert source.parts()["train"].elements[0].sum(axis=0).tolist() == [2] * 32
    assert saved_model.check_preprocessing(source.preprocessing(), source, Topology()) is None


def test_bins_do_not_depend_on_the_precision_of_the_run(tmp_path):
    """In a graph, as exported, Keras would cast cells to float16 first, in which they are infinite."""
    prices = 100_000.0 + 1000 * np.arange(64)
    parquet.write_table(pa.table({"x": prices, "y": ["a", "b"] * 32}), tmp_path / "t.parquet")
    path = str(tmp_path / "t.parquet")
    keras.config.set_dtype_policy("mixed_float16")
    try:
        source = Table(path, "y", num_test=0, features={"x": "float_discretized"})
        rows = source.parts()["train"].elements[0]
        model = source.preprocessing()
        raw = {"x": tf.constant(prices.astype(np.float32)[:, None])}
        assert np.array_equal(tf.function(lambda cells: model(cells))(raw), rows)
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(
    "options", [{"file": ""}, {"file": []}, {"file": ["a.csv", ""]}, {"test_file": ""}]
)
def test_a_setting_of_an_unset_variable_is_refused(options):
    with pytest.raises(ConfigError, match="file is empty; give a file or a folder"):
        Table(**options)


def test_a_run_needs_its_table_no_more_whatever_has_become_of_it(tmp_path):
    parquet.write_table(pa.table({"x": range(64), "y": ["a", "b"] * 32}), tmp_path / "t.parquet")
    source = Table(str(tmp_path / "t.parquet"), "y", num_test=9)
    fitted = source.fitted()
    parquet.write_table(pa.table({"x": range(5), "y": list("ababa")}), tmp_path / "t.parquet")
    later = Table(str(tmp_path / "t.parquet"), "y", num_test=9)
    with pytest.raises(ConfigError, match="leave none of the 5 rows"):
        later.whole_targets()
    later.fit_as(fitted)
    assert later.whole_targets() == {}


def test_an_embedded_table():
    source = Table()
    assert (source.num_examples("train"), source.num_examples("test")) == (342, 100)
    assert source.element_spec == (tf.TensorSpec((10,), tf.float32), tf.TensorSpec((), tf.float32))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"target": "pay"},
            r"dataset.target=pay is not a column of people; it has age, city, income, plan",
        ),
        (
            {"features": {"size": "float"}},
            r"dataset.features.size is not a column of people; it has age, city, income",
        ),
        (
            {"features": {"age": "number"}},
            r"dataset.features.age=number is not one of float, float_normalized",
        ),
        (
            {"features": {"income": "integer_categorical"}},
            r"people.\w+: row 0 has \S+ as income, which takes int",
        ),
        (
            {"features": {"city": "float"}},
            r"people.\w+: the column city holds '\w+', which cannot be read as float",
        ),
        ({"num_test": 60}, r"dataset.num_test=60 and num_validation=0 leave none of the 60 rows"),
        ({"target_is": "number"}, r"dataset.target_is=number, but the column plan holds"),
        ({"features": ["age"]}, r"dataset.features=\['age'\] is not a mapping; write one such as"),
        ({"target_is": "names"}, r"dataset.target_is=names is not one of class, number, null"),
    ],
)
def test_what_does_not_fit_is_refused(file, options, said):
    with pytest.raises((ConfigError, DataError), match=said):
        Table(**{"file": file, "target": "plan", "num_test": 10, **options}).num_examples("train")


@pytest.mark.parametrize(
    ("task", "targets", "advice"),
    [
        (Classification, "0.0 1.0", r"float32 numbers; choose task=regression or another dataset"),
        (
            Regression,
            "1 2 3",
            r"one of 3 classes \(1, 2, 3\); choose another task or another dataset",
        ),
    ],
)
def test_a_target_of_another_kind_can_be_set(task, targets, advice, tmp_path):
    """pandas writes the classes 0 and 1 as 0.0 and 1.0 if a row had none."""
    rows = [f"{number},{target}" for number, target in enumerate(targets.split() * 20)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y", *rows]))
    with pytest.raises(ConfigError, match=rf"{advice}.target_is"):
        task().prepare(Table(str(tmp_path / "t.csv"), "y", num_test=9))


def test_gaps_and_missing_files_are_named(tmp_path):
    with pytest.raises(
        DataError,
        match=r"dataset.file=nowhere.csv names no table; give a .csv or .parquet file, or a folder of them",
    ):
        Table("nowhere.csv").num_examples("train")
    csv.write_csv(
        pa.table({"a": [1.0, None, 3.0], "b": [1.0, 2.0, float("nan")], "c": [1, 0, 1]}),
        tmp_path / "t.csv",
    )
    with pytest.raises(
        DataError, match=r"t.csv: row 1 has no a \(rows without it: 1\); fill or drop them"
    ):
        Table(str(tmp_path / "t.csv"), "c", num_test=1).num_examples("train")


def test_cells_of_another_kind_are_named_in_a_warning(tmp_path):
    lines = ["a,b", *(f"{number}.5,{number % 2}" for number in range(19)), "?,1"]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    source = Table(str(tmp_path / "t.csv"), "b", num_test=2, missing="median")
    assert source.num_examples("train") == 18
    assert source.description()["warnings"] == [
        "a is a column of numbers, but holds '?'; such cells count as gaps"
    ]
