"""Runs on each rank: DistributedOptimizer(shard=True) against the same without it.

argv[1]: where rank 0 writes JSON.
"""

import json
import sys
from pathlib import Path

import fast_keras  # noqa: F401
import keras
import numpy as np
import tensorflow as tf
from keras import layers, optimizers

import hvtrain.keras as hvd
from hvtrain.keras import sharded_optimizer
from hvtrain.keras.sharded_optimizer import Sharded
from hvtrain.system.console import launched_size

STEPS = 6
# So that even these weights need several messages.
sharded_optimizer.GATHERED_BYTES = 200

# Two of three ranks, to resume what three ranks have saved. Two ranks are all, and no set of their own.
PAIR = hvd.ProcessSet([0, 1]) if launched_size() > 2 else hvd.global_process_set
hvd.init(process_sets=[PAIR] if launched_size() > 2 else None)
rank, size = hvd.rank(), hvd.size()


class Scale(layers.Layer):
    """Multiplies by a scalar weight, which cannot be cut."""

    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

    def call(self, inputs):
        return inputs * self.factor


def new_model(unused=False):
    """Variables of 44, 28, 7, 1, 35, 5, 5 and 1 elements: no border of a part is one of theirs."""
    # Slots are named after layers, which Keras numbers.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    words = keras.Input((3,), dtype="int32")
    features = layers.GlobalAveragePooling1D()(layers.Embedding(11, 4)(words))
    features = layers.Dense(5, "tanh")(Scale()(layers.Dense(7, "tanh")(features)))
    outputs = layers.Dense(1)(features)
    if unused:  # Without gradients, and as large as the rest.
        outputs = [outputs, layers.Dense(30)(features)]
    return keras.Model(words, outputs)


def trained(optimizer, unused=False, number=STEPS, reverse=False, named=True):
    """The model after some steps on this rank's batches."""
    model = new_model(unused)
    weights = model.trainable_variables[:: -1 if reverse else 1]
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([*model.variables, *optimizer.variables], 0)
    random = np.random.default_rng(rank)

    @tf.function
    def step(words, targets):
        with tf.GradientTape() as tape:
            outputs = model(words)
            loss = tf.reduce_mean(((outputs[0] if unused else outputs) - targets) ** 2)
            loss = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(loss, weights), weights if named else None)

    for _ in range(number):
        words = random.integers(0, 11, (8, 3))
        step(
            tf.constant(words, tf.int32), tf.constant(words.mean(axis=1, keepdims=True), tf.float32)
        )
    optimizer.finalize_variable_values(model.trainable_variables)
    return model


def gap(first, second):
    return max(float(np.max(np.abs(a - b), initial=0)) for a, b in zip(first, second, strict=True))


def whole_slots(optimizer):
    """All variables of the optimizer on rank 0, those whole that are sharded."""
    gathered = hvd.gather_slots(optimizer)
    return [
        gathered.get(position, variable.numpy())
        for position, variable in enumerate(optimizer.variables)
    ]


def compared(make, unused=False, cuts_anywhere=None, reverse=False, named=True, **options):
    """Largest differences of weights and slots from the optimizer that is not sharded, and this rank's share."""
    plain = hvd.DistributedOptimizer(make(), **options)
    sharded = hvd.DistributedOptimizer(make(), shard=True, **options)
    inner = getattr(sharded, "inner_optimizer", sharded)
    assert isinstance(inner, Sharded)
    if cuts_anywhere is not None:
        type(inner)._cuts_anywhere = cuts_anywhere
    weights = trained(plain, unused, reverse=reverse, named=named).get_weights()
    own = trained(sharded, unused, reverse=reverse, named=named).get_weights()
    slots = whole_slots(sharded)
    results = {
        "weights": gap(own, weights),
        "apart": max(gap(own, other) for other in hvd.allgather_object(own)),
    }
    if rank == 0:
        expected = [variable.numpy() for variable in plain.variables]
        results["slots"] = gap(slots, expected)
        names = [
            [v.path.partition("/")[2] for v in optimizer.variables]
            for optimizer in (plain, sharded)
        ]
        results["same names"] = names[0] == names[1]
    parts = [variable for variable in sharded.variables if hasattr(variable, "rank_part")]
    results["own elements"] = sum(int(np.prod(part.shape)) for part in parts)
    results["all elements"] = sum(
        int(np.prod(whole.shape))
        for whole, part in zip(plain.variables, sharded.variables)
        if hasattr(part, "rank_part")
    )
    results["reductions"] = hvd.num_reductions(sharded)
    return results


def without_biases(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def resumed_on_two():
    """Slots of all ranks on the first two of them: differences after more steps, and after they are gathered again."""
    first = hvd.DistributedOptimizer(optimizers.Adam(0.05), shard=True)
    trained(first)
    slots = hvd.gather_slots(first)
    if rank > 1:
        return None
    second = hvd.DistributedOptimizer(optimizers.Adam(0.05), shard=True, process_set=PAIR)
    second.build(new_model().trainable_variables)
    hvd.scatter_slots(second, slots)
    again = hvd.gather_slots(second)
    return gap(list(slots.values()), list(again.values())) if rank == 0 else 0.0


def moved_in_bfloat16():
    """A slot of 7 numbers that went to its ranks, and came back to rank 0."""
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.1, momentum=0.5), shard=True)
    optimizer.build([keras.Variable(np.zeros(7), dtype="bfloat16")])
    slots = hvd.gather_slots(optimizer)
    hvd.scatter_slots(
        optimizer, {place: np.arange(7).astype(slot.dtype) for place, slot in slots.items()}
    )
    return [slot.astype(float).tolist() for slot in hvd.gather_slots(optimizer).values()]


def noise_of_a_pair():
    """Squared norms of 10 and 9 in batches of 10 and 20: S = 1 / (1/10 - 1/20) = 20, |G|^2 = 9 - 20 / 20 = 8."""
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.0), process_set=PAIR)
    noise = hvd.NoiseScale(optimizer, every=1)
    optimizer.apply([tf.constant([3.0, 1.0 - 2 * rank])], [keras.Variable([0.0, 0.0])])
    return noise.estimate(10)


def fitted(optimizer):
    """How far the ranks' weights are apart after Keras's fit, with a model that its first step builds."""
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=False)
    callbacks = [
        hvd.BroadcastGlobalVariablesCallback(0),
        hvd.ReductionCheckCallback(),
        hvd.StopTogetherCallback(),
    ]
    inputs = np.random.default_rng(rank).normal(size=(32, 5)).astype("float32")
    model.fit(
        inputs,
        inputs[:, :1],
        batch_size=8,
        verbose=0,
        callbacks=[*callbacks, hvd.WeightCheckCallback()],
    )
    weights = model.get_weights()
    return max(gap(weights, other) for other in hvd.allgather_object(weights))


def refusal(action):
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


class OwnStep(optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)


def built():
    optimizer = optimizers.Adam()
    optimizer.build(new_model().trainable_variables)
    return optimizer


def shard(optimizer):
    return hvd.DistributedOptimizer(optimizer, shard=True)


results = {
    "size": size,
    "same bits": {
        "sgd": compared(lambda: optimizers.SGD(0.1)),
        "momentum": compared(lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True)),
        "adam": compared(lambda: optimizers.Adam(0.05)),
        "adamw": compared(lambda: without_biases(optimizers.AdamW(0.05, weight_decay=0.1))),
        "lion": compared(lambda: optimizers.Lion(0.01, weight_decay=0.1)),
        "clipnorm": compared(lambda: optimizers.Adam(0.05, clipnorm=0.01)),
        "global_clipnorm": compared(
            lambda: optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.01)
        ),
        "loss scale": compared(lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.05))),
        "accumulation": compared(lambda: optimizers.Adam(0.05, gradient_accumulation_steps=2)),
        "averages": compared(lambda: optimizers.Adam(0.05, use_ema=True, ema_momentum=0.5)),
        "bf16 on the wire": compared(
            lambda: optimizers.Adam(0.05), compression=hvd.Compression.bf16
        ),
        "a part without gradients": compared(lambda: optimizers.Nadam(0.05), unused=True),
        "variables in another order": compared(lambda: optimizers.Adam(0.05), reverse=True),
        "no variables given": compared(lambda: optimizers.Adam(0.05), named=False),
        "lamb": compared(lambda: optimizers.Lamb(0.05)),
        "adafactor": compared(lambda: optimizers.Adafactor(0.05)),
        "muon": compared(lambda: optimizers.Muon(0.05)),
        "rowwise adagrad": compared(lambda: hvd.optimizers.RowwiseAdagrad(0.05)),
    },
    # The control: LAMB takes norms, which are others if a variable is cut.
    "lamb, cut": compared(lambda: optimizers.Lamb(0.05), cuts_anywhere=True),
    "resumed on two": resumed_on_two(),
    "bfloat16": moved_in_bfloat16(),
    "noise of a pair": noise_of_a_pair(),
    # In several messages, of which each rank needs others for its part: see Sharded._backend_update_step.
    "fitted": fitted(hvd.DistributedOptimizer(optimizers.Adam(0.05), shard=True, bucket_bytes=50)),
    "refused": {
        "own step": refusal(lambda: shard(OwnStep())),
        "built": refusal(lambda: shard(built())),
        "schedule free": refusal(lambda: shard(optimizers.ScheduleFreeAdamW())),
        "local variable": refusal(
            lambda: shard(optimizers.SGD()).register_local_var(tf.Variable(0.0))
        ),
        "elastic": refusal(lambda: hvd.elastic.KerasState(new_model(), shard(optimizers.SGD()))),
        "join": refusal(hvd.join),
    },
}
everybody = hvd.allgather_object(results)
if rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(everybody))
hvd.shutdown()
