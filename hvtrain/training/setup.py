"""Sets up a run: its seeds, data, plan and model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from hvtrain.config.instantiate import build
from hvtrain.config.make_plan import choose_uneven, make_plan, planned_batch_sizes, resumed_plan
from hvtrain.config.schema import RunConfig
from hvtrain.core.schedule import Schedule
from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology, reduced
from hvtrain.data import fitted
from hvtrain.data.source import Source, symbolic
from hvtrain.errors import CheckpointError, ConfigError, cause_of
from hvtrain.models.parts import change_parts, sharded_tables
from hvtrain.models.rates import decay_kernels, factors_of, keep_averages, multiply_rates
from hvtrain.step.joint_loss import overridden_steps
from hvtrain.strategies.base import Strategy
from hvtrain.system.storage.cache import forget_copies
from hvtrain.system.text import counted
from hvtrain.tasks import Task
from hvtrain.training.augment import open_augmentation
from hvtrain.training.prepared_step import class_weights, prepare_step


def seed_everything(config: RunConfig, rank: int) -> None:
    """Resets Keras's names and random numbers, as in a new process, and sets precision and determinism.

    Each rank has its own seed, since dropout must differ between ranks; weights are broadcast anyway.
    """
    # Checkpoints contain layer names, which Keras numbers from the start of a session.
    keras.utils.clear_session()
    # A seed of NumPy has 32 bits.
    keras.utils.set_random_seed((config.seed + rank) % 2**32)
    if config.train.deterministic:
        tf.config.experimental.enable_op_determinism()
    keras.config.set_dtype_policy(config.train.precision)


def open_data(
    config: RunConfig, rank: int, fitted_files: Mapping[str, bytes] | None = None
) -> Source:
    """Opens the data set of a run on this rank, before the run is planned.

    Args:
        config: The run's settings.
        rank: The rank of this process.
        fitted_files: Files, by name, with what earlier starts fitted to the training data, if any.

    Raises:
        ConfigError: Settings and data set do not fit each other.
        DataError: The data set cannot be opened.
    """
    seed_everything(config, rank)
    source = open_source(config)
    if fitted_files:
        fitted.apply(source, fitted_files)
    # With a GPU, batches are copied to it as they are stored, and the step normalizes them.
    source.raw_batches = bool(tf.config.list_logical_devices("GPU"))
    return source


def open_source(config: RunConfig) -> Source:
    """Opens the data set that the settings name. Raises ConfigError or DataError if that fails."""
    forget_copies()
    source: Source = build(config, "dataset", Source)
    source.on_error = config.data.on_error
    source.bucket_by_length = config.data.bucket_by_length
    return source


def open_task(config: RunConfig, source: Source) -> Task:
    """Builds the task, and checks that it fits the source."""
    task: Task = build(config, "task", Task)
    task.prepare(source)
    return task


def open_task_and_layers(config: RunConfig, source: Source, is_resized: bool) -> Task:
    """Builds the task, and adds the layers of augment to the streams of its data set.

    Args:
        config: The run's settings.
        source: The data set.
        is_resized: The run continues with another number of ranks. Layers on the device then move
            to the input pipeline, whose batches are still those of the earlier ranks.

    Raises:
        ConfigError: Settings, data set and task do not fit each other.
    """
    task = open_task(config, source)
    if config.data.bucket_by_length and source.lengths("train") is None:
        raise ConfigError(
            f"data.bucket_by_length={config.data.bucket_by_length} needs examples of different lengths, and "
            f"{source.name} gives none; choose dataset=text dataset.examples=documents, or leave the setting out"
        )
    if config.augment:
        open_augmentation(config, source, task)
    if is_resized and source.augmentation:
        source.augmentation.in_step = False
    return task


def plan_run(
    config: RunConfig,
    source: Source,
    strategy: Strategy,
    saved: dict[str, Any] | None = None,
) -> tuple[StepPlan, Topology]:
    """Plans the run for the size of its data set (every rank).

    Args:
        config: The run's settings.
        source: The data set.
        strategy: The started strategy.
        saved: Meta of the checkpoint to resume from, if any; its plan is continued.

    Returns:
        The plan, and this rank's topology with its share of the data.

    Raises:
        CheckpointError: The strategy cannot continue a run whose steps had another number of parts.
        ConfigError: The strategy cannot take the batches, or they do not fit the data.
    """
    comm = strategy.comm
    num_processes = strategy.topology.size
    if config.data.bucket_by_length and not strategy.takes_varying_shapes:
        raise ConfigError(
            "data.bucket_by_length gives batches of different lengths, and this strategy needs equal ones; "
            "leave the setting out, or choose strategy=horovod"
        )
    # One entry for each rank of the plan, that is for each replica,
    # since a process may have several.
    hosts = [host for host in comm.gather(comm.topology.host) for _ in range(strategy.num_replicas)]
    if strategy.cuts_batches and saved and saved["num_ranks"] != len(hosts):
        parts = saved["num_ranks"]
        raise CheckpointError(
            f"the run in this folder began with steps of {counted(parts, 'part')}, and now they have {len(hosts)}; "
            f"set strategy.virtual_ranks={parts}, or choose another run.dir"
        )
    batch_sizes = planned_batch_sizes(saved, config.train, hosts)
    weights = reduced(batch_sizes)
    if len(batch_sizes) == num_processes:
        # If the size of the data is unknown, each rank counts its own
        # shard, and all ranks get the counts.
        topology = replace(comm.topology, weights=tuple(weights))
        source.take_counts(comm.gather(comm.all_or_raise(lambda: source.own_counts(topology))))
    shard_sizes = comm.all_or_raise(lambda: source.shard_sizes("train", len(batch_sizes), weights))

    if config.data.uneven == "auto":
        can_pad = strategy.takes_short_batches and strategy.takes_varying_shapes
        config.data.uneven = choose_uneven(config.train, shard_sizes, batch_sizes, can_pad, saved)
    rate = config.optimizer["learning_rate"]
    plan = make_plan(config.train, rate, shard_sizes, source.name, batch_sizes, config.data.uneven)
    plan = resumed_plan(plan, saved, config.train, len(hosts))
    if num_processes != len(hosts):
        # A process that leads several replicas takes their batches as one.
        plan = plan.on(num_processes)
    return plan, replace(comm.topology, weights=() if plan.is_resized else plan.weights)


def build_model(
    config: RunConfig,
    source: Source,
    task: Task,
    plan: StepPlan,
    strategy: Strategy,
) -> keras.Model:
    """Builds and compiles the model and its optimizer.

    Raises ConfigError if settings, model, data set and task do not fit each other.
    """
    # Each layer built so far, such as those of augment, has advanced Keras's name counters and
    # random numbers. After a reset, the model does not depend on them.
    seed_everything(config, strategy.topology.rank)
    with strategy.scope():
        if config.train.sync_batch_norm and strategy.num_replicas > 1:
            raise ConfigError(
                f"train.sync_batch_norm=true normalizes over ranks, and this strategy has {strategy.num_replicas} "
                "replicas in one process; leave the setting out"
            )
        model = build_network(config, source, task, strategy.topology.size)
        for layer in model._flatten_layers():
            if config.train.jit_compile and not getattr(layer, "supports_jit", True):
                raise ConfigError(
                    f"train.jit_compile=true and the layer {layer.name}, which XLA cannot compile, exclude each other; "
                    "leave one of the two out"
                )

        optimizer = strategy.distribute(build_optimizer(config, plan), config.guard.finite)
        try:
            task.compile(
                model,
                optimizer,
                config.train.jit_compile,
                weighted=len(source.element_spec) > 2,
                distribute_loss=strategy.distribute_loss,
                soft_targets=bool(
                    task.label_smoothing or (source.augmentation and source.augmentation.mixes)
                ),
            )
        except ValueError as error:
            if sharded_tables(model):
                raise ConfigError(f"model.shard_embeddings: {error}") from error
            raise
        factors = factors_of(model, config.train.rates)
        multiply_rates(model.optimizer, model.trainable_variables, factors)
    strategy.prepare(model)
    prepare_step(
        model,
        source,
        has_batch_weights=not plan.is_even,
        class_weights=class_weights(config, source, task),
        harden=task.harden,
    )
    return model


def build_network(config: RunConfig, source: Source, task: Task, size: int) -> keras.Model:
    """Builds the model for `size` ranks, with the changes that the settings ask for; does not compile it."""
    facts = {**source.facts(), **task.facts(source), "input_spec": source.element_spec[0]}
    with _sharding(config):
        model: keras.Model = build(config, "model", keras.Model, facts, source.name)
    if sharded_tables(model):
        if config.model_options.lora_rank:
            raise ConfigError(
                "model.lora_rank adapts whole tables, and model.shard_embeddings spreads them over the ranks; "
                "leave one of the two out"
            )
        if config.train.ema:
            raise ConfigError(
                "train.ema averages whole tables in each step, and model.shard_embeddings spreads them over the ranks; "
                "leave one of the two out"
            )
        if source.skips:
            raise ConfigError(
                "model.shard_embeddings needs equal numbers of batches on all ranks, and data.on_error=skip may leave "
                "some out; choose one of the two"
            )
    check_model(model, f"model._target_={config.model['_target_']}", source, task)
    change_parts(model, config, size)
    return model


@contextmanager
def _sharding(config: RunConfig) -> Iterator[None]:
    """Shards the embedding layers built in this context that model.shard_embeddings selects by name or rows."""
    patterns = config.model_options.shard_embeddings
    if not patterns:
        yield
        return
    # This imports Horovod, which hvtrain.plan does not need.
    from hvtrain.keras.sharded_embedding import sharding_embeddings

    names: list[str] = []
    unused = set(patterns)

    def is_chosen(layer):
        names.append(f"{layer.name} ({layer.input_dim} rows)")
        matching = {
            pattern
            for pattern in patterns
            if fnmatchcase(layer.name, pattern)
            or (pattern.isdigit() and layer.input_dim >= int(pattern))
        }
        unused.difference_update(matching)
        return bool(matching)

    with sharding_embeddings(is_chosen, config.seed):
        yield
    if unused:
        known = ", ".join(names) or "none"
        raise ConfigError(
            f"model.shard_embeddings={min(unused)} matches no embedding layer; the model has {known}"
        )


def check_model(model: keras.Model, name: str, source: Source, task: Task) -> None:
    """Checks that the model turns the source's inputs into what the task needs.

    Builds the model by calling it. Raises ConfigError if that fails, or if the outputs do not fit.
    """
    inputs = source.element_spec[0]
    try:
        outputs = model(symbolic(inputs))
    except Exception as error:  # A user's own layers may raise anything.
        kind = "images" if "image_shape" in source.facts() else "arrays"
        shapes = ", ".join(str(tuple(spec.shape)) for spec in tf.nest.flatten(inputs))
        needed = "one input"
        if isinstance(inputs, dict):
            needed = f"inputs named {', '.join(inputs)}"

        raise ConfigError(
            f"{name} must take {needed}, {kind} of shape {shapes} as {source.name} gives them; it failed "
            f"with {cause_of(error)}; tracebacks=true shows its traceback"
        ) from error

    # A user's own train_step or compute_loss may use outputs of any form.
    if not overridden_steps(type(model)):
        task.check_outputs(outputs, name, source)


def build_schedule(config: RunConfig, plan: StepPlan) -> Schedule:
    """Builds the learning rate schedule over the plan's own steps."""
    return build(
        config,
        "schedule",
        Schedule,
        base=plan.base_learning_rate,
        peak=plan.peak_learning_rate,
        steps_per_epoch=plan.steps_per_epoch,
        num_steps=plan.scheduled_steps,
    )


class LearningRate:
    """A schedule, computed in the graph at the optimizer's step, times a factor that callbacks may change.

    Keras gets such a rate by calling it, and sets it with `assign`. So callbacks that set the rate, such
    as ReduceLROnPlateau, work: they set the rate of the current step, and all later rates change by the
    same factor. Keras's own LearningRateSchedule cannot be set.

    Args:
        schedule: A function of the step.
        shift: Optimizer steps before the schedule's first step; see StepPlan.
    """

    def __init__(self, schedule: Schedule, shift: int = 0) -> None:
        self.schedule = schedule
        self.shift = shift
        self.factor = keras.Variable(1.0, trainable=False, name="learning_rate_factor")
        self._optimizer: Any = None

    def follow(self, optimizer: Optimizer) -> None:
        """Reads the step from `optimizer` from now on.

        The optimizer's config then has a schedule of Keras that stays at the current rate, so that a model
        that a callback saves can be loaded without hvtrain.
        """
        self._optimizer = optimizer
        get_config = optimizer.get_config
        schedules = keras.optimizers.schedules

        def config_with_constant_rate():
            constant = schedules.ExponentialDecay(float(self()), decay_steps=1, decay_rate=1.0)
            return {**get_config(), "learning_rate": schedules.serialize(constant)}

        optimizer.get_config = config_with_constant_rate

    def get_config(self) -> dict[str, Any]:
        return {}  # Keras's optimizers ask for it; see follow.

    def __call__(self) -> Any:
        return self._scheduled() * self.factor

    def _scheduled(self) -> Any:
        # As for Keras's schedules, batches that only accumulate count too; `iterations` omits them.
        step = 0.0
        if self._optimizer is not None:
            step = keras.ops.cast(self._optimizer._iterations, "float32")
        return self.schedule(step - self.shift, ops=keras.ops)

    def assign(self, value: Any) -> None:
        """Sets the factor so that the current step's rate is `value`."""
        # If the scheduled rate is 0, no factor changes it, and the factor becomes 1.
        scheduled = self._scheduled()
        self.factor.assign(keras.ops.where(scheduled > 0, value / scheduled, 1.0))


def build_optimizer(config: RunConfig, plan: StepPlan) -> Optimizer:
    """Builds the optimizer as for one process, with the run's learning rate."""
    rate = LearningRate(build_schedule(config, plan), plan.shift)
    optimizer = optimizer_at(rate, config)
    # A LossScaleOptimizer wraps the optimizer that counts steps.
    rate.follow(getattr(optimizer, "inner_optimizer", optimizer))
    return optimizer


def optimizer_at(rate: Any, config: RunConfig) -> Optimizer:
    """Builds the optimizer as for one process, with a callable learning rate."""
    arguments: dict[str, Any] = {"learning_rate": rate}
    # Keras refuses gradient_accumulation_steps=1.
    if config.train.accumulate > 1:
        arguments["gradient_accumulation_steps"] = config.train.accumulate
    optimizer = build(config, "optimizer", Optimizer, **arguments)
    decay_kernels(optimizer, config.train.weight_decay)
    keep_averages(optimizer, config.train.ema)
    return optimizer
