"""Runs on each rank: where it computes, what it sums, and whether compiled steps stay equal. JSON to argv[1].

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
        "memory_grows": [tf.config.experimental.get_memory_growth(gpu) for gpu in gpus],
    }


def sums() -> dict[str, Any]:
    """Sums over the ranks of values that each rank makes on its device: large, small, and of half precision."""
    found = {}
    for name, size, dtype in (("large", 3_000_000, "float32"), ("small", 3, "float32"), ("half", 1000, "float16")):
        mine = tf.range(size, dtype=tf.int32) % 97 + RANK
        total = np.asarray(hvd.allreduce(tf.cast(mine, dtype), op=hvd.Sum), "float64")
        expected = SIZE * (np.arange(size) % 97) + SIZE * (SIZE - 1) / 2
        found[name] = float(np.max(np.abs(total - expected)))
    return {"errors": found, "nccl_built": bool(hvd.nccl_built())}


def network() -> keras.Model:
    keras.utils.set_random_seed(9)
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(5)])
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


def distance(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return max(float(np.max(np.abs(a - b))) for a, b in zip(one, other))


def loops() -> dict[str, float]:
    start = network().get_weights()
    compiled, joint = loop(compiled=True, joint=False), loop(compiled=False, joint=True)
    return {
        "compiled_against_joint": distance(compiled, joint),
        "plain_against_joint": distance(loop(compiled=False, joint=False), joint),
        "moved": distance(start, joint),
        "ranks_differ": max(distance(compiled, other) for other in strategy.comm.gather(compiled)),
    }


# TensorFloat-32 would round a product to three digits, and the comparisons say more than that.
tf.config.experimental.enable_tensor_float_32_execution(False)
found = strategy.comm.gather({"place": place(), "sums": sums(), "loops": loops()})
if topology.is_chief:
    Path(sys.argv[1]).write_text(json.dumps(found))
strategy.stop()
