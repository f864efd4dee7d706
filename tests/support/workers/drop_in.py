"""Runs on each rank: the parts of Horovod's Keras interface, and ours beside it. JSON from rank 0 to argv[1]."""

import json
import sys
from pathlib import Path

import fast_keras  # noqa: F401
import keras
import numpy as np
import tensorflow as tf

import hvtrain.keras as hvd
from hvtrain.errors import RankError
from hvtrain.keras.equality import WeightCheck, fingerprint
from hvtrain.keras.gradients import NOT_FINITE
from hvtrain.keras.hooks import hook_of
from hvtrain.system.console import launched_size

# Rank 0 and the last one; with two ranks that would be all of them.
ENDS = hvd.ProcessSet([0, 2]) if (launched_size() or 1) > 2 else None
hvd.init(process_sets=[ENDS] if ENDS else None)
RANK, SIZE = hvd.rank(), hvd.size()
LAST = RANK == SIZE - 1
FOLDER = Path(sys.argv[1]).parent
SGD = keras.optimizers.SGD


def stepped(optimizer, *gradients, start=(0.0, 0.0)):
    """A variable after the steps, and after each of them what the optimizer says."""
    variable = keras.Variable(list(start))
    optimizer.build([variable])
    apply = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
    for gradient in gradients:
        apply(tf.constant(gradient, tf.float32))
    return variable.numpy().tolist()


def refusal(action):
    try:
        action()
    except (ValueError, TypeError, RuntimeError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def local_variables():
    shared, own = keras.Variable([0.0]), keras.Variable([0.0])
    values = []
    for scale in (True, False):
        optimizer = hvd.DistributedOptimizer(SGD(1.0), scale_local_gradients=scale)
        optimizer.register_local_var(own)
        optimizer.build([shared, own])
        optimizer.apply([tf.constant([RANK + 1.0]), tf.constant([RANK + 1.0])], [shared, own])
        values.append([float(shared.numpy()[0]), float(own.numpy()[0])])
        shared.assign([0.0])
        own.assign([0.0])
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(2, name="a"), keras.layers.Dense(2, name="b")]
    )
    optimizer = hvd.PartialDistributedOptimizer(
        SGD(1.0, momentum=0.5), local_layers=model.layers[1]
    )
    keras.utils.set_random_seed(RANK)
    model.compile(optimizer, "mse", jit_compile=False)
    hvd.broadcast_variables(model.weights, 0)
    x = np.full((4, 2), RANK + 1.0, "float32")
    keep = hvd.BroadcastGlobalVariablesCallback(
        0, local_variables=model.layers[1].trainable_weights
    )
    model.fit(x, x, verbose=0, callbacks=[keep, hvd.WeightCheckCallback()])
    weights = hvd.allgather_object([layer.get_weights()[0] for layer in model.layers])
    equal = [all(np.array_equal(rank[at], weights[0][at]) for rank in weights) for at in (0, 1)]
    return {"scaled": values[0], "unscaled": values[1], "layers equal": equal}


def local_overflow():
    """An infinite gradient of a local variable on the last rank, with a shared variable and without one."""
    results = []
    for with_shared in (True, False):
        shared, own = keras.Variable([0.0]), keras.Variable([0.0])
        variables = [own, shared] if with_shared else [own]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(SGD(1.0)))
        optimizer.register_local_var(own)
        optimizer.build(variables)
        optimizer.scale_loss(1.0)
        gradients = [tf.constant([np.inf if LAST else 1.0]), tf.constant([1.0])]
        optimizer.apply(gradients[: len(variables)], variables)
        values = [float(variable.numpy()[0]) for variable in (own, shared)]
        results.append([float(optimizer.dynamic_scale), *values])
    return results


def groups():
    first, second = keras.Variable([0.0]), keras.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(SGD(1.0), groups=[[first]])
    optimizer.build([first, second])
    optimizer.apply([tf.constant([RANK + 1.0]), tf.constant([2 * RANK + 2.0])], [first, second])
    return [float(first.numpy()[0]), float(second.numpy()[0]), hvd.num_reductions(optimizer)]


def copies():
    """What upstream's test_from_config asks, and that a copy reduces."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.5))
    config = optimizer.get_config()
    made = [optimizer.from_config(dict(config)), optimizer.__class__.from_config(dict(config))]
    copy = hvd.DistributedOptimizer(SGD(1.0))
    copy = copy.from_config(copy.get_config())
    return {
        "same config": [other.get_config() == config for other in made],
        "after a step": stepped(copy, [RANK + 1.0, 0.0]),
    }


def adasum():
    if SIZE == 3:
        return refusal(lambda: hvd.DistributedOptimizer(SGD(1.0), op=hvd.Adasum))
    return stepped(
        hvd.DistributedOptimizer(SGD(1.0), op=hvd.Adasum),
        [1.0, 0.0] if RANK % 2 == 0 else [1.0, 1.0],
    )


def process_set():
    if ENDS is None:
        return None
    return stepped(hvd.DistributedOptimizer(SGD(1.0), process_set=ENDS), [RANK + 1.0, 0.0])[0]


def broadcast_in_a_process_set():
    """The variable after a broadcast from rank 2, and the error of one of different shapes."""
    variable = keras.Variable([float(RANK)])
    if ENDS is None or not ENDS.included():
        return [float(variable.numpy()[0]), ""]
    hvd.broadcast_variables([variable], 2, process_set=ENDS, inplace=True)
    unlike = tf.Variable([1.0] * (RANK + 1))
    message = refusal(lambda: hvd.broadcast_variables([unlike], 0, process_set=ENDS))
    return [float(variable.numpy()[0]), message]


def overflow_while_accumulating():
    """An infinite gradient on the last rank in the second of three micro-steps; two make a step."""
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = hvd.DistributedOptimizer(SGD(1.0), backward_passes_per_step=2)
    keras.config.set_dtype_policy("float32")
    variable = keras.Variable([0.0, 0.0])
    optimizer.build([variable])
    apply = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
    scales = [float(optimizer.scale_loss(1.0))]
    apply(tf.constant([scales[0] * (RANK + 1), 0.0]))
    apply(tf.constant([np.inf if LAST else 1.0, 0.0]))
    scales.append(float(optimizer.dynamic_scale))
    between = hvd.num_reductions(optimizer)
    apply(tf.constant([scales[1] * (RANK + 1), 0.0]))
    return {
        "scales": scales,
        "reductions": [between, hvd.num_reductions(optimizer)],
        "after": variable.numpy().tolist(),
    }


def tapes():
    """Dense and sparse gradients of two tapes in one step, as in a GAN."""
    dense, rows = keras.Variable([1.0, 2.0]), keras.Variable(np.ones((SIZE + 1, 2), "float32"))

    @tf.function
    def step():
        with tf.GradientTape() as first:
            loss = tf.reduce_sum(dense * float(RANK + 1)) + tf.reduce_sum(
                tf.gather(rows.value, [RANK])
            )
        with tf.GradientTape() as second:
            other = tf.reduce_sum(dense * float(10 * RANK))
        tape_result = hvd.DistributedGradientTape(first).gradient(
            loss, {"dense": dense, "rows": rows}
        )
        two = hvd.DistributedGradientTape(second, op=hvd.Sum).gradient(other, [dense])
        return tape_result["dense"], tf.convert_to_tensor(tape_result["rows"]), two[0]

    before = hvd.num_tape_reductions()
    results = [tensor.numpy().tolist() for tensor in step()]
    for _ in range(3):
        step()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(dense * float(RANK + 1))
    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer, scale_local_gradients=False)
    tape.register_local_source(dense)
    local, shared = tape.get_local_and_global_gradients(loss, [dense])
    return {
        "found": results,
        "reductions": hvd.num_tape_reductions() - before,
        "local": [gradient.numpy().tolist() for _, gradient in local],
        "shared": len(shared),
    }


def finite(waits=True):
    """NaN on the last rank; after it the weights are as before, on all ranks."""
    optimizer = hvd.DistributedOptimizer(SGD(1.0), check_finite=True)
    hook_of(optimizer).finite_check.waits = waits
    variable = keras.Variable([0.0, 0.0])
    optimizer.build([variable])
    apply = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
    apply(tf.constant([1.0, 1.0]))
    try:
        apply(tf.constant([float("nan") if LAST else 1.0, 1.0]))
        was_refused = False
    except tf.errors.InvalidArgumentError as error:
        was_refused = NOT_FINITE in str(error)
    operations = apply.get_concrete_function(tf.TensorSpec([2])).graph.get_operations()
    update = next(operation for operation in operations if operation.type == "AssignSubVariableOp")
    return {
        "told": was_refused,
        "ranks": hvd.ranks_at_fault(optimizer),
        "weights": variable.numpy().tolist(),
        "update waits": any(operation.type == "If" for operation in ancestors(update)),
    }


def finite_on_gpus():
    """As on GPUs, where the update does not wait for what the host learns."""
    return finite(waits=False)


def ancestors(operation):
    """All operations that it waits for."""
    seen = set()
    new = [operation]
    while new:
        current = new.pop()
        seen.add(current)
        new += {*(tensor.op for tensor in current.inputs), *current.control_inputs} - seen
    return seen


def exchanges_of_constants():
    """Those among the exchanges of a step that TensorFlow could make while it optimizes the graph, and results."""
    table = keras.Variable(np.ones((SIZE + 1, 2), "float32"))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table.value, [0, RANK + 1]))
        (rows,) = hvd.DistributedGradientTape(tape).gradient(loss, [table])
        batch = hvd.joint_batch(tf.fill([RANK + 1, 2], RANK + 1.0))
        mean = hvd.joint_mean(tf.fill([RANK + 1], RANK + 1.0))
        return tf.convert_to_tensor(rows)[:, 0], batch[:, 0], mean

    operations = step.get_concrete_function().graph.get_operations()
    exchanges = [operation for operation in operations if operation.type.startswith("Horovod")]
    constant = [
        operation.name
        for operation in exchanges
        if not any(other.type == "ReadVariableOp" for other in ancestors(operation))
    ]
    rows, batch, mean = (tensor.numpy().tolist() for tensor in step())
    return {
        "exchanges": len(exchanges),
        "constant": constant,
        "rows": rows,
        "batch": batch,
        "mean": mean,
    }


def small_model(broadcast=True, backward_passes_per_step=1, **compiled):
    keras.utils.set_random_seed(RANK)
    layers = [
        keras.layers.Dense(4, name="hidden"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(2),
    ]
    model = keras.Sequential([keras.Input((3,)), *layers])
    adam = keras.optimizers.Adam(0.01)
    optimizer = hvd.DistributedOptimizer(adam, backward_passes_per_step=backward_passes_per_step)
    model.compile(optimizer, "mse", jit_compile=False, **compiled)
    if broadcast:
        hvd.broadcast_model(model)
    return model


def model_of_a_table():
    """All of its gradients are sparse, as those of a matrix factorization."""
    layers = [
        keras.Input((2,), dtype="int32"),
        keras.layers.Embedding(16, 1),
        keras.layers.Flatten(),
    ]
    model = keras.Sequential(layers)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", jit_compile=False)
    hvd.broadcast_model(model)
    return model


class StopsOnLastRank(keras.callbacks.Callback):
    """Wishes to stop on one rank alone, and counts."""

    def __init__(self, batch=None, epoch=None):
        super().__init__()
        self.batch, self.epoch, self.batches = batch, epoch, 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        self.model.stop_training |= LAST and self.batches == self.batch

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training |= LAST and epoch == self.epoch


def stopping_and_drifting():
    rng = np.random.default_rng(RANK)
    x, y = rng.normal(size=(64, 3)).astype("float32"), rng.normal(size=(64, 2)).astype("float32")
    model = small_model()
    batches = []
    for stops in (StopsOnLastRank(batch=3), StopsOnLastRank(epoch=1)):
        callbacks = [stops, hvd.StopTogetherCallback(), hvd.WeightCheckCallback(3)]
        model.fit(x, y, batch_size=4, epochs=4, verbose=0, callbacks=callbacks)
        batches.append(stops.batches)
    stops = StopsOnLastRank(batch=3)
    table = model_of_a_table()
    rows = rng.integers(0, 16, (64, 2))
    table.fit(rows, y, batch_size=4, verbose=0, callbacks=[stops, hvd.StopTogetherCallback()])
    accumulating = small_model(backward_passes_per_step=3)
    accumulating.fit(x, y, batch_size=4, verbose=0, callbacks=[hvd.WeightCheckCallback(1)])
    accumulator = accumulating.optimizer._accumulated_gradients[0]
    accumulated = accumulator.numpy().tolist()
    WeightCheck(accumulating).average_untrained()
    check = WeightCheck(model)
    check("now")
    moving = refusal(lambda: check("now", everything=True))
    check.average_untrained()
    check("now", everything=True)
    if LAST:
        model.layers[0].kernel.assign_add(np.full((3, 4), 1e-6, "float32"))
    return {
        "batches": batches,
        "batches of a table": stops.batches,
        "moving": moving,
        "accumulated": accumulated,
        "averaged": accumulator.numpy().tolist(),
        "drift": refusal(lambda: check("after step 7")),
        "drift seen in training": refusal(
            lambda: model.fit(x, y, verbose=0, callbacks=[hvd.callbacks.WeightCheckCallback()])
        ),
    }


def one_list_of_callbacks_for_two_models():
    """Rank 0 also makes an optimizer that never steps, as for a model that it only shows."""
    if RANK == 0:
        hvd.DistributedOptimizer(SGD())
    rng = np.random.default_rng(RANK)
    x, y = rng.normal(size=(64, 3)).astype("float32"), rng.normal(size=(64, 2)).astype("float32")
    callbacks = [
        hvd.BroadcastGlobalVariablesCallback(0),
        hvd.StopTogetherCallback(),
        hvd.WeightCheckCallback(2),
    ]
    results = []
    for _ in range(2):
        model, stops = small_model(broadcast=False), StopsOnLastRank(batch=3)
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[stops, *callbacks])
        weights = hvd.allgather_object(
            [weight.numpy().tolist() for weight in model.trainable_weights]
        )
        results.append({"batches": stops.batches, "are equal": weights == [weights[0]] * SIZE})
    return results


class Mine(keras.optimizers.RMSprop):
    """An optimizer of one's own."""


def saving():
    own = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    own.compile(hvd.DistributedOptimizer(Mine(0.01)), "mse", jit_compile=False)
    own.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    own.save(FOLDER / f"own-{RANK}.keras")
    own = hvd.load_model(FOLDER / f"own-{RANK}.keras", custom_optimizers=[Mine])
    model = small_model()
    x = np.random.default_rng(RANK).normal(size=(16, 3)).astype("float32")
    best = FOLDER / "best.keras"
    callbacks = [
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=best),
    ]
    model.fit(x, x[:, :2], verbose=0, epochs=2, callbacks=callbacks)
    hvd.allreduce(0.0)  # Until rank 0 has written.
    loaded = hvd.load_model(best, compression=hvd.Compression.fp16)
    before = hvd.num_reductions(loaded.optimizer)
    hvd.broadcast_model(loaded)
    loaded.fit(x, x[:, :2], verbose=0)
    parts = hvd.load_model(best, compression=hvd.Compression.int8)
    for variables in (parts.trainable_variables[:1], parts.trainable_variables):
        parts.optimizer.apply([tf.ones(variable.shape) for variable in variables], variables)
    unnamed = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    return {
        "reduces": hvd.num_reductions(loaded.optimizer) - before,
        "iterations": int(loaded.optimizer.iterations.numpy()),
        "in parts": hvd.num_reductions(parts.optimizer),
        "weights equal": fingerprint(loaded.trainable_variables).hex(),
        "without a path": refusal(lambda: model.fit(x, x[:, :2], verbose=0, callbacks=[unnamed])),
        "own optimizer": type(own.optimizer).__name__
        if hvd.is_distributed(own.optimizer)
        else "plain",
        "legacy": refusal(lambda: hvd.load_model(best, legacy_opts=True)),
    }


def refusals():
    int8 = hvd.DistributedOptimizer(SGD(), compression=hvd.Compression.int8)
    return {
        "no variables": refusal(lambda: hvd.broadcast_variables(keras.Sequential([]).variables, 0)),
        "global variables": refusal(lambda: hvd.broadcast_global_variables(0)),
        "groups": refusal(lambda: hvd.DistributedOptimizer(SGD(), groups=-1)),
        "op": refusal(lambda: hvd.DistributedOptimizer(SGD(), op=hvd.Max)),
        "predivide": refusal(
            lambda: hvd.DistributedOptimizer(SGD(), op=hvd.Sum, gradient_predivide_factor=2.0)
        ),
        "complex": refusal(
            lambda: hvd.DistributedOptimizer(SGD()).apply(
                [tf.constant([1 + 1j])], [tf.Variable([1 + 1j])]
            )
        ),
        "twice": refusal(lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(SGD()))),
        "not keras": refusal(lambda: hvd.DistributedOptimizer(object())),
        "local layer": refusal(
            lambda: hvd.PartialDistributedOptimizer(SGD(), local_layers=keras.layers.Dense(1))
        ),
        "passes": refusal(
            lambda: hvd.DistributedOptimizer(
                SGD(gradient_accumulation_steps=2), backward_passes_per_step=2
            )
        ),
        "elastic errors": refusal(lambda: hvd.elastic.KerasState(small_model(), int8)),
        "elastic anchors": refusal(
            lambda: hvd.elastic.KerasState(small_model(), hvd.DiLoCo(SGD()))
        ),
        "local variables": refusal(
            lambda: hvd.DistributedOptimizer(SGD(), check_finite=True).register_local_var(
                keras.Variable([1.0])
            )
        ),
        "local and clipped": refusal(
            lambda: hvd.DistributedOptimizer(
                keras.optimizers.LossScaleOptimizer(SGD(global_clipnorm=1.0))
            ).register_local_var(keras.Variable([1.0]))
        ),
    }


def a_script_for_horovod():
    """Written for horovod.tensorflow.keras but for the import, in the manner of upstream's examples."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype("float32")[RANK::SIZE], y[RANK::SIZE]
    checkpoint = FOLDER / "checkpoint-{epoch}.keras"
    scores = []
    for epochs in (2, 3):
        resume_from_epoch = 0
        for try_epoch in range(epochs, 0, -1):
            if RANK == 0 and Path(str(checkpoint).format(epoch=try_epoch)).exists():
                resume_from_epoch = try_epoch
                break
        resume_from_epoch = int(hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch"))
        initial_lr = 0.05 * hvd.size()
        if resume_from_epoch > 0 and hvd.rank() == 0:
            model = hvd.load_model(str(checkpoint).format(epoch=resume_from_epoch))
        else:
            model = keras.Sequential(
                [
                    keras.Input((64,)),
                    keras.layers.Dense(32, "relu"),
                    keras.layers.Dense(10, "softmax"),
                ]
            )
            optimizer = hvd.DistributedOptimizer(
                SGD(learning_rate=initial_lr, momentum=0.9),
                backward_passes_per_step=1,
                average_aggregated_gradients=True,
            )
            model.compile(
                loss="sparse_categorical_crossentropy",
                optimizer=optimizer,
                metrics=["accuracy"],
                jit_compile=False,
            )
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(
                initial_lr=initial_lr, warmup_epochs=1, verbose=0
            ),
            hvd.callbacks.LearningRateScheduleCallback(
                initial_lr=initial_lr, multiplier=lambda epoch: 0.1, start_epoch=2
            ),
        ]
        if hvd.rank() == 0:
            callbacks.append(keras.callbacks.ModelCheckpoint(str(checkpoint)))
        model.fit(
            x, y, batch_size=16, steps_per_epoch=len(x) // 16, callbacks=callbacks, epochs=epochs,
            initial_epoch=resume_from_epoch, verbose=1 if hvd.rank() == 0 else 0,
        )  # fmt: skip
        scores.append(hvd.allreduce(model.evaluate(x, y, verbose=0)).numpy().tolist())
    return {
        "resumed from": resume_from_epoch,
        "scores": scores,
        "rate": round(float(model.optimizer.learning_rate), 6),
        "weights": fingerprint(model.trainable_variables).hex(),
    }


WORK = (
    local_variables, local_overflow, groups, copies, adasum, process_set, broadcast_in_a_process_set,
    overflow_while_accumulating, tapes, finite, finite_on_gpus, exchanges_of_constants,
    stopping_and_drifting, one_list_of_callbacks_for_two_models, saving, refusals, a_script_for_horovod,
)  # fmt: skip
results = {work.__name__: work() for work in WORK}
everyone = hvd.allgather_object(results)
if RANK == 0:
    Path(sys.argv[1]).write_text(json.dumps(everyone))
hvd.shutdown()
