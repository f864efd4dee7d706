"""Files and arrays as people have them: each case becomes what Pillow and NumPy read, or one line with the fix.

Each line of a table is a case: what is written, and what it must become. The numbers are those of the points in
the issue on data that were read wrongly without a word: 8 splits, 9 masks, 10 images, 11 records, 12 text, 13 arrays.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest, from_arrays, write_tfrecords
from hvtrain.data.description import describe
from hvtrain.data.formats.documents import read_documents, read_labelled
from hvtrain.data.formats.image_files import decode_by_pillow
from hvtrain.data.sources.arrays import ImagesWithMasks
from hvtrain.data.sources.image_folder import ImageFolder
from hvtrain.data.sources.parquet import Parquet
from hvtrain.data.sources.segmentation_folder import IGNORED, SegmentationFolder
from hvtrain.data.sources.text import Text
from hvtrain.data.sources.tfrecord import TFRecords
from hvtrain.errors import ConfigError, DataError
from tiny_data import random_images

SHAPE = (4, 6, 3)
RANDOM = np.random.default_rng(0)
COLORS = RANDOM.integers(0, 256, SHAPE, np.uint8)
PICTURE = Image.fromarray(COLORS)
TRANSPARENT = Image.merge("RGBA", [*PICTURE.split(), PICTURE.getchannel(0)])
ANIMATED = {"save_all": True, "append_images": [PICTURE.rotate(180)], "icc_profile": b"colors"}
LABELS = RANDOM.integers(0, 2, (4, 6)).astype(np.uint8)


def encoded(picture: Image.Image, kind: str = "PNG", orientation: int = 1, **options) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    data = io.BytesIO()
    picture.save(data, kind, **options, **({"exif": exif.tobytes()} if orientation > 1 else {}))
    return data.getvalue()


def write(path: Path, content: bytes | str | np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, np.ndarray):
        content = encoded(Image.fromarray(content))
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_all(folder: Path, files: str) -> None:
    """Writes a picture for each of the names, which stand apart by spaces."""
    for name in files.split():
        write(folder / name, COLORS)


def examples(source, split="train"):
    """The images, as bytes, and the targets of a split."""
    batches = source.evaluation(split, Topology(), 50).as_numpy_iterator()
    images, targets = (np.concatenate(parts) for parts in zip(*batches))
    return np.round(images * 255).astype(np.uint8), targets


def explained_examples(source):
    """The examples, or the error that a run would show."""
    try:
        return examples(source)
    except tf.errors.OpError as error:
        raise source.explain(error) from error


def warnings(source) -> str:
    return "; ".join(source.description().get("warnings", []))


# 10. Name, suffix, Pillow's format, picture, options of saving; Pillow must see the same pixels.
PICTURES = [
    *((f"turned {turn}", ".png", "PNG", PICTURE, {"orientation": turn}) for turn in range(2, 9)),
    ("turned JPEG", ".JPG", "JPEG", PICTURE, {"orientation": 6}),
    ("turned WebP", ".webp", "WEBP", PICTURE, {"orientation": 8, "lossless": True}),
    ("turned TIFF", ".tif", "TIFF", PICTURE, {"orientation": 3}),
    ("WebP", ".WebP", "WEBP", PICTURE, {"lossless": True}),
    ("TIFF", ".TIFF", "TIFF", PICTURE, {"compression": "tiff_lzw"}),
    ("palette BMP", ".bmp", "BMP", PICTURE.quantize(8), {}),
    ("grey BMP", ".bmp", "BMP", PICTURE.convert("L"), {}),
    ("black and white BMP", ".bmp", "BMP", PICTURE.convert("1"), {}),
    ("BMP with alpha", ".bmp", "BMP", PICTURE.convert("RGBA"), {}),
    ("palette PNG", ".PNG", "PNG", PICTURE.quantize(8), {}),
    ("grey TIFF", ".tif", "TIFF", PICTURE.convert("L"), {}),
    ("CMYK TIFF", ".tif", "TIFF", PICTURE.convert("CMYK"), {}),
    ("AVIF", ".jpg", "AVIF", PICTURE, {}),
    ("animated WebP", ".webp", "WEBP", PICTURE, ANIMATED),
    ("transparent WebP", ".webp", "WEBP", TRANSPARENT, {}),
    ("transparent lossless WebP", ".webp", "WEBP", TRANSPARENT, {"lossless": True, "exact": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("suffix", "kind", "picture", "options"),
    [case[1:] for case in PICTURES],
    ids=[f"{number} {case[0]}" for number, case in enumerate(PICTURES)],
)
def test_pictures_are_what_pillow_sees(suffix, kind, picture, options, tmp_path):
    path = write(tmp_path / "train/a" / f"1{suffix}", encoded(picture, kind, **options))
    seen = ImageOps.exif_transpose(Image.open(path))
    for channels, mode in ((3, "RGB"), (1, "L")) if kind in ("BMP", "TIFF") else ((3, "RGB"),):
        expected = np.asarray(seen.convert(mode)).reshape(*seen.size[::-1], channels)
        ((image,), _) = examples(ImageFolder(str(tmp_path), expected.shape, flip=False))
        assert np.array_equal(image, expected)


def test_cmyk_becomes_grey_behind_a_long_color_profile(tmp_path):
    content = encoded(PICTURE.convert("CMYK"), "JPEG", icc_profile=bytes(8000))
    path = write(tmp_path / "train/a/1.jpg", content)
    grey = np.asarray(Image.open(path).convert("L"))[..., None]
    ((image,), _) = examples(ImageFolder(str(tmp_path), (4, 6, 1), flip=False))
    assert np.array_equal(image, grey)


def test_orientation_can_be_left_as_it_is_stored(tmp_path):
    write(tmp_path / "train/a/1.png", encoded(PICTURE, orientation=6))
    source = ImageFolder(str(tmp_path), SHAPE, flip=False, exif=False)
    assert np.array_equal(examples(source)[0], COLORS[None])
    assert (
        "1 with an EXIF orientation, left as they are stored" in source.description()["images"][-1]
    )
    told = [each.preprocessing().values for each in (source, ImageFolder(str(tmp_path), SHAPE))]
    assert ["upright" in values for values in told] == [False, True], "to users of the model"


def test_an_odd_entry_beside_the_orientation_does_not_matter():
    """Pillow fails to write such an entry anew (python-pillow/Pillow#8965, photographs of a Samsung phone)."""
    entries = struct.pack("<HHIHH", 274, 3, 1, 6, 0) + struct.pack("<HHIhh", 296, 8, 1, -1, 0)
    odd = b"Exif\0\0II*\0\x08\0\0\0\x02\0" + entries + bytes(4)
    content = encoded(PICTURE, "JPEG", exif=odd)
    stored = np.asarray(Image.open(io.BytesIO(content)))
    turned = decode_by_pillow(content + b".", channels=3, exif=True)
    assert np.array_equal(turned, np.rot90(stored, -1))


# 10. Pictures that would lose what they show.
# In the last one, 12 colors of 8 bits a row become 6 of 16 bits.
DEEP = [
    (
        ".png",
        encoded(Image.fromarray(RANDOM.integers(0, 4096, (4, 6)).astype(np.uint16))),
        "16 bits per channel and no value above",
    ),
    (
        ".tif",
        encoded(Image.fromarray(RANDOM.random((4, 6)).astype(np.float32)), "TIFF"),
        "more than 8 bits per channel",
    ),
    (
        ".tif",
        encoded(Image.new("RGB", (12, 4), (7, 8, 9)), "TIFF")
        .replace(b"\0\1\4\0\1\0\0\0\x0c", b"\0\1\4\0\1\0\0\0\6")
        .replace(3 * b"\x08\0", 3 * b"\x10\0"),
        "more than 8 bits per channel (TIFF, mode RGB)",
    ),
]


@pytest.mark.parametrize(("suffix", "content", "message"), DEEP, ids=[".png", ".tif", "RGB.tif"])
def test_pictures_of_more_than_8_bits_are_refused(suffix, content, message, tmp_path):
    path = write(tmp_path / "train/a" / f"1{suffix}", content)
    with pytest.raises((DataError, tf.errors.OpError)) as caught:
        source = ImageFolder(str(tmp_path), SHAPE)
        try:
            next(iter(source.training(StreamRequest(Topology(), 1, 1, 0, 1))))
        except tf.errors.OpError as error:
            raise source.explain(error) from error
    assert (
        message in str(caught.value)
        and str(path) in str(caught.value)
        and "\n" not in str(caught.value)
    )


# 10. What people save under the name of an image.
NO_IMAGES = [
    ("<!DOCTYPE html><html>404</html>", "it is a web page"),
    ('<svg width="4" height="4"/>', "it is SVG"),
    ("%PDF-1.7", "it is a PDF"),
    ("version https://git-lfs.github.com/spec/v1", "git lfs pull"),
    ("\0\0\0\x18ftypheic" + 40 * "\0", "it is HEIC"),
]


@pytest.mark.parametrize(("content", "message"), NO_IMAGES)
def test_what_is_no_image_is_named(content, message, tmp_path):
    write_all(tmp_path, "train/a/1.png train/a/2.png")
    path = write(tmp_path / "train/a/3.png", content)
    with pytest.raises(DataError, match=f"{path}: .*{message}"):
        explained_examples(ImageFolder(str(tmp_path), SHAPE))


# 8. Files, options, examples in train, validation and test, a part of the warnings.
FOLDERS = [
    ("train/a/1.png val/a/1.png", {}, (1, 1, 0), ""),
    ("train/a/1.png valid/a/1.png testing/a/1.png", {}, (1, 1, 1), ""),
    ("Train/a/1.png Validation/a/1.png TEST/a/1.png", {}, (1, 1, 1), ""),
    ("training/a/1.png dev/a/1.png", {}, (1, 1, 0), ""),
    (
        "train/a/1.png validation/a/1.png val/a/2.png",
        {},
        (1, 1, 0),
        "they are in no split: val (each split is read from the first of: train, training; validation, val,",
    ),
    (
        "train/a/1.png holdout/a/1.png x.png",
        {},
        (1, 0, 0),
        "they are in no split: holdout, x.png",
    ),
    ("train/a/1.png train/a/._1.png train/a/Thumbs.db __MACOSX/x.png", {}, (1, 0, 0), ""),
    (
        "train/a/1.png train/a/1.heic",
        {},
        (1, 0, 0),
        "left out entries that are not images of a class: 1 x .heic",
    ),
    (
        "train/a/1.png train/2.png train/3.png val/a/1.png",
        {},
        (1, 1, 0),
        "train: left out entries that are not images of a class: 2 x .png",
    ),
    ("train/a/1.png train/b/1.png test/a/1.png", {}, (2, 0, 1), ""),
    (
        "train/a/1.jpg train/a/2.JPG train/a/3.webp train/a/4.TIF train/a/5.jfif train/a/6.avif",
        {"validation_fraction": 0.5},
        (3, 3, 0),
        "",
    ),
]


@pytest.mark.parametrize(("files", "options", "counts", "warning"), FOLDERS)
def test_folders_become_splits(files, options, counts, warning, tmp_path):
    write_all(tmp_path, files)
    source = ImageFolder(str(tmp_path), SHAPE, **options)
    assert tuple(source.num_examples(split) for split in source.SPLITS) == counts
    assert warning in warnings(source) if warning else warnings(source) == ""


# 8 and 10. Files, options, the message.
REFUSED_FOLDERS = [
    (
        "train/a/1.png train/a/2.png",
        {"validation_fraction": 0.1},
        "validation_fraction=0.1 takes 0 images, and leaves training images of 1 of 1 classes: each class has 2 to 2",
    ),
    (
        "train/a/1.png train/b/1.png train/b/2.png",
        {"test_fraction": 0.6},
        "test_fraction=0.6 takes 2 images, and leaves training images of 1 of 2 classes",
    ),
    (
        "train/a/x/1.png train/b/x/1.png",
        {},
        "train/a holds no images .*move those of its subfolders",
    ),
    ("train/a/1.png test/b/1.png", {}, "test has classes that .*train lacks: b"),
    ("train/caf\udce9/1.png", {}, r"caf\\xe9' is a file whose name is not UTF-8; rename it"),
    (
        f"train/caf{chr(233)}/1.png train/cafe{chr(769)}/1.png",
        {},
        "two folders .* differ only in their Unicode form",
    ),
]


@pytest.mark.parametrize(("files", "options", "message"), REFUSED_FOLDERS)
def test_folders_that_are_refused(files, options, message, tmp_path):
    write_all(tmp_path, files)
    with pytest.raises((ConfigError, DataError), match=message):
        ImageFolder(str(tmp_path), SHAPE, **options)


def test_a_class_may_be_written_in_another_unicode_form(tmp_path):
    forms = [unicodedata.normalize(form, "café") for form in ("NFC", "NFD")]
    write_all(tmp_path, f"train/apple/1.png train/{forms[0]}/1.png test/{forms[1]}/1.png")
    source = ImageFolder(str(tmp_path), SHAPE)
    assert source.class_names == ["apple", "café"] and examples(source, "test")[1].tolist() == [1]


# 9. Name of the mask of 1.png, how it is written, options; it must become LABELS.
TWO = {"num_classes": 2}
RED = {"colors": [[0, 0, 0], [255, 0, 0]], **TWO}
IN_COLORS = LABELS[..., None] * np.array([255, 0, 0], np.uint8)
MASKS = [
    ("1.png", LABELS * 255, TWO),
    ("1.png", LABELS, TWO),
    ("1_mask.png", LABELS, TWO),
    ("1_GT.tif", LABELS, TWO),
    ("1-label.bmp", LABELS, TWO),
    ("1.gif", LABELS, TWO),
    ("1.png", IN_COLORS, RED),
    ("1.png", IN_COLORS, {**RED, "colors": ["black", "#ff0000", "white"]}),
    ("1.png", LABELS * 128, {**TWO, "colors": [0, 128]}),
    ("1.png", np.repeat(LABELS[..., None], 3, axis=-1), TWO),
    ("1.png", LABELS.astype(np.uint16), TWO),
    ("1.png", LABELS == 1, TWO),
    ("1.tif", LABELS.astype(np.float32), TWO),
]


@pytest.mark.parametrize(("name", "mask", "options"), MASKS)
@pytest.mark.parametrize("layout", ["train/images train/masks", "images/train masks/train"])
def test_masks_become_classes(layout, name, mask, options, tmp_path):
    images, masks = layout.split()
    write(tmp_path / images / "1.png", COLORS)
    path = tmp_path / masks / name
    path.parent.mkdir(parents=True)
    Image.fromarray(mask).save(path)
    (tmp_path / images / "._1.png").touch()
    (tmp_path / masks / "Thumbs.db").touch()
    source = SegmentationFolder(str(tmp_path), SHAPE, flip=False, **options)
    image, read = examples(source)
    assert np.array_equal(image[0], COLORS) and np.array_equal(read[0], LABELS)
    assert warnings(source) == ""


def test_a_mask_fits_the_photograph_as_people_see_it(tmp_path):
    write(tmp_path / "train/images/1.jpg", encoded(PICTURE, "JPEG", orientation=6))
    write(tmp_path / "train/masks/1.png", LABELS.T)
    _, mask = examples(SegmentationFolder(str(tmp_path), (6, 4, 3), flip=False, **TWO))
    assert np.array_equal(mask[0], LABELS.T)


# 9. Masks by name, options, the message.
REFUSED_MASKS = [
    (
        {"1.png": LABELS[:, :5]},
        TWO,
        r"1.png has \(5, 4\) pixels and its image \(6, 4\); both need the same size",
    ),
    (
        {"1_mask.png": LABELS, "1_gt.png": LABELS},
        TWO,
        "1.png needs one mask, .* but has 1_gt.png and 1_mask.png",
    ),
    ({"2_mask.png": LABELS}, TWO, "1.png needs one mask, such as .*1.png, but has none"),
    ({"1.png": IN_COLORS}, TWO, "is in color; give the color of each class"),
    (
        {"1.png": IN_COLORS + np.array([0, 0, 1], np.uint8)},
        RED,
        r"has the color \[\d+, 0, 1\], which is not in dataset.colors",
    ),
    ({"1.png": LABELS * 3}, TWO, "has the label 3, outside 0 ... 1"),
    ({"1.jpg": LABELS}, TWO, "1.jpg is a JPEG, which changes class indices a little; write"),
    ({"1.tif": LABELS * np.float32(-9999)}, TWO, "has the label -9999.0, outside 0 ... 1"),
    ({"1.tif": LABELS * np.float32(0.5)}, TWO, "has the label 0.5, outside 0 ... 1"),
    ({"1.tif": (LABELS * np.uint16(300)).astype(">u2")}, TWO, "has the label 300, outside 0 ... 1"),
    (
        {"1.png": LABELS},
        {**RED, "colors": [[0, 0, 0]]},
        r"dataset.colors=\[\(0, 0, 0\)\] does not suit 2 classes",
    ),
    ({"1.png": LABELS}, {**RED, "colors": [0, "reddish"]}, "reddish is not a color; give"),
]


@pytest.mark.parametrize(("masks", "options", "message"), REFUSED_MASKS)
def test_masks_that_are_refused(masks, options, message, tmp_path):
    write(tmp_path / "train/images/1.png", COLORS)
    for name, mask in masks.items():
        kind = {".tif": "TIFF", ".jpg": "JPEG"}.get(name[-4:], "PNG")
        write(tmp_path / "train/masks" / name, encoded(Image.fromarray(mask), kind))
    with pytest.raises((ConfigError, DataError), match=message):
        source = SegmentationFolder(str(tmp_path), SHAPE, **options)
        try:
            examples(source)
        except tf.errors.OpError as error:
            raise source.explain(error) from error


@pytest.mark.parametrize("layout", ["{0}/images {0}/masks", "images/{0} masks/{0}"])
def test_images_of_no_split_are_named(layout, tmp_path):
    for split in ("train", "unlabelled"):
        for folder in layout.format(split).split():
            write(tmp_path / folder / "1.png", LABELS)
    source = SegmentationFolder(str(tmp_path), SHAPE, **TWO)
    assert "they are in no split: unlabelled" in warnings(source)


def test_a_class_that_no_mask_shows_is_named(tmp_path):
    for split, mask in {"train": LABELS, "val": LABELS * 0}.items():
        write(tmp_path / split / "images/1.png", COLORS)
        write(tmp_path / split / "masks/1.png", mask)
    source = SegmentationFolder(
        str(tmp_path), SHAPE, num_classes=3, class_names=["soil", "leaf", "stem"]
    )
    assert warnings(source) == (
        "train has no pixel of stem in 1 of 1 masks; validation has no pixel of leaf, stem in 1 of 1 masks"
    )


# 11. Names of the files of 4 examples, packed or not.
RECORDS = [
    ("train.tfrecord", bytes),
    ("train.tfrecord.gz", gzip.compress),
    ("train.tfrecord", gzip.compress),
    ("train.tfrecords", bytes),
    ("train0.tfrec", bytes),
    ("train-00000-of-00001", bytes),
    ("train.tfrecord-00000-of-00001", bytes),
    ("Train/part-0.tfrecord", bytes),
]


def record(image: bytes, **label) -> bytes:
    """A tf.train.Example of an image and a label of any type."""
    feature = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        "label": tf.train.Feature(**label),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


@pytest.mark.parametrize(("name", "pack"), RECORDS)
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_records_have_many_names(name, pack, on_error, tmp_path):
    images, labels = random_images(4)
    (path,) = write_tfrecords(tmp_path / "written", "train", images, labels, num_files=1)
    write(tmp_path / "data" / name, pack(path.read_bytes()))
    write(
        tmp_path
        / "data"
        / Path(name).parent
        / f"train_2{''.join(Path(name).suffixes) or '-00001-of-00002'}",
        b"",
    )
    source = TFRecords(str(tmp_path / "data"), images.shape[1:], 3)
    source.on_error = on_error
    read, classes = examples(source)
    assert np.array_equal(read, images) and classes.tolist() == labels.tolist()
    assert len(list(source.training(StreamRequest(Topology(), 2, 1, 0, 2)).take(3))) == 3
    assert "1 file(s) without records" in warnings(source) and not source.unreadable()


def test_some_files_of_a_split_may_be_packed(tmp_path):
    images, labels = random_images(6)
    paths = write_tfrecords(tmp_path, "train", images, labels, num_files=2)
    paths[1].write_bytes(gzip.compress(paths[1].read_bytes()))
    source = TFRecords(str(tmp_path), images.shape[1:], 3)
    read, classes = examples(source)
    order = [0, 2, 4, 1, 3, 5]
    assert np.array_equal(read, images[order]) and classes.tolist() == labels[order].tolist()
    stream = source.training(StreamRequest(Topology(), 6, 1, 0, 1)).take(1)
    (_, shuffled) = next(stream.as_numpy_iterator())
    assert sorted(shuffled) == sorted(labels)


def test_damage_in_packed_records_is_named(tmp_path):
    (path,) = write_tfrecords(tmp_path, "train", *random_images(4), num_files=1)
    whole = path.read_bytes()
    path.write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(
        DataError, match=rf"{path}: cannot be read after record \d|truncated or damaged"
    ):
        TFRecords(str(tmp_path), (6, 6, 1), 3).num_examples("train")
    damaged = bytearray(whole)
    damaged[-20] ^= 1
    path.write_bytes(gzip.compress(damaged))
    source = TFRecords(str(tmp_path), (6, 6, 1), 3)
    with pytest.raises(tf.errors.OpError) as caught:
        list(source.evaluation("train", Topology(), 2))
    assert str(source.explain(caught.value)).startswith(f"{path}, record 3 at byte ")


# 11. The label as it is written, options, its class.
TEXT_LABELS = {"class_names": ["cat", "dog"]}
RECORD_LABELS = [
    ({"int64_list": tf.train.Int64List(value=[1])}, {}, 1),
    ({"float_list": tf.train.FloatList(value=[1.0])}, {}, 1),
    ({"bytes_list": tf.train.BytesList(value=[b"dog"])}, TEXT_LABELS, 1),
    ({"bytes_list": tf.train.BytesList(value=[b"10"])}, {"class_names": [20, 10]}, 1),
    (
        {"bytes_list": tf.train.BytesList(value=[b"dog"])},
        {},
        r"label holds 1 name\(s\) \(dog\), but .*num_classes is 2; set it to 1, or give",
    ),
    (
        {"bytes_list": tf.train.BytesList(value=[b"cow"])},
        TEXT_LABELS,
        "label 'cow' is not one of dataset.class_names",
    ),
    ({"float_list": tf.train.FloatList(value=[0.5])}, {}, "label 0.5 is outside 0 ... 1"),
    (
        {"int64_list": tf.train.Int64List(value=[0, 1])},
        {},
        "record 0 has 2 values in label, and one is needed",
    ),
]


@pytest.mark.parametrize(("label", "options", "expected"), RECORD_LABELS)
def test_labels_of_records(label, options, expected, tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "train.tfrecord")) as writer:
        writer.write(record(encoded(PICTURE, orientation=3), **label))
    source = TFRecords(str(tmp_path), SHAPE, 2, **options)

    if isinstance(expected, str):
        with pytest.raises((ConfigError, DataError), match=expected):
            explained_examples(source)
    else:
        (image,), classes = explained_examples(source)
        assert classes.tolist() == [expected] and np.array_equal(image, COLORS[::-1, ::-1])


def test_names_in_records_are_those_of_the_training_part(tmp_path, monkeypatch):
    for split, names in (("train", ["hen", "cow", "hen"]), ("test", ["cow"])):
        with tf.io.TFRecordWriter(str(tmp_path / f"{split}.tfrecord")) as writer:
            for name in names:
                label = {"bytes_list": tf.train.BytesList(value=[name.encode()])}
                writer.write(record(encoded(PICTURE), **label))
    source = TFRecords(str(tmp_path), SHAPE, 2)
    assert source.facts()["class_names"] == ["cow", "hen"]
    assert examples(source, "train")[1].tolist() == [1, 0, 1] and examples(source, "test")[
        1
    ].tolist() == [0]
    monkeypatch.setattr("hvtrain.data.sources.tfrecord.MAX_NAMED_BYTES", 9)
    with pytest.raises(
        DataError,
        match=r"label holds text \(cow, hen\); give the names of all 2 .*class_names=\[cow,hen,",
    ):
        TFRecords(str(tmp_path), SHAPE, 2).facts()


# 10 and 11. Pixels and labels of two files, options, the classes or the message.
PIXELS = COLORS.ravel()
ROWS = [
    ([PIXELS, PIXELS], [0, 1], {}, [0, 1]),
    ([PIXELS, PIXELS], ["b", "a"], {}, [1, 0]),
    ([PIXELS, PIXELS], ["b", "a"], {"class_names": ["b", "a"]}, [0, 1]),
    ([PIXELS, PIXELS], ["20", "10"], {"class_names": [20, 10]}, [0, 1]),
    ([PIXELS, PIXELS], pa.array(["b", "a"]).dictionary_encode(), {}, [1, 0]),
    ([PIXELS, PIXELS], (pa.array(["b"]), pa.array(["a"], pa.large_string())), {}, [1, 0]),
    ([PIXELS, PIXELS], ["b", "c"], {"class_names": ["b", "a"]}, "label c is none of b, a"),
    ([PIXELS, PIXELS], ["b", "b"], {}, r"label holds 1 name\(s\) \(b\), but .*num_classes is 2"),
    ([PIXELS / 255, PIXELS * 1.0], [0, 1], {}, "up to 2.*; write both with the same range"),
    ([encoded(PICTURE, orientation=3), encoded(PICTURE)], [0, 1], {}, [0, 1]),
]


@pytest.mark.parametrize(("images", "labels", "options", "expected"), ROWS)
def test_rows_of_parquet(images, labels, options, expected, tmp_path):
    if isinstance(labels, list):
        labels = pa.array(labels)
    for row, name in enumerate(["train_a.parquet", "train_b.parquet"]):
        label = labels[row] if isinstance(labels, tuple) else labels[row : row + 1]
        table = pa.table({"image": pa.array([images[row]]), "label": label})
        pq.write_table(table, tmp_path / name)
        pq.write_table(table, tmp_path / "VAL.PARQUET")
    pq.write_table(table, tmp_path / "value.parquet")
    source = Parquet(str(tmp_path), SHAPE, 2, **options)

    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            explained_examples(source)
    else:
        (first, second), classes = explained_examples(source)
        assert classes.tolist() == expected and source.num_examples("validation") == 1
        assert np.array_equal(second, COLORS)
        assert np.array_equal(first, COLORS[::-1, ::-1] if isinstance(images[0], bytes) else COLORS)
        assert "they are in no split: value.parquet" in warnings(source)


def test_pixels_that_are_scaled_twice_are_named(tmp_path):
    pq.write_table(pa.table({"image": [PIXELS / 255], "label": [0]}), tmp_path / "train.parquet")
    assert "pixels reach 0.972549 and are divided by 255; set dataset.scale" in warnings(
        Parquet(str(tmp_path), SHAPE, 2)
    )


# 12. Files by name, the column; the documents.
TALES = ["a tree", "the\nriver"]
TEXTS = [
    ({"t.jsonl": "\n".join(json.dumps({"id": 1, "tale": tale}) for tale in TALES)}, "tale", TALES),
    ({"t.NDJSON": "\n".join(json.dumps({"tale": tale}) for tale in (*TALES, None))}, "tale", TALES),
    ({"t.tsv": 'id\ttale\n1\ta tree\n2\t"the\nriver"\n'}, "tale", TALES),
    (
        {"t.tsv": 'id\ttale\n1\t"a tree\n2\ta stone\n3\t"the" river\n'},
        "tale",
        ['"a tree', "a stone", '"the" river'],
    ),
    ({"t.CSV": 'id,tale\n1,a tree\n2,"the\nriver"\n'}, "tale", TALES),
    ({"a.txt": "a tree", "b.TXT": "the\nriver", "._a.txt": "\0", "Thumbs.db": "\0"}, None, TALES),
    (
        {"t.jsonl": '{"tale": "a tree"}'},
        None,
        "dataset.column=null is not a column of t.jsonl; choose one of tale",
    ),
    (
        {"t.jsonl": b'{"tale": "a b\xfcrch"}'},
        "tale",
        "t.jsonl cannot be read: .*Invalid UTF8 sequence.*; each line must be a JSON object",
    ),
    (
        {"t.json": '[{"tale": "a tree"}]'},
        "tale",
        "t.json cannot be read: .*; each line must be a JSON object",
    ),
]


@pytest.mark.parametrize(("files", "column", "expected"), TEXTS)
def test_documents(files, column, expected, tmp_path):
    paths = [write(tmp_path / name, content) for name, content in files.items()]
    location = str(paths[0] if len(paths) == 1 else tmp_path)
    if isinstance(expected, str):
        with pytest.raises((ConfigError, DataError), match=expected):
            read_documents(location, column)
    else:
        assert read_documents(location, column) == expected


# 12. The labels of 60 texts; the names of the classes, or the message.
LABELLED = [
    (["no", "yes"] * 30, ["no", "yes"]),
    ([str(number % 11) for number in range(60)], [str(number) for number in range(11)]),
    (["", "NA", *["no", "yes"] * 29], "2 of 60 texts have no label; fill the column"),
    (["yes"] * 60, "label is 'yes' for every text, and nothing can be learned"),
    (range(60), "dataset.label=label has 60 values for 60 texts, too many for classes"),
]


@pytest.mark.parametrize(("labels", "expected"), LABELLED)
def test_labels_of_texts(labels, expected, tmp_path):
    rows = [f"a tale of {number} trees,{label}" for number, label in enumerate(labels)]
    path = write(tmp_path / "t.csv", "\n".join(["text,label", *rows]))
    if isinstance(expected, str):
        with pytest.raises((ConfigError, DataError), match=expected):
            read_labelled(str(path), "text", "label")
    else:
        _, numbers, names = read_labelled(str(path), "text", "label")
        assert names == expected
        assert [names[number] for number in numbers] == labels


def test_a_folder_of_texts_says_what_it_leaves_out(tmp_path):
    words = " ".join(RANDOM.choice(["tree", "river", "stone"], 3000))
    for name in ("a.txt", "b.md", "c.md", ".hidden.txt"):
        write(tmp_path / name, words)
    source = Text(str(tmp_path), vocabulary_size=290, length=16)
    assert source.num_examples("train") > 0
    assert warnings(source) == f"{tmp_path}: left out files that are not .txt: 2 x .md"
    with pytest.raises(
        ConfigError, match=r"dataset.test_share=1e-05 of 1 document.* rounds to nothing"
    ):
        Text(str(tmp_path), vocabulary_size=290, length=16, test_share=1e-5).num_examples("train")


def test_a_long_line_without_spaces_is_learned(tmp_path):
    """Of 5 MB the tokenizer took 2.5 s to train and 7 s to encode; here is a tenth."""
    path = write(tmp_path / "line.txt", "".join(RANDOM.choice([*"ACGT"], 500_000)))
    assert Text(str(path), vocabulary_size=400).num_examples("train") > 500


# 13. Inputs, targets, options; the inputs and the classes, or the message.
X = np.arange(24.0).reshape(6, 4)
Y = np.array([0, 2, 1, 0, 1, 2])
NAMES = np.array(["ant", "bee", "cow"])[Y]
THREE = {"num_classes": 3}


class Sparse:
    """A matrix as scipy has it, of which NumPy would make one object."""

    def toarray(self):
        return X


ARRAYS = [
    (Sparse(), Y, {}, X, Y),
    (X, NAMES, {}, X, Y),
    (X, NAMES.astype(object), {}, X, Y),
    (X, NAMES.astype("S"), {}, X, Y),
    (X, NAMES, {"class_names": ["cow", "bee", "ant"]}, X, 2 - Y),
    (X, NAMES, {"class_names": np.array(["cow", "bee", "ant"])}, X, 2 - Y),
    (X, np.eye(3)[Y], THREE, X, Y),
    (X, np.eye(3, dtype=int)[Y], THREE, X, Y),
    (X, Y.astype(np.float64), THREE, X, Y),
    (X, Y[:, None].astype(np.float32), THREE, X, Y),
    (X, Y == 2, {"num_classes": 2}, X, Y == 2),
    (X, Y == 2, {}, X, Y == 2),
    (X, [*Y], {}, X, Y),
    (X.astype(object), Y, {}, X, Y),
    (X == 3, Y, {}, X == 3, Y),
    (X.tolist(), Y.tolist(), {}, X, Y),
    (list(X), list(np.eye(3)[Y]), THREE, X, Y),
    (X.astype(np.longdouble), Y, {}, X, Y),
    (np.ma.masked_array(X), Y, {}, X, Y),
]


@pytest.mark.parametrize(("x", "y", "options", "inputs", "classes"), ARRAYS)
def test_arrays_whose_meaning_is_clear(x, y, options, inputs, classes):
    source = from_arrays(x, y, x, y, **options)
    ((read, targets),) = source.evaluation("test", Topology(), 6).as_numpy_iterator()
    assert (
        np.array_equal(read, inputs)
        and np.array_equal(targets, classes)
        and targets.dtype == np.int32
    )
    if NAMES is y:
        assert list(source.class_names) == list(options.get("class_names", ["ant", "bee", "cow"]))


MIXED = np.array([[1, "red"], [2, "blue"]], object)
PICTURES_FIRST = RANDOM.integers(0, 256, (6, 3, 8, 8), np.uint8)
REFUSED_ARRAYS = [
    (
        np.array(["2024-01-01"] * 6, "M8[D]"),
        Y,
        {},
        r"x_train holds datetime64\[D\]; numbers or text are needed \(for dates, give numbers ",
    ),
    (
        MIXED,
        Y[:2],
        {},
        r"x_train holds values of the type\(s\) int, str; give numbers alone, or a dict of columns",
    ),
    (
        np.array([[1, 2], [3, None]], object),
        Y[:2],
        {},
        "x_train has no value in row 1; fill the gap",
    ),
    (X[:2], np.array(["ant", np.nan], object), {}, "y_train has no value in row 1; fill the gap"),
    (np.array([{}, {}]), Y[:2], {}, r"x_train holds values of the type\(s\) dict; give numbers"),
    (np.ma.masked_array(X, X > 20), Y, {}, r"x_train has 3 masked value\(s\); fill them"),
    ([[1, 2], [3]], Y[:2], {}, "x_train has rows of different lengths; pad them"),
    ([[1, 2], [3, None]], Y[:2], {}, "x_train has no value in row 1; fill the gap"),
    ((row for row in X), Y, {}, r"x_train \(generator\) has no rows; each example needs one"),
    (1.0, Y, {}, r"x_train \(float\) has no rows; each example needs one"),
    (X[:0], Y[:0], {}, r"x_train \(ndarray\) has no rows"),
    (X * 1j, Y, {}, "x_train holds complex128; numbers or text are needed"),
    (PICTURES_FIRST, Y, {}, r"images of shape \(3, 8, 8\) have their channels first"),
    (X, Y, {**THREE, "class_names": ["ant", "bee"]}, "has length 2, but num_classes is 3; give"),
    (X, np.where(Y == 1, 0.5, Y), THREE, r"labels are float64|0.5"),
    (
        X,
        Y + 1,
        {},
        "y_train holds the labels 1 to 3, and classes are numbered from 0; give y - 1, num_classes=4 if",
    ),
    (
        X,
        Y + 1,
        THREE,
        "y_train holds the labels 1 to 3, and classes are numbered from 0; give y - 1, num_classes=4 if",
    ),
]


@pytest.mark.parametrize(("x", "y", "options", "message"), REFUSED_ARRAYS)
def test_arrays_that_are_refused(x, y, options, message):
    with pytest.raises((ConfigError, DataError), match=message):
        source = from_arrays(x, y, **options)
        source.num_examples("train")


def test_images_as_targets_do_not_move_with_their_inputs():
    """Nor do other numbers for each pixel, such as weights beside masks."""
    pictures = PICTURES_FIRST.transpose(0, 2, 3, 1)
    depths = pictures[..., 0] / 255.0
    for targets, options in (
        (pictures / 255.0, {}),
        (depths, {}),
        (pictures[..., 0] % 3, {"w_train": depths, "num_classes": 3}),
    ):
        source = from_arrays(pictures, targets, flip=True, **options)
        with pytest.raises(ConfigError, match=r"targets or weights that are images.*flip=false"):
            source.training(StreamRequest(Topology(), 2, 1, 0, 3))
    still = from_arrays(pictures, pictures / 255.0).training(StreamRequest(Topology(), 2, 1, 0, 3))
    assert next(iter(still))[1].shape == (2, 8, 8, 3)


def test_names_that_training_lacks_are_refused():
    with pytest.raises(DataError, match=r"test holds eel, not among the classes \(ant, bee, cow\)"):
        from_arrays(X, NAMES, X[:1], np.array(["eel"]))


def test_what_is_odd_about_arrays_is_said():
    described = describe(from_arrays(X, Y + 1, num_classes=4))
    assert described["warnings"] == ["train has no 0"]
    pictures = RANDOM.integers(0, 256, (6, 4, 4, 3))
    assert "the splits hold values in different ranges: train 0" in warnings(
        from_arrays(pictures / 255, Y, pictures, Y)
    )


def test_masks_of_0_and_255_in_arrays():
    masks = RANDOM.integers(0, 2, (6, 4, 4))
    for given in (masks * 255, masks == 1, masks[..., None]):
        source = from_arrays(PICTURES_FIRST.transpose(0, 2, 3, 1)[:, :4, :4], given, num_classes=2)
        assert np.array_equal(source.whole_targets()["train"], masks)
    ignored = np.where(masks == 1, 1, IGNORED)
    source = from_arrays(PICTURES_FIRST.transpose(0, 2, 3, 1)[:, :4, :4], ignored, num_classes=2)
    assert np.array_equal(source.whole_targets()["train"], ignored)
    # Train decides what 255 means in all splits, whatever their order.
    parts = dict.fromkeys(("test", "train"), (np.zeros((6, 4, 4), np.uint8), masks * 255))
    source = ImagesWithMasks("mine", lambda: parts, (4, 4, 1), 2)
    assert np.array_equal(source.whole_targets()["test"], masks)
