"""What a Keras model weighs, and the order and work of its gradients."""

import keras
import pytest
from keras import layers

from hvtrain.keras import sharded_optimizer
from hvtrain.keras.optimizers import RowwiseAdagrad
from hvtrain.keras.sharded_embedding import ShardedEmbedding
from hvtrain.models.memory import WHOLE_SLOTS, flops_per_example, footprint
from hvtrain.plan.forecast import gradients
from hvtrain.plan.methods import method_of


@pytest.fixture
def model():
    """An inner model, a view, a layer without weights and one that is not trained."""
    inner = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3, padding="same")])
    steps = [
        keras.Input((8, 8, 3)),
        inner,
        layers.ReLU(),
        layers.Flatten(),
        layers.Dense(10),
        layers.Dense(2),
    ]
    made = keras.Sequential(steps)
    made.layers[-1].trainable = False
    made.compile("adam")
    made.optimizer.build(made.trainable_variables)
    return made


def test_gradients_come_last_layer_first_with_their_multiplications(model):
    sizes = [(gradient.num_bytes, gradient.work) for gradient in gradients(model)]
    dense, conv = 256 * 10 + 10, 3 * 3 * 3 * 4 + 4
    assert sizes == [(4 * 10, dense), (4 * 2560, 0), (4 * 4, 64 * conv), (4 * 108, 0)]


def test_bytes(model):
    sizes = footprint(model, batch_size=5)
    trained = 3 * 3 * 3 * 4 + 4 + 2560 + 10
    assert sizes.gradient_bytes == 4 * trained
    assert sizes.weight_bytes == 4 * (trained + 22)
    assert 8 * trained < sizes.slot_bytes < 8 * trained + 50, "two moments each, and two counters"
    assert sizes.activation_bytes == 5 * 4 * (256 + 256 + 10 + 2), (
        "convolution, ReLU and dense; no view"
    )
    assert sizes.checkpoint_bytes == sizes.weight_bytes + sizes.slot_bytes


@pytest.mark.parametrize(
    ("options", "num_whole"),
    [
        ({}, 0),
        ({"gradient_accumulation_steps": 2}, 1),
        ({"gradient_accumulation_steps": 2, "use_ema": True}, 2),
    ],
)
def test_sharding_leaves_accumulated_gradients_and_averages_whole(model, options, num_whole):
    model.compile(keras.optimizers.Adam(**options))
    model.optimizer.build(model.trainable_variables)
    sizes = footprint(model, 1)
    extra = method_of({"shard_optimizer": True}).extra_bytes(sizes, num_ranks=10**9)
    whole = sizes.slot_bytes + extra["optimizer slots"]
    assert whole == sizes.whole_slot_bytes == num_whole * sizes.gradient_bytes
    assert WHOLE_SLOTS == sharded_optimizer.WHOLE_SLOTS


def test_a_layer_of_an_inner_model_that_is_used_again_counts_once():
    shared = layers.Dense(4, use_bias=False)
    first, second = keras.Input((4,)), keras.Input((4,))
    inner = keras.Model(first, shared(first))
    model = keras.Model(second, shared(inner(second)))
    assert [gradient.num_bytes for gradient in gradients(model)] == [4 * 16]
    assert flops_per_example(model) == 6 * 2 * 16, "it multiplies twice"


def test_half_precision_halves_activations_alone(model):
    whole = footprint(model, 1)
    policy = {"dtype": "mixed_bfloat16"}
    half = keras.Sequential(
        [keras.Input((256,)), layers.Dense(10, **policy), layers.Dense(2, **policy)]
    )
    half.compile("sgd")
    half.optimizer.build(half.trainable_variables)
    sizes = footprint(half, 1)
    assert sizes.activation_bytes == 2 * 12 and sizes.gradient_bytes == 4 * (2570 + 22)
    assert whole.activation_bytes == 4 * 524


def test_sharded_tables_are_spread_over_the_ranks():
    ids = keras.Input((3,), dtype="int32")
    table = ShardedEmbedding(11, 4, name="table")
    model = keras.Model(ids, layers.Dense(1)(layers.Flatten()(table(ids))))
    model.compile(RowwiseAdagrad(0.1))
    model.optimizer.build(model.trainable_variables)
    dense = 4 * (12 + 1)

    whole = footprint(model, 2)
    assert (whole.weight_bytes, whole.elsewhere_bytes) == (4 * 44 + dense, 0)
    part = footprint(model, 2, num_ranks=2)
    assert part.weight_bytes == 4 * 6 * 4 + dense, "the first rank has 6 of 11 rows"
    assert whole.slot_bytes - part.slot_bytes == 4 * 5, "one number a row"
    assert part.gradient_bytes == dense == sum(gradient.num_bytes for gradient in gradients(model))
    assert part.checkpoint_bytes == whole.checkpoint_bytes


def test_layers_that_do_not_say_their_shapes():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x):
            return self.dense(x)

    own = Own()
    own(keras.ops.zeros((1, 4)))
    own.compile("sgd")
    own.optimizer.build(own.trainable_variables)
    assert footprint(own, 8).activation_bytes is None
    assert sum(gradient.num_bytes for gradient in gradients(own)) == 4 * 15
