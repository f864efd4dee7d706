"""Checks of the user's run: its data is sharded, and its model trains on all ranks' gradients."""

import hashlib
from collections import Counter
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.checks.joint_batch import largest_difference
from hvtrain.checks.library import round_trip
from hvtrain.checks.table import CheckError, Checks
from hvtrain.config.schema import RunConfig
from hvtrain.keras.equality import WeightCheck
from hvtrain.keras.optimizer import num_reductions
from hvtrain.models.rates import factors_of, multiply_rates
from hvtrain.strategies.base import Strategy
from hvtrain.training.run import training_batches
from hvtrain.training.setup import (
    build_model,
    build_optimizer,
    open_source,
    open_task,
    plan_run,
    seed_everything,
)

BATCHES = 20
# A data set may hold a few images twice; overlapping shards share far more.
MAX_SHARED_FRACTION = 0.05


class OwnRun:
    """Data, plan and model of the run, built as the runner does (every rank)."""

    def __init__(self, config: RunConfig, strategy: Strategy) -> None:
        seed_everything(config, strategy.topology.rank)
        self.config = config
        self.strategy = strategy
        self.source = strategy.comm.all_or_raise(lambda: open_source(config))
        task = strategy.comm.all_or_raise(lambda: open_task(config, self.source))
        self.plan, self.topology = plan_run(config, self.source, strategy)
        self.model = strategy.comm.all_or_raise(lambda: build_model(config, self.source, task, self.plan, strategy))
        strategy.comm.broadcast_model(self.model)

    def batches(self) -> tf.data.Dataset:
        """This rank's first batches."""
        stream = training_batches(self.source, self.plan, self.topology, self.config.seed, step=0)
        return stream.take(min(BATCHES, self.plan.steps_per_epoch))


def own_run_checks(config: RunConfig, strategy: Strategy) -> Checks:
    """The checks in an order in which an early failure explains later ones."""
    run = OwnRun(config, strategy)

    return {
        f"data: {run.source.name}": partial(_data, run),
        "step of your model": partial(_step, run),
        "weights": partial(_weights, run),
        "your checkpoint": partial(round_trip, run.model, strategy),
    }


def _data(run: OwnRun) -> str:
    """Compares hashes of the examples of the first batches over all ranks."""
    hashes = {
        hashlib.blake2b(b"".join(part.tobytes() for part in example), digest_size=8).digest()
        for batch in run.batches().as_numpy_iterator()
        for example in zip(*tf.nest.flatten(batch))
    }
    by_rank = run.strategy.comm.gather(hashes)
    num_readers = Counter(digest for rank_hashes in by_rank for digest in rank_hashes)
    num_shared = sum(count > 1 for count in num_readers.values())
    # The shards' sizes are those that the run's steps are computed from.
    sizes = run.source.shard_sizes("train", run.plan.size, run.topology.weights)
    total = run.source.num_examples("train")
    if sum(sizes) != total:
        raise CheckError(f"shards of {sizes} examples are not the {total} of the data set; look at shard_sizes")
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
    inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(next(iter(run.batches())))
    model = run.model
    comm = run.strategy.comm

    @tf.function
    def gradients() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(inputs, targets, model(inputs, training=True), weights)
        values = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        # Sparse gradients (of embeddings) become dense ones.
        return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in values]

    # A variable that the loss does not depend on has no gradient.
    own = [None if gradient is None else gradient.numpy() for gradient in gradients()]
    joint = [_mean(parts) for parts in zip(*comm.gather(own))]

    copies = [keras.Variable(variable.numpy()) for variable in model.trainable_variables]
    plain = build_optimizer(run.config, run.plan)
    multiply_rates(plain, copies, factors_of(model, run.config.train.rates))
    # Copies: the run's own variables take the distributed step below.
    expected = _change(plain, joint, copies)
    reductions_before = num_reductions(model.optimizer)
    change = _change(model.optimizer, own, model.trainable_variables)
    count = num_reductions(model.optimizer) - reductions_before
    gap = max(comm.gather(largest_difference(change, expected)))
    pairs = [pair for pair in zip(own, joint) if pair[0] is not None]
    apart = max(comm.gather(largest_difference(*map(list, zip(*pairs)))))

    if not count:
        raise CheckError("the step reduced no gradient; wrap the optimizer in hvtrain.keras.DistributedOptimizer")
    if gap > 1e-3:
        raise CheckError(
            f"the step differs from a plain one on the mean gradient by {gap:.2g}; look at strategy.distribute"
        )
    return f"equals a plain step on all ranks' mean gradient to {gap:.1g}; own gradients differ from it by {apart:.1g}"


def _mean(gradients: tuple[Any, ...]) -> Any:
    """The mean over ranks of one variable's gradients; None if the loss does not depend on it."""
    if gradients[0] is None:
        return None
    return np.mean(gradients, axis=0, dtype=gradients[0].dtype)


def _change(
    optimizer: keras.optimizers.Optimizer,
    gradients: list[Any],
    variables: list[Any],
) -> list[np.ndarray]:
    """Takes one step and returns the changes of the variables.

    gradients: of a loss before the optimizer's scale_loss.
    """
    if not optimizer.built:
        optimizer.build(variables)

    before = [variable.numpy() for variable in variables]
    scale = float(optimizer.scale_loss(tf.constant(1.0)))
    scaled = [None if gradient is None else tf.constant(gradient * scale, gradient.dtype) for gradient in gradients]
    apply = tf.function(lambda: optimizer.apply(scaled, variables))
    # With accumulation, the weights change only after so many calls.
    for _ in range(getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps or 1):
        apply()

    return [variable.numpy() - old for variable, old in zip(variables, before)]


def _weights(run: OwnRun) -> str:
    check = WeightCheck(run.model)
    check("after one step of your model")
    # Moving statistics of batch normalization differ between ranks until they are averaged.
    check.average_untrained()
    check("after their moving statistics were made equal", everything=True)
    return f"equal on {run.plan.size} rank(s) after it, optimizer state too"
