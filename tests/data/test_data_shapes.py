"""dataset=shapes: the same everywhere, masks that fit the images, and move with them."""

import numpy as np
import pytest

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest
from hvtrain.data.description import class_counts
from hvtrain.data.pipeline.transform import IGNORED
from hvtrain.data.sources.built_in import DISTANCES, shapes
from hvtrain.errors import ConfigError
from hvtrain.tasks import Segmentation
from hvtrain.training.saved_model import check_preprocessing, description

SMALL = {
    "image_shape": [40, 56, 3],
    "num_train": 24,
    "num_validation": 4,
    "num_test": 6,
    "noise": 0,
}
AREAS = {  # Of a shape whose circumscribed circle has the radius 1.
    "disc": np.pi,
    "square": 2,
    "triangle": 3 * np.sqrt(3) / 4,
    "ring": np.pi * (1 - 0.5**2),
    "cross": 2 * 1.92 * 0.56 - 0.56**2,
}


def drawn(split="train", **options):
    return shapes(**{**SMALL, **options}).parts()[split].elements


def test_each_shape_is_as_large_as_geometry_has_it():
    ys, xs = np.mgrid[:201, :201] - 100.0
    assert list(AREAS) == list(DISTANCES)
    for name, distance in DISTANCES.items():
        inside = distance(xs, ys, 90.0) <= 0
        assert inside.sum() == pytest.approx(AREAS[name] * 90**2, rel=0.02), name
        reach = np.hypot(xs, ys)[inside].max()
        assert 0.95 * 90 < reach < 1.02 * 90, "its circumscribed circle"


def test_masks_fit_what_is_seen():
    """Ground and shape differ by 64 grey levels in each channel, so the nearer colour tells a pixel's class."""
    images, masks = drawn(num_train=60)
    single = [
        (image, mask)
        for image, mask in zip(images, masks)
        if len(set(np.unique(mask)) - {0, IGNORED}) == 1
    ]
    assert len(single) > 10
    right = total = 0
    for image, mask in single:
        is_ground, is_shape = mask == 0, (mask != 0) & (mask != IGNORED)
        colours = [np.median(image[which], axis=0) for which in (is_ground, is_shape)]
        to_ground, to_shape = (np.abs(image - colour).sum(axis=-1) for colour in colours)
        right += ((to_shape < to_ground) == is_shape)[is_ground | is_shape].sum()
        total += (is_ground | is_shape).sum()
    assert right / total > 0.97


def test_the_outlines_of_shapes_are_ignored():
    (images, masks), (again, whole) = drawn(), drawn(border=0)
    np.testing.assert_array_equal(images, again)
    assert not (whole == IGNORED).any()
    ignored = masks == IGNORED
    np.testing.assert_array_equal(masks[~ignored], whole[~ignored])
    assert 0.02 < ignored.mean() < 0.1
    neighbours = [np.roll(whole, shift, axis) != whole for axis in (1, 2) for shift in (1, -1)]
    beside_another_class = np.any(neighbours, axis=0)
    assert (beside_another_class[ignored]).mean() > 0.9, (
        "the others are of a shape on one of its own class"
    )
    assert (drawn(border=3)[1] == IGNORED).mean() == pytest.approx(3 * ignored.mean(), rel=0.2)


def test_classes_are_balanced_but_for_the_ground():
    source = shapes(num_train=300, num_validation=0, num_test=0)
    _, masks = source.parts()["train"].elements
    with_class = np.array(
        [(masks == label).any(axis=(1, 2)).sum() for label in range(source.num_classes)]
    )
    assert (
        with_class[0] == 300 and (np.abs(with_class[1:] / with_class[1:].mean() - 1) < 0.25).all()
    )
    counts = np.array(class_counts(source)["train"])
    shares = counts / counts.sum()
    assert 0.5 < shares[0] < 0.8 and (shares[1:] > 0.03).all()
    assert list(source.class_names) == ["ground", *DISTANCES]


def test_an_example_is_the_same_in_every_run_and_whatever_the_numbers():
    np.testing.assert_array_equal(drawn()[0], drawn(num_train=30, num_test=0)[0][:24])
    assert shapes(**SMALL).manifest() == shapes(**SMALL).manifest()
    assert shapes(**SMALL).manifest() != shapes(**{**SMALL, "seed": 1}).manifest()
    assert not (drawn("train")[0][:4] == drawn("validation")[0]).all(axis=(1, 2, 3)).any()


def test_ranks_share_the_images_and_masks_move_with_them():
    originals = {image.tobytes(): mask for image, mask in zip(*drawn())}
    found, mirrored = set(), 0
    for rank in range(2):
        source = shapes(**SMALL, standardize="none", flip=True)
        Segmentation().prepare(source)
        stream = source.training(
            StreamRequest(Topology(rank, 2), 4, seed=1, start_step=0, steps_per_epoch=3)
        )
        for images, masks in stream.take(3).as_numpy_iterator():
            for image, mask in zip(images.astype(np.uint8), masks):
                if image.tobytes() not in originals:
                    image, mask, mirrored = image[:, ::-1], mask[:, ::-1], mirrored + 1
                np.testing.assert_array_equal(originals[image.tobytes()], mask)
                found.add(image.tobytes())
    assert len(found) == len(originals) == 24 and 4 < mirrored < 20


def test_the_saved_model_sees_what_streams_give():
    source = shapes(**SMALL)
    assert check_preprocessing(source.preprocessing(), source, Topology()) is None
    told = description(source, Segmentation(), source.preprocessing())
    assert told["output"]["shape"] == [40, 56, 6] and told["class_names"][1] == "disc"
    grey = shapes(**{**SMALL, "image_shape": [40, 56, 1]})
    assert grey.parts()["test"].elements[0].shape == (6, 40, 56, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"image_shape": [12, 64, 3]},
            r"image_shape \(each side\)=12 is out of range; it must be at least 16",
        ),
        ({"image_shape": [64, 64]}, r"image_shape=\[64, 64\] is not \[height, width, channels\]"),
        ({"num_train": 0}, "num_train=0 is out of range; it must be at least 1"),
        ({"noise": -1}, "noise=-1 is out of range; it must be at least 0"),
        ({"border": -1}, "border=-1 is out of range"),
        ({"seed": -1}, "seed=-1 is out of range"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=f"dataset.{message}"):
        shapes(**options)
