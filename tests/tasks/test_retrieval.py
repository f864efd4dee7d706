"""The task of finding items, and what its loss and its metric count."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvtrain.data import from_arrays
from hvtrain.data.sources.interactions import purchases
from hvtrain.errors import ConfigError, DataError
from hvtrain.step.joint_loss import refuse_joint_batch
from hvtrain.tasks import InBatchSoftmax, RecallAtK, Retrieval

VECTORS = np.random.default_rng(0).normal(size=(6, 2, 4)).astype(np.float32)
ITEMS = np.array([3, 1, 3, 0, 2, 1], np.int32)


def in_training(loss, targets=ITEMS, vectors=VECTORS):
    with tf.GradientTape():
        return loss.call(tf.constant(targets), tf.Variable(vectors)).numpy()


def test_the_own_item_is_no_negative_of_a_query():
    """The loss is the cross-entropy among the own item and those rows that hold other items."""
    losses = in_training(InBatchSoftmax(temperature=0.5))
    scores = VECTORS[:, 0] @ VECTORS[:, 1].T / 0.5
    for row, loss in enumerate(losses):
        columns = [row, *np.flatnonzero(ITEMS[row] != ITEMS)]
        assert loss == pytest.approx(
            np.log(np.exp(scores[row, columns]).sum()) - scores[row, row], rel=1e-5
        )
    assert InBatchSoftmax.from_config(InBatchSoftmax(0.5).get_config()).temperature == 0.5
    # A control: of rows 0 and 2, which hold the same item, each would be the other's negative.
    assert in_training(InBatchSoftmax(temperature=0.5), np.arange(6))[0] > losses[0] + 1e-3


def test_an_evaluation_takes_the_whole_catalogue():
    catalogue = np.random.default_rng(1).normal(size=(9, 4)).astype(np.float32)
    loss, recall = InBatchSoftmax(1.0), RecallAtK(2)
    loss.item_vectors = recall.item_vectors = lambda: tf.constant(catalogue)
    scores = VECTORS[:, 0] @ catalogue.T
    expected = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(6), ITEMS]
    np.testing.assert_allclose(loss.call(ITEMS, VECTORS), expected, rtol=1e-5)
    for rows in (slice(4), slice(4, None)):
        recall.update_state(ITEMS[rows], VECTORS[rows])
    hits = [item in np.argsort(-row)[:2] for row, item in zip(scores, ITEMS)]
    assert float(recall.result()) == pytest.approx(np.mean(hits))


def test_a_model_is_bound_to_the_catalogue_it_is_compiled_with():
    """The vectors are those of the input "item" alone, whatever the query."""
    source, task = (
        purchases(num_train=50, num_test=5, num_users=7, num_items=6, num_clusters=2),
        Retrieval(),
    )
    task.prepare(source)
    inputs = {name: keras.Input((1,), dtype="int32", name=name) for name in ("query", "item")}
    vectors = [keras.layers.Embedding(7, 3, name=f"{name}_table")(inputs[name]) for name in inputs]
    model = keras.Model(inputs, keras.ops.concatenate(vectors, axis=1))
    task.compile(model, keras.optimizers.SGD())
    table = model.get_layer("item_table").get_weights()[0]
    np.testing.assert_array_equal(model.loss.item_vectors(), table[:6])
    score = task.columns(VECTORS, source)["score"]
    np.testing.assert_allclose(score, [query @ item for query, item in VECTORS], rtol=1e-5)


def test_an_item_that_is_not_in_the_catalogue_is_refused():
    ids = np.arange(4)[:, None]
    source = from_arrays(
        {"query": ids, "item": ids}, np.array([0, 1, 2, 3]), facts={"catalogue": ids[:3]}
    )
    with pytest.raises(
        DataError,
        match=r"arrays, train: example 3 has the target 3, outside 0 ... 2; fix the targets",
    ):
        Retrieval().prepare(source)

    many = {"catalogue": np.broadcast_to(0, (2**24 + 1, 1))}
    with pytest.raises(
        ConfigError, match="takes up to 16,777,216 items, and arrays has 16,777,217"
    ):
        Retrieval().prepare(from_arrays({"query": ids, "item": ids}, ids[:, 0], facts=many))


def test_a_strategy_without_the_joint_batch_refuses_the_loss():
    with pytest.raises(
        ConfigError,
        match=r"^strategy=mirrored .* InBatchSoftmax compares .* choose strategy=horovod$",
    ):
        refuse_joint_batch(InBatchSoftmax(), "mirrored")
    refuse_joint_batch(SimpleNamespace(), "mirrored")
