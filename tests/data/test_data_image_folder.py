"""Folders of image files: layout, splits, sizes, and files that are no images."""

from __future__ import annotations

import json
import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest
from hvtrain.data.fitted import CLASSES_FILE, check_classes
from hvtrain.data.formats.folders import look_up_labels
from hvtrain.data.manifest import differences
from hvtrain.data.sources.image_folder import ImageFolder
from hvtrain.errors import ConfigError, DataError
from tiny_data import SHAPE, joined, random_images, write_folder


def test_jpeg_and_png_of_any_size_become_one_size(tmp_path):
    image = np.full((20, 10, 3), 200, np.uint8)
    for name, data in (
        ("a.PNG", tf.io.encode_png(image)),
        ("b.jpeg", tf.io.encode_jpeg(image[:7])),
    ):
        (tmp_path / "train" / "cat").mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / "cat" / name).write_bytes(data.numpy())
    source = ImageFolder(str(tmp_path), [8, 8, 3])
    assert source.class_names == ["cat"] and source.num_examples("train") == 2
    images, _ = next(source.training(StreamRequest(Topology(), 2, 1, 0, 1)).as_numpy_iterator())
    assert images.shape == (2, 8, 8, 3)
    np.testing.assert_allclose(images, 200 / 255, atol=2 / 255)


def test_fractions_are_split_off_class_by_class_and_always_alike(tmp_path):
    write_folder(tmp_path / "train", *random_images(60))
    options = {"image_shape": SHAPE, "validation_fraction": 0.2, "test_fraction": 0.1}
    first, second = (ImageFolder(str(tmp_path), **options) for _ in range(2))
    assert [first.num_examples(split) for split in first.SPLITS] == [42, 12, 6]
    assert first._files == second._files
    assert sorted(joined(map(first.paths, first.SPLITS))) == sorted(
        map(str, tmp_path.glob("train/*/*.png"))
    )
    for split, per_class in zip(first.SPLITS, (14, 4, 2), strict=True):
        assert np.bincount([label for _, label in first._files[split]]).tolist() == [per_class] * 3


def test_layouts_that_are_refused(tmp_path):
    with pytest.raises(
        DataError,
        match=r"^dataset.dir=/no/such does not exist on \S+; give a folder that this host",
    ):
        ImageFolder("/no/such")
    with pytest.raises(
        DataError, match=r"train holds no class folders; files are needed as .*CLASS"
    ):
        ImageFolder(str(tmp_path))
    write_folder(tmp_path / "train", *random_images(6))
    (tmp_path / "train" / "empty").mkdir()
    with pytest.raises(DataError, match=r"train/empty holds no images"):
        ImageFolder(str(tmp_path))
    (tmp_path / "train" / "empty").rmdir()
    write_folder(tmp_path / "test", *(part[:2] for part in random_images(6)))
    assert [ImageFolder(str(tmp_path)).num_examples(split) for split in ("train", "test")] == [
        6,
        2,
    ], "without class_2"
    (tmp_path / "test" / "class_1").rename(tmp_path / "test" / "other")
    with pytest.raises(
        DataError, match=r"test has classes that .*train lacks: other; a model can only predict"
    ):
        ImageFolder(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"validation_fraction=0.6 and dataset.test_fraction=0.5: each"
    ):
        ImageFolder(str(tmp_path), validation_fraction=0.6, test_fraction=0.5)
    with pytest.raises(
        ConfigError, match=r"image_shape=\[8, 8\] is not \[height, width, channels\]"
    ):
        ImageFolder(str(tmp_path), image_shape=[8, 8])


def test_hidden_folders_are_no_classes_and_other_files_are_reported(tmp_path):
    write_folder(tmp_path / "train", *random_images(6))
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    for name in ("._0000.png", "Thumbs.db", "a.xcf", "b.xcf", "notes"):
        (tmp_path / "train" / "class_0" / name).touch()
    (tmp_path / "train" / "class_1" / "more").mkdir()
    source = ImageFolder(str(tmp_path), SHAPE)
    assert (
        source.class_names == ["class_0", "class_1", "class_2"]
        and source.num_examples("train") == 6
    )
    (message,) = source.description()["warnings"]
    assert (
        message
        == f"{tmp_path}/train: left out entries that are not images of a class: 2 x .xcf, 1 x notes, 1 x folder"
    )


@pytest.mark.parametrize("content", [b"", b"<html>", b"\xff\xd8\xff\xe0 cut off"])
def test_a_file_that_is_no_image_is_named(content, tmp_path):
    write_folder(tmp_path / "train", *random_images(6))
    culprit = tmp_path / "train" / "class_1" / "0001.png"
    culprit.write_bytes(content)
    for cache in (False, True):
        source = ImageFolder(str(tmp_path), SHAPE, cache=cache)
        with pytest.raises(tf.errors.OpError) as caught:
            list(source.training(StreamRequest(Topology(), 6, 1, 0, 1)).take(1))
        explained = source.explain(caught.value)
        assert isinstance(explained, DataError)
        assert str(explained).startswith(f"{culprit}: ")
        assert str(explained).endswith(
            "; fix or remove it, or set data.on_error=skip to leave out what cannot be read"
        )


def test_an_error_of_something_else_is_not_explained(tmp_path):
    write_folder(tmp_path / "train", *random_images(6))
    error = tf.errors.UnknownError(None, None, "HorovodAllreduce failed")
    assert ImageFolder(str(tmp_path), SHAPE).explain(error) is error


def test_the_cache_reads_each_file_once(tmp_path):
    write_folder(tmp_path / "train", *random_images(6))
    source = ImageFolder(str(tmp_path), SHAPE, cache=True)
    stream = source.training(StreamRequest(Topology(), 6, 1, 0, 1))
    for path in tmp_path.glob("train/*/*.png"):
        path.unlink()
    assert len(list(stream.take(3))) == 3
    assert len(list(source.training(StreamRequest(Topology(), 2, 1, 0, 3)).take(3))) == 3


def test_a_few_images_do_not_fill_the_cache(tmp_path, monkeypatch):
    write_folder(tmp_path / "train", *random_images(6))
    source = ImageFolder(str(tmp_path), SHAPE, cache=True)
    monkeypatch.setattr(
        ImageFolder, "_decode_all", lambda *_: pytest.fail("decodes the whole split")
    )
    assert [len(labels) for _, labels in source.spread("train", 3, 2)] == [2]


def test_raw_examples_without_an_unreadable_image(tmp_path):
    write_folder(tmp_path / "train", *random_images(6))
    (tmp_path / "train/class_0/0000.png").write_bytes(b"no image")
    source = ImageFolder(str(tmp_path), SHAPE)
    with pytest.raises(DataError, match=r"class_0/0000.png: "):
        source.raw_examples("train", Topology(), 3)
    source.on_error = "skip"
    assert len(source.raw_examples("train", Topology(), 3)) == 2


def test_another_division_of_the_ranks_is_another_cache(tmp_path):
    """As after an epoch of train.balance, in the same process."""
    write_folder(tmp_path / "train", *random_images(6))
    source = ImageFolder(str(tmp_path), SHAPE, cache=True)
    for weights in ((1, 1), (2, 1)):
        rank = Topology(0, 2, weights=weights)
        _, labels = source.reader("train", rank)(tf.range(rank.share_size(6)))
        assert labels.numpy().tolist() == source.whole_targets()["train"][rank.share(6)].tolist()


def test_a_file_of_labels(tmp_path):
    """Names and classes may have blanks; Excel begins the file with a byte order mark."""
    for name in ("train/golden retriever/1", "train/cat/1", "test/IMG 1", "test/IMG 2"):
        path = tmp_path / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(np.zeros((4, 4, 3), np.uint8)).numpy())
    labels = tmp_path / "labels.csv"
    labels.write_text("IMG 1.png,golden retriever\nIMG 2.png,cat\n", encoding="utf-8-sig")
    source = ImageFolder(str(tmp_path), (4, 4, 3), labels=str(labels))
    assert source.whole_targets()["test"].tolist() == [1, 0]
    before = source.manifest()
    labels.write_text("IMG 1.png,cat\nIMG 2.png,golden retriever\n")
    after = ImageFolder(str(tmp_path), (4, 4, 3), labels=str(labels)).manifest()
    assert differences(before, after) == ["test: the classes of its files differ"]
    labels.write_text("test/IMG 1.png,cat\ntest/IMG 2.png,cat\nval/IMG 1.png,golden retriever\n")
    with pytest.raises(
        DataError, match=r"gives 1 image.* a class .* IMG 1.png \(cat or golden retriever\)"
    ):
        ImageFolder(str(tmp_path), (4, 4, 3), labels=str(labels))
    labels.write_text("cat\ncat\n")
    source = ImageFolder(str(tmp_path), (4, 4, 3), labels=str(labels))
    assert source.whole_targets()["test"].tolist() == [0, 0]
    (tmp_path / "test/IMG 1.png").rename(tmp_path / "test/IMG 10.png")
    with pytest.raises(DataError, match=r"no file names.* 10 may come before or after 2"):
        ImageFolder(str(tmp_path), (4, 4, 3), labels=str(labels))
    with pytest.raises(DataError, match=r"gone.csv cannot be read: .*No such file"):
        ImageFolder(str(tmp_path), (4, 4, 3), labels=str(tmp_path / "gone.csv"))


def test_a_list_of_classes_may_have_another_unicode_form(tmp_path):
    composed, decomposed = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    (tmp_path / "labels.csv").write_text(f"{decomposed}.png,{decomposed}\n", encoding="utf-8")
    paths = [tmp_path / f"{composed}.png"]
    found = look_up_labels(paths, {"apple": 0, composed: 1}, str(tmp_path / "labels.csv"), None)
    assert [label for _, label in found] == [1]
    run_classes = {CLASSES_FILE: json.dumps(["apple", decomposed]).encode()}
    source = SimpleNamespace(name="copy", facts=lambda: {"class_names": ["apple", composed]})
    check_classes(source, run_classes, refuse=True)


def test_labels_may_be_quoted(tmp_path):
    (tmp_path / "labels.csv").write_text('"a.jpg","cat"\n"b.jpg","crane, bird"\n')
    labels = {"cat": 0, "crane, bird": 1}
    paths = [tmp_path / "a.jpg", tmp_path / "b.jpg"]
    found = look_up_labels(paths, labels, str(tmp_path / "labels.csv"), None)
    assert [label for _, label in found] == [0, 1]
