"""Runs on each rank: LocalSGD and DiLoCo against one process that plays all ranks in turn.

argv[1]: where rank 0 writes JSON.
"""

import json
import os
import sys
from pathlib import Path

import fast_keras  # noqa: F401
import keras
import numpy as np
import tensorflow as tf

import hvtrain.keras as hvd
from hvtrain.keras.hooks import hook_of

STEPS = 12
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
hvd.init()
rank, size = hvd.rank(), hvd.size()
HOSTS = [[0, 1], *([other] for other in range(2, size))]
"""Ranks of each host, as if the first two shared one."""
HOST = (
    hvd.global_process_set
    if size == 2
    else [hvd.add_process_set(ranks) for ranks in HOSTS][max(0, rank - 1)]
)


def batches(worker):
    """A worker's batches: [steps, 8, 5], and targets of a function that differs a little by worker."""
    random = np.random.default_rng(worker)
    inputs = random.normal(size=(STEPS, 8, 5)).astype("float32")
    return inputs, inputs.sum(axis=2, keepdims=True) * (1 + 0.3 * worker)


def new_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )


def step_of(model, optimizer):
    @tf.function
    def step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - targets) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    return step


def trained(optimizer, settle=True):
    """This rank's weights after its steps, and the reductions that ran."""
    model = new_model()
    step = step_of(model, optimizer)
    for inputs, targets in zip(*batches(rank)):
        step(inputs, targets)
    before = hook_of(optimizer).reducer.count.numpy()
    if settle:
        hvd.synchronize(optimizer)
    return model.get_weights(), int(before)


def simulated(make_optimizer, every, outer_rate=1.0, outer_momentum=0.0, warmup=0, hosts=()):
    """The weights of workers that one process plays in turn, with NumPy's means and outer steps."""
    models = [new_model() for _ in range(size)]
    optimizers = [make_optimizer() for _ in range(size)]
    steps = [step_of(model, optimizer) for model, optimizer in zip(models, optimizers)]
    data = [batches(worker) for worker in range(size)]
    anchor = models[0].get_weights()
    momentum = [np.zeros_like(weight) for weight in anchor]

    def meet():
        nonlocal anchor, momentum
        means = [
            np.mean(parts, axis=0) for parts in zip(*(model.get_weights() for model in models))
        ]
        change = [old - new for old, new in zip(anchor, means)]
        momentum = [outer_momentum * value + part for value, part in zip(momentum, change)]
        # Nesterov's step looks ahead along the momentum.
        ahead = [part + outer_momentum * value for part, value in zip(change, momentum)]
        anchor = [old - outer_rate * part for old, part in zip(anchor, ahead)]
        for model in models:
            model.set_weights(anchor)

    for number in range(STEPS):
        batch = [(inputs[number], targets[number]) for inputs, targets in data]
        if number < warmup:
            joint_step(models, optimizers, batch)
            anchor = models[0].get_weights()
            continue
        for workers in hosts or [[worker] for worker in range(size)]:
            if len(workers) == 1:
                steps[workers[0]](*batch[workers[0]])
            else:
                joint_step(
                    *(
                        [values[worker] for worker in workers]
                        for values in (models, optimizers, batch)
                    )
                )
        if (number + 1) % every == 0:
            meet()
    if STEPS % every:
        meet()
    return models[0].get_weights()


def joint_step(models, optimizers, data):
    """A synchronous step: the workers' mean gradient, in each of them."""
    gradients = []
    for model, (inputs, targets) in zip(models, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - targets) ** 2)
        gradients.append(tape.gradient(loss, model.trainable_variables))
    means = [tf.reduce_mean(tf.stack(parts), axis=0) for parts in zip(*gradients)]
    for model, optimizer in zip(models, optimizers):
        optimizer.apply(means, model.trainable_variables)


def gap(one, other):
    return max(float(np.max(np.abs(a - b))) for a, b in zip(one, other))


def fitted(optimizer):
    """How far the ranks' weights are apart after Keras's fit, with a model that its first step builds."""
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=False)
    check = hvd.WeightCheckCallback(1)
    callbacks = [
        hvd.BroadcastGlobalVariablesCallback(0),
        hvd.ReductionCheckCallback(),
        hvd.StopTogetherCallback(),
        check,
    ]
    inputs, targets = batches(rank)
    model.fit(
        inputs.reshape(-1, 5), targets.reshape(-1, 1), batch_size=8, verbose=0, callbacks=callbacks
    )
    hvd.synchronize(optimizer)
    weights = model.get_weights()
    apart = max(gap(weights, other) for other in hvd.allgather_object(weights))
    return {"apart": apart, "weight checks": check.check.num_checks}


def broadcast_late(optimizer):
    """How far the ranks' weights are apart if they are broadcast after the first step, as in Horovod's examples."""
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    step = step_of(model, optimizer)
    for number, (inputs, targets) in enumerate(zip(*batches(rank))):
        step(inputs, targets)
        if number == 0:
            hvd.broadcast_variables(model.variables, 0)
            hvd.broadcast_variables(optimizer.variables, 0)
    hvd.synchronize(optimizer)
    weights = model.get_weights()
    return max(gap(weights, other) for other in hvd.allgather_object(weights))


def loaded(optimizer):
    """How far the weights move, at a learning rate of 0, from those that all ranks load within a round."""
    model = new_model()
    step = step_of(model, optimizer)
    ones = [np.ones_like(weight) for weight in model.get_weights()]
    for number, (inputs, targets) in enumerate(zip(*batches(rank))):
        if number == 3:
            hvd.synchronize(optimizer)
            model.set_weights(ones)
        step(inputs, targets)
    return gap(model.get_weights(), ones)


def constrained(optimizer):
    """How far the norms of weights constrained to 1 are from it after a synchronization."""
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(2, kernel_constraint="unit_norm")]
    )
    step = step_of(model, optimizer)
    for inputs, targets in zip(*batches(rank)):
        step(inputs, targets)
    hvd.synchronize(optimizer)
    return float(np.max(np.abs(np.linalg.norm(model.get_weights()[0], axis=0) - 1)))


def refusal(function):
    try:
        return str(function())
    except ValueError as error:
        return str(error)


def compared(optimizer, expected):
    weights, reductions = trained(optimizer)
    apart = max(gap(weights, other) for other in hvd.allgather_object(weights))
    return {"error": gap(weights, expected), "apart": apart, "reductions": reductions}


def adam():
    return Adam(0.05)


def momentum():
    return SGD(0.05, momentum=0.9)


synchronous, _ = trained(hvd.DistributedOptimizer(SGD(0.05)), settle=False)
alone, _ = trained(hvd.LocalSGD(SGD(0.05), every=1000), settle=False)
results = {
    "size": size,
    "cases": {
        "every=1 and SGD": compared(hvd.LocalSGD(SGD(0.05), every=1), synchronous),
        "local, adam, 4": compared(hvd.LocalSGD(adam(), every=4), simulated(adam, 4)),
        "local, momentum, 5": compared(hvd.LocalSGD(momentum(), every=5), simulated(momentum, 5)),
        "local, adam, 3, warm": compared(
            hvd.LocalSGD(adam(), 3, warmup_steps=4), simulated(adam, 3, warmup=4)
        ),
        "diloco, adam, 4": compared(hvd.DiLoCo(adam(), 4), simulated(adam, 4, 0.7, 0.9)),
        "diloco, sgd, 5": compared(
            hvd.DiLoCo(SGD(0.05), 5, 0.5, 0.8), simulated(lambda: SGD(0.05), 5, 0.5, 0.8)
        ),
        "diloco as local": compared(hvd.DiLoCo(adam(), 4, 1, 0), simulated(adam, 4)),
        "within hosts": compared(
            hvd.LocalSGD(adam(), 4, within=HOST), simulated(adam, 4, hosts=HOSTS)
        ),
        "within, warm": compared(
            hvd.DiLoCo(adam(), 3, 0.7, 0.9, 4, within=HOST), simulated(adam, 3, 0.7, 0.9, 4, HOSTS)
        ),
        "diloco, buckets": compared(
            hvd.DiLoCo(adam(), 4, bucket_bytes=50), simulated(adam, 4, 0.7, 0.9)
        ),
    },
    # Controls: without a synchronization the ranks differ from each other, and from the synchronous run.
    "apart without": max(gap(alone, other) for other in hvd.allgather_object(alone)),
    "error without": gap(alone, synchronous),
    "join": refusal(hvd.join),
    "constrained": [constrained(wrap(adam(), every=5)) for wrap in (hvd.LocalSGD, hvd.DiLoCo)],
    "loaded": loaded(hvd.DiLoCo(SGD(0.0), every=5)),
    "broadcast late": broadcast_late(hvd.DiLoCo(adam(), every=5)),
    "fitted": [fitted(hvd.LocalSGD(adam(), every=4)), fitted(hvd.DiLoCo(adam(), every=5))],
    # Gradients are a thousand times as large as changes, and so are their errors.
    "int8, warm": compared(
        hvd.DiLoCo(SGD(0.001), 4, warmup_steps=3, compression=hvd.Compression.int8),
        simulated(lambda: SGD(0.001), 4, 0.7, 0.9, warmup=3),
    ),
    "int8": compared(
        hvd.DiLoCo(adam(), 4, compression=hvd.Compression.int8), simulated(adam, 4, 0.7, 0.9)
    ),
}
everybody = hvd.allgather_object(results)
if rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(everybody))
hvd.shutdown()
