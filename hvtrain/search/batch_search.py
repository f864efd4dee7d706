"""The search: trains with one size after another, on all ranks together, until one does not fit."""

import gc
import logging
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvtrain import runner
from hvtrain.config.schema import RunConfig
from hvtrain.core.step_plan import StepPlan
from hvtrain.errors import ConfigError, TrainingError
from hvtrain.plan.forecast import footprint
from hvtrain.search.batch_results import in_words, write
from hvtrain.search.fitting import Room, Trial, fastest, lacking, predicted_peak
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.loop import CallSteps
from hvtrain.system.free_memory import forget_peak, free_bytes, peak_bytes, resident_bytes
from hvtrain.system.secrets import without_secrets
from hvtrain.training.callbacks.guard import explain_errors, named
from hvtrain.training.callbacks.run_context import RunContext
from hvtrain.training.planning import make_plan
from hvtrain.training.repeated_step import step_without_update
from hvtrain.training.resume import RunState, Start
from hvtrain.training.run import Run, described, summary

log = logging.getLogger(__name__)

GIB = 2**30


class Stopwatch(keras.callbacks.Callback):
    """Times the calls of the graph: seconds of a step in each."""

    def __init__(self) -> None:
        super().__init__()
        self.step_seconds: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._begin = time.perf_counter(), batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        float(next(iter((logs or {"loss": 0.0}).values())))  # A GPU may still be at work.
        began, first = self._begin
        self.step_seconds.append((time.perf_counter() - began) / (batch + 1 - first))


def search(config: RunConfig, largest: int | None, limit_bytes: int | None, words: Sequence[str]) -> list[Trial]:
    """Tries sizes from train.batch_size on, doubled each time; returns the trials on every rank.

    Args:
        largest: the last size to try; None: until one does not fit.
        limit_bytes: memory of all ranks of a host; None: what is free.
        words: of the command line, for the line that uses the result.
    """
    attempt = partial(_attempt, largest=largest, limit_bytes=limit_bytes, words=words)
    trials: list[Trial] = runner.on_all_ranks(config, attempt)
    return trials


def _attempt(
    config: RunConfig,
    strategy: Strategy,
    state: RunState,
    largest: int | None,
    limit_bytes: int | None,
    words: Sequence[str],
) -> list[Trial]:
    if not strategy.is_plain:
        raise ConfigError(
            "find_batch measures ranks that take steps by themselves, and this strategy has other steps; "
            "choose strategy=horovod, elastic or single"
        )
    run, _ = runner.open_run(config, strategy, state, "find_batch")
    model, start = runner.restore(run, None)
    of_sizes = ("global batch", "learning rate", "steps")  # Each size has its own.
    log.info("%s", summary({name: text for name, text in described(run, model, start).items() if name not in of_sizes}))
    sizes = Sizes(run, model, start, limit_bytes)
    size, reason = run.plan.batch_sizes[0], ""
    while not reason:
        if largest is not None and size > largest:
            reason = f"{size} is above --largest {largest}"
        elif not (reason := sizes.obstacle(size)):
            reason = sizes.measure(size)
            if not reason:
                log.info("%s", in_words(sizes.trials[-1]))
                strategy.comm.on_chief(lambda: write(run.folder, sizes.trials))
        size *= 2
    log.info("ended: %s", reason)
    if not sizes.trials:
        raise TrainingError(f"no batch was tried: {reason}; choose a smaller --first, or a smaller model")
    strategy.comm.on_chief(lambda: write(run.folder, sizes.trials, reason))
    strategy.stop()
    _report(sizes.trials, run, words)
    return sizes.trials


class Sizes:
    """Measures sizes, one after the other, and says what stands in the way of the next (every rank)."""

    def __init__(self, run: Run, model: keras.Model, start: Start, limit_bytes: int | None) -> None:
        self.run, self.model, self.start, self.limit_bytes = run, model, start, limit_bytes
        self.comm = run.strategy.comm
        self.trials: list[Trial] = []
        self._peaks = [(0, resident_bytes())]  # Of this rank on the host, by size.
        self._gpu = tf.config.list_logical_devices("GPU")[:1]

    def plan_of(self, size: int) -> StepPlan:
        """The plan with batches of that size. Raises ConfigError if the data set has too few examples."""
        run, train = self.run, replace(self.run.config.train, batch_size=size)
        shards = run.source.shard_sizes("train", run.plan.size)
        return make_plan(train, run.plan.base_learning_rate, shards, run.source.name)

    def obstacle(self, size: int) -> str:
        """What is known before the size is tried: too few examples, or too little memory of a host; else empty."""
        try:
            self.plan_of(size)
        except ConfigError as error:
            return str(error).partition(";")[0]
        first_slope = 0 if self._gpu else footprint(self.model, 1).activation_bytes or 0
        resident = resident_bytes()
        growth = max(0.0, predicted_peak(self._peaks, size, first_slope) - resident)
        room = Room(self.comm.topology.host, growth, free_bytes(), resident)
        if found := lacking(self.comm.gather(room), self.limit_bytes):
            host, needed, free = found
            more = f"about {needed / GIB:.2f} GiB more on {host}, where {free / GIB:.2f} GiB are left"
            return f"train.batch_size={size} would take {more}"
        return ""

    def measure(self, size: int) -> str:
        """Trains some steps; the reason if the size does not fit on a rank, else empty."""
        run, stopwatch = replace(self.run, plan=self.plan_of(size)), Stopwatch()
        forget_peak()
        if self._gpu:
            tf.config.experimental.reset_memory_stats("GPU:0")
        if ranks := [rank for rank, fits in enumerate(self.comm.gather(self._fits(run))) if not fits]:
            return f"train.batch_size={size} exceeds the memory of {named(ranks)}"
        steps = CallSteps(run.config.train.steps_per_execution, [], self.comm.broadcast)
        context = RunContext.begin(run, self.model, self.start.step)
        with explain_errors(context):
            run.strategy.fit(self.model, run.batches_from, run.plan, 0, [context.position, stopwatch], steps)
        self._peaks.append((size, peak_bytes()))
        peak = tf.config.experimental.get_memory_info("GPU:0")["peak"] if self._gpu else self._peaks[-1][1]
        # The chief's clock: ranks wait for each other in each step. Other work on the machine can only add to a call.
        seconds = self.comm.broadcast(min(stopwatch.step_seconds[1:]))
        self.trials.append(Trial(size, run.plan.global_batch, seconds, self.comm.gather(peak)))
        gc.collect()
        return ""

    def _fits(self, run: Run) -> bool:
        """Whether a step without reduction and update finds memory on this rank.

        A rank that failed in a step of all ranks would leave the others waiting for its gradients. What the reduction
        itself needs does not depend on the batch.
        """
        model = self.model

        def alone(batch: Any) -> Any:
            logs, pairs = step_without_update(model, batch)
            return logs, [gradient for gradient, _ in pairs]

        try:
            tf.function(alone, jit_compile=bool(model.jit_compile))(next(iter(run.batches_from(0))))
        except tf.errors.OpError as error:
            if not is_out_of_memory(error):
                raise
            log.info("rank %d: %s", self.comm.topology.rank, " ".join(error.message.split())[:200])
            return False
        return True


def is_out_of_memory(error: tf.errors.OpError) -> bool:
    """True if the error says that a device had no memory left. CUDA's libraries have words of their own for it."""
    words = ("out of memory", "OUT_OF_MEMORY", "failed to allocate", "ALLOC_FAILED")
    return isinstance(error, tf.errors.ResourceExhaustedError) or any(word in str(error) for word in words)


def _report(trials: Sequence[Trial], run: Run, words: Sequence[str]) -> None:
    """Prints the largest and the fastest size, and how to use it."""
    best, largest, ranks = fastest(trials), trials[-1], run.plan.size
    kept = [word for word in words if not word.startswith(("run.dir=", "train.batch_size="))]
    line = shlex.join([*without_secrets(kept), f"train.batch_size={best.batch_size}"])
    prefix = f"horovodrun -np {ranks} python" if ranks > 1 else "python"
    log.info("largest that fits, of those tried: train.batch_size=%d", largest.batch_size)
    log.info("fastest: train.batch_size=%d, with %s examples/s", best.batch_size, f"{best.examples_per_second:,.0f}")
    log.info("  %s -m hvtrain %s", prefix, line)
    log.info("another batch changes what optimizer.learning_rate means; to find one for it:")
    log.info("  %s -m hvtrain find_lr %s", prefix, line)
    log.info("picture and figures in %s", run.folder)
