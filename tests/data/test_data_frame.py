"""Tables in memory as data sets."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from hvtrain.core.topology import Topology
from hvtrain.data import from_arrays, from_frame
from hvtrain.errors import DataError
from tiny_data import SHAPE, images_of, random_images, scaled

NUM_PIXELS = int(np.prod(SHAPE))


def tables() -> list:
    """The same twelve examples: lists in a pyarrow Table, and columns of single numbers; pandas where it is."""
    images, labels = random_images(12)
    lists = pa.table({"image": images.reshape(12, -1).tolist(), "label": labels})
    columns = {f"pixel{number}": images.reshape(12, -1)[:, number] for number in range(NUM_PIXELS)}
    return [(lists, "image"), (pa.table({**columns, "label": labels}), list(columns))]


@pytest.mark.parametrize("kind", ["arrow", "pandas", "polars"])
def test_a_table_is_a_data_set(kind):
    convert = {
        "arrow": lambda table: table,
        "pandas": lambda table: pytest.importorskip("pandas").DataFrame(table.to_pydict()),
        "polars": lambda table: pytest.importorskip("polars").DataFrame(table.to_pydict()),
    }[kind]
    for table, image_column in tables():
        frame = convert(table)
        source = from_frame(
            frame, frame[:5], image_shape=SHAPE, image_column=image_column, standardize="scale"
        )
        assert [source.num_examples(split) for split in source.SPLITS] == [
            12,
            0,
            5,
        ] and source.num_classes == 3
        assert images_of(source.evaluation("train", Topology(), 12)) == scaled(random_images(12)[0])


def test_names_of_columns_may_be_numbers():
    """As pandas numbers columns without names."""
    table = tables()[1][0]
    numbered = table.rename_columns(list(map(str, range(NUM_PIXELS + 1))))
    options = {"image_column": range(NUM_PIXELS), "label_column": NUM_PIXELS}
    assert from_frame(numbered, image_shape=SHAPE, **options).num_examples("train") == 12


def test_a_table_that_does_not_fit_is_refused():
    (lists, _), (columns, names) = tables()
    for table, options, message in [
        (
            lists,
            {"image_column": "picture"},
            "frame, train has no column picture; it has image, label",
        ),
        (
            lists,
            {"image_shape": (6, 5, 1)},
            r"frame, train, row 0: the image has 36 value\(s\) of type int64; 30 numbers are needed",
        ),
        (
            columns,
            {"image_column": names[:-1]},
            r"frame, train, row 0: the image has 35 value\(s\) of type uint8; 36 numbers are needed",
        ),
        (
            pa.table({"image": [b"png"], "label": [0]}),
            {},
            r"the image has 1 value\(s\) of type .S3.*choose dataset=parquet",
        ),
    ]:
        with pytest.raises(DataError, match=message):
            from_frame(table, **{"image_shape": SHAPE, **options})


@pytest.mark.parametrize("names", [["b", "a"], ["a", "c"]])
def test_inputs_with_other_columns_than_in_training_are_refused(names):
    """Arrays have no names: the test part's columns would silently be taken for others."""
    train = pa.table({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    labels = np.arange(2)
    assert from_arrays(train, labels, train[:1], labels[:1]).num_examples("test") == 1
    with pytest.raises(DataError, match=r"x_test has the columns \w, \w, and x_train a, b; give"):
        from_arrays(train, labels, train.rename_columns(names), labels)


def test_images_with_the_channels_first_are_refused():
    cells = list(np.zeros((4, 3, 6, 6), np.uint8))
    frame = pytest.importorskip("pandas").DataFrame({"image": cells, "label": [0, 1, 0, 1]})
    with pytest.raises(
        DataError, match=r"row 0: the image has the shape \(3, 6, 6\), and image_shape"
    ):
        from_frame(frame, image_shape=(6, 6, 3))


def test_rows_in_a_dict_of_lists_are_those_of_train():
    rows = {"img": [np.zeros((28, 28))] * 100}
    few = {"img": [np.zeros((28, 28))] * 20}
    source = from_arrays(rows, np.zeros(100), few, np.zeros(20))
    assert source.num_examples("test") == 20
