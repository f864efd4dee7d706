"""Runs on each rank: where it computes, what it sums, and whether steps of several kinds stay equal. JSON to argv[1].

The second word, share, lets ranks use one GPU together. Started by test_gpu_ranks.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvtrain.keras as hvd
from hvtrain.strategies.horovod import HorovodStrategy
from hvtrain.training.callbacks import console_progress

strategy = HorovodStrategy(share_gpus="share" in sys.argv)
topology = strategy.start()
RANK, SIZE = topology.rank, topology.size
RANDOM = np.random.default_rng(3)
STEPS, BATCH = 10, 16
X = RANDOM.normal(size=(STEPS, SIZE, BATCH, 20)).astype("float32")
Y = RANDOM.integers(0, 5, (STEPS, SIZE, BATCH))


def place() -> dict[str, Any]:
    """Where a multiplication runs, and how TensorFlow takes memory there."""
    product = tf.matmul(tf.ones((512, 512)), tf.ones((512, 512)))
    gpus = tf.config.get_visible_devices("GPU")
    return {
        "devices": list(strategy.devices),
        "computed_on": tf.DeviceSpec.from_string(product.device).device_type,
        "right": bool(tf.reduce_all(product == 512.0)),
        "num_visible": len(gpus),
        "in_words": console_progress.gpu(),
        "memory_grows": [tf.config.experimental.get_memory_growth(gpu) for gpu in gpus],
    }


def sums() -> dict[str, Any]:
    """Sums over the ranks of values that each rank makes on its device: large, small, and of half precision.

    In a graph, as a step sums them: TensorFlow places an eager reduction on the CPU.
    """
    result = {}
    devices = set()
    for name, size, dtype in (
        ("large", 3_000_000, "float32"),
        ("small", 3, "float32"),
        ("half", 1000, "float16"),
    ):
        mine = tf.range(size, dtype=tf.int32) % 97 + RANK
        reduce = tf.function(lambda values: hvd.allreduce(values, op=hvd.Sum))
        reduced = reduce(tf.cast(mine, dtype))
        devices.add(tf.DeviceSpec.from_string(reduced.device).device_type)
        total = np.asarray(reduced, "float64")
        expected = SIZE * (np.arange(size) % 97) + SIZE * (SIZE - 1) / 2
        result[name] = float(np.max(np.abs(total - expected)))
    return {"errors": result, "devices": sorted(devices), "nccl_built": bool(hvd.nccl_built())}


def network() -> keras.Model:
    keras.utils.set_random_seed(9)
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(5)]
    )
    hvd.broadcast_variables(model.weights, 0)
    return model


def loop(compiled: bool, joint: bool) -> list[np.ndarray]:
    """Weights after a loop of one's own: this rank's part of each batch, reduced; joint: the whole batch, alone.

    The model and its loss are compiled by XLA where `compiled` says so; the reduction stays outside.
    """
    model, optimizer = network(), keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(jit_compile=compiled)
    def compute(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return entropy(y, model(x, training=True))

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = compute(x, y)
        reducing = tape if joint else hvd.DistributedGradientTape(tape)
        gradients = reducing.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    for x, y in zip(X, Y):
        rows = (x.reshape(-1, 20), y.reshape(-1)) if joint else (x[RANK], y[RANK])
        step(tf.constant(rows[0]), tf.constant(rows[1]))
    return [np.asarray(weight) for weight in model.get_weights()]


def distance(item: list[np.ndarray], other: list[np.ndarray]) -> float:
    return max(float(np.max(np.abs(np.subtract(a, b)))) for a, b in zip(item, other))


def loops() -> dict[str, float]:
    start = network().get_weights()
    compiled, joint = loop(compiled=True, joint=False), loop(compiled=False, joint=True)
    return {
        "compiled_against_joint": distance(compiled, joint),
        "plain_against_joint": distance(loop(compiled=False, joint=False), joint),
        "moved": distance(start, joint),
        "ranks_differ": max(distance(compiled, other) for other in strategy.comm.gather(compiled)),
    }


def normalization() -> dict[str, float]:
    """SyncBatchNormalization on this rank's part of a batch against Keras's layer on all of it."""
    rows = tf.constant(RANDOM.normal(3, 2, (SIZE, 32, 6, 6, 8)).astype("float32"))

    def through(layer: keras.Layer, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, list[np.ndarray]]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(tf.sin(y))
        return (
            y,
            tape.gradient(loss, x),
            [np.asarray(weight) for weight in layer.non_trainable_weights],
        )

    together, alone = (
        hvd.SyncBatchNormalization(momentum=0.5),
        keras.layers.BatchNormalization(momentum=0.5),
    )
    joint = keras.layers.BatchNormalization(momentum=0.5)
    y, gradient, moving = through(together, rows[RANK])
    joint_y, joint_gradient, joint_moving = through(joint, tf.reshape(rows, (-1, 6, 6, 8)))
    mine = slice(32 * RANK, 32 * RANK + 32)
    return {
        "outputs": distance([y], [joint_y[mine]]),
        "input_gradient": distance([gradient], [joint_gradient[mine]]),
        "moving": distance(moving, joint_moving),
        "moving_alone": distance(through(alone, rows[RANK])[2], joint_moving),
        "ranks_differ": max(distance(moving, other) for other in strategy.comm.gather(moving)),
    }


def sparse(reduces: bool = True, joint: bool = False) -> list[np.ndarray]:
    """An embedding's table after some steps. An index comes about 80 times in a batch, and its gradients are added."""
    keras.utils.set_random_seed(4)
    random = np.random.default_rng(6)
    layer = keras.layers.Embedding(50, 16)
    layer.build()
    optimizer = keras.optimizers.SGD(5.0)
    optimizer = hvd.DistributedOptimizer(optimizer) if reduces else optimizer
    optimizer.build(layer.trainable_variables)
    hvd.broadcast_variables(layer.weights, 0)

    @tf.function
    def step(indices: tf.Tensor, targets: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum((layer(indices) - targets) ** 2, -1))
        gradient = tape.gradient(loss, layer.embeddings.value)
        assert isinstance(gradient, tf.IndexedSlices)
        optimizer.apply([gradient], layer.trainable_variables)

    for _ in range(20):
        indices, targets = (
            random.integers(0, 50, (SIZE, 4096)),
            random.normal(size=(SIZE, 4096, 16)).astype("float32"),
        )
        part = slice(None) if joint else slice(RANK, RANK + 1)
        step(tf.constant(indices[part].ravel()), tf.constant(targets[part].reshape(-1, 16)))
    return [np.asarray(weight) for weight in layer.get_weights()]


def sparse_gradients() -> dict[str, float]:
    """On GPUs each rank adds the gradients of an index in an order of its own, unless operations are deterministic."""
    plain, joint, alone = sparse(), sparse(reduces=False, joint=True), sparse(reduces=False)
    tf.config.experimental.enable_op_determinism()  # As train.deterministic=true does. It stays on: so this comes last.
    exact = sparse()
    return {
        "against_joint": distance(plain, joint),
        "alone_against_joint": distance(alone, joint),
        "ranks_differ": max(distance(plain, other) for other in strategy.comm.gather(plain)),
        "deterministic_against_joint": distance(exact, joint),
        "deterministic_ranks_differ": max(
            distance(exact, other) for other in strategy.comm.gather(exact)
        ),
    }


# TensorFloat-32 would round a product to three digits, and the comparisons say more than that.
tf.config.experimental.enable_tensor_float_32_execution(False)
parts = (place, sums, loops, normalization, sparse_gradients)
result = strategy.comm.gather({part.__name__: part() for part in parts})
if topology.is_chief:
    Path(sys.argv[1]).write_text(json.dumps(result))
strategy.stop()
