"""Runs on each rank: trains N ranks x B with hvtrain.keras and, on rank 0, one process on the joint batch.

Writes what it found to the file in argv[1], as JSON, from rank 0.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import hvtrain.keras as hvd

STEPS, BATCH = 20, 16


def data(kind, size):
    generator = np.random.default_rng(7)
    count = STEPS * BATCH * size
    if kind == "embedding":
        return generator.integers(0, 50, (count, 6)), generator.integers(0, 3, count)
    return generator.normal(size=(count, 12)).astype("float32"), generator.integers(0, 3, count)


class Unused(keras.layers.Layer):
    """Holds a weight that the loss does not depend on: its gradient is None."""

    def build(self, input_shape):
        self.weight = self.add_weight(shape=(2,), name="unused")

    def call(self, inputs):
        return inputs


def model(kind, seed):
    keras.utils.set_random_seed(seed)
    if kind == "embedding":
        layers = [keras.Input((6,)), keras.layers.Embedding(50, 8, name="e"), keras.layers.Flatten(name="f")]
    else:
        # kind is "dense", "unused", or the dtype policy of a dense one.
        policy = kind if kind.startswith("mixed") else "float32"
        layers = [keras.Input((12,)), keras.layers.Dense(24, activation="tanh", name="d", dtype=policy)]
        layers += [Unused(name="u")] if kind == "unused" else []
    return keras.Sequential([*layers, keras.layers.Dense(3, name="o", dtype="float32")], name="m")


def train(kind, optimizer, batches, seed, distributed, wrap=True):
    """Weights and slots after one pass over the batches, each a (features, labels) of one step."""
    net = model(kind, seed)
    if wrap:
        optimizer = hvd.DistributedOptimizer(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer, loss, jit_compile=False)
    if distributed:
        hvd.broadcast_model(net)
    before = [w.copy() for w in net.get_weights()]
    x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(batches[0][0]))
    net.fit(dataset, epochs=1, verbose=0, shuffle=False)
    slots = [v.numpy() for v in net.optimizer.variables if v.dtype == "float32"]
    return before, net.get_weights(), slots, hvd.num_reductions(net.optimizer)


def largest_difference(ours, theirs):
    """Relative to the largest value of each array."""
    return max(float(np.max(np.abs(a - b)) / (np.max(np.abs(b)) + 1e-12)) for a, b in zip(ours, theirs, strict=True))


CASES = {
    "sgd": ("dense", lambda: keras.optimizers.SGD(0.05)),
    "momentum": ("dense", lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)),
    "rmsprop": ("dense", lambda: keras.optimizers.RMSprop(0.003)),
    "adam": ("dense", lambda: keras.optimizers.Adam(0.003)),
    "adamw": ("dense", lambda: keras.optimizers.AdamW(0.003, weight_decay=0.01)),
    "lamb": ("dense", lambda: keras.optimizers.Lamb(0.003)),
    "lion": ("dense", lambda: keras.optimizers.Lion(0.0005)),
    "clipped": ("dense", lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.05)),
    "clipnorm": ("dense", lambda: keras.optimizers.Adam(0.003, clipnorm=0.01)),
    "ema": ("dense", lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9)),
    "loss_scale_factor": ("dense", lambda: keras.optimizers.SGD(0.05, loss_scale_factor=128.0)),
    "schedule": ("dense", lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, STEPS))),
    "accumulate": ("dense", lambda: keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=4)),
    "none_gradient": ("unused", lambda: keras.optimizers.SGD(0.05, momentum=0.9)),
    "mixed_bfloat16": ("mixed_bfloat16", lambda: keras.optimizers.SGD(0.05, momentum=0.9)),
    "mixed_float16": ("mixed_float16", lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05))),
    "embedding": ("embedding", lambda: keras.optimizers.SGD(0.05, momentum=0.9)),
    "embedding_adam": ("embedding", lambda: keras.optimizers.Adam(0.003)),
}


def main():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    found = {"size": size, "mpi": hvd.mpi_enabled(), "cases": {}}
    for name, (kind, optimizer) in CASES.items():
        x, y = data(kind, size)
        steps = np.arange(len(x)).reshape(STEPS, size, BATCH)
        mine = [(x[i], y[i]) for i in steps[:, rank]]
        joint = [(x[i.ravel()], y[i.ravel()]) for i in steps]
        # Ranks start with different weights: the broadcast must make them equal.
        before, weights, slots, reductions = train(kind, optimizer(), mine, seed=rank, distributed=True)
        everywhere = hvd.allgather_object((before, weights, slots))
        result = {"reductions": reductions, "ranks_differ": 0.0, "start_differs": 0.0}
        for other in everywhere:
            result["start_differs"] = max(result["start_differs"], largest_difference(other[0], everywhere[0][0]))
            result["ranks_differ"] = max(
                result["ranks_differ"],
                largest_difference([*other[1], *other[2]], [*everywhere[0][1], *everywhere[0][2]]),
            )
        if rank == 0:
            _, one, one_slots, _ = train(kind, optimizer(), joint, seed=0, distributed=False, wrap=False)
            result["error"] = largest_difference([*weights, *slots], [*one, *one_slots])
            _, alone, alone_slots, _ = train(kind, optimizer(), mine, seed=0, distributed=False, wrap=False)
            result["error_without_reduction"] = largest_difference([*alone, *alone_slots], [*one, *one_slots])
        found["cases"][name] = result
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    hvd.shutdown()


main()
