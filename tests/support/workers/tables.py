"""Runs on each rank: sharded embedding tables against a plain Embedding on the joint batch in one process.

argv[1]: where rank 0 writes JSON.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import fast_keras  # noqa: F401
import keras
import numpy as np
import tensorflow as tf
from keras import layers, optimizers

import hvtrain.keras as hvd
from hvtrain.keras.gradients import variable_id
from hvtrain.keras.reduction import Reducer
from hvtrain.keras.table_rows import rows_of

hvd.init()
rank, size = hvd.rank(), hvd.size()

ROWS, WIDTH, STEPS, JOINT = 23, 3, 5, 24
RANDOM = np.random.default_rng(0)
# Frequent ids, repeated ones, and ids that only one rank looks up.
IDS = np.minimum(RANDOM.zipf(1.3, (STEPS, JOINT, 2)) - 1, ROWS - 1).astype("int32")
TARGETS = RANDOM.normal(size=(STEPS, JOINT, 1)).astype("float32")
TABLE = RANDOM.normal(size=(ROWS, WIDTH)).astype("float32")


FEW = np.array([[5, 5, 0], [22, 1, 5]])
# Those of the last example are 0, so its mean has nothing to divide by.
WEIGHTS = RANDOM.uniform(0.1, 2, (JOINT, 2)).astype("float32")
WEIGHTS[-1] = 0
OWN = np.array_split(np.arange(JOINT), size)[rank]
# The same joint batch, of which the last rank has nothing.
UNEVEN = [*np.array_split(np.arange(JOINT), size - 1), np.arange(0)][rank]
KERNEL = keras.initializers.RandomNormal(seed=3)


def new_model(layer, num_calls=1):
    ids = keras.Input((2,), dtype="int32")
    parts = keras.ops.split(ids, num_calls, axis=1)
    rows = (
        layers.Concatenate(axis=1)([layer(part) for part in parts]) if num_calls > 1 else layer(ids)
    )
    return keras.Model(
        ids, layers.Dense(1, kernel_initializer=KERNEL, name="out")(layers.Flatten()(rows))
    )


def whole(variable):
    """The variable on rank 0, whole if it is sharded; None elsewhere."""
    rows = rows_of(variable)
    return rows.gather(variable) if rows else variable.numpy()


def trained(optimizer, layer, ids, targets, num_calls=1):
    """The table and the dense kernel after a step for each batch of ids and targets.

    The mean of the ranks' losses is the loss of the joint batch, even if a rank has no example.
    """
    is_sharded = isinstance(layer, hvd.ShardedEmbedding)
    num_parts = size if is_sharded else 1
    model = new_model(layer, num_calls)
    layer.load_own_variables({"0": TABLE})
    if is_sharded:
        hvd.broadcast_model(model)
    optimizer.build(model.trainable_variables)

    @tf.function(reduce_retracing=True)
    def step(batch, values):
        with tf.GradientTape() as record:
            loss = tf.reduce_sum((model(batch) - values) ** 2) * (num_parts / JOINT)
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(
            record.gradient(scaled, model.trainable_variables), model.trainable_variables
        )

    for batch, values in zip(ids, targets):
        step(tf.constant(batch), tf.constant(values))
    return whole(layer._embeddings), model.layers[-1].kernel.numpy()


def gap(first, second):
    return max(float(np.max(np.abs(a - b))) for a, b in zip(first, second, strict=True))


class Summed(layers.Embedding):
    """Has the gradient of the whole table. Keras squares rows of the same id one by one, in slots and norms."""

    def call(self, inputs):
        return tf.one_hot(inputs, ROWS) @ self._embeddings


def lazy_adam_in_numpy(rate=0.01, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    """What trained gives for LazyAdam on the joint batches, by its formula in float64."""
    weights = [TABLE.astype(float), KERNEL((2 * WIDTH, 1)).numpy().astype(float), np.zeros(1)]
    momenta, velocities = ([np.zeros_like(weight) for weight in weights] for _ in range(2))
    for step, (ids, targets) in enumerate(zip(IDS, TARGETS), 1):
        table, kernel, bias = weights
        features = table[ids].reshape(JOINT, -1)
        upstream = 2 / JOINT * (features @ kernel + bias - targets)
        of_table = np.zeros_like(table)
        np.add.at(of_table, ids, (upstream @ kernel.T).reshape(JOINT, 2, WIDTH))
        gradients = [of_table, features.T @ upstream, upstream.sum(axis=0)]
        scale = rate * np.sqrt(1 - beta_2**step) / (1 - beta_1**step)
        for weight, momentum, velocity, gradient, rows in zip(
            weights, momenta, velocities, gradients, [np.unique(ids), ..., ...]
        ):
            momentum[rows] = beta_1 * momentum[rows] + (1 - beta_1) * gradient[rows]
            velocity[rows] = beta_2 * velocity[rows] + (1 - beta_2) * gradient[rows] ** 2
            weight[rows] -= scale * momentum[rows] / (np.sqrt(velocity[rows]) + epsilon)
    return weights[:2]


def compared(
    make,
    ids=IDS,
    reference=layers.Embedding,
    wrapped=True,
    num_calls=1,
    own=OWN,
    expected=None,
    **options,
):
    """Largest difference on rank 0 from one process with the joint batch; 0.0 on other ranks."""
    plain = expected
    if rank == 0 and not expected:
        plain = trained(make(), reference(ROWS, WIDTH), ids, TARGETS)
    optimizer = hvd.DistributedOptimizer(make(), **options) if wrapped else make()
    sharded = trained(
        optimizer, hvd.ShardedEmbedding(ROWS, WIDTH), ids[:, own], TARGETS[:, own], num_calls
    )
    return gap(plain, sharded) if rank == 0 else 0.0


def looked_up(ids, input_dim=ROWS, **options):
    layer = hvd.ShardedEmbedding(input_dim, WIDTH, **options)
    layer.build()
    layer.load_own_variables({"0": TABLE})
    return layer(tf.constant(ids)).numpy()


def weighted(combiner):
    """Largest differences from a plain Embedding and NumPy: of the rows, and of the gradients of table and weights."""
    plain = layers.Embedding(ROWS, WIDTH)
    sharded = hvd.ShardedEmbedding(ROWS, WIDTH, combiner=combiner)
    for layer in (plain, sharded):
        layer.build()
        layer.load_own_variables({"0": TABLE})
    weights = tf.constant(WEIGHTS[OWN])
    with tf.GradientTape() as tape:
        tape.watch(weights)
        combined = sharded(tf.constant(IDS[0][OWN]), weights=weights)
        loss = tf.reduce_sum(combined * TARGETS[0][OWN])
    of_table, of_weights = tape.gradient(loss, [sharded._embeddings.value, weights])

    rows = plain(IDS[0]).numpy()
    products = (rows * TARGETS[0][:, None]).sum(axis=-1)
    divisors, means = np.ones((JOINT, 1), "float32"), 0
    if combiner == "mean":
        divisors = WEIGHTS.sum(axis=1, keepdims=True)
        divisors[divisors == 0] = np.inf
        means = (products * WEIGHTS / divisors).sum(axis=1, keepdims=True)
    shares = (WEIGHTS / divisors)[..., None]
    expected_of_table = np.zeros_like(TABLE)
    np.add.at(expected_of_table, IDS[0], shares * TARGETS[0][:, None])
    expected_of_weights = (products - means) / divisors
    return {
        "rows": gap([combined.numpy()], [(rows * shares).sum(axis=1)[OWN]]),
        "table": gap([tf.convert_to_tensor(of_table).numpy()], [expected_of_table[rank::size]]),
        "weights": gap([of_weights.numpy()], [expected_of_weights[OWN]]),
    }


def local_and_dense():
    """A local gradient of rows under sparse_as_dense."""
    table = tf.Variable(TABLE)
    reducer = Reducer(sparse_as_dense=True)
    reducer.local_ids.add(variable_id(table))
    rows = tf.IndexedSlices(tf.ones([2, WIDTH]), [0, 0], tf.constant([ROWS, WIDTH]))
    (gradient,) = reducer([rows], [table])
    return float(tf.reduce_sum(gradient)) if isinstance(gradient, tf.Tensor) else 0.0


def constant_ids():
    layer = hvd.ShardedEmbedding(ROWS, WIDTH)
    layer.build()
    layer.load_own_variables({"0": TABLE})
    return bool(np.array_equal(tf.function(lambda: layer(tf.constant(FEW)))(), TABLE[FEW]))


def empty_batch():
    """The last rank looks up nothing, the others all rows."""
    ids = np.arange(ROWS) if rank < size - 1 else np.zeros(0, int)
    return bool(np.array_equal(looked_up(ids), TABLE[ids]))


def fitted(policy):
    """How far the weights that all ranks have are apart after fit, the last loss, and the reductions."""
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(rank)
    model = new_model(hvd.ShardedEmbedding(ROWS, WIDTH))
    model.compile(hvd.DistributedOptimizer(hvd.optimizers.LazyAdam(0.05)), "mse", jit_compile=False)
    callbacks = [
        hvd.BroadcastGlobalVariablesCallback(0),
        hvd.ReductionCheckCallback(),
        hvd.WeightCheckCallback(),
    ]
    ids, targets = IDS[:, OWN].reshape(-1, 2), TARGETS[:, OWN].reshape(-1, 1)
    history = model.fit(ids, targets, batch_size=len(OWN), epochs=4, verbose=0, callbacks=callbacks)
    keras.config.set_dtype_policy("float32")
    kernels = hvd.allgather_object(model.layers[-1].kernel.numpy())
    return {
        "apart": max(gap([kernels[0]], [other]) for other in kernels),
        "loss": history.history["loss"],
    }


def not_finite():
    """The error of a step in which the last rank's rows alone have a gradient that is not finite."""
    model = new_model(hvd.ShardedEmbedding(ROWS, WIDTH))
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.1), check_finite=True)
    kernel = model.layers[-1].kernel.numpy()
    value = float("nan") if rank == size - 1 else 1.0
    rows = tf.IndexedSlices(tf.fill([1, WIDTH], value), [0], tf.constant([ROWS, WIDTH]))
    gradients = [rows, *(tf.ones_like(variable) for variable in model.trainable_variables[1:])]
    message = refusal(lambda: optimizer.apply(gradients, model.trainable_variables))
    return {"message": message, "moved": gap([kernel], [model.layers[-1].kernel.numpy()])}


def not_finite_without_dense_weights():
    """As in a matrix factorization: no dense gradient goes to all ranks, and rank 0 looks up nothing."""
    layer = hvd.ShardedEmbedding(ROWS, WIDTH)
    layer.build()
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.1), check_finite=True)
    number, value = (1, float("nan")) if rank == size - 1 else (0, 1.0)
    shape = tf.constant(list(layer._embeddings.shape))
    rows = tf.IndexedSlices(tf.fill([number, WIDTH], value), tf.zeros([number], tf.int32), shape)
    return refusal(lambda: tf.function(lambda: optimizer.apply([rows], [layer._embeddings]))())


def kept_errors():
    """Compression keeps none of a table, whose parts differ in size between ranks."""
    model = new_model(hvd.ShardedEmbedding(ROWS, WIDTH))
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.1), compression=hvd.Compression.int8)
    optimizer.build(model.trainable_variables)
    return sorted(optimizer.rank_variables)


def saved(folder):
    """Differences of a saved model that a process without ranks loads, from the model on all ranks."""
    with hvd.sharding_embeddings(lambda layer: layer.name == "users", seed=4):
        model = new_model(layers.Embedding(ROWS, WIDTH, name="users"))
    model.compile(hvd.DistributedOptimizer(optimizers.Adam(0.0)), "mse", jit_compile=False)
    model.train_on_batch(IDS[0], TARGETS[0])
    ids = tf.constant(IDS[0])
    expected = model(ids).numpy()
    file = folder / "model.keras"
    message = refusal(lambda: model.save(file)) if rank == 0 else ""
    too_large = ""
    as_h5 = ""
    with hvd.whole_tables(model):
        if rank == 0:
            as_h5 = refusal(lambda: model.save(folder / "model.h5"))
            alone = model(ids).numpy()
            model.save(file)
            # Enough for Keras to write in memory, since it counts this rank's rows only.
            free = SimpleNamespace(available=500)
            with mock.patch("psutil.virtual_memory", lambda: free):
                too_large = refusal(lambda: model.save(folder / "too_large.keras"))
                model.save_weights(folder / "tables.weights.h5")
    # Of the joint batch by its parts, of which each rank has one.
    predicted = np.concatenate(hvd.allgather_object(model.predict(IDS[1][OWN], verbose=0)))
    losses = hvd.allgather_object(model.evaluate(IDS[1][OWN], TARGETS[1][OWN], verbose=0))
    loaded = None
    evaluated = None
    if rank == 0:
        plain = keras.models.load_model(file)
        assert type(plain.get_layer("users")) is layers.Embedding
        # Slots of one rank's rows would not fit the whole table.
        assert int(plain.optimizer.iterations) == 0
        loaded = gap([alone, plain(ids).numpy()], [expected, expected])
        evaluated = gap(
            [predicted, np.mean(losses)],
            [plain.predict(IDS[1], verbose=0), plain.evaluate(IDS[1], TARGETS[1], verbose=0)],
        )
    hvd.allgather_object(None)
    reloaded = 0.0
    for saved_file in (file, folder / "tables.weights.h5"):
        rows = model.get_layer("users")._embeddings
        rows.assign_add(tf.ones(rows.shape))
        model.load_weights(saved_file)
        reloaded = max(reloaded, gap([model(ids).numpy()], [expected]))
    return {
        "gap": loaded,
        "alone": message,
        "too large": too_large,
        "as h5": as_h5,
        "reloaded": reloaded,
        "evaluated": evaluated,
    }


def refusal(action):
    try:
        action()
    except (ValueError, MemoryError, tf.errors.InvalidArgumentError) as error:
        return str(error)
    return ""


def stepped(optimizer):
    trained(optimizer, hvd.ShardedEmbedding(ROWS, WIDTH, name="t"), IDS, TARGETS)


def built(rows=ROWS, **options):
    layer = hvd.ShardedEmbedding(rows, WIDTH, name="t", **options)
    layer.build()
    return layer


def taped():
    table = built()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table(tf.constant([rank])))
    hvd.DistributedGradientTape(tape).gradient(loss, [table._embeddings])


MEANS = [TABLE[5], (TABLE[22] + TABLE[1] + TABLE[5]) / 3]
results = {
    "size": size,
    "first rows": built(embeddings_initializer="normal", seed=1)._embeddings.numpy().tolist(),
    "equal": {
        "sgd": compared(lambda: optimizers.SGD(0.2)),
        "momentum": compared(lambda: optimizers.SGD(0.1, momentum=0.9)),
        "adagrad": compared(lambda: optimizers.Adagrad(0.1), reference=Summed),
        "adam": compared(lambda: optimizers.Adam(0.01), reference=Summed),
        "lazy adam": compared(lambda: hvd.optimizers.LazyAdam(0.01)),
        "lazy adam in NumPy": compared(
            lambda: hvd.optimizers.LazyAdam(0.01), expected=lazy_adam_in_numpy()
        ),
        "nothing on one rank": compared(
            lambda: hvd.optimizers.LazyAdam(0.01), own=UNEVEN, expected=lazy_adam_in_numpy()
        ),
        "rowwise adagrad": compared(lambda: hvd.optimizers.RowwiseAdagrad(0.1)),
        "averages": compared(lambda: optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2)),
        "accumulation": compared(lambda: optimizers.SGD(0.2, gradient_accumulation_steps=2)),
        "loss scale": compared(lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.2))),
        "shared by two inputs": compared(lambda: hvd.optimizers.LazyAdam(0.01), num_calls=2),
        "all on one rank": compared(lambda: optimizers.SGD(0.2), ids=IDS // size * size),
        "clipnorm": compared(lambda: optimizers.SGD(0.2, clipnorm=0.05), reference=Summed),
        "global_clipnorm": compared(
            lambda: optimizers.SGD(0.2, global_clipnorm=0.05), reference=Summed
        ),
    },
    # The controls: nothing divides the sums of the ranks' gradients; bf16 rounds those of the dense layer.
    "local and dense": local_and_dense(),
    "unwrapped": compared(lambda: optimizers.SGD(0.2), wrapped=False),
    "bf16": compared(lambda: optimizers.SGD(0.2), compression=hvd.Compression.bf16),
    "empty batch": empty_batch(),
    "constant ids": constant_ids(),
    "two tables": bool(
        np.array_equal(looked_up([[5, 2], [0, 0]], [20, 3]), TABLE[[[5, 22], [0, 20]]])
    ),
    "sum": bool(np.allclose(looked_up(FEW, combiner="sum"), TABLE[FEW].sum(axis=1))),
    "mean without padding": bool(
        np.allclose(looked_up(FEW, combiner="mean", mask_zero=True), MEANS, atol=1e-6)
    ),
    "weighted sum": weighted("sum"),
    "weighted mean": weighted("mean"),
    "fitted": fitted("float32"),
    "fitted in mixed precision": fitted("mixed_float16"),
    "not finite": not_finite(),
    "not finite, tables alone": not_finite_without_dense_weights(),
    "kept errors": kept_errors(),
    "saved": saved(Path(sys.argv[1]).parent),
    "refused": {
        "out of range": refusal(lambda: looked_up(np.array([[4, ROWS]]))),
        "out of the second": refusal(lambda: looked_up(np.array([[4, 3]]), [20, 3], name="t")),
        "three tables": refusal(lambda: looked_up(np.array([[4, 1]]), [20, 2, 1])),
        "negative": refusal(lambda: looked_up(np.array([[-1, 2]]))),
        "floats": refusal(lambda: looked_up(np.array([[1.0]]))),
        "regularizer": refusal(lambda: built(embeddings_regularizer="l2")),
        "tied": refusal(lambda: built().embeddings),
        "initializer": refusal(lambda: built(embeddings_initializer="orthogonal")),
        "too large": refusal(lambda: built(rows=10**13)),
        "tape": refusal(taped),
        "lamb": refusal(lambda: stepped(hvd.DistributedOptimizer(optimizers.Lamb()))),
        "shard": refusal(lambda: stepped(hvd.DistributedOptimizer(optimizers.SGD(), shard=True))),
        "local": refusal(lambda: stepped(hvd.LocalSGD(optimizers.SGD(), 2))),
        "local in every step": refusal(lambda: stepped(hvd.LocalSGD(optimizers.SGD(), 1))),
    },
}
everybody = hvd.allgather_object(results)
if rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(everybody))
hvd.shutdown()
