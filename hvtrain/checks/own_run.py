"""All checks, and those of the user's own run: its data is sharded, and its model trains on all ranks' gradients."""

import hashlib
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.checks.joint_batch import largest_difference
from hvtrain.checks.library import CheckError, Checks, library_checks, round_trip
from hvtrain.config.instantiate import build
from hvtrain.config.schema import RunConfig
from hvtrain.errors import RankError
from hvtrain.keras.equality import WeightCheck
from hvtrain.keras.optimizer import num_reductions
from hvtrain.models.rates import factors_of, multiply_rates
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.horovod import HorovodStrategy
from hvtrain.system import console
from hvtrain.training.run import training_batches
from hvtrain.training.setup import build_model, build_optimizer, open_data, open_task, seed_everything

SECONDS_PER_CHECK = 120.0
BATCHES = 20
# A data set may hold a few images twice; overlapping shards share far more.
MAX_SHARED_FRACTION = 0.05


class OwnRun:
    """Data, plan and model of the run, built as the runner does (every rank)."""

    def __init__(self, config: RunConfig, strategy: Strategy) -> None:
        seed_everything(config, strategy.topology.rank)
        self.config, self.strategy = config, strategy
        self.source, self.plan, self.topology = open_data(config, strategy)
        task = strategy.comm.all_or_raise(lambda: open_task(config, self.source))
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
    prints = {
        hashlib.blake2b(b"".join(part.tobytes() for part in example), digest_size=8).digest()
        for batch in run.batches().as_numpy_iterator()
        for example in zip(*tf.nest.flatten(batch))
    }
    everyone = run.strategy.comm.gather(prints)
    holders = Counter(found for rank in everyone for found in rank)
    shared = sum(count > 1 for count in holders.values())
    sizes = run.source.shard_sizes("train", run.plan.size, run.topology.weights)
    total = run.source.num_examples("train")
    if sum(sizes) != total:
        raise CheckError(f"shards of {sizes} examples are not the {total} of the data set; look at shard_sizes")
    if shared > MAX_SHARED_FRACTION * len(holders) and not run.source.same_on_all_ranks:
        raise CheckError(
            f"{shared} of {len(holders)} samples looked at are read by more than one rank; give each rank its own "
            "part (topology.share), or set same_on_all_ranks on the data set if that is intended"
        )
    return f"{len(holders)} samples looked at, {shared} on more than one rank; shards of {min(sizes)} to {max(sizes)}"


def _step(run: OwnRun) -> str:
    """Compares the distributed optimizer's step with a plain one's on the mean of all ranks' gradients."""
    batch = next(iter(run.batches()))
    inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
    model, optimizer, comm = run.model, run.model.optimizer, run.strategy.comm

    @tf.function
    def gradients() -> list[Any]:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(inputs, targets, model(inputs, training=True), weights)
        found = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in found]

    own = [None if gradient is None else gradient.numpy() for gradient in gradients()]
    joint = [
        None if parts[0] is None else np.mean(parts, axis=0, dtype=parts[0].dtype) for parts in zip(*comm.gather(own))
    ]
    copies = [keras.Variable(variable.numpy()) for variable in model.trainable_variables]
    plain = build_optimizer(run.config, run.plan)
    multiply_rates(plain, copies, factors_of(model, run.config.train.rates))
    expected = _change(plain, joint, copies)
    before = num_reductions(optimizer)
    change = _change(optimizer, own, model.trainable_variables)
    count = num_reductions(optimizer) - before
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


def _change(optimizer: keras.optimizers.Optimizer, gradients: list[Any], variables: list[Any]) -> list[np.ndarray]:
    """Takes one step, on gradients of a loss before the optimizer's scale_loss; the changes of the variables."""
    if not optimizer.built:
        optimizer.build(variables)
    before = [variable.numpy() for variable in variables]
    scale = float(optimizer.scale_loss(tf.constant(1.0)))
    scaled = [None if gradient is None else tf.constant(gradient * scale, gradient.dtype) for gradient in gradients]
    apply = tf.function(lambda: optimizer.apply(scaled, variables))
    for _ in range(getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps or 1):
        apply()
    return [variable.numpy() - old for variable, old in zip(variables, before)]


def _weights(run: OwnRun) -> str:
    check = WeightCheck(run.model)
    check("after one step of your model")
    check.average_untrained()
    check("after their moving statistics were made equal", everything=True)
    return f"equal on {run.plan.size} rank(s) after it, optimizer state too"


def run_checks(checks: Checks, strategy: Strategy) -> bool:
    """Prints a line for each check on the chief; True if all passed on all ranks (every rank).

    Each has a deadline, so that none can hang.
    """

    def say(line: str) -> None:
        if strategy.topology.is_chief:
            sys.stdout.write(f"{line}\n")  # One write: launchers add their prefix to each one.
            sys.stdout.flush()

    def time_out(name: str) -> None:
        sys.stderr.write(
            f"FAIL  {name}: {socket.gethostname()} waited {SECONDS_PER_CHECK:.0f} s for the other ranks; "
            "one of them has stopped or left: look at its output\n"
        )
        os._exit(1)

    began, failed = time.monotonic(), 0
    for name, check in checks.items():
        finding, own_error = "", None
        deadline = threading.Timer(SECONDS_PER_CHECK, time_out, [name])
        deadline.daemon = True
        deadline.start()
        try:
            finding = check()
        except CheckError as error:
            own_error = str(error)
        except Exception as error:
            own_error = " ".join(f"{type(error).__name__}: {error}".split())
        finally:
            deadline.cancel()
        errors = enumerate(strategy.comm.gather(own_error))
        failure = next((f"rank {rank}: {text}" if rank else text for rank, text in errors if text is not None), None)
        failed += failure is not None
        say(f"{'PASS' if failure is None else 'FAIL'}  {name:<22} {failure or finding}")
    outcome = f"{len(checks) - failed} checks passed, {failed} failed" if failed else f"all {len(checks)} checks passed"
    say(f"{outcome} on {strategy.topology.size} rank(s) in {time.monotonic() - began:.0f} s")
    return not failed


def verify(config: RunConfig, own_run: bool) -> bool:
    """True if every check passes on every rank. own_run: also check the model, data and optimizer of config."""
    strategy: Strategy = build(config, "strategy", Strategy) if own_run else HorovodStrategy()
    # With the ten bits of TF32, healthy GPUs from Ampere on differ by up to 2.5e-3 where these checks allow 1e-5.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        topology = strategy.start()
        if topology.size == 1:
            raise RankError("one rank was started and at least two are needed; start them with horovodrun -np 2")
        console.start_log(topology.is_chief)
        logging.getLogger("hvtrain").setLevel(logging.WARNING)
        own_checks = own_run_checks(config, strategy) if own_run else {}
        passed = run_checks({**library_checks(strategy), **own_checks}, strategy)
        strategy.stop()
    except BaseException as error:
        strategy.report_failure(error)
        raise
    return passed
