"""Makes all callbacks of a run, in their order, including the user's own."""

import math
import re
import warnings
from collections.abc import Mapping
from importlib.util import find_spec

import keras
from keras.callbacks import Callback, LambdaCallback

from hvtrain.checkpoint.writer import Writer
from hvtrain.config.instantiate import build
from hvtrain.config.schema import RunConfig
from hvtrain.config.validate import nearest
from hvtrain.errors import ConfigError
from hvtrain.models.parts import sharded_tables
from hvtrain.strategies.loop import CallSteps
from hvtrain.training.callbacks.balance import Balance
from hvtrain.training.callbacks.checkpointing import (
    STEPS_BETWEEN_CLOCK_CHECKS,
    CallbackState,
    Checkpointing,
    Interruption,
    MemoryCommit,
)
from hvtrain.training.callbacks.console_progress import Progress
from hvtrain.training.callbacks.epochs import (
    EpochMetrics,
    GradientNoise,
    Recording,
    SameLogs,
    Throughput,
    Validation,
    report_skipped,
)
from hvtrain.training.callbacks.guard import Guard, OneBatch, Proof
from hvtrain.training.callbacks.publishing import Metrics, Tracking
from hvtrain.training.callbacks.recompute import Recompute
from hvtrain.training.callbacks.repeated_step import LayerSearch
from hvtrain.training.callbacks.run_context import Logs, RunContext
from hvtrain.training.callbacks.timeline import TimelineTrace
from hvtrain.training.run import Run, Start


def make_callbacks(
    context: RunContext,
    start: Start,
    interruption: Interruption,
    writer: Writer,
    tracking: Tracking | None,
    search: LayerSearch | None,
    metrics: Metrics | None = None,
) -> list[Callback]:
    """Returns all callbacks in the order in which Keras calls them (every rank).

    The first ones count the step, check that it was reduced, and time it. The next ones compute the
    epoch's metrics over all ranks, check them and validate, so that later callbacks read true logs. Then
    the user's callbacks act, and all ranks stop if one requests it. The last ones record, save, track and
    commit. The record comes before the checkpoint: in the other order, a run killed between the two would
    resume without this epoch's row.

    Args:
        context: The run's context.
        start: Where the run begins or resumes.
        interruption: Stops the run at a signal or a time limit.
        writer: Writes the checkpoints.
        tracking: Feeds the trackers; None: there are none.
        search: Checks each step, with guard.layers=true; else None.
        metrics: Serves numbers for monitoring; None: none are served.

    Raises:
        ConfigError: A callback does not fit the run; see own_callbacks.
    """
    run = context.run
    config = run.config
    strategy = run.strategy
    position = context.position
    is_chief = run.topology.is_chief
    progress = strategy.watchdog.progress

    throughput = Throughput(context)
    validation = Validation(context, start)
    validates = validation.dataset is not None
    user_callbacks = strategy.comm.all_or_raise(
        lambda: own_callbacks(run, context.model, validates)
    )
    own = {
        name: callback
        for name, callback in user_callbacks.items()
        if is_chief or not isinstance(callback, WRITERS)
    }
    for callback in own.values():
        _skip_interrupted_epochs(callback, context)
    state = CallbackState(context, own, start)

    # end_step is called first and begin_step last, so that the watchdog can tell a step from a callback.
    end_step = LambdaCallback(
        on_train_batch_end=lambda batch, logs: progress.end_step(position.step)
    )
    begin_step = LambdaCallback(
        on_train_batch_begin=lambda batch, logs: progress.begin_step(position.step)
    )

    def agree_within_epoch(epoch, logs):
        # At the end of an epoch a callback may still request a stop, so Checkpointing agrees later.
        if position.in_epoch:
            interruption.agree_on_reason()

    agree = LambdaCallback(on_epoch_end=agree_within_epoch)
    monitored = monitored_names(user_callbacks, config.checkpoint.best)

    def check_names(epoch, logs):
        def check():
            try:
                check_logged(monitored, logs)
            except ConfigError:
                # The checkpoint must be complete before any rank ends, since the watchdog then ends the others.
                writer.finish()
                raise

        if monitored:
            strategy.comm.on_chief(check)

    skipped = LambdaCallback(on_epoch_end=lambda epoch, logs: report_skipped(run, context.report))

    has_ranks = run.topology.size > 1
    callbacks = [
        position,
        end_step,
        *strategy.guards(),
        throughput,
        Proof(context),
        search,
        has_ranks and config.guard.recompute_every and Recompute(context),
        has_ranks and config.profile.noise_scale_every and GradientNoise(context),
        # The logs first become metrics over all ranks, and then identical on all of them.
        EpochMetrics(context, start),
        Guard(context),
        validation,
        SameLogs(context),
        config.data.one_batch and OneBatch(context),
        # First the callbacks that may stop the training, then those that extend one rank's stop to
        # all ranks. `agree` comes before both: whether a user's callback sees the end of an epoch
        # that was cut short depends on the reason (_skip_interrupted_epochs).
        agree,
        *own.values(),
        interruption,
        state,
        *strategy.stop_callbacks(),
        has_ranks and config.train.balance and Balance(context, throughput),
        Recording(context, throughput),
        Checkpointing(context, state, validation, interruption, writer),
        # After the checkpoint, from which the run continues once the name is corrected.
        LambdaCallback(on_epoch_end=check_names),
        is_chief and tracking,
        is_chief and Progress(context),
        is_chief and metrics and metrics.is_on and metrics,
        skipped,
        config.profile.timeline and TimelineTrace(context),
        # MemoryCommit raises if ranks join or leave, and then no later callback is called.
        strategy.membership.commit_steps and MemoryCommit(context, state, validation),
        begin_step,
    ]
    # A callback that is switched off is None, False or 0 here.
    return [callback for callback in callbacks if isinstance(callback, Callback)]


def _skip_interrupted_epochs(callback: Callback, context: RunContext) -> None:
    """Changes a user's callback so that its on_epoch_end is not called for an interrupted epoch.

    The callback sees the epoch's end when a resumed run finishes the epoch; EarlyStopping, for example,
    would otherwise count the epoch twice. A run that a callback has stopped within an epoch is complete,
    so its last epoch does end.
    """
    end_epoch = callback.on_epoch_end

    def on_epoch_end(epoch, logs=None):
        if not (context.position.in_epoch and context.report.stopped_by):
            end_epoch(epoch, logs)

    callback.on_epoch_end = on_epoch_end


def call_steps(run: Run, callbacks: list[Callback]) -> CallSteps:
    """Returns how many steps one call of the graph may do (every rank).

    The number is 1 with guard.layers, and otherwise train.steps_per_execution. If that is not set, it is 1
    if a user's callback acts on batches, and otherwise the loop finds it by timing. A call must not cross
    the step intervals after which a callback acts.

    Raises:
        ConfigError: checkpoint.every_steps or train.validate_every_steps is not a multiple of strategy.every.
    """
    config = run.config
    strategy = run.strategy
    hooks = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
    modules = {getattr(callback, hook).__module__ for callback in callbacks for hook in hooks}
    # ModelCheckpoint and TensorBoard count batches themselves if the
    # value is a number, not "epoch".
    frequencies = [
        getattr(callback, name, None)
        for callback in callbacks
        for name in ("save_freq", "update_freq")
    ]
    # The callbacks of hvtrain.keras that set the learning rate for each batch count as the user's.
    acts_on_batches = any(
        module.partition(".")[0] not in ("hvtrain", "keras")
        or module == "hvtrain.keras.learning_rate"
        for module in modules
    )
    batch_intervals = [steps for steps in frequencies if isinstance(steps, int)]
    # The chief decides, since it alone has the callbacks that only write.
    acts_on_batches, batch_intervals = strategy.comm.broadcast((acts_on_batches, batch_intervals))

    sync_every = strategy.sync_every
    saved_every = {
        "checkpoint.every_steps": config.checkpoint.every_steps,
        "train.validate_every_steps": config.train.validate_every_steps,
    }
    for name, every in saved_every.items():
        if every and every % sync_every:
            raise ConfigError(
                f"{name}={every} is not a multiple of strategy.every={sync_every}, after which the ranks' weights are "
                f"equal; choose {-(-every // sync_every) * sync_every}"
            )

    steps_between_clock_checks = STEPS_BETWEEN_CLOCK_CHECKS * config.train.accumulate
    intervals = [
        *saved_every.values(),
        config.guard.recompute_every,
        math.lcm(config.guard.every, sync_every),
        *batch_intervals,
        strategy.membership.commit_steps,
        bool(config.checkpoint.every_minutes) and math.lcm(steps_between_clock_checks, sync_every),
        config.profile.timeline and config.profile.steps,
    ]

    steps = config.train.steps_per_execution
    if config.guard.layers or (acts_on_batches and steps is None):
        steps = 1
    intervals = [interval for interval in intervals if interval]
    return CallSteps(steps, intervals, strategy.comm.broadcast, config.train.accumulate)


# Callbacks that only write. The chief alone has them; otherwise ranks would overwrite each other's files.
WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)
# Callbacks of Keras that would do harm in a run, and what to do instead.
_REFUSED = {
    "BackupAndRestore": "would restore rank 0 alone; leave it out, since hvtrain saves and resumes runs itself",
    "SwapEMAWeights": "would exchange the weights that checkpoints save; leave it out and set "
    "train.ema=0.999, whose averages are validated and saved",
    "OrbaxCheckpoint": "is not made for several ranks of TensorFlow; use keras.callbacks.ModelCheckpoint",
}


def own_callbacks(run: Run, model: keras.Model, validates: bool) -> dict[str, Callback]:
    """Builds the user's callbacks, by name.

    Args:
        run: The run, whose config names them.
        model: The compiled model.
        validates: True if there is validation data.

    Raises:
        ConfigError: A callback would do harm, lacks a package, or monitors a validation metric in a run
            without validation data; or checkpoint.best is not a metric of this run.
    """
    config = run.config
    for name, settings in config.callbacks.items():
        package, _, class_name = settings["_target_"].rpartition(".")
        if package.removeprefix("tensorflow.").startswith("keras.") and class_name in _REFUSED:
            raise ConfigError(f"callbacks.{name}: {class_name} {_REFUSED[class_name]}")

    callbacks = {name: build(config, f"callbacks.{name}", Callback) for name in config.callbacks}

    metrics = _logged_metrics(run, model)
    methods = ("train_step", "test_step", "compute_metrics", "get_metrics_result")
    has_own_step = any(
        getattr(type(model), method) is not getattr(keras.Model, method) for method in methods
    )
    may_log_more = has_own_step or any(map(_may_add_metrics, callbacks.values()))
    if run.best not in metrics and not may_log_more:
        raise ConfigError(
            f"checkpoint.best={run.best} is not a metric of this run; {nearest(run.best, metrics)}"
        )
    if validates and config.train.validate_every_epochs != 1:
        # After each epoch without a validation, Keras would warn that these are not available.
        for name in metrics:
            pattern = rf".*\bval_{re.escape(name.removeprefix('val_'))}\b.* available"
            warnings.filterwarnings("ignore", pattern)

    for name, callback in callbacks.items():
        # Keras does not know the direction of a perplexity, and its ReduceLROnPlateau
        # minimizes whatever is not an accuracy.
        if getattr(callback, "mode", None) == "auto" and hasattr(callback, "monitor"):
            callback.mode = "max" if run.task.sign(callback.monitor) == 1 else "min"
        _check_callback(name, callback, run, model)
        if not validates:
            _refuse_unvalidated_monitor(name, callback, config)
    return callbacks


def _check_callback(name: str, callback: Callback, run: Run, model: keras.Model) -> None:
    """Raises ConfigError if a callback lacks a package, or would save weights of rank 0 alone."""
    if getattr(callback, "restore_best_weights", False) and sharded_tables(model):
        raise ConfigError(
            f"callbacks.{name}.restore_best_weights=true and model.shard_embeddings exclude each other, since a "
            "checkpoint would keep rank 0's rows alone; set restore_best_weights=false: best.keras has the best weights"
        )
    is_checkpoint = isinstance(callback, keras.callbacks.ModelCheckpoint)
    if is_checkpoint and callback.save_freq != "epoch" and run.strategy.sync_every > 1:
        raise ConfigError(
            f"callbacks.{name}.save_freq={callback.save_freq} would save rank 0's own weights, since those of "
            f"strategy={run.strategy.name} differ between synchronizations; set it to epoch, or set "
            "checkpoint.every_steps instead"
        )
    is_tensorboard = isinstance(callback, keras.callbacks.TensorBoard)
    if run.topology.is_chief and is_tensorboard and not find_spec("tensorboard"):
        raise ConfigError(
            f"callbacks.{name} needs the package tensorboard, which is missing; pip install tensorboard"
        )


def monitored_names(callbacks: Mapping[str, Callback], best: str | None) -> dict[str, str]:
    """Returns the names of the metrics on which Keras's callbacks and checkpoint.best depend, by setting.

    The result is empty if one of the user's callbacks may add metrics in some epochs only.
    """
    if any(map(_may_add_metrics, callbacks.values())):
        return {}
    names = {
        f"callbacks.{name}.monitor": _monitor_of(callback) for name, callback in callbacks.items()
    }
    names["checkpoint.best"] = best or ""
    return {setting: name for setting, name in names.items() if name}


def check_logged(monitored: Mapping[str, str], logs: Logs) -> None:
    """Checks that an epoch's logs contain the monitored metrics.

    Keras itself only warns, after every epoch. Not all names are known before the training: a model may
    log metrics of its own.

    Args:
        monitored: The result of monitored_names.
        logs: The logs, after all callbacks that add to them.

    Raises:
        ConfigError: A metric is missing.
    """
    has_validated = any(name.startswith("val_") for name in logs)
    for setting, name in monitored.items():
        is_due = has_validated or not name.startswith("val_")
        # An epoch may be too short for an estimate of the noise scale.
        if is_due and name not in (*logs, "noise_scale"):
            raise ConfigError(
                f"{setting}={name} is not a metric of this run; {nearest(name, list(logs))}"
            )


def _may_add_metrics(callback: Callback) -> bool:
    """True if the callback contains the user's own code, which may add metrics to the logs."""
    is_own = type(callback).__module__.partition(".")[0] not in ("hvtrain", "keras")
    return is_own or isinstance(callback, LambdaCallback)


def _monitor_of(callback: Callback) -> str:
    """Returns the name of the metric on which the callback acts; empty if there is none."""
    # ModelCheckpoint uses its monitor only with save_best_only.
    if not getattr(callback, "save_best_only", True):
        return ""
    return str(getattr(callback, "monitor", ""))


def _refuse_unvalidated_monitor(name: str, callback: Callback, config: RunConfig) -> None:
    """Raises ConfigError if a callback monitors a validation metric although there is no validation data."""
    monitor = _monitor_of(callback)
    if not monitor.startswith("val_"):
        return
    advice = "as the split validation"
    if "num_validation" in config.dataset:
        advice = "dataset.num_validation=N"
    raise ConfigError(
        f"callbacks.{name}.monitor={monitor} needs validation data and there is none; take some out of the "
        f"training data ({advice}) or choose ++callbacks.{name}.monitor={monitor[4:]}"
    )


def _logged_metrics(run: Run, model: keras.Model) -> list[str]:
    """Returns the names of the metrics that an epoch's logs may contain: training first, then validation."""
    # A model may have metrics besides those of compile, which Keras keeps in one object.
    own_names = (metric.name for metric in model.metrics if metric.name != "compile_metrics")
    names = list(dict.fromkeys([*run.task.metric_names, *own_names]))
    return [*names, *(f"val_{name}" for name in names)]
