"""Columns of a table as ids for embedding tables; and drawn clicks and purchases."""

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyarrow import csv
from sklearn.metrics import roc_auc_score

from hvtrain.core.topology import Topology
from hvtrain.data.sources.interactions import LOYALTY, clicks, purchases
from hvtrain.data.sources.table import Table
from hvtrain.errors import ConfigError
from hvtrain.training import saved_model

FEATURES = {
    "price": "float_log",
    "age": "float",
    "city": "string_categorical",
    "user": "string_hashed",
}
ROWS = {
    "price": [0.0, -2.0, np.e - 1, None] * 5,
    "age": list(range(20)),
    "city": ["Bonn", "Ulm", None, "Bonn"] * 5,
    "user": [f"u{number}" if number % 5 else None for number in range(20)],
    "y": [0, 1] * 10,
}


def opened(folder, **options):
    csv.write_csv(pa.table(ROWS), folder / "log.csv")
    settings = {
        "features": FEATURES,
        "missing": "indicator",
        "category_ids": True,
        "hash_buckets": 7,
        "num_test": 4,
    }
    return Table(str(folder / "log.csv"), "y", **{**settings, **options})


def fingerprint(name):
    """FarmHash's Fingerprint64, by an operation that Keras's layer does not use."""
    return int(tf.fingerprint([name]).numpy()[0].view("<u8").item())


def first(source, number, split="train"):
    return next(source.evaluation(split, Topology(), number).as_numpy_iterator())[0]


def test_columns_become_numbers_and_ids_in_one_space(tmp_path):
    source = opened(tmp_path)
    inputs = first(source, 16)
    # Unknown, two names and a gap; a gap and seven buckets.
    assert source.facts()["category_sizes"] == [4, 8]
    cities, users = inputs["categories"].T
    assert set(cities) == {1, 2, 3} and set(users) <= set(range(4, 12)) and 4 in users
    spec = source.element_spec[0]
    assert {name: (part.shape[0], part.dtype.name) for name, part in spec.items()} == {
        "numbers": (4, "float32"),  # Each with a flag of its gaps.
        "categories": (2, "int32"),
    }
    _, _, logs, is_gap = inputs["numbers"].T
    assert set(logs[is_gap == 0].round(6)) == {0, 1}
    assert saved_model.check_preprocessing(source.preprocessing(), source, Topology()) is None


def test_a_name_keeps_its_id_in_other_tables(tmp_path):
    """Hashed names by Fingerprint64, the same on all hosts, the others by the schema that a run keeps."""
    source = opened(tmp_path)
    city_id, user_id = first(source, 16)["categories"][-1].tolist()
    last = source.raw_examples("train", Topology(), 16)[-1]
    city, user = last["city"][0], last["user"][0]
    new = {
        "price": [1.0] * 3,
        "age": [1] * 3,
        "city": ["Rome", None, city],
        "user": [None, "new", user],
    }
    csv.write_csv(pa.table(new), tmp_path / "new.csv")
    rows = source.new_rows(tmp_path / "new.csv")
    ids = np.array(source.preprocessing()(rows.raw(np.arange(3)))["categories"])
    assert ids[0].tolist() == [0, 4], "an unknown name, and a gap"
    assert ids[1, 0] not in (0, city_id) and ids[2].tolist() == [city_id, user_id]
    assert user_id == 4 + 1 + fingerprint(user) % 7
    assert rows.unknown == {"city": pytest.approx(1 / 3)}

    later = opened(tmp_path, num_test=10)
    later.fit_as(source.fitted())
    again = later.preprocessing()(rows.raw(np.arange(3)))["categories"]
    np.testing.assert_array_equal(again, ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hash_buckets": 0}, "dataset.hash_buckets=0 is out of range; it must be at least 1"),
        (
            {"features": {"age": "float"}},
            "numbers and of categories, but the table has only numbers; leave it out",
        ),
        (
            {"features": {"city": "string_hashed"}},
            "numbers and of categories, but the table has only categories; leave it out",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, **options).num_examples("train")


def test_clicks_have_a_known_best_auc():
    """The logits that draw them are no input; numbers alone are far from it."""
    source = clicks(num_train=20_000, num_test=20_000, category_sizes=(50, 30, 4))
    inputs, targets = source.parts()["test"].elements
    assert [source.num_examples(split) for split in source.SPLITS] == [20_000, 0, 20_000]
    assert source.facts()["category_sizes"] == (50, 30, 4)
    lows, highs = inputs["categories"].min(axis=0), inputs["categories"].max(axis=0)
    assert lows.tolist() == [0, 50, 80] and highs.tolist() == [49, 79, 83]
    assert roc_auc_score(targets, inputs["numbers"].sum(axis=1)) < source.facts()["best_auc"] - 0.1
    counts = np.sort(np.bincount(inputs["categories"][:, 0]))
    assert counts[-1] > 10 * np.median(counts), "most ids are rare"
    again = clicks(num_train=20_000, num_test=20_000, category_sizes=(50, 30, 4))
    assert again.manifest() == source.manifest()


def test_drawings_that_cannot_be_made_are_refused():
    with pytest.raises(
        ConfigError, match=r"dataset.num_items=30 is not a multiple of num_clusters=4; change one"
    ):
        purchases(num_items=30, num_clusters=4)
    with pytest.raises(
        ConfigError, match=r"dataset.category_sizes=\[9\] has fewer than two features; add some"
    ):
        clicks(category_sizes=[9])
    for name in ("num_train", "num_test", "num_users", "num_clusters"):
        with pytest.raises(
            ConfigError, match=rf"^dataset.{name}=0 is out of range; it must be at least 1$"
        ):
            purchases(**{name: 0})


def test_purchases_follow_the_clusters():
    source = purchases(num_train=100, num_test=20_000, num_users=60, num_items=40, num_clusters=4)
    inputs, items = source.parts()["test"].elements
    np.testing.assert_array_equal(inputs["item"][:, 0], items)
    same = np.mean(inputs["query"][:, 0] % 4 == items % 4)
    assert same == pytest.approx(LOYALTY + (1 - LOYALTY) / 4, abs=0.01)
    np.testing.assert_array_equal(source.facts()["catalogue"][:, 0], np.arange(40))
