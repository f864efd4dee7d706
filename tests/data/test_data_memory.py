"""Arrays of any structure as a data set."""

import numpy as np
import pytest
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest, from_arrays, manifest
from hvtrain.errors import ConfigError, DataError

RANDOM = np.random.default_rng(0)
AGES = np.arange(24)


def structured(**options):
    """Two inputs by name, two targets by name, and a weight for each example; the age tells examples apart."""
    inputs = {"age": AGES.astype(np.float64), "words": RANDOM.integers(9, size=(24, 5))}
    targets = {"income": AGES * 2.0, "likes": np.eye(24)[:, :3]}
    return from_arrays(inputs, targets, w_train=AGES + 0.5, facts={"vocabulary_size": 9}, **options)


def test_a_source_says_what_it_holds():
    source = structured()
    inputs, targets, weights = source.element_spec
    assert inputs == {"age": tf.TensorSpec((), tf.float32), "words": tf.TensorSpec((5,), tf.int32)}
    assert targets == {
        "income": tf.TensorSpec((), tf.float32),
        "likes": tf.TensorSpec((3,), tf.float32),
    }
    assert weights == tf.TensorSpec((), tf.float32)
    assert source.facts() == {"vocabulary_size": 9}
    assert {tuple(one.shape) for one in tf.nest.flatten(source.preprocessing().inputs())} == {
        (None,),
        (None, 5),
    }
    with pytest.raises(
        ConfigError,
        match=r"m needs num_classes, which the data set arrays does not give .it gives voc",
    ):
        source.fact("num_classes", "m")


def test_shards_are_complete_and_parts_stay_together():
    source, seen = structured(), []
    for rank in range(3):
        stream = source.training(
            StreamRequest(Topology(rank, 3), 4, seed=1, start_step=0, steps_per_epoch=2)
        )
        for inputs, targets, weights in stream.take(2).as_numpy_iterator():
            np.testing.assert_array_equal(targets["income"], 2 * inputs["age"])
            np.testing.assert_array_equal(weights, inputs["age"] + 0.5)
            seen += list(inputs["age"])
    assert sorted(seen) == list(range(24))


def test_a_stream_goes_on_in_the_middle():
    def ages(start):
        request = StreamRequest(Topology(1, 2), 3, seed=5, start_step=start, steps_per_epoch=4)
        return [
            list(inputs["age"])
            for inputs, *_ in structured().training(request).take(9 - start).as_numpy_iterator()
        ]

    assert ages(0)[5:] == ages(5)


def test_a_manifest_sees_another_structure_and_another_number():
    first, other = structured(), from_arrays(AGES * 1.0, AGES * 2.0, num_validation=4)
    assert manifest.differences(first.manifest(), other.manifest())[0].startswith(
        "elements is ['float32 ()', 'float32 ()']"
    )
    assert manifest.differences(first.manifest(), structured().manifest())[0].startswith(
        "train: its content differs"
    )
    assert other.num_examples("validation") == 4


def test_equal_texts_have_equal_digests():
    first, equal, other = (
        manifest.digest_arrays([np.array([b"".join([b"a", end]), "c"], object)])
        for end in (b"b", b"b", b"x")
    )
    assert first == equal != other


@pytest.mark.parametrize(
    ("arrays", "options", "said"),
    [
        (
            (AGES * 1.0, AGES[:9]),
            {},
            r"arrays, train .*: 24 inputs, 9 targets; each example needs one of each",
        ),
        (
            ({"a": np.where(AGES == 7, np.nan, AGES)}, AGES),
            {},
            r"inputs.a of example 7 hold NaN or infinite",
        ),
        (
            ({"a": np.where(AGES == 9, 1e39, AGES)}, AGES),
            {},
            r"inputs.a of example 9 hold NaN or infinite",
        ),
        (
            (AGES * 1.0, AGES, np.ones((2, 5)), AGES[:2]),
            {},
            r"test .*: inputs have size 5 per example, but 1 in train",
        ),
        (
            (AGES * 1.0, AGES, AGES * 1.0, AGES),
            {"w_train": AGES},
            r"w_test and w_train belong together; give or omit both",
        ),
        ((AGES * 1.0, AGES), {"flip": True}, r"options for images \(flip\) were given, but"),
        (
            (AGES * 1.0, AGES),
            {"images": True},
            r"x_train holds examples with shape \(\); images \[h, w\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arrays, options, said):
    with pytest.raises((ConfigError, DataError), match=said):
        from_arrays(*arrays, **options).num_examples("train")


def test_images_with_targets_that_are_no_classes_are_normalized_too():
    source = from_arrays(
        RANDOM.integers(256, size=(40, 4, 4, 3), dtype=np.uint8), RANDOM.normal(size=40)
    )
    assert [tuple(one.shape) for one in source.element_spec] == [(4, 4, 3), ()]
    images, numbers = next(
        source.training(StreamRequest(Topology(), 40, 1, 0, 1)).as_numpy_iterator()
    )
    assert abs(images.mean()) < 1e-6 and numbers.dtype == np.float32
    assert "num_classes" not in source.facts()
