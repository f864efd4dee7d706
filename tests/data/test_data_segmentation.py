"""Images and masks as files."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from damage import let_go
from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest, from_arrays
from hvtrain.data.description import class_counts
from hvtrain.data.pipeline.decoding import Sizing
from hvtrain.data.sources.mask_files import IGNORED, MaskReader
from hvtrain.data.sources.segmentation_folder import SegmentationFolder, voc_pairs
from hvtrain.errors import ConfigError, DataError
from hvtrain.tasks import Segmentation
from hvtrain.training import saved_model

OPTIONS = {"image_shape": [8, 12, 3], "num_classes": 3, "flip": False}


def write(path, array, palette=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(array)
    if palette:
        image.putpalette([(value * 37) % 256 for value in range(768)])
    image.save(path)


def make(folder, voc=False, count=6):
    """Images of 16x24 whose left half is red and of class 1, with an ignored edge; the mask is a palette PNG."""
    rng = np.random.default_rng(0)
    for split, number in (("train", count), ("val" if voc else "test", 3)):
        names = [f"{split}{index}" for index in range(number)]
        for name in names:
            image = rng.integers(0, 90, (16, 24, 3)).astype("uint8")
            image[:, :12, 0] = 250
            mask = np.repeat([[1, 2]], 12, axis=1).repeat(16, axis=0).astype("uint8")
            mask[:2] = IGNORED
            images, masks = (folder / "JPEGImages", folder / "SegmentationClass")
            if not voc:
                images, masks = folder / split / "images", folder / split / "masks"
            write(images / f"{name}.{'jpg' if voc else 'png'}", image)
            write(masks / f"{name}.png", mask, palette=True)
        if voc:
            path = folder / "ImageSets/Segmentation" / f"{split}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(names))
    return folder


@pytest.mark.parametrize("border", [{"shift_pixels": 1}, {"fit": "pad"}])
def test_a_filled_border_has_to_be_ignored(tmp_path, border):
    folder = str(make(tmp_path, count=1))
    filled = SegmentationFolder(folder, **OPTIONS, **border)
    Segmentation().check_targets(filled)
    for label, shown in ((None, "null"), (0, "0")):
        task = Segmentation(ignored_label=label)
        task.check_targets(SegmentationFolder(folder, **OPTIONS))
        message = f"task.ignored_label={shown}, but segmentation_folder fills the borders of masks"
        with pytest.raises(ConfigError, match=message):
            task.check_targets(filled)


def test_a_white_foreground_that_few_masks_show_is_class_1(tmp_path):
    """In none of the masks that are counted; and a run keeps it for data whose masks show none."""
    for index in range(70):
        write(tmp_path / "train/images" / f"{index:02}.png", np.zeros((4, 4, 3), np.uint8))
        mask = np.full((4, 4), 255 if index == 33 else 0, np.uint8)
        write(tmp_path / "train/masks" / f"{index:02}.png", mask)
    options = {"image_shape": [4, 4, 3], "num_classes": 2, "flip": False}
    source = SegmentationFolder(str(tmp_path), **options)
    masks = np.concatenate([batch[1] for batch in source.evaluation("train", Topology(), 35)])
    assert [(masks == label).sum() for label in (0, 1, IGNORED)] == [69 * 16, 16, 0]

    write(tmp_path / "train/masks/33.png", np.full((4, 4), 1, np.uint8))
    other = SegmentationFolder(str(tmp_path), **options)
    assert not other._masks.is_binary
    fitted = other.fitted()
    other.fit_as(source.fitted())
    assert other._masks.is_binary

    source.fit_as(fitted)
    assert source._masks.is_binary, "or all foreground would be ignored, and the mean IoU high"
    advice = "masks sampled here hold 0 and 255, .* or set dataset.colors=.0,1,255. if 255 is to be"
    with pytest.raises(tf.errors.InvalidArgumentError, match=advice):
        list(source.evaluation("train", Topology(), 35))


@pytest.mark.parametrize("voc", [False, True])
def test_masks_stay_with_their_images(voc, tmp_path):
    source = SegmentationFolder(
        str(make(tmp_path, voc)), **{**OPTIONS, "flip": True, "shift_pixels": 2}
    )
    Segmentation().prepare(source)
    assert (
        source.num_examples("train") == 6
        and source.num_examples("validation" if voc else "test") == 3
    )
    flipped = set()
    for rank in range(2):
        stream = source.training(
            StreamRequest(Topology(rank, 2), 3, seed=1, start_step=0, steps_per_epoch=1)
        )
        for images, masks in stream.take(6).as_numpy_iterator():
            assert images.shape == (3, 8, 12, 3) and masks.shape == (3, 8, 12)
            # Not where the halves mix.
            inside = (masks != IGNORED) & (np.abs(images[..., 0] - 0.6) > 0.3)
            np.testing.assert_array_equal((images[..., 0] > 0.6)[inside], (masks == 1)[inside])
            assert (masks[(images == 0).all(axis=-1)] == IGNORED).mean() > 0.9, (
                "what came in at a border"
            )
            flipped |= {bool(mask[4, 3] == 2) for mask in masks}
    assert flipped == {False, True}


def test_lists_of_voc_may_have_any_name_of_a_split(tmp_path):
    """And labelme writes a JSON file beside each image."""
    lists = make(tmp_path, voc=True) / "ImageSets/Segmentation"
    (lists / "val.txt").rename(lists / "validation.txt")
    (tmp_path / "JPEGImages/train0.json").touch()
    pairs = voc_pairs(tmp_path)
    assert {split: len(files) for split, files in pairs.items()} == {"train": 6, "validation": 3}
    assert pairs["train"][0][0].endswith("train0.jpg")


def test_evaluation_and_the_saved_model_see_the_same(tmp_path):
    source = SegmentationFolder(str(make(tmp_path)), **OPTIONS)
    ((images, masks),) = source.evaluation("test", Topology(), 3).as_numpy_iterator()
    assert (
        (masks[:, 1:, :6] == 1).all()
        and (masks[:, 1:, 6:] == 2).all()
        and (masks[:, 0] == IGNORED).all()
    )
    assert images.max() <= 1
    assert saved_model.check_preprocessing(source.preprocessing(), source, Topology()) is None


def png_header(width, height):
    """The beginning of a grey PNG of that size, which announces more than the file holds."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100)))


def test_a_mask_may_be_as_large_as_an_image(tmp_path):
    """14,000 x 14,000, as satellites take them, were too many for Pillow's limit."""
    path = tmp_path / "large.png"
    path.write_bytes(png_header(14_000, 14_000))
    with pytest.raises(DataError, match=r"large.png or its image cannot be read: .*truncated"):
        MaskReader(2, (), Sizing((8, 8, 3))).read((str(path), str(path)))


def test_what_is_wrong_with_a_file_is_named(tmp_path):
    folder = make(tmp_path)
    mask = folder / "train/masks/train2.png"

    def first_batch():
        source = SegmentationFolder(str(folder), **OPTIONS)
        try:
            next(iter(source.training(StreamRequest(Topology(), 6, 1, 0, 1))))
        except tf.errors.OpError as error:
            explained = source.explain(error)
        let_go()
        raise explained

    write(mask, np.zeros((16, 20), "uint8"))
    with pytest.raises(
        DataError,
        match=r"train2.png has \(20, 16\) pixels and its image \(24, 16\); both need the same size",
    ):
        first_batch()
    write(mask, np.full((16, 24), 7, "uint8"))
    with pytest.raises(DataError, match=r"train2.png has the label 7, outside 0 \.\.\. 2"):
        first_batch()
    write(mask, np.full((16, 24, 3), (0, 0, 1), "uint8"))
    with pytest.raises(
        DataError, match=r"train2.png is in color; give the color of each class, as in"
    ):
        first_batch()
    mask.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"train2.png or its image cannot be read: cannot identify"):
        first_batch()
    mask.write_bytes(png_header(50_000, 40_000))
    with pytest.raises(
        DataError,
        match=r"train2.png or its image cannot be read: Image size .* exceeds limit of 536870912",
    ):
        first_batch()
    mask.unlink()
    with pytest.raises(
        DataError, match=r"train2.png needs one mask, such as .*masks/train2.png, but has none"
    ):
        first_batch()
    write(mask, np.zeros((16, 24), "uint8"))
    (folder / "train/images/train4.png").write_bytes(b"\x89PNG nothing")
    with pytest.raises(
        DataError, match=r"train/images/train4.png: .*; fix or remove it, or set data.on_error=skip"
    ):
        first_batch()


def test_wrong_settings_are_refused(tmp_path):
    with pytest.raises(
        DataError, match="holds no training images; files are needed as train/images"
    ):
        SegmentationFolder(str(tmp_path), **OPTIONS)
    for number in (1, 256):
        with pytest.raises(
            ConfigError, match=f"num_classes={number}: 8-bit masks hold 2 to 255 classes"
        ):
            SegmentationFolder(str(tmp_path), [8, 12, 3], number)
    with pytest.raises(ConfigError, match=r"class_names has length 1, but num_classes is 3"):
        SegmentationFolder(str(make(tmp_path)), **OPTIONS, class_names=["a"])


def test_images_and_masks_that_cannot_be_read_are_left_out(tmp_path):
    folder = make(tmp_path)
    whole = SegmentationFolder(str(folder), **OPTIONS)
    _, expected = next(whole.evaluation("train", Topology(), 6).as_numpy_iterator())
    write(folder / "train/masks/train2.png", np.full((16, 24), 7, "uint8"))
    (folder / "train/images/train4.png").write_bytes(b"\x89PNG nothing")
    source = SegmentationFolder(str(folder), **OPTIONS)
    source.on_error = "skip"
    ((images, masks),) = source.evaluation("train", Topology(), 6).as_numpy_iterator()
    assert len(images) == 4 and np.array_equal(masks, expected[[0, 1, 3, 5]])
    images, masks = next(source.training(StreamRequest(Topology(), 6, 1, 0, 1)).as_numpy_iterator())
    assert (
        images.shape == (6, 8, 12, 3)
        and masks.shape == (6, 8, 12)
        and set(np.unique(masks)) == {1, 2, IGNORED}
    )
    left_out = {Path(item.location).name: item.problem for item in source.unreadable()}
    assert sorted(left_out) == ["train2.png", "train4.png"]
    assert (
        "train2.png has the label 7, outside 0 ... 2 and 255; fix the mask (write PNG, since JPEG changes labels)"
        in left_out["train2.png"]
    )


def test_masks_in_arrays_move_with_their_images():
    """Of floats too; what comes in at a border is ignored."""
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 3, (12, 6, 7))
    source = from_arrays(
        masks * 0.5 + 0.1, masks, num_classes=3, standardize="none", shift_pixels=2, flip=True
    )
    Segmentation().prepare(source)
    assert class_counts(source)["train"] == np.bincount(masks.ravel()).tolist()
    moved = 0
    for images, found in (
        source.training(StreamRequest(Topology(), 4, 1, 0, 3)).take(6).as_numpy_iterator()
    ):
        assert found.dtype == np.uint8 and images.shape == (4, 6, 7, 1)
        inside = found != IGNORED
        np.testing.assert_allclose(images[..., 0][inside], found[inside] * 0.5 + 0.1, rtol=1e-6)
        assert not images[..., 0][~inside].any()
        moved += (~inside).any(axis=(1, 2)).sum()
    assert moved > 12


def test_masks_of_black_and_white_images_keep_their_labels():
    """A pixel that is True or False could not hold one."""
    masks = np.random.default_rng(0).integers(0, 2, (8, 6, 7))
    source = from_arrays(masks == 1, masks * 2, num_classes=3, standardize="none", flip=True)
    stream = source.training(StreamRequest(Topology(), 8, 1, 0, 1)).take(1)
    ((images, found),) = stream.as_numpy_iterator()
    np.testing.assert_array_equal(found, images[..., 0] * 2)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (
            np.full((5, 6, 7), -1),
            r"masks hold labels from -1 to -1; give classes from 0, and 255 for pixels",
        ),
        (
            np.zeros((5, 4, 7), int),
            r"masks are int64 of shape \(5, 4, 7\); whole numbers \[n, 6, 7\] are needed",
        ),
        (np.zeros((4, 6, 7), int), r"5 inputs, 4 targets; each example needs one of each"),
    ],
)
def test_masks_in_arrays_that_do_not_fit_are_refused(masks, message):
    with pytest.raises(DataError, match=message):
        from_arrays(np.zeros((5, 6, 7)), masks, num_classes=3).num_examples("train")
