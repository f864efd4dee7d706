"""Runs on each rank: the parts of hvtrain.keras that joint_batch.py does not reach. JSON from rank 0 to argv[1]."""

import json
import sys
from pathlib import Path

import fast_keras  # noqa: F401
import keras
import numpy as np
import tensorflow as tf

import hvtrain.keras as hvd
from hvtrain.core.topology import Topology
from hvtrain.data import StreamRequest, from_arrays
from hvtrain.errors import RankError
from hvtrain.keras.collectives import sum_arrays
from hvtrain.strategies.horovod import HorovodStrategy

hvd.init()

import idioms  # noqa: E402  (it needs the rank)
import refusals  # noqa: E402

RANK, SIZE = hvd.rank(), hvd.size()
RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(51, 4)).astype("float32"), RNG.integers(0, 3, 51)


def net(seed, **compiled):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="d", dtype="float32")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        loss=loss, metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)], **compiled
    )
    return model


def in_place():
    variables = [keras.Variable([RANK + 3.0]), tf.Variable([RANK + 4.0])]
    own = keras.random.SeedGenerator(RANK).state
    values = hvd.broadcast_([*variables, own], 0)
    return [float(value.numpy()[0]) for value in (*values, *variables)]


def collectives():
    gathered = hvd.allgather(np.full((RANK + 1, 2), RANK, "float32"))
    return {
        "mean": float(hvd.allreduce(float(RANK))),
        "sum": float(hvd.allreduce(float(RANK), op=hvd.Sum)),
        "gathered_rows": list(gathered.shape),
        "broadcast": float(hvd.broadcast(np.float32(RANK + 7), 0)),
        "object": hvd.broadcast_object({"from": RANK}, 0),
        "object by a function": hvd.broadcast_object_fn()({"from": RANK}),
        "in place": in_place(),
        "objects": hvd.allgather_object(RANK),
        "sums": [array.tolist() for array in sum_arrays([np.array([1, RANK]), np.array(2.5)])],
    }


def other_models_are_refused():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3 + RANK)])
    try:
        hvd.broadcast_variables(model.weights, 0)
    except RankError as error:
        return str(error)
    return ""


def metrics_over_uneven_shards():
    """51 examples over the ranks, in batches of 8, against one process."""
    model = net(0, optimizer="sgd")
    hvd.broadcast_variables(model.weights, 0)
    mine = tf.data.Dataset.from_tensor_slices((X[RANK::SIZE], Y[RANK::SIZE])).batch(8)
    together = HorovodStrategy().evaluate(model, mine)
    # An empty shard on the last rank: all examples on rank 0.
    count = len(X) if RANK == 0 else 0
    lonely = HorovodStrategy().evaluate(
        model, tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).batch(8)
    )
    return {
        "together": together,
        "lonely": lonely,
        "alone": model.evaluate(X, Y, verbose=0, return_dict=True),
    }


def overflow_on_one_rank():
    """An infinite gradient on the last rank: all ranks skip the step and halve the scale."""
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    keras.config.set_dtype_policy("float32")
    variable = keras.Variable([1.0, 2.0])
    optimizer.build([variable])

    @tf.function
    def apply(gradient):
        optimizer.scale_loss(1.0)  # Or nothing would be scaled back.
        optimizer.apply([gradient], [variable])

    apply(tf.constant([np.inf if RANK == SIZE - 1 else 1.0, 1.0]))
    skipped, scale = variable.numpy().tolist(), float(optimizer.dynamic_scale)
    apply(tf.constant([scale, scale]) * (RANK + 1))
    return {
        "type": type(optimizer).__name__,
        "skipped": skipped,
        "scale": scale,
        "after": variable.numpy().tolist(),
    }


def saved_and_loaded(folder):
    model = net(RANK, optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    hvd.broadcast_model(model)
    model.fit(X[:32], Y[:32], batch_size=8, verbose=0, shuffle=False)
    path = Path(folder) / f"saved-{RANK}.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    slots = [
        np.array_equal(a, b)
        for a, b in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True)
    ]
    plain = type(loaded.optimizer) is keras.optimizers.Adam
    # Without the wrapper nothing would be reduced; with it the slots and iterations stay.
    wrapped = hvd.DistributedOptimizer(loaded.optimizer)
    return {
        "plain": plain,
        "equal_slots": all(slots),
        "iterations": int(wrapped.iterations.numpy()),
        "distributed": hvd.is_distributed(wrapped),
    }


def unreduced_training_stops():
    model = net(RANK, optimizer=keras.optimizers.SGD(0.1))
    try:
        model.fit(X, Y, verbose=0, callbacks=[hvd.ReductionCheckCallback()])
    except RankError as error:
        return str(error)
    return ""


def callbacks():
    model = net(
        RANK, optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * SIZE, momentum=0.9))
    )
    rates = []
    seen = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    warmup = hvd.LearningRateWarmupCallback(0.1 * SIZE, warmup_epochs=2, verbose=0)
    broadcast = hvd.BroadcastGlobalVariablesCallback(0)
    check = hvd.ReductionCheckCallback()
    history = model.fit(
        X[RANK * 16 : RANK * 16 + 16], Y[RANK * 16 : RANK * 16 + 16], batch_size=4, epochs=3, verbose=0, shuffle=False,
        callbacks=[broadcast, hvd.MetricAverageCallback(), warmup, seen, check],
    )  # fmt: skip
    logs = hvd.allgather_object({name: values[-1] for name, values in history.history.items()})
    weights = hvd.allgather_object(model.get_weights())
    equal = all(
        np.array_equal(a, b) for other in weights for a, b in zip(other, weights[0], strict=True)
    )
    return {"rates": rates, "logs": logs, "equal_weights": equal}


def contrastive(gather):
    """How far weights are from one process on the joint batch, whose loss sets each example against all others."""
    # [steps, joint batch, features].
    first, second = RNG.normal(size=(2, 5, 4 * SIZE, 6)).astype("float32")
    mine = slice(4 * RANK, 4 * RANK + 4)

    def towers():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)]
        )
        return model, keras.optimizers.SGD(0.5)

    def train(model, optimizer, make_tape, gather, rows, first_row):
        @tf.function
        def step(x, y):
            with make_tape() as tape:
                a, b = model(x), model(y)
                logits = [a @ tf.transpose(gather(b)), b @ tf.transpose(gather(a))]
                losses = [
                    tf.nn.sparse_softmax_cross_entropy_with_logits(
                        first_row + tf.range(tf.shape(x)[0]), o
                    )
                    for o in logits
                ]
                loss = tf.reduce_mean(losses)
            optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )

        for x, y in zip(first, second):
            step(x[rows], y[rows])
        return model.get_weights()

    def distributed_tape():
        return hvd.DistributedGradientTape(tf.GradientTape())

    together = train(*towers(), distributed_tape, gather, mine, 4 * RANK)
    alone = train(*towers(), tf.GradientTape, lambda rows: rows, slice(None), 0)
    return max(float(np.abs(a - b).max()) for a, b in zip(together, alone))


def with_the_mean_gradient(rows):
    """As Horovod's allgather, whose gradient is the mean over the ranks."""
    return hvd.joint_batch(rows / SIZE + tf.stop_gradient(rows - rows / SIZE))


def shards():
    """Which of 37 training and 11 test images this rank reads; each image holds its number."""
    x, x_test = (np.arange(count, dtype="uint8").reshape(-1, 1, 1, 1) for count in (37, 11))
    source = from_arrays(x, x[:, 0, 0, 0] % 3, x_test, x_test[:, 0, 0, 0] % 3, standardize="none")
    topology = Topology(RANK, SIZE)
    steps = len(topology.share(37))
    training = source.training(
        StreamRequest(topology, 1, seed=4, start_step=0, steps_per_epoch=steps)
    ).take(steps)
    test = source.evaluation("test", topology, 4)
    return {
        name: [int(i) for images, _ in dataset for i in images.numpy().ravel()]
        for name, dataset in (("training", training), ("test", test))
    }


results = {
    "size": SIZE,
    "shards": shards(),
    "collectives": collectives(),
    "other_models": other_models_are_refused(),
    "metrics": metrics_over_uneven_shards(),
    "overflow": overflow_on_one_rank(),
    "refusals": refusals.all_of_them(),
    "idioms": idioms.all_of_them(Path(sys.argv[1]).parent),
    "saved": saved_and_loaded(Path(sys.argv[1]).parent),
    "unreduced": unreduced_training_stops(),
    "callbacks": callbacks(),
    "contrastive": contrastive(hvd.joint_batch),
    "contrastive by the mean": contrastive(with_the_mean_gradient),
}
everything = hvd.allgather_object(results)
if RANK == 0:
    Path(sys.argv[1]).write_text(json.dumps(everything))
hvd.shutdown()
