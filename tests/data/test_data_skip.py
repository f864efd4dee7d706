"""data.on_error=skip: what cannot be read is left out, named and counted, and the laws of streams hold."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from damage import FILE_KINDS, arrays_of, broken, flip, image_path, let_go, opened
from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest, write_tfrecords
from hvtrain.data.formats.record_files import scan_records
from hvtrain.data.sources.tfrecord import TFRecords
from hvtrain.errors import DataError
from tiers import mostly_nightly
from tiny_data import SHAPE, images_of, random_images, scaled

every_kind = pytest.mark.parametrize("kind", mostly_nightly(FILE_KINDS, "image_folder", "tfrecord"))
main_kinds = pytest.mark.parametrize(
    "kind", mostly_nightly(["image_folder", "parquet", "tfrecord"], "parquet")
)
BAD = {3, 8, 9}


def failure(source, batches) -> str:
    with pytest.raises(tf.errors.OpError) as caught:
        list(batches)
    error = source.explain(caught.value)
    assert isinstance(error, DataError) and "\n" not in str(error)
    return str(error)


@every_kind
def test_bad_examples_give_their_places_to_good_ones_of_their_batch(kind, tmp_path):
    """Two epochs: full batches, good images alone, labels with their images, all good ones seen; named once."""
    broken(kind, tmp_path, 20, BAD)
    source = opened(kind, tmp_path, "skip", shift_pixels=0)
    batches = arrays_of(source.training(StreamRequest(Topology(), 5, 7, 0, 4)).take(8))
    assert [images.shape for images, _ in batches] == [(5, *SHAPE)] * 8
    images, labels = random_images(20)
    good = {
        image: int(label)
        for n, (image, label) in enumerate(zip(scaled(images), labels))
        if n not in BAD
    }
    for epoch in (batches[:4], batches[4:]):
        seen = [
            (image.tobytes(), label) for part, labels in epoch for image, label in zip(part, labels)
        ]
        assert all(good[image] == label for image, label in seen)
        assert {image for image, _ in seen} == set(good)
    items = source.unreadable()
    assert [item.num_examples for item in items] == [1] * 3
    assert all(item.problem for item in items), items
    if kind.startswith("image_folder"):
        assert {item.location for item in items} == {
            str(image_path(tmp_path, number)) for number in BAD
        }
    assert source.unreadable() == [], "told once"


@main_kinds
def test_a_stream_with_skips_that_starts_later_is_the_tail(kind, tmp_path):
    """This holds for short batches at the end of an epoch, too."""
    broken(kind, tmp_path, 24, BAD)
    place = Topology(1, 2) if kind != "tfrecord" else Topology(0, 2)
    whole, tail = (
        arrays_of(
            opened(kind, tmp_path, "skip", shift_pixels=1, flip=True)
            .training(StreamRequest(place, 4, 5, start, 3, 11))
            .take(7 - start)
        )
        for start in (0, 3)
    )
    for (images, labels), (tail_images, tail_labels) in zip(whole[3:], tail, strict=True):
        np.testing.assert_array_equal(images, tail_images)
        np.testing.assert_array_equal(labels, tail_labels)


@every_kind
def test_evaluation_leaves_bad_examples_out_and_reads_each_good_one_once(kind, tmp_path):
    """Also where a batch of its own would be all bad: example 8 of 9 in batches of 4 and alone in its batch."""
    broken(kind, tmp_path, 6, set())
    broken(kind, tmp_path, 9, {1, 8}, split="test")
    source = opened(kind, tmp_path, "skip")
    images = scaled(random_images(9)[0])
    assert sorted(images_of(source.evaluation("test", Topology(), 4))) == sorted(
        image for number, image in enumerate(images) if number not in {1, 8}
    )
    assert sum(item.num_examples for item in source.unreadable()) == 2
    assert images_of(source.evaluation("validation", Topology(), 4)) == []
    numbered = source.numbered_evaluation("test", Topology(), 4).unbatch().as_numpy_iterator()
    order = (
        sorted(range(9), key=lambda number: number % 3)
        if kind.startswith("image_folder")
        else range(9)
    )
    kept = {place: images[number] for place, number in enumerate(order) if number not in {1, 8}}
    found = {int(place): image.tobytes() for place, image, _ in numbered}
    assert sorted(found.values()) == sorted(kept.values()) and found.keys() < set(range(9))
    if not kind.startswith("tfrecord"):  # Its streams take a record of each file in turn.
        assert found == kept, "those after it keep their number"


@main_kinds
def test_a_batch_or_shard_of_nothing_good_is_an_error(kind, tmp_path):
    broken(kind, tmp_path, 6, set(range(6)))
    broken(kind, tmp_path, 6, set(range(6)), split="test")
    source = opened(kind, tmp_path, "skip")
    training = source.training(StreamRequest(Topology(), 3, 1, 0, 2))
    assert "no other example of its batch can be read either" in failure(source, training)
    test = source.evaluation("test", Topology(), 4)
    assert "no other example of the rank's part of test can be read either" in failure(source, test)


@every_kind
def test_without_skip_the_culprit_of_a_bad_batch_is_named_with_what_can_be_done(kind, tmp_path):
    broken(kind, tmp_path, 20, {9})
    broken(kind, tmp_path, 9, {4}, split="test")
    source = opened(kind, tmp_path, "stop")
    for split, number, batches in (
        ("train", 9, source.training(StreamRequest(Topology(), 5, 1, 0, 4)).take(4)),
        ("test", 4, source.evaluation("test", Topology(), 4)),
    ):
        message = failure(source, batches)
        if kind.startswith("image_folder"):
            assert message.startswith(
                f"{image_path(tmp_path, number, split)}: Unknown image file format"
            )
        elif kind == "webdataset":
            assert (
                message.startswith(f"{tmp_path}/{split}-")
                and f"/{number}.png: Unknown image file" in message
            )
        elif kind == "tfrecord":
            path = next(path for path in sorted(tmp_path.glob(f"{split}-0000{number % 2}*")))
            place = f"record {number // 2} at byte {scan_records(path)[0][number // 2]}"
            assert message.startswith(f"{path}, {place}: corrupted record")
        else:
            assert message.startswith(
                f"{tmp_path}/{split}.parquet, row group {number // 4}, row {number % 4}: "
            )
        assert message.endswith("set data.on_error=skip to leave out what cannot be read")


def test_an_image_that_vanishes_or_is_no_file_is_named(tmp_path):
    broken("image_folder", tmp_path, 6, set())
    source = opened("image_folder", tmp_path, "stop")
    batches = source.training(StreamRequest(Topology(), 6, 1, 0, 1)).take(1)
    image_path(tmp_path, 2).unlink()
    assert failure(source, batches).startswith(
        f"{image_path(tmp_path, 2)}: No such file or directory; fix or remove it"
    )
    let_go()
    image_path(tmp_path, 2).mkdir()
    assert f"{image_path(tmp_path, 2)}: Is a directory" in failure(source, batches)


def test_a_record_file_that_vanishes_or_is_cut_or_emptied_after_opening_is_named(tmp_path):
    path, _ = write_tfrecords(tmp_path, "train", *random_images(40), num_files=2)
    source = opened("tfrecord", tmp_path, "stop")
    batches = source.training(StreamRequest(Topology(), 40, 1, 0, 1)).take(1)
    whole = path.read_bytes()
    cut = scan_records(path)[0][15]
    path.write_bytes(whole[: cut + 40])
    assert failure(source, batches).startswith(
        f"{path}: record 15 at byte {cut} should end at byte "
    )
    let_go()
    path.write_bytes(b"")
    assert failure(source, batches).startswith(
        f"{path}: is empty; write or fetch the file again, or set data.on_error=skip"
    )
    let_go()
    path.unlink()
    assert failure(source, batches).startswith(
        f"{path}: cannot be read (No such file or directory); write or "
    )


def test_the_rest_of_a_record_file_after_a_wrong_length_is_left_out(tmp_path):
    """Its length, the CRC of it, or the end of the file. A file of nothing is no damage."""
    images, labels = random_images(20)
    one, _ = write_tfrecords(tmp_path, "train", images, labels, num_files=2)
    whole, offset = one.read_bytes(), scan_records(one)[0][6]
    for damaged in (
        whole[: offset + 5],
        whole[:offset] + b"\x07" + whole[offset + 1 :],
        whole[: offset + 9] + b"\x99" + whole[offset + 10 :],
        whole[:offset] + bytes(500),
    ):
        one.write_bytes(damaged)
        source = opened("tfrecord", tmp_path, "skip")
        assert source.num_examples("train") == 16
        ((place, why, num_examples),) = source.unreadable()
        assert place == str(one) and num_examples is None and f"record 6 at byte {offset}" in why
        kept = scaled(images[0:12:2]) + scaled(images[1::2])
        assert sorted(
            images_of(source.training(StreamRequest(Topology(), 16, 1, 0, 1)), 1)
        ) == sorted(kept)
    one.write_bytes(b"")
    source = opened("tfrecord", tmp_path, "skip")
    assert source.num_examples("train") == 10 and source.unreadable() == []
    assert opened("tfrecord", tmp_path, "stop").num_examples("train") == 10


def test_a_row_group_and_a_file_that_cannot_be_read_at_all(tmp_path):
    images, _ = random_images(24)
    broken("parquet", tmp_path, 24, set())
    path = tmp_path / "train.parquet"
    chunk = pq.read_metadata(path).row_group(1).column(0)
    data = bytearray(path.read_bytes())
    begin = chunk.dictionary_page_offset or chunk.data_page_offset
    data[begin : begin + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(data)
    (tmp_path / "train-2.parquet").write_bytes(b"")
    source = opened("parquet", tmp_path, "skip")
    ((read, _),) = arrays_of(source.training(StreamRequest(Topology(), 24, 1, 0, 1)).take(1))
    assert {image.tobytes() for image in read} == set(scaled(np.delete(images, range(4, 8), 0)))
    told = {item.location: item.num_examples for item in source.unreadable()}
    assert told == {str(tmp_path / "train-2.parquet"): None, f"{path}, row group 1": 4}
    with pytest.raises(DataError, match=r"train-2\.parquet: is not a Parquet file"):
        opened("parquet", tmp_path, "stop").num_examples("train")


def test_rows_of_nulls_wrong_labels_and_nan_are_left_out(tmp_path):
    images, labels = random_images(8)
    pixels = images.reshape(8, -1).astype(float).tolist()
    pixels[1], pixels[2][3], pixels[4][0] = None, None, float("nan")
    table = {
        "image": pa.array(pixels, pa.list_(pa.float32())),
        "label": pa.array([*labels[:5], None, 9, 1]),
    }
    pq.write_table(pa.table(table), tmp_path / "train.parquet")
    source = opened("parquet", tmp_path, "skip")
    assert sorted(images_of(source.evaluation("train", Topology(), 3))) == sorted(
        scaled(images[[0, 3, 7]])
    )
    assert {
        item.location.split(", ")[-1]: item.problem.split(";")[0] for item in source.unreadable()
    } == {
        "row 1": "image is null",
        "row 2": "a pixel is null, NaN or infinite",
        "row 4": "a pixel is null, NaN or infinite",
        "row 5": "label is null",
        "row 6": "label 9 is outside 0 ... 2",
    }


def test_a_wrong_label_and_a_missing_feature_of_a_record_are_left_out_with_the_reason(tmp_path):
    images, labels = random_images(8)
    labels[5] = 7
    paths = write_tfrecords(tmp_path, "train", images, labels, num_files=1)
    with tf.io.TFRecordWriter(str(tmp_path / "train-9.tfrecord")) as writer:
        writer.write(b"no example")
        writer.write(tf.train.Example().SerializeToString())
    source = TFRecords(str(tmp_path), SHAPE, 3)
    source.on_error = "skip"
    ((_, read),) = arrays_of(source.training(StreamRequest(Topology(), 10, 1, 0, 1)).take(1))
    assert set(read) == {0, 1, 2}
    assert {item.location: item.problem for item in source.unreadable()}.keys() == {
        f"{paths[0]}, record 5 at byte {scan_records(paths[0])[0][5]}",
        f"{tmp_path}/train-9.tfrecord, record 0 at byte 0",
        f"{tmp_path}/train-9.tfrecord, record 1 at byte 26",
    }


def test_a_flipped_bit_in_a_record_loses_that_record_only(tmp_path):
    images, labels = random_images(8)
    (path,) = write_tfrecords(tmp_path, "train", images, labels, num_files=1)
    flip(path, scan_records(path)[0][3] + 20)
    source = opened("tfrecord", tmp_path, "skip")
    assert sorted(images_of(source.evaluation("train", Topology(), 8))) == sorted(
        scaled(np.delete(images, 3, 0))
    )
    assert [item.problem for item in source.unreadable()] == ["corrupted record"]
