"""Runs on each rank: what compression does to gradients, and the noise in these. argv[1]: where rank 0 writes JSON."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import fast_keras  # noqa: F401
import keras
import numpy as np
import tensorflow as tf

import hvtrain.keras as hvd
from hvtrain.keras import wire_formats
from hvtrain.keras.hooks import hook_of
from hvtrain.keras.reduction import Reducer
from hvtrain.step.step_timing import StepMarks
from hvtrain.strategies.horovod import HorovodComm
from hvtrain.training import comm_tuning

# The gradients here have 9 blocks.
wire_formats.PIECE_BLOCKS = 2
STEPS = 10
SHAPES = [(40, 60), (3,), (1500,), (), (3, 3, 16, 32)]
Compression = hvd.Compression

hvd.init()
rank, size = hvd.rank(), hvd.size()
random = np.random.default_rng(rank)


def gradients(dtype):
    """New gradients of this rank; their sizes differ from variable to variable, as they do in models."""
    return [tf.constant(random.normal(0, 10.0**-i, shape), dtype) for i, shape in enumerate(SHAPES)]


def everyone(tensors):
    """The tensors of all ranks: [rank][position]."""
    return hvd.allgather_object([tensor.numpy() for tensor in tensors])


def largest(arrays):
    return max(float(np.max(np.abs(array))) for array in arrays)


def errors_of(reducer):
    return [
        variable
        for name, variable in reducer.compressed.memory.items()
        if name.startswith("sum/error")
    ]


def telescopes(name, compression, forgets=False):
    """What was applied plus what waits in the errors, against the sum of the true means, in float64."""
    variables = [tf.Variable(tf.zeros(shape, tf.float64)) for shape in SHAPES]
    reducer = Reducer(compression=compression, message_name=f"telescopes_{name}")
    step = tf.function(lambda own: reducer(own, variables))
    applied = [np.zeros(shape) for shape in SHAPES]
    true = [np.zeros(shape) for shape in SHAPES]
    for _ in range(STEPS):
        own = gradients(tf.float64)
        reduced = step(own)
        for i, parts in enumerate(zip(*everyone(own))):
            true[i] += np.mean(parts, axis=0)
            applied[i] += reduced[i].numpy()
        if forgets:
            for error in errors_of(reducer):
                error.assign(tf.zeros_like(error))
    waiting = [np.mean(parts, axis=0) for parts in zip(*everyone(errors_of(reducer)))]
    differ = largest([a - b for state in everyone(reduced) for a, b in zip(state, reduced)])
    return {
        "telescopes": largest([a + w - t for a, w, t in zip(applied, waiting, true)]),
        "ranks_differ": differ,
        "reductions": int(reducer.count.numpy()),
        "sent": reducer.sent_bytes,
    }


def rounds_as_by_hand():
    """bfloat16 on the wire, against casts of the ranks' gradients; differing elements."""
    reducer = Reducer(compression=Compression.bf16, message_name="by_hand")
    own = gradients(tf.float32)
    reduced = tf.function(lambda values: reducer(values))(own)
    different = 0
    for value, parts in zip(reduced, zip(*everyone(own))):
        halves = [tf.cast(tf.cast(part, tf.bfloat16), tf.float32) for part in parts]
        mean = tf.add_n(halves) / size
        if size > 2:
            mean = tf.cast(tf.cast(mean, tf.bfloat16), tf.float32)
        different += int(tf.reduce_sum(tf.cast(mean != value, tf.int32)))
    return different


def rows_of_bfloat16():
    """The sum of the ranks' rows, whose values are 1, 2, ... in a type that Horovod cannot gather."""
    rows = tf.IndexedSlices(tf.constant([[rank + 1.0]], tf.bfloat16), tf.constant([rank]))
    (reduced,) = Reducer(op=hvd.Sum, message_name="bfloat16_rows")([rows])
    return [reduced.dtype.name, float(tf.reduce_sum(reduced.values))]


def low_rank():
    """PowerSGD of rank 4 on gradients whose mean has rank 2: exact after some steps of the power iteration.

    The first step has no gradient, and the first four rows, like pixels in a corner, never have one.
    """
    variables = [tf.Variable(tf.zeros((64, 48)))]
    reducer = Reducer(compression=Compression.powersgd(4, whole_steps=0), message_name="low_rank")
    matrices = [np.outer(*np.random.default_rng(i).normal(size=(2, 64)))[:, :48] for i in range(2)]
    for matrix in matrices:
        matrix[:4] = 0
    own = [tf.constant(matrices[rank % 2], tf.float32)]
    true = np.mean([parts[0] for parts in everyone(own)], axis=0)
    reducer([tf.zeros_like(own[0])], variables)
    reduced = reducer(own, variables)
    return largest([reduced[0] - true])


def half_a_step():
    """The largest rounding error of int8, in steps of its block."""
    blocks = tf.constant(random.normal(0, 1, (8, 1024)), tf.float32)
    steps = tf.reduce_max(tf.abs(blocks), axis=1, keepdims=True) / 127
    encoded, decoded = Compression.int8.encode(blocks)
    # What a rank keeps as its error is right only if the others decode the same.
    assert np.array_equal(decoded, Compression.int8.decode(encoded, tf.float32))
    return largest([(blocks - decoded) / steps])


def overflow():
    """One rank's infinity: seen by all ranks, and not kept among the errors."""
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    reducer = Reducer(compression=Compression.int8, message_name="overflow")
    reducer(gradients(tf.float32), variables)
    before = [error.numpy() for error in errors_of(reducer)]
    own = gradients(tf.float32)
    if rank == size - 1:
        own[2] = own[2] + float("inf")
    reduced = reducer(own, variables)
    after = [error.numpy() for error in errors_of(reducer)]
    return {
        "seen": bool(not np.isfinite(reduced[2].numpy()).any()),
        "kept": all(np.array_equal(a, b) for a, b in zip(before, after)) and largest(before) > 0,
    }


def noise_of_a_linear_regression(batch_size=512, num_inputs=1000, steps=60):
    """The estimate at weights of 0, with its weights unlike 1 over the ranks' number; and in closed form.

    Inputs are standard normal, targets w x + e with |w|^2 = 1 and e of variance 1, the loss (p - y)^2 / 2. Then
    |G|^2 = 1, and S = (num_inputs + 1) |w|^2 + num_inputs (the fourth moments of normal inputs).
    """
    variable = tf.Variable(tf.zeros([num_inputs]))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
    noise = hvd.NoiseScale(optimizer, every=2)
    true = tf.fill([num_inputs], num_inputs**-0.5)

    @tf.function
    def step():
        inputs = tf.random.normal([batch_size, num_inputs])
        errors = tf.linalg.matvec(inputs, variable - true) - tf.random.normal([batch_size])
        gradient = tf.linalg.matvec(inputs, errors, transpose_a=True) / batch_size
        optimizer.apply([gradient], [variable])

    tf.random.set_seed(rank)
    before = noise.estimate(batch_size)
    for _ in range(steps):
        step()
    return {"before": before, "estimate": noise.estimate(batch_size), "known": 2.0 * num_inputs + 1}


def refused_noise_scale():
    try:
        hvd.NoiseScale(
            hvd.DistributedOptimizer(keras.optimizers.SGD(), compression=Compression.int8)
        )
    except ValueError as error:
        return str(error)
    return ""


def error_after_a_trial():
    """What PowerSGD keeps after some steps of comm.tune; nothing after those that send whole gradients."""
    model = keras.Sequential([keras.Input((60,)), keras.layers.Dense(40)])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), compression=Compression.powersgd(2)
    )
    model.compile(optimizer, "mse", jit_compile=False)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_model(model)
    batch = [random.normal(size=(8, width)).astype("float32") for width in (60, 40)]
    strategy = SimpleNamespace(comm=HorovodComm(), marks=StepMarks())
    comm_tuning._trial(model, strategy, tf.data.Dataset.from_tensors(tuple(batch)))
    return largest([error.numpy() for error in errors_of(hook_of(optimizer).reducer)])


def refused(**options):
    try:
        Reducer(**options)
    except ValueError as error:
        return str(error)
    return ""


results = {
    "size": size,
    "telescopes": {
        "int8": telescopes("int8", Compression.int8),
        "powersgd": telescopes("powersgd", Compression.powersgd(2, whole_steps=3)),
        "int8 without errors": telescopes("forgets", Compression.int8, forgets=True),
    },
    "rows of bfloat16": rows_of_bfloat16(),
    "low rank": low_rank(),
    "bf16 differs": rounds_as_by_hand(),
    "half a step": half_a_step(),
    "overflow": overflow(),
    "error after a trial": error_after_a_trial(),
    "noise scale": {**noise_of_a_linear_regression(), "refused": refused_noise_scale()},
    "refused": [
        refused(compression=Compression.int8, op=hvd.Adasum),
        refused(compression=Compression.bf16, predivide_factor=2.0),
    ],
}
everybody = hvd.allgather_object(results)
if rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(everybody))
hvd.shutdown()
