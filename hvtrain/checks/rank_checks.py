"""The checks that verify runs: those of the library, and those of the user's run.

Every rank takes part in every check; a failed check raises CheckError after its last collective.
"""

import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import SGD, Adam, LossScaleOptimizer, Optimizer

import hvtrain.keras as hvd
from hvtrain.checkpoint import model_state, store, writer
from hvtrain.checks.joint_batch import CASES, check_joint_batch, largest_difference
from hvtrain.checks.table import CheckError, Checks
from hvtrain.config.schema import RunConfig
from hvtrain.data import StreamRequest, from_arrays
from hvtrain.data.manifest import digest_arrays
from hvtrain.errors import RankError
from hvtrain.keras.equality import WeightCheck, fingerprint
from hvtrain.keras.hooks import hook_of
from hvtrain.models.rates import factors_of, multiply_rates
from hvtrain.strategies.base import Strategy
from hvtrain.training.consistency import check_same_run
from hvtrain.training.run import device_map, training_batches, versions
from hvtrain.training.setup import (
    build_model,
    build_optimizer,
    open_source,
    open_task,
    plan_run,
    seed_everything,
)

BATCHES = 20
# A data set may hold a few duplicates; overlapping shards share far more.
MAX_SHARED_FRACTION = 0.05


def library_checks(strategy: Strategy, config: RunConfig) -> Checks:
    """Returns the library's checks, which need two ranks, ordered so that an early failure explains later ones."""
    return {
        "versions": partial(_versions, strategy, config),
        "controller": partial(_controller, strategy),
        "devices": partial(_devices, strategy),
        "broadcast": _broadcast,
        **{name: partial(check_joint_batch, case) for name, case in CASES.items()},
        "overflow": _overflow,
        "different models": _different_models,
        "shards": partial(_shards, strategy),
        "metrics": partial(_metrics, strategy),
        "checkpoint": partial(_checkpoint, strategy),
    }


def _versions(strategy: Strategy, config: RunConfig) -> str:
    check_same_run(strategy.comm, config)
    return ", ".join(f"{name} {version}" for name, version in versions().items())


def _controller(strategy: Strategy) -> str:
    ranks = strategy.comm.gather((strategy.topology.host, hvd.local_rank()))
    # Ranks with the same local rank on a host would take the same GPU or the same cores.
    if len(set(ranks)) < len(ranks):
        (host, local_rank), count = Counter(ranks).most_common(1)[0]
        raise CheckError(
            f"{count} ranks on {host} have the local rank {local_rank}; give each host its own hostname"
        )

    hosts = dict.fromkeys(host for host, _ in ranks)
    return f"{strategy.description()}, {len(ranks)} rank(s) on {len(hosts)} host(s): {', '.join(hosts)}"


def _devices(strategy: Strategy) -> str:
    devices = device_map(strategy.devices)
    gpus = [device for device in strategy.devices if " GPU " in device]
    if len(set(gpus)) < len(gpus) and not getattr(strategy, "share_gpus", False):
        raise CheckError(f"ranks share a GPU: {devices}; start fewer ranks or give each its own")

    return f"{devices}; TF32 off"


def _broadcast() -> str:
    """Checks that a broadcast makes variables of several types, one of them empty, equal on all ranks."""
    normal = np.random.default_rng(hvd.rank()).normal
    variables = [
        tf.Variable(value)
        for value in (
            normal(size=(3, 5)).astype("float32"),
            np.zeros((3, 0), "float32"),
            normal(size=(3, 2)),
            np.array(hvd.rank()),
            np.array([hvd.rank() == 0]),
        )
    ]
    before = hvd.allgather_object(fingerprint(variables))
    hvd.broadcast_variables(variables, 0)
    after = hvd.allgather_object(fingerprint(variables))
    if set(after) != {before[0]}:
        raise CheckError(
            "variables differ between ranks after a broadcast; look at the network and at Horovod's build"
        )
    # Control: ranks with the same values would agree without a broadcast.
    num_different = len(set(before))
    if num_different < hvd.size():
        raise CheckError(
            "ranks drew the same random numbers, so the broadcast proved nothing; please report this bug"
        )
    return f"5 variables differed on {num_different} rank(s); the broadcast made them equal"


def _overflow() -> str:
    """Checks that all ranks skip a step in which only the last rank's gradient is infinite."""
    # The wrapper is outermost: inside the loss scale, a rank that skips a step
    # alone would leave the others waiting.
    optimizer = hvd.DistributedOptimizer(LossScaleOptimizer(SGD(1.0)))
    variable = keras.Variable([1.0, 2.0])
    optimizer.build([variable])
    scale = float(optimizer.scale_loss(1.0))
    is_last = hvd.rank() == hvd.size() - 1
    gradient = tf.constant([np.inf if is_last else 1.0, 1.0])
    tf.function(lambda gradient: optimizer.apply([gradient], [variable]))(gradient)
    # Expected: unchanged weights and half the loss scale.
    states = hvd.allgather_object((variable.numpy().tolist(), float(optimizer.dynamic_scale)))
    if states != [([1.0, 2.0], scale / 2)] * hvd.size():
        raise CheckError(
            f"ranks did not skip an overflow together: {states}; look at the build of Horovod"
        )
    return "one rank's infinite gradient: all ranks skip the step and halve the loss scale"


def _different_models() -> str:
    """Checks that gradients are refused if the last rank's variable has another width."""
    width = 3 if hvd.rank() == hvd.size() - 1 else 2
    optimizer = hvd.DistributedOptimizer(SGD(1.0))
    variable = keras.Variable([0.0] * width)
    is_refused = False

    try:
        optimizer.apply([tf.ones(width)], [variable])
    except RankError as error:
        is_refused = "cannot reduce the gradients" in str(error)

    if not all(hvd.allgather_object(is_refused)):
        raise CheckError(
            "gradients of different shapes were summed; look at the build of Horovod, or report this bug"
        )
    return "gradients of different shapes are refused on all ranks before they are summed"


def _shards(strategy: Strategy) -> str:
    """Checks that the ranks together read each image once per epoch. An image is one pixel that holds its index."""
    # One more image than the ranks can share evenly.
    count = 40 * hvd.size() + 1
    images = np.arange(count, dtype=np.int32).reshape(-1, 1, 1, 1)
    source = from_arrays(images, images.ravel() % 3, standardize="none")
    steps = strategy.topology.share_size(count)
    request = StreamRequest(strategy.topology, 1, seed=1, start_step=0, steps_per_epoch=steps)
    batches = source.training(request).take(steps)
    read = [image.item() for image, _ in batches.as_numpy_iterator()]
    all_read = [index for indices in strategy.comm.gather(read) for index in indices]
    if sorted(all_read) != list(range(count)):
        raise CheckError(
            f"the ranks read {len(all_read)} samples, {len(set(all_read))} different ones, and should read each of "
            f"the {count} once; please report this bug"
        )
    return f"{count} samples over {hvd.size()} rank(s): each read once, by one rank"


def _metrics(strategy: Strategy) -> str:
    """Compares the ranks' metrics on shards of different sizes with those of one process on all examples."""
    generator = np.random.default_rng(5)
    x = generator.normal(size=(51, 4)).astype("float32")
    y = generator.integers(0, 3, 51)
    # All ranks need the same model, since each of them computes `one_process`.
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["accuracy"])
    hvd.broadcast_variables(model.weights, 0)

    # The last rank has most of the 51 examples, the others a few each (none in a large job).
    num_each = 3 if hvd.size() < 16 else 0
    own_indices = np.split(np.arange(len(x)), num_each * np.arange(1, hvd.size()))[hvd.rank()]

    shard = tf.data.Dataset.from_tensor_slices((x[own_indices], y[own_indices])).batch(8)
    over_ranks = strategy.evaluate(model, shard)
    one_process = model.evaluate(x, y, verbose=0, return_dict=True)
    own_gap = max(abs(over_ranks[name] - one_process[name]) for name in over_ranks)
    gap = max(strategy.comm.gather(own_gap))
    if gap > 1e-5:
        raise CheckError(
            f"metrics over ranks differ from those of one process by {gap:.2g}: they are not weighted by examples; "
            "please report this bug"
        )
    return f"uneven shards give one process's loss and accuracy to {gap:.1g}"


def _checkpoint(strategy: Strategy) -> str:
    """Writes and restores a checkpoint of a small model."""
    keras.utils.set_random_seed(hvd.rank())
    # Moving statistics are variables that no gradient touches.
    layers = [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()]
    model = keras.Sequential(layers)
    model.compile(hvd.DistributedOptimizer(Adam()), "mse", jit_compile=False)
    hvd.broadcast_model(model)
    return round_trip(model, strategy)


def round_trip(model: keras.Model, strategy: Strategy) -> str:
    """Writes a checkpoint, zeroes all variables, restores and broadcasts them (every rank).

    The optimizer must be built. All variables are unchanged afterwards.
    """
    variables = [*model.weights, *model.optimizer.variables]
    before = fingerprint(variables)
    saved = []
    parts = strategy.comm.gather_parts(
        model_state.sharded_variables(model), Path(tempfile.gettempdir())
    )

    def write():
        snapshot = model_state.snapshot(model, [model_state.rank_state(model)], {}, parts)
        with tempfile.TemporaryDirectory() as folder:
            saved.append(store.read(writer.write(Path(folder), 1, snapshot, {})))

    # Only the chief touches the disk; the broadcast brings the values to the others.
    strategy.comm.on_chief(write)
    # Zeroed on all ranks, so that nothing but the file can bring the values back.
    for variable in variables:
        variable.assign(keras.ops.zeros_like(variable.value))

    strategy.comm.on_chief(lambda: model_state.restore(saved[0], model))
    strategy.comm.broadcast_model(model)
    after = fingerprint(variables)
    if not all(strategy.comm.gather(after == before)):
        raise CheckError(
            "variables differ after a checkpoint was written and restored; check the file system of /tmp"
        )
    return f"{len(variables)} variables written, lost, restored and broadcast: the same bits on all ranks"


class OwnRun:
    """Builds the data, plan and model of the user's run as the runner does (every rank)."""

    def __init__(self, config: RunConfig, strategy: Strategy) -> None:
        comm = strategy.comm
        seed_everything(config, strategy.topology.rank)
        self.config = config
        self.strategy = strategy
        self.source = comm.all_or_raise(lambda: open_source(config))
        task = comm.all_or_raise(lambda: open_task(config, self.source))
        self.plan, self.topology = plan_run(config, self.source, strategy)
        self.model = comm.all_or_raise(
            lambda: build_model(config, self.source, task, self.plan, strategy)
        )
        comm.broadcast_model(self.model)

    def batches(self) -> tf.data.Dataset:
        """Returns this rank's first batches: BATCHES, or fewer if an epoch has fewer."""
        stream = training_batches(self.source, self.plan, self.topology, self.config.seed, step=0)
        return stream.take(min(BATCHES, self.plan.steps_per_epoch))


def own_run_checks(config: RunConfig, strategy: Strategy) -> Checks:
    """Returns the run's checks, ordered so that an early failure explains later ones."""
    run = OwnRun(config, strategy)
    strategy.exclude({"verify": getattr(hook_of(run.model.optimizer), "averages_weights", False)})

    return {
        f"data: {run.source.name}": partial(_data, run),
        "step of your model": partial(_step, run),
        "weights": partial(_weights, run),
        "your checkpoint": partial(round_trip, run.model, strategy),
    }


def _data(run: OwnRun) -> str:
    """Checks that shards add up, and that few examples of the ranks' first batches are read by several ranks."""
    hashes = {
        digest_arrays(example)
        for batch in run.batches().as_numpy_iterator()
        for example in zip(*tf.nest.flatten(batch))
    }
    by_rank = run.strategy.comm.gather(hashes)
    num_readers = Counter(digest for rank_hashes in by_rank for digest in rank_hashes)
    num_shared = sum(count > 1 for count in num_readers.values())
    # These sizes decide the run's number of steps, so they must add up.
    sizes = run.source.shard_sizes("train", run.plan.size, run.topology.weights)
    total = run.source.num_examples("train")
    if sum(sizes) != total:
        raise CheckError(
            f"shards of {sizes} examples do not add up to the {total} of the data set; look at shard_sizes"
        )
    if num_shared > MAX_SHARED_FRACTION * len(num_readers) and not run.source.same_on_all_ranks:
        raise CheckError(
            f"{num_shared} of {len(num_readers)} samples looked at are read by more than one rank; give each rank its "
            "own part (topology.share), or set same_on_all_ranks on the data set if that is intended"
        )

    return (
        f"{len(num_readers)} samples looked at, {num_shared} on more than one rank; "
        f"shards of {min(sizes)} to {max(sizes)}"
    )


def _step(run: OwnRun) -> str:
    """Compares the distributed step with a plain one on the mean of all ranks' gradients."""
    model = run.model
    comm = run.strategy.comm
    own_gradients = _own_gradients(run)
    joint: list[Any] = []
    shared = []
    means = []
    for item, values in zip(model.trainable_variables, own_gradients):
        if values is not None and hasattr(item, "rank_part"):
            # The gradient of this rank's part of a table is already the sum over all ranks.
            joint.append(values / comm.topology.size)
            continue
        # Gathered one by one: all gradients of a large model would fit neither a message nor memory.
        parts = comm.gather(values)
        joint.append(None if values is None else np.mean(parts, axis=0, dtype=values.dtype))
        if values is not None:
            shared.append(values)
            means.append(joint[-1])

    # Copies: the run's own variables take the distributed step below.
    copies = [keras.Variable(variable.numpy()) for variable in model.trainable_variables]
    # The same optimizer as the run's, but not wrapped by the strategy.
    plain = build_optimizer(run.config, run.plan)
    multiply_rates(plain, copies, factors_of(model, run.config.train.rates))
    expected = _change(plain, joint, copies)
    reductions_before = hvd.num_reductions(model.optimizer)
    change = _change(model.optimizer, own_gradients, model.trainable_variables)
    count = hvd.num_reductions(model.optimizer) - reductions_before
    gap = max(comm.gather(largest_difference(change, expected)))
    gradient_gap = max(comm.gather(largest_difference(shared, means)))

    if not count:
        raise CheckError(
            "the step reduced no gradient; wrap the optimizer in hvtrain.keras.DistributedOptimizer"
        )
    if gap > 1e-3:
        raise CheckError(
            f"the step differs from a plain one on the mean gradient by {gap:.2g}; look at strategy.distribute"
        )
    return f"equals a plain step on the ranks' mean gradient to {gap:.1g}; own gradients differ by {gradient_gap:.1g}"


def _own_gradients(run: OwnRun) -> list[np.ndarray | None]:
    """Returns this rank's gradients on its first batch; None for a variable on which the loss does not depend."""
    inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(next(iter(run.batches())))
    model = run.model

    @tf.function
    def gradients():
        with tf.GradientTape() as tape:
            loss = model.compute_loss(inputs, targets, model(inputs, training=True), weights)
        return tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    # Sparse gradients (of embeddings) become dense ones.
    return [None if part is None else tf.convert_to_tensor(part).numpy() for part in gradients()]


def _change(optimizer: Optimizer, gradients: list[Any], variables: list[Any]) -> list[np.ndarray]:
    """Takes one step and returns the changes of the variables.

    The gradients are those of the loss, not yet scaled by the optimizer's scale_loss.
    """
    # The run's optimizer is built; a plain one is not.
    if not optimizer.built:
        optimizer.build(variables)

    before = [variable.numpy() for variable in variables]
    scale = float(optimizer.scale_loss(tf.constant(1.0)))
    scaled = [None if part is None else tf.constant(part * scale, part.dtype) for part in gradients]
    apply = tf.function(lambda: optimizer.apply(scaled, variables))
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # With accumulation, the weights change only after this many calls.
    for _ in range(inner.gradient_accumulation_steps or 1):
        apply()

    return [variable.numpy() - old for variable, old in zip(variables, before)]


def _weights(run: OwnRun) -> str:
    check = WeightCheck(run.model)
    check("after one step of your model")
    # Moving statistics of batch normalization differ between ranks until they are averaged.
    check.average_untrained()
    check("after their moving statistics were made equal", everything=True)
    return f"equal on {run.plan.size} rank(s) after this step, optimizer state too"
