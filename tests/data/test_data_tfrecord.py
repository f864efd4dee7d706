"""TFRecord files: counting, dealing by file, damage."""

from __future__ import annotations

import re

import pytest
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest, write_tfrecords
from hvtrain.data.formats.record_files import scan_records
from hvtrain.data.sources.file_source import deal
from hvtrain.data.sources.tfrecord import TFRecords
from hvtrain.errors import ConfigError, DataError
from tiny_data import SHAPE, images_of, joined, random_images


def test_records_are_counted_and_truncation_is_found_with_its_place(tmp_path):
    paths = write_tfrecords(tmp_path, "train", *random_images(11), num_files=3)
    assert [path.name for path in paths] == [f"train-0000{i}-of-00003.tfrecord" for i in range(3)]
    assert [len(scan_records(path)[0]) for path in paths] == [4, 4, 3]

    data = paths[0].read_bytes()
    paths[0].write_bytes(data[:-1])
    with pytest.raises(
        DataError, match=rf"{paths[0]}: record 3 at byte \d+ should end at byte {len(data)}, "
    ):
        TFRecords(str(tmp_path), SHAPE, 3).num_examples("train")
    paths[0].write_bytes(data + b"\x01")
    with pytest.raises(DataError, match=rf"record 4 at byte {len(data)} "):
        TFRecords(str(tmp_path), SHAPE, 3).num_examples("train")
    paths[0].write_bytes(b"")
    source = TFRecords(str(tmp_path), SHAPE, 3)
    assert source.num_examples("train") == 7
    assert source.description()["warnings"] == [f"1 file(s) without records: {paths[0]}"]
    for path in paths:
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"all training files are empty; write or fetch them again"):
        TFRecords(str(tmp_path), SHAPE, 3).num_examples("train")


def test_files_are_dealt_whole_and_evenly():
    counts = {f"file{number}": size for number, size in enumerate([9, 1, 5, 5, 4, 4, 1])}
    shards = deal(counts, 3)
    assert sorted(joined(shards)) == sorted(counts)
    assert sorted(sum(counts[path] for path in shard) for shard in shards) == [9, 10, 10]


def test_evaluation_keeps_the_order_of_the_records(tmp_path):
    """Though the largest files are dealt first."""
    images, labels = random_images(10)
    write_tfrecords(tmp_path, "train", images, labels, num_files=1)
    for name, rows in (("test-a", slice(3)), ("test-b", slice(3, 10))):
        write_tfrecords(tmp_path, name, images[rows], labels[rows], num_files=1)
    source = TFRecords(str(tmp_path), SHAPE, 3)
    read = [batch[1].numpy() for batch in source.evaluation("test", Topology(), 4)]
    assert joined(read) == labels.tolist()


def test_each_rank_reads_files_of_its_own(tmp_path):
    write_tfrecords(tmp_path, "train", *random_images(23), num_files=5)
    source = TFRecords(str(tmp_path), SHAPE, 3)
    files = source.shards("train", 3)
    assert sorted(joined(files)) == sorted(map(str, tmp_path.glob("train*")))
    assert source.shard_sizes("train", 3) == [
        sum(len(scan_records(tmp_path / f)[0]) for f in part) for part in files
    ]


def test_fewer_files_than_ranks_is_refused_for_training_but_not_for_testing(tmp_path):
    write_tfrecords(tmp_path, "train", *random_images(8), num_files=4)
    write_tfrecords(tmp_path, "test", *random_images(3), num_files=1)
    source = TFRecords(str(tmp_path), SHAPE, 3)
    with pytest.raises(
        DataError,
        match=r"4 TFRecord file\(s\) of training .* for 5 ranks.*write at least 5 TFRecord files",
    ):
        source.shard_sizes("train", 5)
    assert source.shard_sizes("test", 4) == [3, 0, 0, 0]
    assert images_of(source.evaluation("test", Topology(2, 4), 2)) == []


def test_no_files_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no train\*.tfrecord"):
        TFRecords(str(tmp_path), SHAPE, 3)


def explained(source: TFRecords) -> str:
    with pytest.raises(tf.errors.OpError) as caught:
        list(source.training(StreamRequest(Topology(), 8, 1, 0, 1)).take(1))
    error = source.explain(caught.value)
    assert isinstance(error, DataError)
    return str(error)


def test_a_flipped_bit_is_traced_to_its_file(tmp_path):
    _, path = write_tfrecords(tmp_path, "train", *random_images(8), num_files=2)
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)
    message = explained(TFRecords(str(tmp_path), SHAPE, 3))
    assert message == (
        f"{path}, record 3 at byte {scan_records(path)[0][3]}: corrupted record; write or fetch the file again, "
        "or set data.on_error=skip to leave out what cannot be read"
    )


def test_a_label_outside_the_classes_is_traced_to_its_file(tmp_path):
    images, labels = random_images(8)
    labels[5] = 7
    _, path = write_tfrecords(tmp_path, "train", images, labels, num_files=2)
    message = explained(TFRecords(str(tmp_path), SHAPE, 3))
    assert message.startswith(f"{path}, record 2 at byte "), message
    assert ": label 7 is outside 0 ... 2; write or fetch the file again, or" in message


def test_a_missing_feature_and_a_bad_image_are_traced_to_their_file(tmp_path):
    (path,) = write_tfrecords(tmp_path, "train", *random_images(8), num_files=1)
    for options, problem in (
        ({"image_key": "picture"}, r"has no feature picture, but image \(bytes\), label \(int64\)"),
        ({"label_key": "kind"}, r"has no feature kind, but image .*; set dataset.label_key"),
        ({"image_key": "label"}, "has numbers in label, and an encoded image is needed"),
    ):
        with pytest.raises(ConfigError, match=f"{path}, record 0 {problem}"):
            TFRecords(str(tmp_path), SHAPE, 3, **options).num_examples("train")
    with tf.io.TFRecordWriter(str(path)) as writer:
        for _ in range(8):
            feature = {
                "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"no image"])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[0])),
            }
            writer.write(
                tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
            )
    message = explained(TFRecords(str(tmp_path), SHAPE, 3))
    assert re.match(rf"{path}, record \d at byte \d+: Unknown image file", message), message
