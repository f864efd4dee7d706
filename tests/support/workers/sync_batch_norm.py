"""Runs on each rank: SyncBatchNormalization against Keras's layer on the joint batch. JSON from rank 0 to argv[1]."""

import json
import sys
from pathlib import Path

import fast_keras  # noqa: F401
import keras
import numpy as np
import tensorflow as tf
from keras.layers import BatchNormalization, Dense

import hvtrain.keras as hvd
from hvtrain.keras.in_graph import counter
from hvtrain.keras.over_ranks import SyncBatchNormalization

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
EVEN, UNEVEN, EMPTY = (
    [6] * SIZE,
    [4 + 3 * rank for rank in range(SIZE)],
    [6, *[6] * (SIZE - 2), *[0] * (SIZE > 1)],
)

# Ranks that made other layers first: from here on Keras's names for the same layer differ between them.
for _ in range(RANK):
    keras.Sequential([keras.Input((3,)), SyncBatchNormalization()])


def difference(ours, expected):
    """Largest, relative to the largest value of each array."""
    return max(
        float(np.max(np.abs(a - b)) / (np.max(np.abs(b)) + 1e-12))
        for a, b in zip(ours, expected, strict=True)
    )


def mine(sizes):
    return slice(sum(sizes[:RANK]), sum(sizes[: RANK + 1]))


class Net:
    """Dense - normalization, or twice the same normalization; and one step of it by hand."""

    def __init__(self, norm, shape, policy="float32", twice=False, **options):
        keras.utils.set_random_seed(3)
        uniform, normal = (
            keras.initializers.RandomUniform(0.5, 1.5, 1),
            keras.initializers.RandomNormal(0, 1, 2),
        )
        options = {
            "momentum": 0.7,
            "gamma_initializer": uniform,
            "beta_initializer": normal,
            **options,
        }
        self.dense, self.norm = (
            Dense(shape[-1], use_bias=False, dtype=policy),
            norm(dtype=policy, **options),
        )
        self.twice = twice
        self.dense.build((None, *shape))
        self.norm.build((None, *shape))

    def step(self, x, target, mask, num_examples):
        """Outputs and gradients; each loss is the mean over the joint batch times the ranks that share it."""
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = self.norm(self.dense(x), training=True, mask=mask)
            if self.twice:
                y = self.norm(self.dense(y), training=True, mask=mask)
            loss = tf.reduce_sum(tf.sin(tf.cast(y, target.dtype)) * target) / num_examples
        variables = [
            variable.value
            for variable in (*self.dense.trainable_weights, *self.norm.trainable_weights)
        ]
        dx, *gradients = tape.gradient(loss, [x, *variables])
        return y, dx, gradients


def against_joint_batch(shape, sizes=EVEN, policy="float32", mask=None, traced=True, **options):
    """Differences of this rank from Keras's layer on the joint batch; and of Keras's layer on this rank's."""
    generator = np.random.default_rng(11)
    dtype = "float64" if policy == "float64" else "float32"
    x, target = (generator.normal(0.5, 2, (sum(sizes), *shape)).astype(dtype) for _ in range(2))
    own = mine(sizes)

    def run(norm, rows, factor):
        net = Net(norm, shape, policy, **options)
        step = tf.function(net.step) if traced and norm is SyncBatchNormalization else net.step
        tensors = [tf.constant(array[rows]) for array in (x, target)]
        y, dx, gradients = step(
            *tensors, None if mask is None else tf.constant(mask[rows]), sum(sizes) / factor
        )
        return [weight.numpy() for weight in net.norm.non_trainable_weights], y, dx, gradients

    moving, y, dx, gradients = run(SyncBatchNormalization, own, SIZE)
    gradients = [hvd.allreduce(gradient, name=f"test{i}") for i, gradient in enumerate(gradients)]
    one_moving, one_y, one_dx, one_gradients = run(BatchNormalization, slice(None), 1)
    alone_moving, alone_y, *_ = run(BatchNormalization, own, SIZE)
    outputs, one_outputs, alone_outputs = (
        tf.cast(a, dtype).numpy() for a in (y, one_y[own], alone_y)
    )
    scale = np.max(np.abs(one_dx))
    return {
        "dtype": [y.dtype.name, one_y.dtype.name],
        "outputs": float(np.max(np.abs(outputs - one_outputs), initial=0)),
        "alone": float(np.max(np.abs(alone_outputs - one_outputs), initial=0)),
        "alone_moving": difference(alone_moving, one_moving),
        "input_gradient": float(np.max(np.abs(dx / SIZE - one_dx[own]), initial=0) / scale),
        "gradients": difference(gradients, [gradient.numpy() for gradient in one_gradients]),
        "moving": difference(moving, one_moving),
        "ranks_differ": max(difference(moving, other) for other in hvd.allgather_object(moving)),
    }


def mask(length, sizes, nothing_on_last=False):
    kept = np.random.default_rng(5).random((sum(sizes), length)) < 0.6
    return (
        kept & (np.arange(sum(sizes)) < sum(sizes[:-1]))[:, None]
        if nothing_on_last and SIZE > 1
        else kept
    )


def large_mean():
    """Mean 10000, deviation 1, against float64; and what a reduction of means of squares would have found."""
    x = np.random.default_rng(2).normal(1e4, 1, (64 * SIZE, 5)).astype("float32")
    parts = x.reshape(SIZE, 64, 5)
    squares = np.mean(np.mean(parts**2, 1), 0) - np.mean(np.mean(parts, 1), 0) ** 2
    layer = SyncBatchNormalization(momentum=0.0, epsilon=0.0)
    y = layer(parts[RANK], training=True).numpy()
    exact = x.astype("float64")
    plain = BatchNormalization(epsilon=0.0)(x, training=True).numpy().reshape(parts.shape)[RANK]
    expected = ((exact - exact.mean(0)) / exact.std(0)).reshape(parts.shape)[RANK]
    return {
        "outputs": float(np.max(np.abs(y - expected))),
        "outputs_of_plain": float(np.max(np.abs(plain - expected))),
        "variance": difference([layer.moving_variance.numpy()], [exact.var(0)]),
        "variance_from_squares": difference([squares], [exact.var(0)]),
    }


def fitted(norm, rows, batch, distributed=True):
    """Weights and moving statistics after 3 epochs of fit, rows of each joint batch of 8 examples a rank."""
    generator = np.random.default_rng(8)
    x = generator.normal(1, 2, (5, 8 * SIZE, 6, 6, 2)).astype("float32")
    y = generator.integers(0, 3, (5, 8 * SIZE))
    keras.utils.set_random_seed(RANK if distributed else 0)
    layers = [keras.layers.Conv2D(4, 3, use_bias=False), norm(momentum=0.8), keras.layers.ReLU()]
    model = keras.Sequential([keras.Input((6, 6, 2)), *layers, keras.layers.Flatten(), Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(hvd.DistributedOptimizer(optimizer) if distributed else optimizer, loss)
    if distributed:
        hvd.broadcast_model(model)
    x, y = x[:, rows].reshape(-1, 6, 6, 2), y[:, rows].reshape(-1)
    model.fit(x, y, batch_size=batch, epochs=3, shuffle=False, verbose=0)
    return model


def training():
    rows = slice(8 * RANK, 8 * RANK + 8)
    together = fitted(SyncBatchNormalization, rows, 8)
    ours = together.get_weights()
    saved = saved_and_loaded(together, Path(sys.argv[1]).parent)
    alone = fitted(BatchNormalization, slice(None), 8 * SIZE, distributed=False).get_weights()
    apart = fitted(BatchNormalization, rows, 8).get_weights()
    return {
        "name": together.layers[1].name,
        "xla": together.jit_compile,
        "error": difference(ours, alone),
        "error_of_plain": difference(apart, alone),
        "ranks_differ": max(difference(ours, other) for other in hvd.allgather_object(ours)),
        "saved": saved,
    }


def saved_and_loaded(model, folder):
    model.save(path := folder / f"sync-{RANK}.keras")
    loaded = keras.models.load_model(path)
    x = np.random.default_rng(1).normal(size=(4, 6, 6, 2)).astype("float32")
    layer = BatchNormalization(momentum=0.8)
    layer.build((None, 4, 4, 4))
    layer.set_weights(model.layers[1].get_weights())
    features, layers = model.layers[0](x), [model.layers[1], loaded.layers[1]]
    return {
        "same": [
            type(layers[1]) is type(layers[0]),
            layers[1].get_config() == layers[0].get_config(),
        ],
        "inference": difference([loaded.predict(x, verbose=0)], [model.predict(x, verbose=0)]),
        "inference_of_plain": difference(
            [model.layers[1](features).numpy()], [layer(features).numpy()]
        ),
        "training": difference(
            [loaded(x, training=True).numpy()], [model(x, training=True).numpy()]
        ),
    }


def functions_in_one_graph():
    """Two functions traced for themselves, so that their sums have equal names, each called twice in one graph."""
    x = tf.constant(np.random.default_rng(RANK).normal(size=(4, 3)).astype("float32"))
    nets = [Net(SyncBatchNormalization, (3,)) for _ in range(2)]
    functions = [
        tf.function(lambda x, net=net: net.norm(net.dense(x), training=True)) for net in nets
    ]
    variables = [net.dense.kernel.value for net in nets]

    def step(x):
        with tf.GradientTape() as tape:
            parts = [tf.sin(function(x * scale)) for scale in (1.0, 3.0) for function in functions]
            loss = tf.add_n([tf.reduce_mean(part) * (i + 1) for i, part in enumerate(parts)])
        return tape.gradient(loss, variables)

    expected = step(x)
    traced, before = tf.function(step), int(counter("sync_batch_norm"))
    error = max(difference(traced(x), expected) for _ in range(10))
    return {"error": error, "sums": int(counter("sync_batch_norm")) - before}


def second_derivative():
    """Of a penalty on the gradient, as in some adversarial networks, against the formula on the joint batch."""
    x = np.random.default_rng(4).normal(size=(5 * SIZE, 3)).astype("float32")

    def formula(x, training):
        mean = tf.reduce_mean(x, 0)
        return (x - mean) / tf.sqrt(tf.reduce_mean((x - mean) ** 2, 0) + 1e-3)

    def penalty_gradient(layer, x):
        x = tf.Variable(x)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(tf.sin(layer(x, training=True)))
            penalty = tf.reduce_sum(inner.gradient(loss, x) ** 2)
        return outer.gradient(penalty, x).numpy()

    own = mine([5] * SIZE)
    return difference(
        [penalty_gradient(SyncBatchNormalization(), x[own])], [penalty_gradient(formula, x)[own]]
    )


def joined():
    """The last rank has no more batches: the moments are those of the others."""
    x = np.random.default_rng(6).normal(size=(SIZE, 4, 3)).astype("float32")
    layer = SyncBatchNormalization(momentum=0.0)
    layer.build((None, 3))
    if RANK < SIZE - 1:
        layer(x[RANK], training=True)
    hvd.join()
    if RANK == SIZE - 1:
        return 0.0
    moments = [layer.moving_mean.numpy(), layer.moving_variance.numpy()]
    return difference(moments, [x[:-1].mean((0, 1)), x[:-1].var((0, 1))])


CASES = {
    "dense": {"shape": (6,)},
    "eager": {"shape": (6,), "traced": False},
    "image": {"shape": (5, 4, 3)},
    "channels_first": {"shape": (3, 5, 4), "axis": 1},
    "one_channel": {"shape": (5, 1)},
    "volume": {"shape": (3, 2, 4, 3)},
    "volume_axis_2": {"shape": (3, 2, 4, 3), "axis": 2},
    "no_scale": {"shape": (4, 6), "scale": False, "center": False},
    "uneven": {"shape": (5, 3), "sizes": UNEVEN},
    "empty": {"shape": (5, 3), "sizes": EMPTY},
    "twice": {"shape": (6,), "twice": True},
    "mask": {"shape": (7, 4), "mask": mask(7, EVEN)},
    "mask_uneven": {"shape": (7, 4), "sizes": UNEVEN, "mask": mask(7, UNEVEN), "traced": False},
    "mask_axis_1": {"shape": (4, 7), "axis": 1, "mask": mask(4, EVEN)},
    "mask_all_of_one_rank": {"shape": (7, 4), "mask": mask(7, EVEN, nothing_on_last=True)},
    "float64": {"shape": (5, 3), "sizes": UNEVEN, "policy": "float64"},
    "mixed_bfloat16": {"shape": (5, 3), "policy": "mixed_bfloat16"},
    "mixed_float16": {"shape": (5, 3), "policy": "mixed_float16"},
}

results = {
    "cases": {name: against_joint_batch(**case) for name, case in CASES.items()},
    "large_mean": large_mean(),
    "training": training(),
    "functions": functions_in_one_graph(),
    "second_derivative": second_derivative(),
    "joined": joined(),
}
everything = json.dumps(hvd.allgather_object(results))
if RANK == 0:
    Path(sys.argv[1]).write_text(everything)
hvd.shutdown()
