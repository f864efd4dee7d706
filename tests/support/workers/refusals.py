"""Runs on each rank: what DistributedOptimizer and the tape refuse, or must do although it looks odd."""

import keras
import numpy as np
import tensorflow as tf
from own_steps import SGD, Delegates, OwnApply

import hvtrain.keras as hvd

RANK, SIZE = hvd.rank(), hvd.size()
LAST = RANK == SIZE - 1
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def refused(action):
    """The class of the error, and what it says."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def examples(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 4)).astype("float32"), rng.integers(0, 3, count)


def net(optimizer, units=5, **compiled):
    keras.utils.set_random_seed(0)
    names = {"name": "unlike" if units == 6 else "d"}
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(units, **names),
        keras.layers.Dense(3, name="o", dtype="float32"),
    ]
    model = keras.Sequential(layers, name="m")
    model.compile(optimizer, CROSSENTROPY, jit_compile=False, **compiled)
    return model


def unlike_shapes():
    model = net(hvd.DistributedOptimizer(SGD(0.1)), units=6 if LAST else 5)
    return refused(lambda: model.fit(*examples(8), verbose=0))


def one_gradient(optimizer_or_none, lacks):
    """A step on two variables, whose second has no gradient where lacks is true."""
    variables = [keras.Variable([1.0, 2.0], name="a"), keras.Variable([1.0], name="b")]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0] * 2.0) + (
                0.0 if lacks else tf.reduce_sum(variables[1] * 3.0)
            )
        if optimizer_or_none is None:
            return hvd.DistributedGradientTape(tape).gradient(loss, variables)
        sources = [variable.value for variable in variables]
        return optimizer_or_none.apply(tape.gradient(loss, sources), variables)

    step()
    return [variable.numpy().tolist() for variable in variables]


def groups_of_unlike_tensors():
    """In shape or in number, outside and inside a tf.function; then groups that are alike."""
    ones = [tf.ones([3]), tf.ones([2, 4])]
    unlike = [tf.ones([3]), tf.ones([2, 5 if LAST else 4])]
    fewer = tf.function(lambda: hvd.grouped_reducescatter(ones[:1] if LAST else ones, op=hvd.Sum))
    return {
        "allreduce": refused(lambda: hvd.grouped_allreduce(unlike, op=hvd.Sum)),
        "allgather": refused(lambda: hvd.grouped_allgather(unlike)),
        "reducescatter": refused(fewer),
        "alike": [value.numpy().sum().item() for value in hvd.grouped_allreduce(ones, op=hvd.Sum)],
        "of own length": [
            value.shape.as_list() for value in hvd.grouped_allgather([tf.ones([RANK + 1, 2])])
        ],
    }


def gradients_of_one_rank():
    return {
        "optimizer": refused(lambda: one_gradient(hvd.DistributedOptimizer(SGD(1.0)), lacks=LAST)),
        "accumulated": refused(
            lambda: one_gradient(
                hvd.DistributedOptimizer(SGD(1.0, gradient_accumulation_steps=2)), lacks=LAST
            )
        ),
        "tape": refused(lambda: one_gradient(None, lacks=LAST)),
        "settings": refused(
            lambda: one_gradient(
                hvd.DistributedOptimizer(SGD(1.0), num_groups=2 if LAST else 0), lacks=False
            )
        ),
        "on all": one_gradient(hvd.DistributedOptimizer(SGD(1.0)), lacks=True),
    }


def traced_again_on_one_rank():
    """The last rank's last batch is short, so it alone traces the step again: nobody waits for it."""
    model = net(hvd.DistributedOptimizer(SGD(0.1)))
    model.fit(*examples(30 if LAST else 32), batch_size=8, verbose=0)
    return hvd.num_reductions(model.optimizer)


def numbered_names():
    """The last rank has built another layer before, so that Keras numbers its names otherwise."""
    if LAST:
        keras.layers.Dense(1).build((None, 1))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(hvd.DistributedOptimizer(SGD(0.1)), CROSSENTROPY, jit_compile=False)
    model.fit(*examples(8), verbose=0)
    return len(set(hvd.allgather_object(model.layers[0].kernel.path)))


def twice():
    inside = hvd.DistributedOptimizer(SGD(0.1))
    delegates = hvd.DistributedOptimizer(Delegates(hvd.DistributedOptimizer(SGD(0.1))))
    scaled = with_policy("mixed_float16", lambda: hvd.DistributedOptimizer(SGD(0.05)))
    own = OwnApply(0.1, gradient_accumulation_steps=2)
    step = [tf.constant([1.0])], [keras.Variable([1.0])]
    return {
        "inside a loss scale": refused(
            lambda: keras.optimizers.LossScaleOptimizer(inside).apply(*step)
        ),
        "scaled inside a loss scale": refused(
            lambda: keras.optimizers.LossScaleOptimizer(scaled).apply(*step)
        ),
        "inside another": refused(lambda: delegates.apply(*step)),
        "inside a multi-optimizer": refused(
            lambda: hvd.DistributedOptimizer(
                keras.optimizers.MultiOptimizer(
                    keras.optimizers.OptimizerMap(hvd.DistributedOptimizer(SGD(0.1)))
                )
            )
        ),
        "never scaled": refused(
            lambda: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(SGD(0.1))).apply(
                *step
            )
        ),
        "accumulates by itself": refused(lambda: hvd.DistributedOptimizer(own)),
    }


def accumulated_eagerly():
    """Two micro-steps outside of graphs, where the first one reduces nothing."""
    optimizer, variable = (
        hvd.DistributedOptimizer(SGD(1.0, gradient_accumulation_steps=2)),
        keras.Variable([0.0]),
    )
    for _ in range(2):
        optimizer.apply([tf.constant([RANK + 1.0])], [variable])
    return [variable.numpy().tolist(), hvd.num_reductions(optimizer)]


def with_policy(name, action):
    keras.config.set_dtype_policy(name)
    try:
        return action()
    finally:
        keras.config.set_dtype_policy("float32")


def losses_that_nobody_scales():
    """Under mixed_float16, without scale_loss: as in one process, no scale is undone that was never applied."""
    optimizer = with_policy("mixed_float16", lambda: hvd.DistributedOptimizer(SGD(1.0)))
    variable = keras.Variable([0.0])
    optimizer.apply_gradients([(tf.constant([RANK + 1.0]), variable)])

    def trained(wrap, rows):
        model = net(wrap(SGD(0.5)), auto_scale_loss=False)
        model.fit(
            *(array[rows] for array in examples(8 * SIZE)),
            batch_size=len(rows),
            shuffle=False,
            verbose=0,
        )
        return np.concatenate([weight.ravel() for weight in model.get_weights()])

    everything = np.arange(8 * SIZE)
    ours = with_policy(
        "mixed_float16", lambda: trained(hvd.DistributedOptimizer, everything[RANK::SIZE])
    )
    expected = with_policy(
        "mixed_float16", lambda: trained(lambda optimizer: optimizer, everything)
    )
    return {"loop": variable.numpy().tolist(), "gap": float(np.max(np.abs(ours - expected)))}


def tensors():
    """Outside of graphs collectives return tensors, and a tape differentiates them as Horovod's own."""
    value = tf.constant([RANK + 1.0])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(value)
        gathered = tf.reduce_sum(hvd.allgather(value) ** 2)
        mean = tf.reduce_sum(hvd.allreduce(value) ** 2)
    results = [
        hvd.allreduce(value),
        hvd.allgather(value),
        hvd.broadcast(value, 0),
        hvd.reducescatter(tf.ones([SIZE])),
    ]
    return {
        "tensors": [isinstance(result, tf.Tensor) for result in results],
        "allgather": tape.gradient(gathered, value).numpy().tolist(),
        "allreduce": tape.gradient(mean, value).numpy().tolist(),
    }


def all_of_them():
    return {
        "unlike_shapes": unlike_shapes(),
        "groups": groups_of_unlike_tensors(),
        "gradients_of_one_rank": gradients_of_one_rank(),
        "traced_again": traced_again_on_one_rank(),
        "numbered_names": numbered_names(),
        "twice": twice(),
        "accumulated_eagerly": accumulated_eagerly(),
        "unscaled": losses_that_nobody_scales(),
        "tensors": tensors(),
    }
