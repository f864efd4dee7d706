"""Arrays in memory: normalization, splits, what is kept, what is refused."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from sklearn.preprocessing import StandardScaler

from hvtrain.core.topology import Topology
from hvtrain.data import ArraySource, StreamRequest, from_arrays
from hvtrain.data.pipeline.transform import fit
from hvtrain.data.sources.memory import narrow_dtype
from hvtrain.data.sources.user_shards import checked_pipeline
from hvtrain.errors import ConfigError, DataError
from tiny_data import images_of, random_images


def test_per_pixel_standardisation_is_that_of_standard_scaler(monkeypatch):
    # 50 rows in four pieces, the last one short.
    monkeypatch.setattr("hvtrain.data.pipeline.transform.FIT_ROWS", 16)
    images, labels = random_images(50)
    images[:, 2, 3] = 7  # A pixel that never changes.
    expected = StandardScaler().fit_transform(images.reshape(50, -1).astype(np.float64))
    source = from_arrays(images, labels, images, labels, standardize="per_pixel")
    batch, _ = next(source.evaluation("test", Topology(), 50).as_numpy_iterator())
    np.testing.assert_allclose(batch.reshape(50, -1), expected, atol=1e-6)
    assert not batch[:, 2, 3].any()


def test_the_fit_covers_the_whole_training_part_whatever_the_rank():
    images, labels = random_images(50)
    source = from_arrays(images, labels, standardize="per_pixel", num_validation=10)
    transforms = []
    for rank in range(3):
        source.training(
            StreamRequest(Topology(rank, 3), 1, seed=1, start_step=0, steps_per_epoch=1)
        )
        transforms.append(source.transform)
    rows = np.random.default_rng(0).permutation(50)[10:]
    for transform in transforms:
        np.testing.assert_allclose(transform.mean, images[rows].mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(transform.scale, images[rows].std(axis=0), rtol=1e-12)


def test_per_channel_standardisation_gives_mean_0_and_deviation_1_per_channel():
    images = np.random.default_rng(0).integers(0, 256, (40, 5, 5, 3), np.uint8)
    images[..., 2] //= 10
    mean, scale = fit(images, np.arange(40), "per_channel", 255.0)
    normal = (images - mean) / scale
    np.testing.assert_allclose(normal.mean(axis=(0, 1, 2)), 0, atol=1e-12)
    np.testing.assert_allclose(normal.std(axis=(0, 1, 2)), 1, rtol=1e-12)


@pytest.mark.parametrize(("standardize", "largest"), [("scale", 1.0), ("none", 255.0)])
def test_scale_and_none(standardize, largest):
    images, labels = random_images(50)
    source = from_arrays(images, labels, standardize=standardize)
    batch, _ = next(source.training(StreamRequest(Topology(), 50, 1, 0, 1)).as_numpy_iterator())
    assert batch.max() == images.max() / 255 * largest


def test_validation_is_taken_out_of_training_and_is_always_the_same():
    images, labels = random_images(30)
    first, second = (from_arrays(images, labels, num_validation=7) for _ in range(2))
    assert [first.num_examples(split) for split in first.SPLITS] == [23, 7, 0]
    validation = images_of(first.evaluation("validation", Topology(), 4))
    training = images_of(first.training(StreamRequest(Topology(), 23, 1, 0, 1)), 1)
    assert validation == images_of(second.evaluation("validation", Topology(), 4))
    assert len(set(validation) | set(training)) == 30


def test_only_the_shard_stays_in_memory():
    whole: list[weakref.ref] = []

    def load():
        images, labels = random_images(1000)
        whole.append(weakref.ref(images))
        return {"train": (images, labels), "test": (images, labels)}

    source = ArraySource("big", load, (6, 6, 1), 3)
    assert not whole, "loaded before it was asked for"
    assert source.num_examples("train") == 1000
    assert len(whole) == 1 and whole[0]() is not None
    stream = source.training(StreamRequest(Topology(1, 4), 10, 1, 0, 20))
    gc.collect()
    assert len(whole) == 1, "loaded twice"
    assert whole[0]() is None, "the whole array is still held"
    ((place, shards),) = source._shards.items()
    assert place == Topology(1, 4)
    assert {split: images.shape[0] for split, (images, _) in shards.items()} == {
        "train": 250,
        "test": 250,
    }
    assert shards["train"][0].dtype == "uint8"
    next(iter(stream))


def test_a_users_own_data_set_of_floats_without_channels():
    random = np.random.default_rng(0)
    source = from_arrays(
        random.normal(3, 2, (40, 4, 5)), random.integers(0, 2, (40, 1)), name="mine"
    )
    assert (source.image_shape, source.num_classes) == ((4, 5, 1), 2)
    images, labels = next(
        source.training(StreamRequest(Topology(), 40, 1, 0, 1)).as_numpy_iterator()
    )
    assert images.shape == (40, 4, 5, 1) and labels.shape == (40,)
    assert abs(images.mean()) < 1e-6 and abs(images.std() - 1) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x, y: (x, np.where(np.arange(9) == 4, 3, y)),
            r"train .*: label 3 at index 4 is outside 0 \.\.\. 2",
        ),
        (lambda x, y: (x, np.where(np.arange(9) == 2, -1, y)), r"label -1 at index 2 is outside"),
        (lambda x, y: (x, y[:8]), r"9 inputs, 8 targets; each example needs one of each"),
        (lambda x, y: (x, np.eye(3)[y] / 2), r"labels are float64 of shape \(9, 3\); .*argmax"),
        (lambda x, y: (np.where(x > 250, np.nan, x), y), r"NaN or infinite"),
    ],
)
def test_damaged_arrays_are_refused(change, message):
    with pytest.raises(DataError, match=message):
        from_arrays(*change(*random_images(9)), num_classes=3).num_examples("train")


@pytest.mark.parametrize("value", [2**31, -(2**40), 2**63 + 3])
def test_integers_beyond_32_bits_are_refused(value):
    """They would become others: ids of users are often hashes."""
    ids = np.array([[1], [value]], np.int64 if value < 2**62 else np.uint64)
    labels = np.array([0, 1])
    with pytest.raises(
        DataError, match=f"the integer {value} does not fit in the 32 bits that models take; number"
    ):
        narrow_dtype(ids)
    examples = checked_pipeline(tf.data.Dataset.from_tensor_slices((ids, labels)), "mine")
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="models take integers of 32 bits; number the ids",
    ):
        list(examples)


def test_bad_options_are_refused():
    images, labels = random_images(9)
    with pytest.raises(ConfigError, match=r"standardize=zscore is not one of per_pixel"):
        from_arrays(images, labels, standardize="zscore")
    with pytest.raises(
        ConfigError, match=r"num_validation=9 leaves none of the 9 training examples"
    ):
        from_arrays(images, labels, num_validation=9).num_examples("train")
    with pytest.raises(ConfigError, match=r"shift_pixels=-1 is out of range"):
        from_arrays(images, labels, shift_pixels=-1)
    with pytest.raises(DataError, match=r"x_test and y_test belong together"):
        from_arrays(images, labels, images)
