"""Manifests in checkpoints: the same for the same data, and the differences of another data set, in words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from damage import FILE_KINDS, broken, image_path, opened
from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest, from_arrays, manifest
from hvtrain.data.manifest import describe_files, differences, digest_of, user_path
from hvtrain.data.sources.built_in import Synthetic, digits
from hvtrain.errors import DataError
from tiny_data import random_images


def of(source) -> dict:
    """The manifest as it comes back from a checkpoint."""
    return json.loads(json.dumps(source.manifest()))


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_files_by_name_and_size(kind, tmp_path):
    for split, number in (("train", 20), ("test", 6)):
        broken(kind, tmp_path, number, set(), split)
    before = of(opened(kind, tmp_path, "stop"))
    assert before["splits"]["train"]["examples"] == 20 and "validation" not in before["splits"]
    assert differences(before, of(opened(kind, tmp_path, "stop"))) == []
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    assert differences(before, of(opened(kind, moved, "stop"))) == [], (
        "names within the folder count"
    )

    broken(kind, moved, 24, set())
    (found, *_) = differences(before, of(opened(kind, moved, "stop")))
    assert found == "train holds 24 examples, was 20"


def test_each_file_that_differs_is_named(tmp_path):
    broken("image_folder", tmp_path, 12, set())
    before = of(opened("image_folder", tmp_path, "stop"))
    name = image_path(tmp_path, 5).relative_to(tmp_path)
    size = image_path(tmp_path, 5).stat().st_size
    with image_path(tmp_path, 5).open("ab") as file:
        file.write(b"more")
    after = of(opened("image_folder", tmp_path, "stop"))
    assert differences(before, after) == [f"train: {name} has {size + 4} bytes, was {size}"]
    new = (
        image_path(tmp_path, 5)
        .rename(tmp_path / "train" / "class_0" / "a.png")
        .relative_to(tmp_path)
    )
    after = of(opened("image_folder", tmp_path, "stop"))
    assert differences(before, after) == [f"train: {new} is new", f"train: {name} is gone"]
    assert digest_of(before) != digest_of(after)


def test_of_many_files_a_digest_is_kept_and_some_sizes_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "MAX_FILES", 10)
    monkeypatch.setattr(manifest, "MAX_SIZES", 6)
    asked = []
    monkeypatch.setattr(
        manifest, "_file_bytes", lambda path: asked.append(path) or Path(path).stat().st_size
    )
    broken("image_folder", tmp_path, 12, set())
    before = of(opened("image_folder", tmp_path, "stop"))
    assert len(asked) == 6 and "files" not in before["splits"]["train"]
    with Path(asked[0]).open("ab") as file:
        file.write(b"more")
    (found,) = differences(before, of(opened("image_folder", tmp_path, "stop")))
    assert found == "train: names or sizes of its files differ"


def test_arrays_by_their_contents(monkeypatch):
    images, labels = random_images(50)

    def opened_arrays(**options):
        return from_arrays(
            images, labels, images[:9], labels[:9], name="mine", standardize="scale", **options
        )

    source = opened_arrays(num_validation=5)
    before = of(source)
    assert {split: part["examples"] for split, part in before["splits"].items()} == {
        "train": 45,
        "validation": 5,
        "test": 9,
    }
    source.training(StreamRequest(Topology(1, 2), 4, 1, 0, 2))
    assert of(source) == before, "after the arrays were cut to a rank's shard, too"
    assert differences(before, of(opened_arrays(num_validation=5, shift_pixels=2))) == [], (
        "augmentation is no data"
    )
    assert differences(before, of(opened_arrays(num_validation=6)))[:2] == [
        "train holds 44 examples, was 45",
        "validation holds 6 examples, was 5",
    ]
    images[30, 2, 2, 0] ^= 1
    assert differences(before, of(opened_arrays(num_validation=5))) == [
        "train: its content differs",
        "validation: its content differs",
    ]
    images[30, 2, 2, 0] ^= 1
    labels[30] = (labels[30] + 1) % 3
    assert len(differences(before, of(opened_arrays(num_validation=5)))) == 2
    monkeypatch.setattr(manifest, "MAX_BYTES", 600)
    few = of(opened_arrays(num_validation=5))
    images[0] ^= 1
    assert differences(few, of(opened_arrays(num_validation=5))), (
        "the first row is always among those read"
    )


def test_other_sources_by_their_counts_and_shape():
    before, after = (
        of(Synthetic([4, 4, 1], classes, num_train=train)) for classes, train in ((3, 9), (4, 8))
    )
    assert differences(before, after) == [
        "num_classes is 4, was 3",
        "train holds 8 examples, was 9",
    ]
    assert (
        differences(of(digits()), of(digits(num_test=300)))[0]
        == "train holds 1,497 examples, was 1,437"
    )
    assert differences({}, of(digits()))[0] == "name is digits, was missing", (
        "a checkpoint's may be anything"
    )


def test_a_damaged_size_is_not_fatal(tmp_path):
    assert manifest.describe_files(tmp_path, [f"{tmp_path}/gone.png"])["files"] == {
        "gone.png": None
    }


def test_a_file_name_that_is_not_utf_8_is_named(tmp_path):
    with pytest.raises(
        DataError, match=r"x\\xff.png' is a file whose name is not UTF-8; rename it"
    ):
        describe_files(tmp_path, [os.fsdecode(bytes(tmp_path) + b"/x\xff.png")])


def test_a_user_without_a_home_has_paths(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    assert user_path("~/data") == Path("~/data") and user_path("/data") == Path("/data")


def test_a_relative_folder_has_the_names_of_the_absolute_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [f"{tmp_path}/a/train/f.arrow"]
    by_absolute = describe_files(tmp_path / "a", paths)
    assert describe_files(Path("a"), paths) == by_absolute
    assert list(by_absolute["files"]) == ["train/f.arrow"]
