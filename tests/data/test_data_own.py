"""from_dataset: a user's own tf.data pipeline, or PyDataset."""

import itertools
import logging
import sys
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest, from_dataset
from hvtrain.errors import ConfigError, DataError
from launching import ROOT
from tiers import mostly_nightly

sys.path.insert(0, str(ROOT / "tests/support/own"))
import pipelines

KINDS = ["shuffled", "by_epoch", "batches", "batches_of_five", "batches_from_start"]
every_kind = pytest.mark.parametrize(
    "kind", mostly_nightly(KINDS, "shuffled", "batches_from_start")
)


def read(source, request, number):
    """Batches of the inputs, rows as tuples."""
    stream = source.training(request).take(number)
    return [list(map(tuple, inputs.tolist())) for inputs, _ in stream.as_numpy_iterator()]


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def rows(split="train"):
    return sorted(map(tuple, pipelines.leaves(split)[0].astype(np.float32).tolist()))


@every_kind
def test_ranks_read_disjoint_shards_that_are_complete(kind):
    source = pipelines.data(kind)
    assert source.num_examples("train") == 61 and source.shard_sizes("train", 3) == [21, 20, 20]
    places = [(Topology(rank, 3), size) for rank, size in enumerate(source.shard_sizes("train", 3))]
    shards = [
        flat(read(source, StreamRequest(place, 1, 1, 0, size), size)) for place, size in places
    ]
    assert sorted(flat(shards)) == rows()
    assert source.element_spec == (tf.TensorSpec((3,), tf.float32), tf.TensorSpec((), tf.int32))


@every_kind
def test_epochs_differ_and_streams_go_on_in_the_middle(kind):
    """Batches of 4; steps 0-6, 7-13, 14-20 are epochs, of which 2 examples are left out."""
    source, place = pipelines.data(kind), Topology(1, 2)
    whole = read(source, StreamRequest(place, 4, 5, 0, 7), 21)
    assert flat(whole[:7]) != flat(whole[7:14]) != flat(whole[14:])
    for start in (3, 7, 16):
        assert read(source, StreamRequest(place, 4, 5, start, 7), 21 - start) == whole[start:], (
            start
        )
    assert read(source, StreamRequest(place, 4, 6, 0, 7), 7) != whole[:7]


@every_kind
def test_padded_epochs_read_each_example_once(kind):
    source = pipelines.data(kind)
    whole = read(source, StreamRequest(Topology(0, 2), 4, 5, 0, 8, num_examples=31), 16)
    assert [len(batch) for batch in whole] == ([4] * 7 + [3]) * 2
    assert len(set(flat(whole[:8]))) == len(set(flat(whole[8:]))) == 31
    for start in (6, 9):
        request = StreamRequest(Topology(0, 2), 4, 5, start, 8, num_examples=31)
        assert read(source, request, 16 - start) == whole[start:], start


@every_kind
def test_unlike_ranks_get_several_shards(kind):
    source = pipelines.data(kind)
    sizes = source.shard_sizes("train", 2, weights=(3, 1))
    assert sizes == [46, 15]
    shards = []
    for rank, size in enumerate(sizes):
        request = StreamRequest(Topology(rank, 2, weights=(3, 1)), 1, 5, 0, size)
        whole = read(source, request, size)
        tail = read(
            source, StreamRequest(Topology(rank, 2, weights=(3, 1)), 1, 5, 9, size), size - 9
        )
        assert tail == whole[9:]
        shards += flat(whole)
    assert sorted(shards) == rows()


@pytest.mark.parametrize("kind", ["shuffled", "batches"])
def test_evaluation_counts_each_example_once(kind):
    source = pipelines.data(kind)
    assert [source.num_examples(split) for split in source.SPLITS] == [61, 0, 23]
    streams = [source.evaluation("test", Topology(rank, 3), 4) for rank in range(3)]
    for _ in range(2):  # A validation reads its stream again and again.
        found = [
            tuple(row)
            for stream in streams
            for x, _ in stream.as_numpy_iterator()
            for row in x.tolist()
        ]
        assert sorted(found) == rows("test")
    assert list(source.evaluation("validation", Topology(), 4)) == []


def test_the_order_does_not_depend_on_what_else_the_process_did_nor_changes_it():
    request, source = StreamRequest(Topology(), 4, 5, 0, 15), pipelines.data("shuffled")
    tf.random.set_seed(1)
    before = read(source, request, 20)
    after = float(tf.random.uniform([]))
    tf.random.set_seed(1)
    assert float(tf.random.uniform([])) == after
    assert read(source, request, 20) == before


def test_a_shuffle_with_a_seed_of_its_own_has_another_order_in_each_epoch():
    def function(shard, num_shards):
        return (
            tf.data.Dataset.range(8)
            .map(lambda i: (i, i))
            .shuffle(8, seed=3, reshuffle_each_iteration=False)
        )

    stream = from_dataset(function).training(StreamRequest(Topology(), 8, 1, 0, 1)).take(3)
    orders = [inputs.tolist() for inputs, _ in stream.as_numpy_iterator()]
    assert orders[0] != orders[1] != orders[2]


def numbers(shard, num_shards, then=lambda dataset: dataset):
    return then(tf.data.Dataset.range(20).shard(num_shards, shard).map(lambda i: (i, i)))


def made(then, **options):
    return from_dataset(partial(numbers, then=then), name="numbers", **options)


def first(source, size=2, rank=0, steps=5):
    return next(iter(source.training(StreamRequest(Topology(rank, size), 2, 1, 0, steps))))


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (
            lambda d: d.batch(4),
            r"numbers\(shard=0, num_shards=1\) gives TensorSpec\(shape=\(None,\), .*; single examples",
        ),
        (
            lambda d: d.batch(4, drop_remainder=True).prefetch(1),
            r"numbers\(shard=0, num_shards=1\) ends with .batch\(\), but the run makes batches; remove",
        ),
        (
            lambda d: d.map(lambda x, y: {"x": x}),
            r"gives an object of type dict per element; \(inputs, targets\) or",
        ),
        (lambda d: d.map(lambda x, y: (x,)), r"gives 1 part\(s\) per element; \(inputs, targets\)"),
        (
            lambda d: d.map(lambda x, y: (tf.RaggedTensor.from_row_lengths([x], [1]), y)),
            "gives RaggedTensorSpec.* make tensors dense",
        ),
        (lambda d: [1], r"returned an object of type list; a tf.data.Dataset or a keras.utils"),
        (
            lambda d: None,
            r"returned None; a tf.data.Dataset or a keras.utils.PyDataset is needed",
        ),
        (lambda d: d.repeat(), r"never ends; set num_examples"),
    ],
)
def test_what_is_no_pipeline_of_examples_is_refused(then, message):
    with pytest.raises(DataError, match=message):
        first(made(then))


def test_functions_with_wrong_arguments_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"takes no shard and no num_shards; declare shard and num_shards, and return only",
    ):
        from_dataset(lambda: None)
    with pytest.raises(
        ConfigError,
        match=r"has the argument folder, and hvtrain gives only shard, num_shards, split",
    ):
        from_dataset(lambda shard, num_shards, folder: None)
    with pytest.raises(
        ConfigError,
        match=r"num_examples has test; it may have train, validation, test if the function",
    ):
        from_dataset(numbers, num_examples={"train": 3, "test": 4})
    source = made(lambda d: d)
    source.on_error = "skip"
    with pytest.raises(
        ConfigError,
        match=r"does not apply to a user.s function; use data.on_error=stop, and dataset.ignore_errors\(\)",
    ):
        first(source)


def test_arguments_that_a_function_does_not_name_are_not_taken_for_heeded():
    """Its training part would be the test part too, and a resumed epoch would begin anew."""
    source = from_dataset(lambda shard, num_shards, **_: numbers(shard, num_shards), name="any")
    assert [source.num_examples(split) for split in source.SPLITS] == [20, 0, 0]
    inputs, _ = next(iter(source.training(StreamRequest(Topology(0, 2), 2, 1, 3, 5))))
    assert inputs.numpy().tolist() == [12, 14]


def test_shards_that_are_not_parts_of_the_whole_are_refused():
    with pytest.raises(
        DataError,
        match=r"train hold 61 \+ 61 examples, but the whole split holds 61; the function",
    ):
        pipelines.data("ignoring").shard_sizes("train", 2)
    with pytest.raises(
        DataError, match=r"2 shards of train hold 31 \+ 9 examples, but the whole split holds 61"
    ):
        pipelines.data("short").shard_sizes("train", 2)
    whole = from_dataset(lambda shard, num_shards: numbers(0, 1), name="whole", num_examples=20)
    with pytest.raises(
        DataError,
        match=r"whole\(shard=0, num_shards=2\) returns all 20 examples of num_examples; the",
    ):
        first(whole)


def test_an_epoch_that_ends_early_is_named_with_its_shard():
    with pytest.raises(
        DataError,
        match=r"short\(shard=1, num_shards=2\) gives 9 example\(s\), but the run needs 30; each shard",
    ):
        first(pipelines.data("short", number=61), rank=1, steps=15)
    # Its number is not known beforehand.
    source = made(lambda d: d.filter(lambda x, y: x < 13), num_examples=20)
    with pytest.raises(tf.errors.OpError) as caught:
        list(source.training(StreamRequest(Topology(1, 2), 2, 1, 0, 5)).take(9))
    said = "numbers(shard=1, num_shards=2) gives 6 example(s), but the run needs 10; each shard must hold an equal part"
    assert str(source.explain(caught.value)).startswith(said)


def test_an_evaluation_of_more_examples_than_were_said_is_refused():
    source = made(lambda d: d.filter(lambda x, y: True), num_examples=18)
    with pytest.raises(tf.errors.OpError) as caught:
        list(source.evaluation("train", Topology(0, 2), 4))
    assert "gives 10 example(s), but the run needs 9" in str(source.explain(caught.value))


def test_examples_without_end_and_examples_that_must_be_read_are_counted():
    assert made(lambda d: d.filter(lambda x, y: x > 4)).shard_sizes("train", 2) == [7, 8]
    source = made(lambda d: d.repeat(), num_examples=20)
    assert source.shard_sizes("train", 2) == [10, 10]
    assert first(source)[0].numpy().tolist() == [0, 2]


def test_only_splits_without_a_given_number_are_counted():
    def data(shard, num_shards, split):
        return numbers(shard, num_shards) if split != "test" else None

    source = from_dataset(data, num_examples=np.int64(10))
    assert [source.num_examples(split) for split in source.SPLITS] == [10, 20, 0]
    assert {split for *_, split in source.own_counts(Topology())} == {"validation", "test"}


def test_each_rank_reads_its_own_shard_alone_to_count_it(caplog):
    """Each read all shards and the whole: 17 times the data on each of 16 ranks."""
    caplog.set_level(logging.INFO)
    sources = [made(lambda d: d.filter(lambda x, y: x > 4)) for _ in range(3)]
    counts = []
    for rank, source in enumerate(sources):
        counts.append(source.own_counts(Topology(rank, 3)))
        read = [record.message.partition(":")[0] for record in caplog.records]
        whole = ["numbers(shard=0, num_shards=1)"] if rank == 0 else []
        assert read == [f"numbers(shard={rank}, num_shards=3)", *whole]
        caplog.clear()
    for source in sources:
        source.take_counts(counts)
        assert source.shard_sizes("train", 3) == [5, 5, 5]
    assert caplog.records == []


def test_what_a_pipeline_cannot_do_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    source = made(lambda d: d.map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False))
    for _ in range(2):
        next(iter(source.training(StreamRequest(Topology(), 2, 1, 13, 10))))
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "numbers neither shuffles nor declares epoch, so all epochs may have the same order",
        "numbers sets deterministic=False, so a resumed run will not be bit-for-bit reproducible",
    ]


def test_an_exception_of_the_function_is_named_with_its_line():
    file = ROOT / "tests/support/own/pipelines/__init__.py"
    lines = {
        mark: n
        for n, text in enumerate(file.read_text().splitlines(), 1)
        for mark in [text.partition("  # ")[2]]
    }
    message = (
        r"failing\(shard=0, num_shards=1\) failed: ZeroDivisionError: .* "
        rf"\({file}, line {lines['failing']}\); trace"
    )
    with pytest.raises(ConfigError, match=message):
        pipelines.data("failing").num_examples("train")
    source = pipelines.data("failing_later")
    with pytest.raises(tf.errors.OpError) as caught:
        list(source.training(StreamRequest(Topology(), 61, 1, 0, 1)).take(2))
    found = source.explain(caught.value)
    assert isinstance(found, ConfigError)
    assert f"IndexError: list index out of range ({file}, line {lines['later']})" in str(found)


class Lists(keras.utils.PyDataset):
    """Batches as they are given."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, number):
        return self.batches[number]


TWO = (np.zeros((2, 3)), np.zeros(2))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], r"the PyDataset has no batches or no __len__; define __len__"),
        ([np.zeros(3)], r"batch 0 holds an object of type ndarray; \(inputs, targets\) or"),
        (
            [(np.zeros(3), np.zeros(2))],
            r"the arrays of batch 0 have 2 and 3 rows; each example needs one row in each array",
        ),
        (
            [TWO, TWO, (np.zeros((3, 3)), np.zeros(3))],
            r"batch 2 of 3 holds 3 example\(s\), but batch 0 holds 2; give all batches one",
        ),
        (
            [TWO, (np.zeros((1, 3)), np.zeros(1)), TWO],
            r"batch 1 of 3 holds 1 example\(s\), but batch 0 holds 2; give all batches one",
        ),
        (
            [TWO, (np.zeros((2, 4)), np.zeros(2)), TWO],
            r"batch 1 holds float32 \(4,\), float32 \(\), but batch 0 holds float32 \(3",
        ),
        (
            [TWO, (*TWO, np.zeros(2)), TWO],
            r"batch 1 holds float32 .*\(\), float32 \(\), but batch 0 holds float32",
        ),
    ],
)
def test_batches_of_a_pydataset_are_checked(batches, message):
    source = from_dataset(lambda shard, num_shards: Lists(batches), name="lists")
    with pytest.raises((DataError, tf.errors.OpError)) as caught:
        list(source.evaluation("train", Topology(), 2))
    error = caught.value if isinstance(caught.value, DataError) else source.explain(caught.value)
    with pytest.raises(DataError, match=message):
        raise error


def test_a_list_of_inputs_is_several_inputs():
    batch = ([np.zeros((2, 3)), np.zeros((2, 5))], np.zeros(2))
    source = from_dataset(lambda **_: Lists([batch]), name="lists")
    ((inputs, _),) = source.training(StreamRequest(Topology(), 2, 1, 0, 1)).take(1)
    assert [part.shape[1] for part in inputs] == [3, 5]
