"""Measures one batch size after another, on all ranks together, until one does not fit."""

import gc
import logging
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from hvtrain import runner
from hvtrain.config.make_plan import make_plan
from hvtrain.config.schema import RunConfig
from hvtrain.errors import ConfigError, TrainingError
from hvtrain.models.memory import footprint
from hvtrain.search.batch_sizes import (
    RankMemory,
    Trial,
    fastest,
    lacking_host,
    predicted_peak,
    write_png,
    write_sizes,
)
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.loop import CallSteps
from hvtrain.system.resources import free_bytes, peak_bytes, reset_peak, resident_bytes
from hvtrain.system.secrets import without_secrets
from hvtrain.training.callbacks.guard import explain_errors, ranks_in_words
from hvtrain.training.callbacks.repeated_step import step_without_update
from hvtrain.training.callbacks.run_context import RunContext
from hvtrain.training.run import Run, RunState, describe, summary

log = logging.getLogger(__name__)

GIB = 2**30
# Lines of a run's description that depend on the batch size, so they are not logged.
_SIZE_DEPENDENT = ("global batch", "learning rate", "steps", "left out")
# Parts of the messages with which CUDA's libraries report that a device is out of memory.
_OUT_OF_MEMORY = ("out of memory", "OUT_OF_MEMORY", "failed to allocate", "ALLOC_FAILED")


class Stopwatch(keras.callbacks.Callback):
    """Times calls of the graph; `step_seconds` has the seconds per step of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.step_seconds: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._began = time.perf_counter()
        self._first = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # A GPU may still be computing; reading a value waits until it has finished.
        float(next(iter(logs.values())))
        seconds = time.perf_counter() - self._began
        self.step_seconds.append(seconds / (batch + 1 - self._first))


def try_sizes(
    config: RunConfig,
    strategy: Strategy,
    state: RunState,
    largest: int | None,
    limit_bytes: int | None,
    overrides: Sequence[str],
) -> list[Trial]:
    """Tries train.batch_size, then twice that size, and so on; returns the trials (every rank).

    Args:
        config: the settings of the run, made by commands.as_search.
        strategy: the strategy of the ranks.
        state: the state of the run.
        largest: the largest size to try; None: sizes are tried until one does not fit.
        limit_bytes: as in batch_sizes.lacking_host.
        overrides: settings on the command line, for the suggested commands.

    Raises:
        ConfigError: the strategy's steps are not those that find_batch measures.
        TrainingError: not even the first size could be tried.
    """
    # The workers of parameter servers compute in other processes, replicas and virtual ranks have
    # their own train steps, and some steps of local_sgd send nothing.
    if not strategy.is_plain:
        raise ConfigError(
            "find_batch needs ranks that compute on batches of their own and reduce gradients in every step, which "
            f"strategy={strategy.name} lacks; choose strategy=horovod, elastic or single"
        )

    run, _ = runner.open_run(config, strategy, state, "find_batch")
    model = runner.make_model(run)
    start = runner.restore(run, model, None)
    lines = describe(run, model, start).items()
    log.info(summary({name: text for name, text in lines if name not in _SIZE_DEPENDENT}))

    search = BatchSearch(run, model, limit_bytes)
    reason = search.try_doubling(run.plan.batch_sizes[0], largest)
    log.info(f"ended: {reason}")
    trials = search.trials
    if not trials:
        raise TrainingError(
            f"no batch was tried: {reason}; choose a smaller --first, or a smaller model"
        )

    def write_results():
        write_sizes(run.folder, trials, reason)
        write_png(run.folder, trials)
        run.state.store.send()

    strategy.comm.on_chief(write_results)
    strategy.stop()
    _report(trials, run, overrides)

    return trials


@dataclass
class BatchSearch:
    """Tries batch sizes one after another on the same model (every rank).

    Args:
        run: the run; each size replaces its plan.
        model: the run's model, with its weights set.
        limit_bytes: as in batch_sizes.lacking_host.
    """

    run: Run
    model: keras.Model
    limit_bytes: int | None

    def __post_init__(self) -> None:
        self.comm = self.run.strategy.comm
        self.trials: list[Trial] = []
        # Pairs of a size and this rank's peak memory on the host, in bytes.
        self._peaks = [(0, resident_bytes())]
        self._has_gpu = bool(tf.config.list_logical_devices("GPU"))

    def try_doubling(self, first: int, largest: int | None) -> str:
        """Tries `first`, then twice that size, and so on up to `largest`. Returns why the search ended."""
        size = first
        while largest is None or size <= largest:
            # The reason comes from gathered values, so it is the same on every rank, and all ranks
            # leave the loop together.
            reason = self.try_size(size)
            if reason:
                return reason
            log.info("%s", self.trials[-1])
            # Written after each size, because the kernel may kill the ranks during the next.
            self.comm.on_chief(lambda: write_sizes(self.run.folder, self.trials))
            size *= 2
        return f"{size} is above --largest {largest}"

    def try_size(self, size: int) -> str:
        """Trains some steps with this size and adds a trial. Returns "", or the reason why no trial was added."""
        run = self.run
        train = replace(run.config.train, batch_size=size)
        shards = run.source.shard_sizes("train", run.plan.size)
        # A data set that does not fill a batch of this size has no plan.
        try:
            plan = make_plan(train, run.plan.base_learning_rate, shards, run.source.name)
        except ConfigError as error:
            return str(error).partition(";")[0]

        return self._memory_shortage(size) or self._measure(replace(run, plan=plan), size)

    def _memory_shortage(self, size: int) -> str:
        """Predicts the memory for this size. Returns "", or a message that names the host without enough memory."""
        # With a GPU, activations do not use the host's memory. The GPU's memory is not predicted: running
        # out of it raises an error, which the process survives.
        first_slope = 0 if self._has_gpu else footprint(self.model, 1).activation_bytes or 0
        resident = resident_bytes()
        growth = max(0.0, predicted_peak(self._peaks, size, first_slope) - resident)
        memory = RankMemory(self.comm.topology.host, growth, free_bytes(), resident)
        lacking = lacking_host(self.comm.gather(memory), self.limit_bytes)
        if lacking is None:
            return ""
        host, needed, free = lacking

        return (
            f"train.batch_size={size} would take about {needed / GIB:.2f} GiB more on {host}, "
            f"which has {free / GIB:.2f} GiB left"
        )

    def _measure(self, run: Run, size: int) -> str:
        """Trains by the run's plan and adds a trial. Returns "", or a message that names the ranks out of memory."""
        # From here on, the peaks are those of this size.
        reset_peak()
        if self._has_gpu:
            tf.config.experimental.reset_memory_stats("GPU:0")

        fits_by_rank = self.comm.gather(self._fits(run))
        exhausted = [rank for rank, fits in enumerate(fits_by_rank) if not fits]
        if exhausted:
            return f"train.batch_size={size} exceeds the memory of {ranks_in_words(exhausted)}"

        stopwatch = Stopwatch()
        steps = CallSteps(run.config.train.steps_per_execution, [], self.comm.broadcast)
        context = RunContext.begin(run, self.model, 0)
        with explain_errors(context):
            run.strategy.fit(
                self.model, run.batches_from, run.plan, 0, [context.position, stopwatch], steps
            )

        peak = peak_bytes()
        self._peaks.append((size, peak))
        if self._has_gpu:
            peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
        # The chief's clock suffices, since ranks wait for each other in each step. The first call is left
        # out, because it traces the graph. Of the others the fastest counts, because other work on the
        # machine can only slow a call down.
        seconds = self.comm.broadcast(min(stopwatch.step_seconds[1:]))
        self.trials.append(Trial(size, run.plan.global_batch, seconds, self.comm.gather(peak)))
        gc.collect()  # Memory left in reference cycles would count toward the next size's peak.

        return ""

    def _fits(self, run: Run) -> bool:
        """True if a step without reduction and update fits into this rank's memory.

        Each rank tries the step alone, because a rank that fails in a joint step leaves the others waiting
        for its gradients. The memory for the reduction itself does not depend on the batch.

        Raises TrainingError if it does not fit and the step itself has collectives, in which the others wait.
        """
        model = self.model

        def gradients_only(batch):
            logs, pairs = step_without_update(model, batch)
            return logs, [gradient for gradient, _ in pairs]

        # Compiled like the real step, since XLA plans memory differently.
        step = tf.function(gradients_only, jit_compile=model.jit_compile)

        batch = next(iter(run.batches_from(0)))
        try:
            step(batch)
        except tf.errors.OpError as error:
            is_exhausted = isinstance(error, tf.errors.ResourceExhaustedError)
            if not is_exhausted and not any(text in str(error) for text in _OUT_OF_MEMORY):
                raise
            # Only this rank's log has the error itself; the other ranks learn that there was one.
            rank = self.comm.topology.rank
            log.info(f"rank {rank}: {' '.join(error.message.split())[:200]}")
            if _has_collectives(step.get_concrete_function(batch).graph):
                size = run.plan.batch_sizes[0]
                raise TrainingError(
                    f"train.batch_size={size} exceeds the memory of rank {rank}, and the other ranks wait for it "
                    "within the step (synchronized batch norm, a sharded table or a loss over the joint batch); add "
                    f"--largest {size // 2}"
                ) from error
            return False

        return True


def _has_collectives(graph: tf.Graph) -> bool:
    """True if an operation of the graph, or of a function that it calls, is one of Horovod's."""
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes.extend(function.node_def)
    return any(node.op.startswith("Horovod") for node in nodes)


def _report(trials: Sequence[Trial], run: Run, overrides: Sequence[str]) -> None:
    """Logs the largest and the fastest size, and commands that use the fastest."""
    # Not the largest, since beyond some size a larger batch only takes longer.
    best = fastest(trials)
    others = [text for text in overrides if not text.startswith(("run.dir=", "train.batch_size="))]
    settings = shlex.join([*without_secrets(others), f"train.batch_size={best.batch_size}"])
    num_ranks = run.plan.size
    python = "python" if num_ranks == 1 else f"horovodrun -np {num_ranks} python"

    log.info(f"largest that fits, of those tried: train.batch_size={trials[-1].batch_size}")
    log.info(
        f"fastest: train.batch_size={best.batch_size}, with {best.examples_per_second:,.0f} examples/s"
    )
    log.info(f"  {python} -m hvtrain {settings}")
    log.info("another batch size needs another optimizer.learning_rate; to find one:")
    log.info(f"  {python} -m hvtrain find_lr {settings}")
    log.info(f"picture and measurements in {run.folder}")
