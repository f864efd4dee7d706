"""The checks that need nothing of the user's: environment, exchange, optimizers, data, metrics, checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import hvtrain.keras as hvd
from hvtrain.checkpoint import store, writer
from hvtrain.data import StreamRequest, from_arrays
from hvtrain.errors import RankError
from hvtrain.keras.equality import fingerprint
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.evaluation import evaluate
from hvtrain.training.summary import device_map, versions
from hvtrain.verify.check import Check, CheckError
from hvtrain.verify.joint_batch import ACCUMULATION, FAMILIES, OWN_STEP, PRECISION, SPARSE, Case, compare

STEPS = 8


def library_checks(strategy: Strategy) -> Iterator[Check]:
    """All of them, in the order in which a failure explains those after it."""
    yield Check("versions", partial(_versions, strategy))
    yield Check("controller", partial(_controller, strategy))
    yield Check("devices", partial(_devices, strategy))
    yield Check("broadcast", _broadcast)
    for name, case in {**FAMILIES, **OWN_STEP, **SPARSE, **ACCUMULATION, **PRECISION}.items():
        yield Check(name, partial(_joint_batch, case))
    yield Check("overflow", _overflow)
    yield Check("unlike models", _unlike_models)
    yield Check("shards", partial(_shards, strategy))
    yield Check("metrics", partial(_metrics, strategy))
    yield Check("checkpoint", partial(_checkpoint, strategy))


def _versions(strategy: Strategy) -> str:
    found = strategy.comm.gather(versions())
    for rank, other in enumerate(found):
        different = [f"{name} {found[0][name]} and {other[name]}" for name in other if other[name] != found[0][name]]
        if different:
            raise CheckError(f"ranks 0 and {rank} have {', '.join(different)}; install the same versions on all hosts")
    return ", ".join(f"{name} {number}" for name, number in found[0].items())


def _controller(strategy: Strategy) -> str:
    places = strategy.comm.gather((hvd.size(), hvd.mpi_enabled(), strategy.topology.host, hvd.rank(), hvd.local_rank()))
    sizes = [place[0] for place in places]
    if sizes != [len(places)] * len(places) or [place[3] for place in places] != list(range(len(places))):
        raise CheckError(f"ranks see jobs of {sizes} ranks; start all of them with one launcher")
    if len({(place[2], place[4]) for place in places}) < len(places):
        raise CheckError("two ranks are the same local rank of one host; give each host a name of its own")
    hosts = dict.fromkeys(place[2] for place in places)
    return f"{strategy.description()}, {len(places)} rank(s) on {len(hosts)} host(s): {', '.join(hosts)}"


def _devices(strategy: Strategy) -> str:
    devices = strategy.devices()
    gpus = [device for device in devices if " GPU " in device]
    if len(set(gpus)) < len(gpus):
        raise CheckError(f"ranks share a GPU: {device_map(devices)}; start fewer ranks or give each its own")
    if gpus and len(gpus) < len(devices):
        raise CheckError(f"some ranks have a GPU and some have none: {device_map(devices)}; look at the hosts without")
    return device_map(devices)


def _broadcast() -> str:
    generator = np.random.default_rng(hvd.rank())
    values = [
        generator.normal(size=(3, size)).astype(dtype)
        for size, dtype in ((5, "float32"), (0, "float32"), (2, "float64"))
    ]
    variables = [tf.Variable(value) for value in [*values, np.array(hvd.rank()), np.array([hvd.rank() == 0])]]
    differ = len(set(hvd.allgather_object(fingerprint(variables))))
    hvd.broadcast_variables(variables, 0)
    after = hvd.allgather_object((fingerprint(variables), int(variables[3])))
    if len(set(after)) > 1 or after[0][1] != 0:
        raise CheckError("variables differ between ranks after a broadcast; look at the network and at Horovod's build")
    if differ < hvd.size():
        raise CheckError("ranks drew the same random numbers, so the broadcast proved nothing; a defect of this check")
    return f"5 variables differed on {differ} rank(s), and are rank 0's on all of them"


def _joint_batch(case: Case) -> str:
    found = compare(case, STEPS)
    size = hvd.size()
    expected = STEPS // case.steps_per_reduction
    if size > 1 and found.reductions != expected:
        raise CheckError(
            f"{found.reductions} reductions in the graph for {expected} steps that change weights; "
            "the optimizer that trains is not the distributed one"
        )
    if not found.error < case.tolerance:
        raise CheckError(
            f"{size} ranks differ from one process on the joint batch by {found.error:.2g} "
            f"(at most {case.tolerance:g}); gradients are not reduced, or wrongly"
        )
    if found.ranks_differ:
        raise CheckError(f"weights differ between ranks by {found.ranks_differ:.2g}; look at broadcast and reduction")
    if size > 1 and found.error_without_reduction < 3 * case.tolerance:
        raise CheckError("one rank without reduction ends with the same weights, so this proved nothing")
    alone = f"; without reduction {found.error_without_reduction:.1g}" if size > 1 else ""
    return f"{size} x 16 equal 1 x {16 * size} to {found.error:.1g}{alone}; {found.reductions} reductions"


def _overflow() -> str:
    """An infinite gradient on the last rank alone."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)))
    variable = keras.Variable([1.0, 2.0])
    optimizer.build([variable])
    scale = float(optimizer.scale_loss(1.0))
    last = hvd.rank() == hvd.size() - 1
    tf.function(lambda gradient: optimizer.apply([gradient], [variable]))(tf.constant([np.inf if last else 1.0, 1.0]))
    found = hvd.allgather_object((variable.numpy().tolist(), float(optimizer.dynamic_scale)))
    if found != [([1.0, 2.0], scale / 2)] * hvd.size():
        raise CheckError(f"ranks did not skip an overflow together: {found}; look at the build of Horovod")
    return "one rank's infinite gradient: all ranks skip the step and halve the loss scale"


def _unlike_models() -> str:
    """The last rank has a model of another width."""
    if hvd.size() == 1:
        return "one rank has no other to differ from"
    width = 3 if hvd.rank() == hvd.size() - 1 else 2
    optimizer, variable = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), keras.Variable([0.0] * width)
    try:
        optimizer.apply([tf.ones(width)], [variable])
    except RankError as error:
        said = str(error)
    else:
        said = ""
    if not all(hvd.allgather_object("cannot reduce the gradients" in said)):
        raise CheckError("gradients of unlike shapes were summed; a defect of hvtrain.keras or of Horovod's build")
    return "gradients of unlike shapes are refused on all ranks before they are summed"


def _shards(strategy: Strategy) -> str:
    """Which of some images each rank reads in an epoch; each image holds its number."""
    count = 40 * hvd.size() + 1
    images = np.arange(count, dtype=np.int32).reshape(-1, 1, 1, 1)
    source = from_arrays(images, images[:, 0, 0, 0] % 3, standardize="none")
    steps = len(strategy.topology.share(count))
    request = StreamRequest(strategy.topology, 1, seed=1, start_step=0, steps_per_epoch=steps)
    read = [int(number) for images, _ in source.training(request).take(steps) for number in images.numpy().ravel()]
    everyone = [number for numbers in strategy.comm.gather(read) for number in numbers]
    if sorted(everyone) != list(range(count)):
        raise CheckError(f"{len(set(everyone))} of {count} samples were read, {len(everyone)} times; look at data/")
    return f"{count} samples over {hvd.size()} rank(s): each read once, by one rank"


def _metrics(strategy: Strategy) -> str:
    """On shards of different sizes, against one process."""
    generator = np.random.default_rng(5)
    x, y = generator.normal(size=(51, 4)).astype("float32"), generator.integers(0, 3, 51)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    hvd.broadcast_variables(model.weights, 0)
    # Rank 0 has most of them, the others a few each.
    few = 3 if hvd.size() < 16 else 0
    mine = slice(few * (hvd.size() - 1), None) if hvd.rank() == 0 else slice(few * (hvd.rank() - 1), few * hvd.rank())
    together = evaluate(model, tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).batch(8), strategy.comm)
    alone = model.evaluate(x, y, verbose=0, return_dict=True)
    gap = max(abs(together[name] - alone[name]) for name in together)
    gap = max(strategy.comm.gather(gap))
    if gap > 1e-5:
        raise CheckError(f"metrics over ranks differ from one process by {gap:.2g}; they are not weighted by examples")
    return f"uneven shards give one process's loss and accuracy to {gap:.1g}"


def _checkpoint(strategy: Strategy) -> str:
    """Written by rank 0, lost, restored by rank 0, broadcast."""
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse", jit_compile=False)
    hvd.broadcast_model(model)
    return round_trip(model, strategy)


def round_trip(model: keras.Model, strategy: Strategy) -> str:
    """Of a model whose optimizer is built; its variables are as before afterwards."""
    variables = [*model.weights, *model.optimizer.variables]
    before = fingerprint([variable.value for variable in variables])
    with tempfile.TemporaryDirectory() as folder:

        def write() -> None:
            writer.write(Path(folder), 1, store.snapshot(model, [store.rank_state(model)]), {})

        def restore() -> None:
            newest, _ = store.read_newest(Path(folder))
            assert newest is not None
            store.restore(newest, model)

        strategy.comm.on_chief(write)
        for variable in variables:
            variable.assign(keras.ops.zeros_like(variable.value))
        strategy.comm.on_chief(restore)
    strategy.comm.broadcast_model(model)
    after = strategy.comm.gather(fingerprint([variable.value for variable in variables]))
    if after != [before] * len(after):
        raise CheckError(
            "variables differ after a checkpoint was written and restored; look at the folder's file system"
        )
    return f"{len(variables)} variables written, lost, restored and broadcast: the same bits on all ranks"
