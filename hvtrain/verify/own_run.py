"""The checks of a user's own run: is its data shared out, does its model train on all ranks' gradients?"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.config.schema import RunConfig
from hvtrain.core.step_plan import StepPlan
from hvtrain.data.source import Source
from hvtrain.strategies.base import Strategy
from hvtrain.training.run import training_batches
from hvtrain.training.setup import build_model, build_optimizer, open_data, seed_everything
from hvtrain.verify.check import Check, CheckError
from hvtrain.verify.joint_batch import largest_difference
from hvtrain.verify.library import round_trip

BATCHES = 20
# Data sets hold a few images twice; shards that overlap hold very many.
LARGEST_SHARED_FRACTION = 0.05


class OwnRun:
    """The parts of the run, made as the runner makes them (every rank)."""

    def __init__(self, config: RunConfig, strategy: Strategy) -> None:
        seed_everything(config, strategy.topology.rank)
        self.config, self.strategy = config, strategy
        self.source: Source
        self.plan: StepPlan
        self.source, self.plan, self.topology = open_data(config, strategy.comm)
        with strategy.scope():
            self.model: keras.Model = strategy.comm.all_or_raise(
                lambda: build_model(config, self.source, self.plan, strategy)
            )
        strategy.comm.broadcast_model(self.model)

    def batches(self) -> tf.data.Dataset:
        """This rank's first batches."""
        stream = training_batches(self.source, self.plan, self.topology, self.config.seed, step=0)
        return stream.take(min(BATCHES, self.plan.steps_per_epoch))


def own_run_checks(config: RunConfig, strategy: Strategy) -> Iterator[Check]:
    """In the order in which a failure explains those after it."""
    run = OwnRun(config, strategy)
    yield Check(f"data: {run.source.name}", partial(_data, run))
    yield Check("step of your model", partial(_step, run))
    yield Check("weights", partial(_weights, run))
    yield Check("your checkpoint", lambda: round_trip(run.model, strategy))


def _data(run: OwnRun) -> str:
    """Hashes of the examples of the first batches, over all ranks."""
    prints = {
        hashlib.blake2b(image.tobytes() + label.tobytes(), digest_size=8).digest()
        for images, labels in run.batches().as_numpy_iterator()
        for image, label in zip(images, labels)
    }
    everyone = run.strategy.comm.gather(prints)
    holders = Counter(found for rank in everyone for found in rank)
    shared = sum(count > 1 for count in holders.values())
    sizes = run.source.shard_sizes("train", run.plan.size, run.topology.weights)
    total = run.source.num_examples("train")
    if sum(sizes) != total:
        raise CheckError(f"shards of {sizes} examples are not the {total} of the data set; look at shard_sizes")
    if shared > LARGEST_SHARED_FRACTION * len(holders) and not run.source.same_on_all_ranks:
        raise CheckError(
            f"{shared} of {len(holders)} samples looked at are read by more than one rank; give each rank its own "
            "part (topology.share), or set same_on_all_ranks on the data set if that is meant"
        )
    return f"{len(holders)} samples looked at, {shared} on more than one rank; shards of {min(sizes)} to {max(sizes)}"


def _step(run: OwnRun) -> str:
    """The step of the distributed optimizer against a plain one's on the mean of all ranks' gradients."""
    images, labels = next(iter(run.batches()))
    model, optimizer = run.model, run.model.optimizer

    @tf.function
    def gradients() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(images, labels, model(images, training=True))
        found = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in found]

    own = [None if gradient is None else gradient.numpy() for gradient in gradients()]
    everyone = run.strategy.comm.gather(own)
    joint = [None if parts[0] is None else np.mean(parts, axis=0, dtype=parts[0].dtype) for parts in zip(*everyone)]
    copies = [keras.Variable(variable.numpy()) for variable in model.trainable_variables]
    plain = build_optimizer(run.config, run.plan)
    accumulated = getattr(plain, "inner_optimizer", plain).gradient_accumulation_steps or 1
    before = [copy.numpy() for copy in copies]
    joint_of_losses = _of_scaled_loss(plain, joint)
    for _ in range(accumulated):
        plain.apply(joint_of_losses, copies)
    expected = [copy.numpy() - old for copy, old in zip(copies, before)]

    count = run.strategy.guards.num_reductions(optimizer)
    own_of_losses = _of_scaled_loss(optimizer, own)
    apply = tf.function(lambda: optimizer.apply(own_of_losses, model.trainable_variables))
    for _ in range(accumulated):
        apply()
    steps = [variable.numpy() - old for variable, old in zip(model.trainable_variables, before)]
    count = run.strategy.guards.num_reductions(optimizer) - count
    gap = max(run.strategy.comm.gather(largest_difference(steps, expected)))
    apart = max(
        run.strategy.comm.gather(
            largest_difference([g for g in own if g is not None], [g for g in joint if g is not None])
        )
    )
    if run.plan.size > 1 and not count:
        raise CheckError("the step reduced no gradient; wrap the optimizer in hvtrain.keras.DistributedOptimizer")
    if gap > 1e-3:
        raise CheckError(
            f"the step differs from a plain one on the mean gradient by {gap:.2g}; look at strategy.distribute"
        )
    return f"equals a plain step on all ranks' mean gradient to {gap:.1g}; own gradients differ from it by {apart:.1g}"


def _of_scaled_loss(optimizer: keras.optimizers.Optimizer, gradients: list[Any]) -> list[Any]:
    """What the gradients of a loss are once the loss went through the optimizer's scale_loss, as in train_step."""
    scale = float(optimizer.scale_loss(tf.constant(1.0)))
    return [None if gradient is None else tf.constant(gradient * scale, gradient.dtype) for gradient in gradients]


def _weights(run: OwnRun) -> str:
    check = run.strategy.guards.weight_check(run.model)
    check("after one step of your model")
    check.average_untrained()
    check("after their moving statistics were made equal", everything=True)
    return f"equal on {run.plan.size} rank(s) after it, optimizer state too"
