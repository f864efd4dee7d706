"""The laws of source.py, held against every kind of source."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as tensorflow_config

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest
from hvtrain.errors import ConfigError
from tiers import mostly_nightly
from tiny_data import KINDS, images_of, joined, random_images, scaled

# Image folders and Parquet have files of their own besides.
every_kind = pytest.mark.parametrize("kind", mostly_nightly(KINDS, "arrays"))
records_too = pytest.mark.parametrize("kind", mostly_nightly(KINDS, "arrays", "tfrecord"))


@records_too
def test_three_ranks_read_disjoint_shards_that_are_complete(kind, make_source):
    # 23 examples over 3 ranks: sizes that do not divide. 23 - (the shard's remainder) are read per epoch.
    source = make_source(kind, 23)
    sizes = source.shard_sizes("train", 3)
    assert sum(sizes) == source.num_examples("train") == 23
    shards = [
        images_of(
            source.training(
                StreamRequest(Topology(rank, 3), 1, seed=1, start_step=0, steps_per_epoch=size)
            ),
            size,
        )
        for rank, size in enumerate(sizes)
    ]
    assert [len(set(shard)) for shard in shards] == sizes
    assert sorted(joined(shards)) == sorted(scaled(random_images(23)[0]))


@records_too
def test_evaluation_counts_each_of_ten_examples_once_over_three_ranks(kind, make_source):
    source = make_source(kind, 6, num_test=10)
    streams = [source.evaluation("test", Topology(rank, 3), batch_size=3) for rank in range(3)]
    seen = [images_of(stream) for stream in streams]
    assert [len(shard) for shard in seen] == source.shard_sizes("test", 3)
    assert sorted(joined(seen)) == sorted(scaled(random_images(10, seed=1)[0]))


@every_kind
def test_no_such_split_is_an_empty_stream(kind, make_source):
    source = make_source(kind, 6)
    assert source.num_examples("validation") == 0
    stream = source.evaluation("validation", Topology(), batch_size=2)
    assert list(stream) == []
    assert stream.element_spec[0].shape.as_list()[1:] == list(source.image_shape)


@records_too
@pytest.mark.parametrize("start_step", [3, 7])
def test_start_step_gives_the_tail_of_the_uninterrupted_stream(kind, start_step, make_source):
    # 3 steps an epoch, so 2 is within the first epoch, 3 at a border, 7 within the third.
    source = make_source(kind, 23, shift_pixels=1, flip=True)
    whole = list(
        source.training(StreamRequest(Topology(1, 2), 3, 5, 0, 3)).take(10).as_numpy_iterator()
    )
    tail = list(
        source.training(StreamRequest(Topology(1, 2), 3, 5, start_step, 3))
        .take(10 - start_step)
        .as_numpy_iterator()
    )
    for (images, labels), (tail_images, tail_labels) in zip(whole[start_step:], tail, strict=True):
        np.testing.assert_array_equal(images, tail_images)
        np.testing.assert_array_equal(labels, tail_labels)


@every_kind
def test_no_stream_waits_for_the_autotuner_at_its_end(kind, make_source):
    # TensorFlow's waits for its next round where it misses the end of an iterator, a long one in a long run.
    source, alone = make_source(kind, 8), Topology(0, 1)
    streams = (
        source.training(StreamRequest(alone, 4, seed=1, start_step=0, steps_per_epoch=2)),
        source.evaluation("test", alone, 4),
    )
    assert [stream.options().autotune.enabled for stream in streams] == [False, False]


@every_kind
def test_batches_are_full_and_typed(kind, make_source):
    stream = make_source(kind, 23).training(
        StreamRequest(Topology(), 4, seed=1, start_step=0, steps_per_epoch=5)
    )
    assert stream.element_spec == (
        tf.TensorSpec((4, 6, 6, 1), tf.float32),
        tf.TensorSpec((4,), tf.int32),
    )


@every_kind
def test_the_order_depends_on_seed_epoch_and_rank(kind, make_source):
    source = make_source(kind, 24)

    def epoch(seed: int, number: int, rank: int = 0) -> list[bytes]:
        return images_of(
            source.training(StreamRequest(Topology(rank, 2), 1, seed, number * 8, 8)), 8
        )

    assert epoch(1, 0) == epoch(1, 0)
    assert epoch(1, 0) != epoch(2, 0)
    assert epoch(1, 0) != epoch(1, 1)
    assert not set(epoch(1, 0, rank=0)) & set(epoch(1, 0, rank=1))


def test_each_rank_has_an_order_of_its_own(make_source):
    """Within its shard, of which it takes all places."""
    source = make_source("arrays", 24)
    place_of = {image: number // 2 for number, image in enumerate(scaled(random_images(24)[0]))}
    requests = [
        StreamRequest(Topology(rank, 2), 1, seed=1, start_step=0, steps_per_epoch=12)
        for rank in range(2)
    ]
    first, second = (
        [place_of[image] for image in images_of(source.training(one), 12)] for one in requests
    )
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


@every_kind
def test_labels_stay_with_their_images(kind, make_source):
    images, labels = random_images(23)
    label_of = dict(zip(scaled(images), labels, strict=True))
    stream = make_source(kind, 23).training(
        StreamRequest(Topology(), 23, seed=1, start_step=0, steps_per_epoch=1)
    )
    shuffled, shuffled_labels = next(stream.as_numpy_iterator())
    assert [label_of[image.tobytes()] for image in shuffled] == shuffled_labels.tolist()


@every_kind
def test_the_stream_is_the_same_under_another_global_seed_and_op_determinism(kind, make_source):
    source = make_source(kind, 23, shift_pixels=1, flip=True)
    tf.random.set_seed(1)
    before = images_of(source.training(StreamRequest(Topology(), 3, 5, 0, 7)), 9)
    tf.random.set_seed(2)
    tf.config.experimental.enable_op_determinism()
    try:
        assert images_of(source.training(StreamRequest(Topology(), 3, 5, 0, 7)), 9) == before
    finally:
        tensorflow_config.disable_op_determinism()


@every_kind
def test_an_epoch_that_the_shard_cannot_fill_is_refused(kind, make_source):
    source = make_source(kind, 20)
    with pytest.raises(
        ConfigError,
        match=r"4 step\(s\) of 6 examples do not fit the 20 training examples of rank 0",
    ):
        source.training(StreamRequest(Topology(), 6, seed=1, start_step=0, steps_per_epoch=4))


@every_kind
def test_augmentation_differs_from_step_to_step_and_leaves_evaluation_alone(kind, make_source):
    source = make_source(kind, 8, num_test=8, shift_pixels=2, flip=True)
    first, second = (
        set(images_of(source.training(StreamRequest(Topology(), 8, 1, step, 1)), 1))
        for step in (0, 1)
    )
    assert len(first - second) > 4
    assert sorted(images_of(source.evaluation("test", Topology(), 8))) == sorted(
        scaled(random_images(8, seed=1)[0])
    )


@every_kind
def test_padded_epochs_read_each_example_once_in_short_last_batches(kind, make_source):
    # 12 and 11 examples in steps of up to 5: 5, 5, 2 and 5, 5, 1.
    source = make_source(kind, 23)
    sizes = source.shard_sizes("train", 2)
    read = []
    for rank, size in enumerate(sizes):
        stream = source.training(StreamRequest(Topology(rank, 2), 5, 1, 0, 3, num_examples=size))
        first, second = (
            list(stream.skip(epoch * 3).take(3).as_numpy_iterator()) for epoch in (0, 1)
        )
        # Files are dealt whole, so shards of them differ.
        expected = [5, 5, size - 10] if size > 10 else [5, 4, 1]
        assert (
            [len(labels) for _, labels in first]
            == [len(labels) for _, labels in second]
            == expected
        )
        read.append([image.tobytes() for images, _ in first for image in images])
    assert sorted(joined(read)) == sorted(scaled(random_images(23)[0]))


@every_kind
@pytest.mark.parametrize("start_step", [2, 4])
def test_a_padded_stream_goes_on_in_the_middle(kind, start_step, make_source):
    source = make_source(kind, 23, shift_pixels=1, flip=True)
    size = source.shard_sizes("train", 2)[1]
    whole = list(
        source.training(StreamRequest(Topology(1, 2), 5, 5, 0, 3, size)).take(7).as_numpy_iterator()
    )
    tail = list(
        source.training(StreamRequest(Topology(1, 2), 5, 5, start_step, 3, size))
        .take(7 - start_step)
        .as_numpy_iterator()
    )
    for (images, labels), (tail_images, tail_labels) in zip(whole[start_step:], tail, strict=True):
        np.testing.assert_array_equal(images, tail_images)
        np.testing.assert_array_equal(labels, tail_labels)


@every_kind
def test_weighted_shards_are_disjoint_and_complete(kind, make_source):
    source = make_source(kind, 23)
    sizes = source.shard_sizes("train", 2, weights=(3, 1))
    assert sizes[0] > 2 * sizes[1]
    shards = [
        images_of(
            source.training(StreamRequest(Topology(rank, 2, weights=(3, 1)), 1, 1, 0, size)), size
        )
        for rank, size in enumerate(sizes)
    ]
    assert sorted(joined(shards)) == sorted(scaled(random_images(23)[0]))
