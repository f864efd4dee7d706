"""Checks of the installation: environment, exchange, optimizers, data, metrics, checkpoints."""

import tempfile
from functools import partial
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import hvtrain.keras as hvd
from hvtrain.checkpoint import store, writer
from hvtrain.checks.joint_batch import CASES, UNLIKE, Case, compare
from hvtrain.checks.table import CheckError, Checks
from hvtrain.config.schema import RunConfig
from hvtrain.data import StreamRequest, from_arrays
from hvtrain.errors import RankError
from hvtrain.keras.equality import fingerprint
from hvtrain.strategies.base import Strategy
from hvtrain.training.consistency import check_same_run
from hvtrain.training.run import device_map, versions

BATCH = 16
STEPS = 8


def library_checks(strategy: Strategy, config: RunConfig) -> Checks:
    """The checks in an order in which an early failure explains later ones (two ranks or more)."""
    return {
        "versions": partial(_versions, strategy, config),
        "controller": partial(_controller, strategy),
        "devices": partial(_devices, strategy),
        "broadcast": _broadcast,
        **{name: partial(_joint_batch, case) for name, case in CASES.items()},
        "overflow": _overflow,
        "different models": _different_models,
        "shards": partial(_shards, strategy),
        "metrics": partial(_metrics, strategy),
        "checkpoint": partial(_checkpoint, strategy),
    }


def _versions(strategy: Strategy, config: RunConfig) -> str:
    check_same_run(strategy.comm, config)
    return ", ".join(f"{name} {number}" for name, number in versions().items())


def _controller(strategy: Strategy) -> str:
    ranks = strategy.comm.gather((strategy.topology.host, hvd.local_rank()))
    if len(set(ranks)) < len(ranks):
        raise CheckError("two ranks have the same local rank on one host; give each host a name of its own")

    hosts = dict.fromkeys(host for host, _ in ranks)
    return f"{strategy.description()}, {len(ranks)} rank(s) on {len(hosts)} host(s): {', '.join(hosts)}"


def _devices(strategy: Strategy) -> str:
    devices = strategy.devices
    gpus = [device for device in devices if " GPU " in device]
    is_shared = len(set(gpus)) < len(gpus)
    if is_shared and not getattr(strategy, "share_gpus", False):
        raise CheckError(f"ranks share a GPU: {device_map(devices)}; start fewer ranks or give each its own")
    tf32 = "on" if tf.config.experimental.tensor_float_32_execution_enabled() else "off"
    return f"{device_map(devices)}; TF32 {tf32}"


def _broadcast() -> str:
    """Broadcasts variables of several types, one of them empty, that differ between ranks."""
    normal = np.random.default_rng(hvd.rank()).normal

    values = [
        normal(size=(3, 5)).astype("float32"),
        np.zeros((3, 0), "float32"),
        normal(size=(3, 2)),
        np.array(hvd.rank()),
        np.array([hvd.rank() == 0]),
    ]
    variables = [tf.Variable(value) for value in values]
    # The control: ranks that held the same values would agree without a broadcast.
    num_different = len(set(hvd.allgather_object(fingerprint(variables))))
    hvd.broadcast_variables(variables, 0)
    after = hvd.allgather_object((fingerprint(variables), int(variables[3])))
    # Variable 3 holds the rank.
    if len(set(after)) > 1 or after[0][1] != 0:
        raise CheckError("variables differ between ranks after a broadcast; look at the network and at Horovod's build")
    if num_different < hvd.size():
        raise CheckError("ranks drew the same random numbers, so the broadcast proved nothing; please report this bug")
    return f"5 variables differed on {num_different} rank(s), and are rank 0's on all of them"


def _joint_batch(case: Case) -> str:
    comparison = compare(case, STEPS, BATCH)
    size = hvd.size()
    expected = STEPS // case.steps_per_reduction
    # Counted in the graph: a Python counter would count traces.
    if comparison.reductions != expected:
        raise CheckError(
            f"{comparison.reductions} reductions in the graph for {expected} steps that change weights; "
            "the optimizer that trains is not the distributed one"
        )

    if not comparison.error < case.tolerance:
        raise CheckError(
            f"{size} ranks differ from one process on the joint batch by {comparison.error:.2g} "
            f"(at most {case.tolerance:g}); gradients are not reduced, or wrongly"
        )

    if comparison.ranks_differ:
        raise CheckError(
            f"weights differ between ranks by {comparison.ranks_differ:.2g}; look at broadcast and reduction"
        )
    # A check that could not fail is worth nothing: the wrong ways must give other weights.
    if comparison.error_of_plain_loss < 3 * case.tolerance:
        raise CheckError("the mean of the ranks' losses gives the same weights, so the comparison proves nothing")
    if comparison.error_without_reduction < 3 * case.tolerance:
        raise CheckError("one rank without reduction ends with the same weights, so the comparison proves nothing")

    controls = f"without reduction {comparison.error_without_reduction:.1g}"
    if case.kind in UNLIKE:
        controls = f"with the mean of losses {comparison.error_of_plain_loss:.1g}; {controls}"
    return (
        f"{size} x {BATCH} equal 1 x {BATCH * size} to {comparison.error:.1g}; {controls}; "
        f"{comparison.reductions} reductions"
    )


def _overflow() -> str:
    """Gives the last rank alone an infinite gradient."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)))
    variable = keras.Variable([1.0, 2.0])
    optimizer.build([variable])
    scale = float(optimizer.scale_loss(1.0))
    is_last = hvd.rank() == hvd.size() - 1
    gradient = tf.constant([np.inf if is_last else 1.0, 1.0])
    tf.function(lambda gradient: optimizer.apply([gradient], [variable]))(gradient)
    # Weights as they were, and half the loss scale.
    states = hvd.allgather_object((variable.numpy().tolist(), float(optimizer.dynamic_scale)))
    if states != [([1.0, 2.0], scale / 2)] * hvd.size():
        raise CheckError(f"ranks did not skip an overflow together: {states}; look at the build of Horovod")
    return "one rank's infinite gradient: all ranks skip the step and halve the loss scale"


def _different_models() -> str:
    """Gives the last rank a model of another width."""
    width = 3 if hvd.rank() == hvd.size() - 1 else 2
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    variable = keras.Variable([0.0] * width)
    is_refused = False

    try:
        optimizer.apply([tf.ones(width)], [variable])
    except RankError as error:
        is_refused = "cannot reduce the gradients" in str(error)

    if not all(hvd.allgather_object(is_refused)):
        raise CheckError("gradients of different shapes were summed; a bug of hvtrain.keras or of Horovod's build")
    return "gradients of different shapes are refused on all ranks before they are summed"


def _shards(strategy: Strategy) -> str:
    """Counts the images that each rank reads in an epoch; each image holds its number."""
    # One more than the ranks can share evenly.
    count = 40 * hvd.size() + 1
    images = np.arange(count, dtype=np.int32).reshape(-1, 1, 1, 1)
    source = from_arrays(images, images[:, 0, 0, 0] % 3, standardize="none")
    steps = strategy.topology.share_size(count)
    request = StreamRequest(strategy.topology, 1, seed=1, start_step=0, steps_per_epoch=steps)
    batches = source.training(request).take(steps)
    read = [int(number) for images, _ in batches for number in images.numpy().ravel()]
    everyone = [number for numbers in strategy.comm.gather(read) for number in numbers]
    if sorted(everyone) != list(range(count)):
        raise CheckError(f"{len(set(everyone))} of {count} samples were read, {len(everyone)} times; look at data/")
    return f"{count} samples over {hvd.size()} rank(s): each read once, by one rank"


def _metrics(strategy: Strategy) -> str:
    """Compares metrics on shards of different sizes with those of one process."""
    generator = np.random.default_rng(5)
    x = generator.normal(size=(51, 4)).astype("float32")
    y = generator.integers(0, 3, 51)
    # All ranks need one model, and `alone` is computed on each of them.
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    hvd.broadcast_variables(model.weights, 0)

    # Rank 0 has most of the 51 examples, the others a few each (none in a large job).
    few = 3 if hvd.size() < 16 else 0
    own = slice(few * (hvd.rank() - 1), few * hvd.rank())
    if hvd.rank() == 0:
        own = slice(few * (hvd.size() - 1), None)

    together = strategy.evaluate(model, tf.data.Dataset.from_tensor_slices((x[own], y[own])).batch(8))
    alone = model.evaluate(x, y, verbose=0, return_dict=True)
    gap = max(strategy.comm.gather(max(abs(together[name] - alone[name]) for name in together)))
    if gap > 1e-5:
        raise CheckError(f"metrics over ranks differ from one process by {gap:.2g}; they are not weighted by examples")
    return f"uneven shards give one process's loss and accuracy to {gap:.1g}"


def _checkpoint(strategy: Strategy) -> str:
    """Writes and restores a checkpoint of a small model."""
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse", jit_compile=False)
    hvd.broadcast_model(model)
    return round_trip(model, strategy)


def round_trip(model: keras.Model, strategy: Strategy) -> str:
    """Writes a checkpoint, loses all variables, restores them and broadcasts (every rank).

    The model's optimizer must be built. Its variables are unchanged afterwards.
    """
    variables = [*model.weights, *model.optimizer.variables]
    before = fingerprint([variable.value for variable in variables])
    saved: list[store.Checkpoint] = []

    def write() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = writer.write(Path(folder), 1, store.snapshot(model, [store.rank_state(model)]), {})
            saved.append(store.read(path))

    # Only the chief touches the disk; the broadcast brings the values to the others.
    strategy.comm.on_chief(write)
    # On all ranks, so that nothing but the file can bring the values back.
    for variable in variables:
        variable.assign(keras.ops.zeros_like(variable.value))

    strategy.comm.on_chief(lambda: store.restore(saved[0], model))
    strategy.comm.broadcast_model(model)
    after = strategy.comm.gather(fingerprint([variable.value for variable in variables]))
    if after != [before] * len(after):
        raise CheckError("variables differ after a checkpoint was written and restored; check the file system of /tmp")
    return f"{len(variables)} variables written, lost, restored and broadcast: the same bits on all ranks"
