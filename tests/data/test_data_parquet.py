"""Parquet: dealing by row group, pixels and encoded images, what is read, damage."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest
from hvtrain.data.formats.row_groups import RowGroup
from hvtrain.data.sources.parquet import Parquet, pieces_of
from hvtrain.errors import ConfigError, DataError
from tiny_data import SHAPE, images_of, joined, random_images, scaled

NUM_PIXELS = int(np.prod(SHAPE))


def png(images: np.ndarray) -> list[bytes]:
    return [tf.io.encode_png(image).numpy() for image in images]


def write(path: Path, image: pa.Array, label: list, group_rows: int = 4, **more: pa.Array) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = label if isinstance(label, pa.Array) else pa.array(label)
    pq.write_table(
        pa.table({"image": image, "label": labels, **more}), path, row_group_size=group_rows
    )
    return path


def pixels(images: np.ndarray, kind: pa.DataType | None = None) -> pa.Array:
    return pa.array(images.reshape(-1, NUM_PIXELS).tolist(), kind or pa.list_(pa.int32()))


@pytest.fixture
def folder(tmp_path):
    """23 examples in groups of 4, 4, 4, 1 and 4, 4, 2; 10 to test."""
    images, labels = random_images(23)
    write(tmp_path / "train-0.parquet", pixels(images[:13]), labels[:13])
    write(tmp_path / "train-1.parquet", pixels(images[13:]), labels[13:])
    test, test_labels = random_images(10, seed=1)
    write(tmp_path / "test.parquet", pixels(test), test_labels)
    return tmp_path


def test_evaluation_keeps_the_order_of_the_rows(tmp_path):
    """Though the largest groups are dealt first: here of 4, 1, 4 and 4 rows."""
    images, _ = random_images(13)
    write(tmp_path / "train.parquet", pixels(images), [0] * 13)
    for number, rows in enumerate((slice(5), slice(5, 13))):
        write(tmp_path / f"test-{number}.parquet", pixels(images[rows]), [0] * len(images[rows]))
    source = Parquet(str(tmp_path), SHAPE, 1)
    assert images_of(source.evaluation("test", Topology(), 3)) == scaled(images)


@pytest.mark.parametrize("weights", [(), (3, 1, 1)])
def test_row_groups_are_dealt_whole_and_all(folder, weights):
    source = Parquet(str(folder), SHAPE, 3)
    assert [source.num_examples(split) for split in source.SPLITS] == [23, 0, 10]
    sizes = source.shard_sizes("train", 3, weights)
    assert sum(sizes) == 23 and (not weights or sizes[0] >= 2 * max(sizes[1:]))
    places = [Topology(rank, 3, weights=weights) for rank in range(3)]
    shards = [
        images_of(source.training(StreamRequest(place, 1, 1, 0, size)), size)
        for place, size in zip(places, sizes)
    ]
    assert [len(set(shard)) for shard in shards] == sizes
    assert sorted(joined(shards)) == sorted(scaled(random_images(23)[0]))
    tested = [images_of(source.evaluation("test", place, 3)) for place in places]
    assert sorted(joined(tested)) == sorted(scaled(random_images(10, seed=1)[0]))


@pytest.mark.parametrize(
    ("num_examples", "start_step"), [(None, 1), (None, 5), (11, 1), (11, 4), (11, 8)]
)
def test_a_stream_that_starts_later_is_the_tail(folder, num_examples, start_step):
    source = Parquet(str(folder), SHAPE, 3, shuffle_groups=2, shift_pixels=1, flip=True)
    assert source.shard_sizes("train", 2)[1] == 11
    steps = 3 if num_examples else 2
    place = Topology(1, 2)
    whole = list(
        source.training(StreamRequest(place, 5, 7, 0, steps, num_examples))
        .take(9)
        .as_numpy_iterator()
    )
    tail = list(
        source.training(StreamRequest(place, 5, 7, start_step, steps, num_examples))
        .take(9 - start_step)
        .as_numpy_iterator()
    )
    for (images, labels), (tail_images, tail_labels) in zip(whole[start_step:], tail, strict=True):
        np.testing.assert_array_equal(images, tail_images)
        np.testing.assert_array_equal(labels, tail_labels)
    assert [len(labels) for _, labels in whole] == ([5, 5, 1] * 3 if num_examples else [5] * 9)


def test_a_stream_that_starts_later_reads_nothing_of_before():
    groups = [RowGroup("file", number, 10) for number in range(6)]
    whole = list(islice(pieces_of(groups, 2, StreamRequest(Topology(), 5, 1, 0, 12)), 6))
    assert [len(piece.groups) for piece in whole] == [2] * 6, "so many are in memory"
    later = next(pieces_of(groups, 2, StreamRequest(Topology(), 5, 1, 12 + 7, 12)))
    assert later.groups == whole[4].groups
    np.testing.assert_array_equal(later.rows, whole[4].rows[15:])


def test_one_piece_is_read_ahead_and_no_more(folder, monkeypatch):
    source = Parquet(str(folder), SHAPE, 3, shuffle_groups=1)
    num_read = []
    read = source._read
    monkeypatch.setattr(source, "_read", lambda piece: num_read.append(piece) or read(piece))
    batches = iter(source.training_batches(StreamRequest(Topology(), 1, 1, 0, 23)))
    next(batches)
    deadline = time.monotonic() + 20
    while len(num_read) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # For one more that would be too many.
    assert len(num_read) == 2


def test_fewer_row_groups_than_ranks_is_refused_for_training_but_not_for_testing(folder):
    source = Parquet(str(folder), SHAPE, 3)
    with pytest.raises(
        DataError, match=r"7 row group\(s\) of training .* for 8 ranks.*write at least 8 row groups"
    ):
        source.shard_sizes("train", 8)
    assert sorted(source.shard_sizes("test", 4)) == [0, 2, 4, 4]
    assert images_of(source.evaluation("test", Topology(3, 4), 2)) == []


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.uint8()),
        pa.list_(pa.float64()),
        pa.list_(pa.float16()),
        pa.large_list(pa.int16()),
        pa.list_(pa.uint8(), NUM_PIXELS),
    ],
)
def test_pixels_of_every_type_are_scaled(kind, tmp_path):
    images, labels = random_images(6)
    write(tmp_path / "train.parquet", pixels(images, kind), pa.array(labels, pa.uint8()))
    source = Parquet(str(tmp_path), SHAPE, 3)
    ((read, read_labels),) = source.evaluation("train", Topology(), 6).as_numpy_iterator()
    assert [image.tobytes() for image in read] == scaled(
        images
    ) and read_labels.tolist() == labels.tolist()
    ((halved, _),) = (
        Parquet(str(tmp_path), SHAPE, 3, scale=2)
        .evaluation("train", Topology(), 6)
        .as_numpy_iterator()
    )
    np.testing.assert_array_equal(halved, images / np.float32(2))


def test_encoded_images_and_labels_in_a_field_of_a_struct(tmp_path):
    images, labels = random_images(6)
    struct = pa.array([{"bytes": one, "path": "a.png"} for one in png(images)])
    targets = pa.array([{"id": int(label)} for label in labels])
    write(tmp_path / "train.parquet", struct, labels, target=targets)
    for label_column in ("label", "target.id"):
        source = Parquet(
            str(tmp_path), SHAPE, 3, image_column="image.bytes", label_column=label_column
        )
        assert images_of(source.evaluation("train", Topology(), 4)) == scaled(images)
        ((_, read),) = source.evaluation("train", Topology(), 6).as_numpy_iterator()
        assert read.tolist() == list(labels)
    with pytest.raises(
        DataError,
        match=r"has no column image\.data; it has image\.bytes, image\.path, label, target",
    ):
        Parquet(str(tmp_path), SHAPE, 3, image_column="image.data").num_examples("train")


def test_folders_as_spark_writes_them_and_a_single_file(tmp_path):
    images, labels = random_images(8)
    for number in range(2):
        part = tmp_path / "train" / f"part-0000{number}.snappy.parquet"
        write(part, pixels(images[number::2]), labels[number::2])
    write(tmp_path / "train" / "part-00002.parquet", pixels(images[:0]), pa.array([], pa.int64()))
    (tmp_path / "train" / "_SUCCESS").touch()
    (tmp_path / "train" / "_temporary").mkdir()
    (tmp_path / "train" / "_temporary" / "part-9.parquet").write_text("half")
    (tmp_path / "train" / ".part-00000.parquet.crc").write_text("sum")
    write(tmp_path / "test.parquet" / "part-00000.parquet", pixels(images[:3]), labels[:3])
    source = Parquet(str(tmp_path), SHAPE, 3)
    assert [source.num_examples(split) for split in source.SPLITS] == [8, 0, 3]
    assert sorted(images_of(source.evaluation("train", Topology(), 8))) == sorted(scaled(images))
    alone = Parquet(str(part), SHAPE, 3)
    assert [alone.num_examples(split) for split in alone.SPLITS] == [4, 0, 0]


@pytest.mark.nightly
def test_a_process_that_ends_in_the_middle_of_an_epoch_ends_quietly(folder):
    code = (
        "import sys; from hvtrain.data.sources.parquet import Parquet; from hvtrain.core.topology import Topology\n"
        "from hvtrain.data import StreamRequest\n"
        "request = StreamRequest(Topology(), 2, 1, 0, 11)\n"
        "stream = iter(Parquet(sys.argv[1], (6, 6, 1), 3, shuffle_groups=1).training(request))\n"
        "next(stream)"
    )
    line = [sys.executable, "-c", code, str(folder)]
    ended = subprocess.run(
        line,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "Traceback" not in ended.stderr and "RuntimeError" not in ended.stderr


def overwrite(path: Path, group: int, column: int) -> None:
    """Puts noise over the data of one column of one row group; the footer stays."""
    chunk = pq.read_metadata(path).row_group(group).column(column)
    begin = chunk.dictionary_page_offset or chunk.data_page_offset
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(b"\xff" * chunk.total_compressed_size)


def test_opening_reads_footers_and_a_stream_reads_two_columns(tmp_path):
    images, labels = random_images(8)
    path = write(tmp_path / "train.parquet", pixels(images), labels, more=pa.array(["other"] * 8))
    last = pq.read_metadata(path).num_columns - 1
    overwrite(path, 0, last)
    overwrite(path, 1, last)
    assert images_of(Parquet(str(tmp_path), SHAPE, 3).evaluation("train", Topology(), 8)) == scaled(
        images
    )
    overwrite(path, 1, 0)
    source = Parquet(str(tmp_path), SHAPE, 3)
    assert source.num_examples("train") == 8, "counts come from the footer"
    assert explained(source).startswith(f"{path}, row group 1: cannot be read: ")


def explained(source: Parquet) -> str:
    with pytest.raises(tf.errors.OpError) as caught:
        list(source.training(StreamRequest(Topology(), 8, 1, 0, 1)).take(1))
    error = source.explain(caught.value)
    assert isinstance(error, DataError)
    assert "\n" not in str(error)
    return str(error)


def test_files_that_cannot_be_opened(tmp_path):
    images, labels = random_images(8)
    path = write(tmp_path / "train.parquet", pixels(images), labels)
    data = path.read_bytes()
    for damaged in (data[:-9], b"no Parquet", b""):
        path.write_bytes(damaged)
        with pytest.raises(
            DataError,
            match=rf"^{path}: is not a Parquet file, or is damaged: .+; fix or remove it, or set data.on_error=skip",
        ):
            Parquet(str(tmp_path), SHAPE, 3).num_examples("train")
    path.unlink()
    with pytest.raises(DataError, match=r"holds no training rows; .* in train\*.parquet or train/"):
        Parquet(str(tmp_path), SHAPE, 3).num_examples("train")


def test_columns_that_do_not_fit_are_refused_at_opening(tmp_path):
    images, labels = random_images(8)
    path = write(tmp_path / "train.parquet", pixels(images), labels, text=pa.array(["x"] * 8))
    for options, message in [
        ({"image_column": "picture"}, "has no column picture; it has image, label, text"),
        (
            {"image_column": "text"},
            r"column text is string; encoded images \(binary\) or lists of pixels are needed",
        ),
        (
            {"label_column": "text"},
            r"text holds 1 name\(s\) \(x\), but dataset.num_classes is 3; set it to 1, or give",
        ),
    ]:
        with pytest.raises(DataError, match=message):
            Parquet(str(tmp_path), SHAPE, 3, **options).num_examples("train")
    other = write(tmp_path / "train2.parquet", pa.array(png(images)), labels)
    with pytest.raises(
        DataError,
        match=f"{path} and {other}: image holds encoded images in one and pixels in the other",
    ):
        Parquet(str(tmp_path), SHAPE, 3).num_examples("train")
    other = write(tmp_path / "train2.parquet", pixels(images), pa.array(["x"] * 8))
    with pytest.raises(
        DataError,
        match=f"{path} and {other}: label holds text in one and whole numbers in the other",
    ):
        Parquet(str(tmp_path), SHAPE, 3).num_examples("train")
    for options in ({"scale": 0}, {"shuffle_groups": 0}, {"shuffle_groups": "many"}):
        with pytest.raises(ConfigError, match=rf"{next(iter(options))}=(0|many) "):
            Parquet(str(tmp_path), SHAPE, 3, **options)


def broken(images: list, labels: list, what: str) -> tuple[pa.Array, pa.Array]:
    """Example 6, row 2 of row group 1, broken in one way; pixels are floats."""
    if what == "label":
        labels[6] = 7
    elif what == "null label":
        labels[6] = None
    elif what == "null image":
        images[6] = None
    elif what == "short":
        images[6] = images[6][:-1]
    else:
        images[6] = [*images[6][:-1], None if what == "null pixel" else float(what)]
    return pa.array(images, pa.list_(pa.float32())), pa.array(labels, pa.int64())


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("label", "label 7 is outside 0 ... 2"),
        ("null label", "label is null"),
        ("null image", "image is null"),
        ("short", f"image has length {NUM_PIXELS - 1}; image_shape 6 x 6 x 1 needs {NUM_PIXELS}"),
        ("nan", "a pixel is null, NaN or infinite"),
        ("-inf", "a pixel is null, NaN or infinite"),
        ("null pixel", "a pixel is null, NaN or infinite"),
    ],
)
def test_a_bad_row_is_traced_to_its_place(what, message, tmp_path):
    images, labels = random_images(8)
    path = write(
        tmp_path / "train.parquet", *broken(images.reshape(8, -1).tolist(), labels.tolist(), what)
    )
    assert explained(Parquet(str(tmp_path), SHAPE, 3)) == (
        f"{path}, row group 1, row 2: {message}; fix or remove it, "
        "or set data.on_error=skip to leave out what cannot be read"
    )


def test_an_image_that_cannot_be_decoded_is_traced_to_its_place(tmp_path):
    images, labels = random_images(8)
    path = write(
        tmp_path / "train.parquet",
        pa.array([*png(images)[:5], b"no image", *png(images)[6:]]),
        labels,
    )
    assert explained(Parquet(str(tmp_path), SHAPE, 3)).startswith(
        f"{path}, row group 1, row 1: Unknown image file"
    )
