"""Shards of WebDataset: exact counts and a global shuffle by ranged reads, and what cannot be read in one line."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest
from hvtrain.data.description import class_counts
from hvtrain.data.formats import tar_files
from hvtrain.data.sources.image_folder import ImageFolder
from hvtrain.data.sources.segmentation_folder import SegmentationFolder
from hvtrain.data.sources.webdataset import web_dataset
from hvtrain.errors import ConfigError, DataError
from launching import many_runs
from shards import IMAGE_KEYS, members_of, write_shard, write_shards
from tiny_data import SHAPE, images_of, joined, random_images, scaled, write_folder

ADVICE = (
    "write or fetch the shard again, or set data.on_error=skip to leave out what cannot be read"
)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """The user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def opened(folder, on_error="stop", train=("*train*.tar",), **options):
    source = web_dataset(str(folder), SHAPE, 3, train, image_key=IMAGE_KEYS, **options)
    source.on_error = on_error
    return source


def arrays_of(batches):
    return list(batches.as_numpy_iterator())


def equal(first, second):
    return len(first) == len(second) and all(
        np.array_equal(a, b) for batch, other in zip(first, second) for a, b in zip(batch, other)
    )


def test_streams_are_those_of_the_same_images_in_folders(tmp_path):
    """Order, augmentation and labels of each rank, in training from any step and in evaluation."""
    images, labels = random_images(23)
    write_folder(tmp_path / "folder" / "train", images, labels)
    write_shards(tmp_path / "shards", "train", images, labels, 4)
    changes = {"flip": True, "shift_pixels": 1}
    folder = ImageFolder(str(tmp_path / "folder"), SHAPE, **changes)
    shards = opened(tmp_path / "shards", **changes)
    assert class_counts(shards) == class_counts(folder)
    for rank, start in ((0, 0), (2, 3)):
        place = Topology(rank, 3)
        request = StreamRequest(place, 3, 5, start, 2)
        first, second = (arrays_of(source.training(request).take(5)) for source in (folder, shards))
        assert equal(first, second)
        first, second = (
            arrays_of(source.evaluation("train", place, 4)) for source in (folder, shards)
        )
        assert equal(first, second)
        raw, others = (source.raw_examples("train", place, 3) for source in (folder, shards))
        assert equal([raw], [others])


@pytest.mark.parametrize("num_ranks", [1, 5])
def test_an_epoch_has_each_example_once_on_any_number_of_ranks(num_ranks, tmp_path):
    """Also where there are more ranks than shards, and examples do not divide evenly."""
    images, labels = random_images(20)
    write_shards(tmp_path, "train", images, labels, 3)
    source = opened(tmp_path)
    places = [Topology(rank, num_ranks) for rank in range(num_ranks)]
    assert sorted(
        joined(images_of(source.evaluation("train", place, 4)) for place in places)
    ) == sorted(scaled(images))
    orders = []
    for epoch in range(2):
        start = epoch * (20 // num_ranks)
        streams = [
            source.training(StreamRequest(place, 1, 7, start, 20 // num_ranks)) for place in places
        ]
        orders.append(joined(images_of(stream, 20 // num_ranks) for stream in streams))
    assert len(set(orders[0])) == len(set(orders[1])) == 20 // num_ranks * num_ranks
    assert orders[0] != orders[1]


def test_an_example_is_one_read_of_its_bytes(tmp_path, monkeypatch):
    images, labels = random_images(6)
    write_shards(tmp_path, "train", images, labels, 1)
    source = opened(tmp_path)
    read = source.reader("train", Topology())
    sizes = []
    pread = os.pread
    monkeypatch.setattr(
        os, "pread", lambda file, size, offset: sizes.append(size) or pread(file, size, offset)
    )
    read(tf.constant([2, 5], tf.int64))
    # Classes come after each other, as in folders: 0, 3, 1, 4, 2, 5.
    assert sizes == [len(tf.io.encode_png(image).numpy()) for image in images[[1, 5]]]


LAYOUTS = {
    "beside each other": (["train-0.tar", "val-0.tar", "test-0.tar"], {}),
    "in folders": (["train/a.tar", "valid/a.tar", "test/a.tar"], {}),
    "in ranges": (
        ["s-08.tar", "s-09.tar", "s-10.tar"],
        {"train": "s-{08..08}.tar", "validation": ["s-{09..09}.tar"], "test": ["s-{10..10}.tar"]},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_splits(name, tmp_path):
    paths, options = LAYOUTS[name]
    images, labels = random_images(6)
    for number, path in enumerate(paths, 1):
        write_shard(tmp_path / path, members_of(images, labels, range(number)))
        # As macOS leaves it.
        (tmp_path / path).with_name(f"._{Path(path).name}").write_bytes(b"junk")
    defaults = {
        "train": ["train*.tar", "train/*.tar"],
        "validation": ["val*.tar", "val*/*.tar"],
        "test": ["test*.tar", "test*/*.tar"],
    }
    source = opened(tmp_path, **{**defaults, **options})
    assert [source.num_examples(split) for split in source.SPLITS] == [1, 2, 3]
    assert [len(source.paths(split)) for split in source.SPLITS] == [1, 1, 1]


def test_validation_is_taken_out_of_training(tmp_path):
    images, labels = random_images(20)
    write_shards(tmp_path, "train", images, labels, 2)
    source = opened(tmp_path, num_validation=6)
    train, validation = (
        images_of(source.evaluation(split, Topology(), 4)) for split in ("train", "validation")
    )
    assert (len(train), len(validation)) == (14, 6)
    assert sorted(train + validation) == sorted(scaled(images))
    assert source.manifest()["splits"]["validation"]["num_files"] == 2
    with pytest.raises(ConfigError, match=r"num_validation=20 is not possible; give 0 ... 19"):
        opened(tmp_path, num_validation=20).num_examples("train")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["train-{000000..000002}.tar"],
            r"train-000002.tar does not exist; fetch it, or change dataset.train",
        ),
        (["shard*.tar"], r" has no shard\*\.tar; set dataset.train to its tar files"),
    ],
)
def test_shards_that_are_not_there(names, message, tmp_path):
    write_shards(tmp_path, "train", *random_images(6), 2)
    with pytest.raises(DataError, match=message):
        opened(tmp_path, train=names)


def test_a_shard_is_read_once_and_in_one_split(tmp_path):
    write_shards(tmp_path, "train", *random_images(6), 2)
    names = ["train-000001.tar", "train*.tar", "train-{000000..000001}.tar"]
    assert opened(tmp_path, train=names).num_examples("train") == 6
    assert web_dataset(str(tmp_path), SHAPE, 3, image_key="png").num_examples("train") == 6
    with pytest.raises(
        DataError,
        match=r"train-000001.tar is in both dataset.train and dataset.test; remove it from one",
    ):
        opened(tmp_path, train="train*.tar", test="train-000001.tar")


def write_labels(folder, suffix, texts):
    images, _ = random_images(len(texts))
    members = []
    for number, (image, text) in enumerate(zip(images, texts)):
        members += [
            (f"{number}.png", tf.io.encode_png(image).numpy()),
            (f"{number}.{suffix}", text),
        ]
    write_shard(folder / "train.tar", members)


@pytest.mark.parametrize(
    ("label_key", "suffix", "texts"),
    [
        ("cls", "cls", [b"2", b" 0\n", b"1"]),
        ("Cls", "CLS", [b"wolf", b"ant", b"bee"]),
        (
            "json.label",
            "json",
            [b'{"label": 2}', b'{"label": "ant"}', b'{"label": "1", "other": null}'],
        ),
        ("json.a.b", "json", [b'{"a": {"b": 2}}', b'{"a": {"b": 0}}', b'{"a": {"b": 1}}']),
        (
            "json.label",
            "json",
            [json.dumps({"text": "x" * 9000, "label": label}).encode() for label in (2, 0, 1)],
        ),
    ],
)
def test_labels(label_key, suffix, texts, tmp_path):
    write_labels(tmp_path, suffix, texts)
    source = opened(tmp_path, label_key=label_key, class_names=["ant", "bee", "wolf"])
    assert source.whole_targets()["train"].tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("label_key", "text", "shown"),
    [
        ("cls", b"3", "'3'"),
        ("cls", b"-1", "'-1'"),
        ("cls", b"", "''"),
        ("cls", b"cow", "'cow'"),
        ("cls", b"\xff\n\xfe", "'\ufffd\\n\ufffd'"),
        ("json.label", b'{"name": 1}', "{'name': 1}"),
        ("json.label", b"[[[", "'[[['"),
        ("json.label", b'{"label": 1.5}', "1.5"),
        ("json.label", b"[" * 5000, "'" + "[" * 40),
    ],
)
def test_a_label_that_is_no_class_is_one_line_or_left_out(label_key, text, shown, tmp_path):
    suffix = label_key.partition(".")[0]
    write_labels(tmp_path, suffix, [{"cls": b"0", "json": b'{"label": 0}'}[suffix], text])
    with pytest.raises(DataError) as caught:
        opened(tmp_path, label_key=label_key).num_examples("train")
    problem = f"{label_key} is "
    assert str(caught.value).startswith(f"{tmp_path}/train.tar, 1: {problem}") and "\n" not in str(
        caught.value
    )
    assert str(caught.value).endswith(
        f"; 0 ... 2 is needed, or one of dataset.class_names; {ADVICE}"
    )
    source = opened(tmp_path, "skip", label_key=label_key)
    assert source.num_examples("train") == 1
    (item,) = source.unreadable()
    assert (item.location, item.num_examples) == (f"{tmp_path}/train.tar, 1", 1)


LONG = "deep/" * 30 + "n" * 120


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_any_length_and_alphabet(format, tmp_path):
    images, _ = random_images(3)
    members = []
    for number, key in enumerate((f"{LONG}/été.é", f"{LONG}/x y@3+4", "päx/0")):
        members += [
            (f"{key}.cls", str(number).encode()),
            (f"{key}.png", tf.io.encode_png(images[number]).numpy()),
        ]
    write_shard(tmp_path / "train.tar", members, format)
    # "été.é.png" is what WebDataset calls é.png of été.
    source = opened(tmp_path, label_key="cls", on_error="skip")
    assert [item.location.rpartition(", ")[2] for item in source.unreadable()] == []
    assert source.num_examples("train") == 2
    assert images_of(source.evaluation("train", Topology(), 2)) == scaled(images[1:])


def test_a_shard_of_the_command_tar(tmp_path):
    """With folders, links and what else lies there; all images before all labels."""
    images, labels = random_images(4)
    folder = tmp_path / "files"
    (folder / "sub").mkdir(parents=True)
    for name, data in members_of(images, labels, range(4)):
        (folder / "sub" / name).write_bytes(data)
    (folder / "sub" / "README").write_text("no point in its name")
    (folder / "sub" / "notes.txt").write_text("no image, and no label")
    (folder / "sub" / ".hidden.png").write_bytes(b"hidden")
    (folder / "link.png").symlink_to("sub/0000.png")
    names = sorted(
        (str(path.relative_to(folder)) for path in folder.rglob("*")), key=lambda name: name[-4:]
    )
    subprocess.run(
        ["tar", "-cf", tmp_path / "train.tar", "--no-recursion", *names], cwd=folder, check=True
    )
    source = opened(tmp_path)
    assert sorted(images_of(source.evaluation("train", Topology(), 4))) == sorted(scaled(images))


def test_wherever_a_shard_is_cut_off_it_is_one_line(tmp_path):
    """With skip the examples before the cut are read."""
    images, labels = random_images(4)
    path = write_shard(tmp_path / "train.tar", members_of(images, labels, range(4)))
    data = path.read_bytes()
    # Eight members of a header and a block each, and then zeros.
    for length in [*range(0, 8 * 1024, 300), 8 * 1024, 8 * 1024 + 511]:
        path.write_bytes(data[:length])
        with pytest.raises(DataError) as caught:
            opened(tmp_path).num_examples("train")
        assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value), length
        assert "it is truncated" in str(caught.value), length
        if length >= 2048:
            source = opened(tmp_path, "skip")
            # The zeros after an image may be missing.
            assert source.num_examples("train") in (length // 2048, (length + 512) // 2048), length
            assert source.unreadable()[0].location == str(path)
    source = opened(tmp_path, "skip")
    assert images_of(source.evaluation("train", Topology(), 4)) == scaled(images)
    path.write_bytes(data[: 8 * 1024 + 512])
    assert opened(tmp_path).num_examples("train") == 4


def test_a_damaged_header_is_not_the_end(tmp_path):
    path = write_shard(tmp_path / "train.tar", members_of(*random_images(4), range(4)))
    data = bytearray(path.read_bytes())
    data[4096 + 50] ^= 4
    path.write_bytes(data)
    with pytest.raises(
        DataError,
        match=r"train.tar: has no header at byte 4,096: it is truncated or damaged; write",
    ):
        opened(tmp_path).num_examples("train")


def test_shards_that_were_joined_by_cat_are_refused(tmp_path):
    """For tar the archive ends with the first of them."""
    path = write_shard(tmp_path / "train.tar", members_of(*random_images(4), range(4)))
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(
        DataError, match=r"continues after its end at byte 8,192: `cat` does not join tar files; wr"
    ):
        opened(tmp_path).num_examples("train")


def test_a_compressed_shard_is_refused(tmp_path):
    path = write_shard(tmp_path / "train.tar", members_of(*random_images(4), range(4)))
    (tmp_path / "train.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(
        DataError,
        match=r"train.tar.gz: is compressed, so that no part of it can be read alone: decompress",
    ):
        opened(tmp_path, train=["train.tar.gz"]).num_examples("train")


@pytest.mark.parametrize(
    ("left_out", "missing"), [("0001.cls", "cls (it has png)"), ("0001.png", "image (it has cls)")]
)
def test_an_example_that_lacks_a_part(left_out, missing, tmp_path):
    members = [
        member for member in members_of(*random_images(3), range(3)) if member[0] != left_out
    ]
    path = write_shard(tmp_path / "train.tar", members)
    with pytest.raises(DataError) as caught:
        opened(tmp_path).num_examples("train")
    assert str(caught.value) == f"{path}, 0001: has no {missing}; {ADVICE}"
    source = opened(tmp_path, "skip")
    assert source.num_examples("train") == 2
    assert [item.location for item in source.unreadable()] == [f"{path}, 0001"]


def test_an_image_that_cannot_be_decoded_is_named(tmp_path):
    members = dict(members_of(*random_images(4), range(4)))
    members["0002.png"] = b"no image"
    path = write_shard(tmp_path / "train.tar", members.items())
    source = opened(tmp_path)
    with pytest.raises(tf.errors.OpError) as caught:
        arrays_of(source.evaluation("train", Topology(), 4))
    error = source.explain(caught.value)
    assert (
        isinstance(error, DataError)
        and str(error).startswith(f"{path}@")
        and "/0002.png: " in str(error)
    )
    source = opened(tmp_path, "skip")
    assert len(images_of(source.evaluation("train", Topology(), 4))) == 3


def scans(monkeypatch):
    """The shards whose headers are read from here on."""
    paths = []
    scan = tar_files._scan
    monkeypatch.setattr(
        tar_files, "_scan", lambda shard, file: paths.append(shard.name) or scan(shard, file)
    )
    return paths


def test_headers_are_read_once(tmp_path, monkeypatch):
    """And anew for a shard that has changed since, or whose index is damaged."""
    images, labels = random_images(6)
    first, second, third = write_shards(tmp_path, "train", images, labels, 3)
    read = scans(monkeypatch)
    assert [opened(tmp_path).num_examples("train") for _ in range(2)] == [6, 6]
    assert sorted(read) == [first.name, second.name, third.name]
    read.clear()
    # As many bytes, and another order.
    os.utime(write_shard(first, members_of(images, labels, [3, 0])), ns=(0, 0))
    write_shard(second, members_of(images, labels, [1]))
    third.with_name(f".{third.name}.index").write_bytes(b"PAR1 and what follows")
    source = opened(tmp_path)
    assert source.num_examples("train") == 5
    assert sorted(read) == [first.name, second.name, third.name]
    assert images_of(source.evaluation("train", Topology(), 9)) == scaled(images[[3, 0, 1, 2, 5]])


def test_where_shards_are_read_only_the_index_is_in_the_cache(tmp_path, cache, monkeypatch):
    (path,) = write_shards(tmp_path, "train", *random_images(6), 1)
    # No file can take its place, for root neither.
    (tmp_path / f".{path.name}.index").mkdir()
    (tmp_path / f".{path.name}.index" / "full").touch()
    read = scans(monkeypatch)
    assert [opened(tmp_path).num_examples("train") for _ in range(2)] == [6, 6]
    assert read == [path.name]
    assert len(list((cache / "hvtrain").iterdir())) == 1


def scene(seed):
    """An image and its mask, as PNG."""
    random = np.random.default_rng(seed)
    return [
        tf.io.encode_png(random.integers(0, high, (8, 10, channels), np.uint8)).numpy()
        for high, channels in ((256, 3), (3, 1))
    ]


def test_masks_are_those_of_the_same_files_in_folders(tmp_path):
    members = []
    for number in range(5):
        image, mask = scene(number)
        members += [(f"{number}.jpg", image), (f"{number}.seg.png", mask)]
        for part, data in (("images", image), ("masks", mask)):
            (tmp_path / "folder" / "train" / part).mkdir(parents=True, exist_ok=True)
            (tmp_path / "folder" / "train" / part / f"{number}.png").write_bytes(data)
    path = write_shard(tmp_path / "shards" / "train.tar", members)
    shape = (6, 6, 3)
    changes = {"flip": True, "shift_pixels": 1}
    folder = SegmentationFolder(str(tmp_path / "folder"), shape, 3, **changes)
    shards = web_dataset(
        str(path.parent), shape, 3, ["*.tar"], image_key=IMAGE_KEYS, label_key="seg.png", **changes
    )
    request = StreamRequest(Topology(1, 2), 2, 5, 0, 1)
    first, second = (arrays_of(source.training(request).take(3)) for source in (folder, shards))
    assert equal(first, second) and first[0][1].shape == (2, 6, 6)
    ours, theirs = (source.description() for source in (shards, folder))
    assert ours["masks"] == theirs["masks"]
    assert shards.manifest()["splits"]["train"]["files"] == {"train.tar": path.stat().st_size}


def test_a_mask_that_is_wrong_is_named(tmp_path):
    image, _ = scene(0)
    wrong = tf.io.encode_png(np.full((8, 10, 1), 7, np.uint8)).numpy()
    write_shard(tmp_path / "train.tar", [("0.png", image), ("0.seg.png", wrong)])
    shards = web_dataset(
        str(tmp_path), (6, 6, 3), 3, ["*.tar"], image_key=IMAGE_KEYS, label_key="seg.png"
    )
    with pytest.raises(tf.errors.OpError) as caught:
        arrays_of(shards.evaluation("train", Topology(), 4))
    assert (
        "/0.seg.png has the label 7, outside 0 ... 2 and 255; fix the mask (write PNG, since JPEG changes labels)"
        in str(shards.explain(caught.value))
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(folder, what each of two ranks saw, all output) of runs on the same images in folders and in shards."""
    folder = tmp_path_factory.mktemp("ranks")
    images, labels = random_images(40)
    write_folder(folder / "data" / "images" / "train", images, labels)
    write_shards(folder / "data" / "shards", "train", images, labels, 3)
    write_shards(folder / "data" / "changed", "train", images, labels, 3)[2].write_bytes(
        write_shard(folder / "more.tar", members_of(images, labels, range(12))).read_bytes()
    )
    damaged = write_shards(folder / "data" / "damaged", "train", images, labels, 3)[1]
    damaged.write_bytes(damaged.read_bytes()[:9000])
    same = [
        "model=mlp",
        "train.batch_size=4",
        "train.epochs=2",
        "train.deterministic=true",
        "dataset.image_shape=[6,6,1]",
    ]
    shards = [*same, "dataset=webdataset", "dataset.num_classes=3"]
    runs = {
        "images": [
            *same,
            "dataset=image_folder",
            "dataset.flip=false",
            f"dataset.dir={folder}/data/images",
        ],
        "shards": [
            *shards,
            f"dataset.dir={folder}/data/shards",
            'dataset.train="train-{000000..000002}.tar"',
        ],
        "shards/again": [*shards, f"dataset.dir={folder}/data/changed", "train.epochs=4"],
        "damaged": [*shards, f"dataset.dir={folder}/data/damaged"],
        "skipped": [*shards, f"dataset.dir={folder}/data/damaged", "data.on_error=skip"],
    }
    return folder, *many_runs("mpirun", 2, runs, folder)


@pytest.mark.distributed
def test_two_ranks_train_the_weights_of_the_same_images_in_folders(ranks):
    folder, results, output = ranks
    arrays = []
    for name in ("images", "shards"):
        assert all("record" in rank[name] for rank in results), output
        newest = max((folder / name / "checkpoints").glob("step-*"))
        arrays.append(load_file(newest / "state.safetensors"))
    assert arrays[0].keys() == arrays[1].keys()
    assert all(np.array_equal(arrays[0][key], arrays[1][key]) for key in arrays[0])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shards/again", "train holds 39 examples, was 40; restore that data set"),
        (
            "damaged",
            "train-000001.tar: is not a complete tar file (unexpected end of data): it is truncated or damaged",
        ),
    ],
)
def test_ranks_refuse_shards_that_have_changed_or_are_damaged(ranks, name, message):
    _, results, output = ranks
    assert all(message in rank[name]["error"] for rank in results), (results, output)


@pytest.mark.distributed
def test_ranks_train_on_what_is_left_of_a_damaged_shard(ranks):
    _, results, output = ranks
    assert results[0]["skipped"]["record"]["num_steps"] == 6
    assert (
        "skipped 1 example(s) that could not be read, and the rest of 1 damaged file(s)" in output
    )


def test_names_that_are_numbers_are_never_indices(tmp_path):
    write_labels(tmp_path, "cls", [b"1", b"2", b"0"])
    source = web_dataset(
        str(tmp_path), SHAPE, 3, "train.tar", image_key="png", class_names=["1", "2", "3"]
    )
    with pytest.raises(DataError, match=r"cls is '0'; one of dataset.class_names is needed"):
        source.num_examples("train")
