"""Runs on each rank: what scripts written for Horovod do, and mistakes in them that were silent or hung."""

import copy
import logging
import pickle
import time
import warnings
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from refusals import refused

import hvtrain.keras as hvd
from hvtrain.keras import gradients, same_gradients
from hvtrain.keras.hooks import hook_of

RANK, SIZE = hvd.rank(), hvd.size()
LAST = RANK == SIZE - 1
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
X = np.random.default_rng(RANK).normal(size=(16, 4)).astype("float32")


def net(optimizer, *layers, seed=0, **compiled):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(layers or [keras.Input((4,)), keras.layers.Dense(3)])
    compiled = {"loss": keras.losses.MeanSquaredError(), "jit_compile": False, **compiled}
    model.compile(hvd.DistributedOptimizer(optimizer) if optimizer else None, **compiled)
    return model


def fit(model, *callbacks, batches=4, **options):
    return model.fit(
        X[: 4 * batches],
        X[: 4 * batches, :3],
        batch_size=4,
        verbose=0,
        callbacks=callbacks,
        **options,
    )


def gap(arrays):
    """The largest difference between this rank's arrays and rank 0's."""
    ranks = hvd.allgather_object([np.asarray(array) for array in arrays])
    return max(float(np.max(np.abs(a - b), initial=0.0)) for a, b in zip(*ranks[:2], strict=True))


def broadcast_inside_a_function():
    """As in Horovod's examples of TensorFlow 2: in the first step, after the gradients were applied."""
    model, optimizer = net(SGD(0.1), seed=RANK), Adam(0.1)
    model.add(keras.layers.Dropout(0.5, seed=RANK))

    @tf.function
    def step(x, is_first):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - x[:, :3]) ** 2)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        if is_first:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)

    before = gap(model.get_weights())
    for number in range(3):
        step(X, number == 0)
    seeds = hvd.allgather_object(
        next(v.numpy().tolist() for v in model.variables if "seed" in v.path)
    )
    half = tf.Variable([RANK + 1.5, RANK], dtype=tf.bfloat16)
    hvd.broadcast_variables([half], 0)
    return {
        "before": before,
        "after": gap([*model.get_weights(), *optimizer.variables]),
        "seeds differ": seeds[0] != seeds[1],
        "bfloat16": [float(value) for value in half.numpy()],
        "unlike": refused(
            lambda: tf.function(hvd.broadcast_variables)([tf.Variable([1.0] * (RANK + 1))], 0)
        ),
    }


def loop_without_broadcast():
    """What is logged within the steps of a loop of the user's own."""
    same_gradients.POLL_SECONDS = 0.01
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("hvtrain").addHandler(handler)

    def loop(optimizer, number, broadcasts=False):
        logged.clear()
        weights = [keras.Variable([RANK + 1.0, 0.0], name="w"), keras.Variable([0.0], name="b")]
        step = tf.function(lambda: optimizer.apply([tf.ones([2]), tf.ones([1])], weights))
        for count in range(number):
            step()
            if broadcasts and count == 0:
                hvd.broadcast_variables(weights, 0)
        time.sleep(0.1)
        return logged[:]

    results = {
        "forgotten": loop(hvd.DistributedOptimizer(SGD(0.1)), 4),
        "after the first step": loop(hvd.DistributedOptimizer(SGD(0.1)), 4, broadcasts=True),
        "one step": loop(hvd.DistributedOptimizer(SGD(0.1)), 1),
    }
    logging.getLogger("hvtrain").removeHandler(handler)
    return results


def copies():
    made = {}
    for name, action in {
        "pickled": lambda o: pickle.loads(pickle.dumps(o)),
        "deep": copy.deepcopy,
    }.items():
        optimizer, variable = action(hvd.DistributedOptimizer(SGD(1.0))), keras.Variable([0.0])
        optimizer.apply([tf.constant([RANK + 1.0])], [variable])
        made[name] = [float(variable.numpy()[0]), hvd.num_reductions(optimizer)]
    passes = hvd.DistributedOptimizer(SGD(1.0), backward_passes_per_step=2)
    local = hvd.DistributedOptimizer(SGD(1.0))
    local.register_local_var(keras.Variable([1.0]))
    return {
        **made,
        "sums passes": hook_of(copy.deepcopy(passes)).reducer.scale,
        "local": refused(lambda: copy.deepcopy(local)),
        "called": len(local.variables()) == len(local.variables),
    }


def compiled_by_xla():
    @tf.function(jit_compile=True)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(x * x)
        return hvd.DistributedGradientTape(tape).gradient(loss, [x])

    return [
        refused(lambda: fit(net(SGD(0.1), jit_compile=True))),
        refused(lambda: step(tf.constant([1.0]))),
    ]


def learning_rate_schedule():
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    return refused(lambda: fit(net(SGD(decay)), hvd.LearningRateWarmupCallback(0.1, 1)))


class Adversaries(keras.Model):
    """Three optimizers of its own, none in compile."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.first = hvd.DistributedOptimizer(SGD(0.1))
        self.others = [hvd.DistributedOptimizer(SGD(0.1 * (RANK + 1)))]
        self.named = {"third": hvd.DistributedOptimizer(SGD(0.1 * (RANK + 1)))}

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.first.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def own_optimizers():
    model = Adversaries()
    model.build((None, 4))
    model.compile(optimizer=None, jit_compile=False)
    fit(model, hvd.BroadcastGlobalVariablesCallback(0))
    others = [*model.others, *model.named.values()]
    return [gap(model.get_weights()), gap([other.learning_rate for other in others])]


def warned(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught if "rank" in str(warning.message)]


def warnings_of_the_broadcast():
    plain = net(SGD(0.1))
    plain.compile(SGD(0.1), "mse", jit_compile=False)
    in_executions = net(SGD(0.1))
    in_executions.compile(SGD(0.1), "mse", jit_compile=False, steps_per_execution=2)
    unbuilt = net(SGD(0.1), keras.layers.Dense(3), seed=RANK)
    return {
        name: warned(lambda model=model: fit(model, hvd.BroadcastGlobalVariablesCallback(0)))
        for name, model in {
            "plain": plain,
            "in executions": in_executions,
            "unbuilt": unbuilt,
            "neither": net(SGD(0.1)),
        }.items()
    }


def built_on_rank_0():
    """What a model is told that only rank 0 has built, as if it had loaded it: compiled, and in a loop of its own."""

    def begin(optimizer):
        model = net(optimizer, keras.layers.Dense(3))
        if RANK == 0:
            model.build((None, 4))
        callbacks = [hvd.BroadcastGlobalVariablesCallback(0)]
        keras.callbacks.CallbackList(callbacks, model=model).on_train_begin()

    return [refused(lambda: begin(SGD(0.1))), refused(lambda: begin(None))]


def unlike_epochs():
    """The last rank has a batch less, or no validation data."""
    broadcast, metrics = hvd.BroadcastGlobalVariablesCallback(0), hvd.MetricAverageCallback()
    validation = {} if LAST else {"validation_data": (X, X[:, :3])}
    return {
        "batches": refused(lambda: fit(net(SGD(0.1)), broadcast, batches=3 if LAST else 4)),
        "metrics": refused(lambda: fit(net(SGD(0.1)), metrics, **validation)),
        "smallest": hvd.steps_per_epoch(3 if LAST else 4),
        "none": refused(lambda: hvd.steps_per_epoch(0 if LAST else 4)),
    }


def reduced_by_tape_and_optimizer():
    """The sum of sums is wrong; the mean of means is the mean."""

    def step(op):
        variable, optimizer = keras.Variable([0.0]), hvd.DistributedOptimizer(SGD(1.0), op=op)
        with tf.GradientTape() as tape:
            loss = variable * (RANK + 1.0)
        optimizer.apply(
            hvd.DistributedGradientTape(tape, op=op).gradient(loss, [variable]), [variable]
        )
        return variable.numpy().tolist()

    return {"sum": refused(lambda: step(hvd.Sum)), "mean": step(hvd.Average)}


def float8():
    """The largest difference of the scales and histories, which Keras overwrites with their gradients."""
    results = {}
    for name, steps in {"each step": None, "accumulated": 2}.items():
        layers = [keras.Input((16,)), keras.layers.Dense(16, dtype="float8_from_float32")]
        model = net(SGD(0.1, gradient_accumulation_steps=steps), *layers)
        x = np.random.default_rng(RANK).normal(size=(32, 16)).astype("float32") * (RANK + 1)
        model.fit(x, x, batch_size=8, epochs=2, verbose=0)
        scales = [weight for weight in model.weights if weight.overwrite_with_gradient]
        results[name] = [
            len(scales),
            gap(scales),
            max(float(np.max(scale.numpy())) for scale in scales),
        ]
    return results


def rows_with_the_same_index():
    """Whether ranks end alike if one rank adds rows in another order, as a GPU does."""
    results = {}
    for sums in (False, True):
        table, optimizer = (
            keras.Variable(np.zeros((3, 1), "float32")),
            hvd.DistributedOptimizer(SGD(1.0)),
        )
        hook_of(optimizer).reducer.sums_duplicates = sums
        # The order matters: 1e8 + 1 is 1e8 in float32.
        rows = tf.constant([[1e8], [1.0], [-1e8]] if RANK == 0 else [[1.0], [2.0], [0.5]])
        slices = tf.IndexedSlices(rows, tf.constant([1, 1, 1]), tf.constant([3, 1]))
        (gradient,) = optimizer._reduce([slices], [table])
        if LAST:
            gradient = tf.IndexedSlices(
                gradient.values[::-1], gradient.indices[::-1], gradient.dense_shape
            )
        total = 0.0
        for value in gradient.values.numpy()[:, 0]:
            total = np.float32(total + value)
        results["summed" if sums else "as they are"] = gap([total])
    return results


def loaded(folder):
    class Own(SGD):
        pass

    h5, own = Path(folder) / f"{RANK}.h5", Path(folder) / f"{RANK}.keras"
    model = net(Adam(0.1))
    fit(model)
    model.save(h5)
    of_h5 = hvd.load_model(h5) if RANK == 0 else net(Adam(0.1))
    slots = [variable.numpy() for variable in model.optimizer.variables]
    same = RANK > 0 or all(
        np.array_equal(a, b) for a, b in zip(of_h5.optimizer.variables, slots, strict=True)
    )
    fit(of_h5, hvd.BroadcastGlobalVariablesCallback(0))
    model = net(Own(0.1))
    fit(model)
    model.save(own)
    by_function = hvd.load_model(
        own, custom_objects={"Own": lambda **config: hvd.DistributedOptimizer(Own(**config))}
    )
    return {
        "h5": [same, gap(of_h5.get_weights()), int(of_h5.optimizer.iterations)],
        "function": [
            isinstance(by_function.optimizer, Own),
            hvd.is_distributed(by_function.optimizer),
        ],
    }


def counters_of_old_graphs():
    """A tape in a TensorFlow 1 graph, and then in a function."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=[RANK + 1.0], use_resource=True)
        with tf.GradientTape() as tape:
            loss = variable * variable
        (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [variable])
        session.run(tf.compat.v1.global_variables_initializer())
        old = session.run(gradient).tolist()

    @tf.function
    def step(value):
        with tf.GradientTape() as tape:
            tape.watch(value)
            loss = value * value
        return hvd.DistributedGradientTape(tape).gradient(loss, [value])[0]

    return [old, step(tf.constant([RANK + 1.0])).numpy().tolist()]


def joined_after_rows():
    before, gradients.exchanges_rows = gradients.exchanges_rows, True
    message = refused(hvd.join)
    gradients.exchanges_rows = before
    return [before, message]


def all_of_them(folder):
    return {
        "broadcast": broadcast_inside_a_function(),
        "forgotten": loop_without_broadcast(),
        "copies": copies(),
        "xla": compiled_by_xla(),
        "schedule": learning_rate_schedule(),
        "own_optimizers": own_optimizers(),
        "warnings": warnings_of_the_broadcast(),
        "built": built_on_rank_0(),
        "unlike": unlike_epochs(),
        "twice": reduced_by_tape_and_optimizer(),
        "float8": float8(),
        "rows": rows_with_the_same_index(),
        "loaded": loaded(folder),
        "old_graphs": counters_of_old_graphs(),
        "join": joined_after_rows(),
    }
