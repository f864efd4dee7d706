"""The typed schema of a run, with the rules for individual settings. Pure.

`from_dict` turns Hydra's composed tree into a RunConfig. The groups (model, dataset, task, ...)
stay open dictionaries with a `_target_`, so that YAML can name anything in a user's own package.
"""

import sys
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from functools import cached_property
from typing import Any

from hvtrain.config.validate import is_number, parse_duration, setting, typed
from hvtrain.errors import ConfigError
from hvtrain.system.secrets import redacted
from hvtrain.system.text import flatten

# Settings by name, which may be nested. Those of a group are the `_target_` to build and its arguments.
Settings = dict[str, Any]
GROUPS = ("model", "dataset", "task", "optimizer", "schedule", "strategy")
# Groups that take any number of choices, each keyed by its name.
SEVERAL = ("augment", "callbacks", "tracker")
# Groups whose choices set other settings, in this order.
BUNDLES = ("experiment", "debug")


@dataclass
class TrainConfig:
    """Length of the training, batches, learning rate, precision and loss."""

    epochs: int = setting(12, "passes over the training data", low=1)
    steps: int | None = setting(None, "total steps, instead of epochs", low=1)
    divide_steps_by_size: bool = setting(False, "divide train.steps by the number of ranks")
    batch_size: int | list[int] = setting(  # noqa: RUF009
        32,
        "training examples per step and rank; a list: one for each rank or host, if their speeds differ",
        low=1,
    )
    balance: bool = setting(
        False, "after an epoch, give faster ranks more of the global batch, by their measured speed"
    )
    accumulate: int = setting(1, "steps whose gradients are averaged before one update", low=1)
    evaluation_batch_size: int = setting(256, "examples per step and rank of an evaluation", low=1)
    evaluation_steps: int | None = setting(None, "maximum steps of an evaluation; null: all", low=1)
    learning_rate_scale: str = setting(
        "linear",
        "peak = base x n, base x sqrt(n), or base; n = ranks x accumulate",
        choices=("linear", "sqrt", "none"),
    )
    validate_every_epochs: int | None = setting(1, "validate every N epochs; null: off", low=1)
    validate_every_steps: int | None = setting(None, "validate every N steps too", low=1)
    resize: str = setting(
        "keep",
        "resumed on another number of ranks: keep global batch and rate, or scale both",
        choices=("keep", "scale"),
    )
    max_time: str | None = setting(None, "save and stop after this time: 11h50m, 90s")
    precision: str = setting(
        "float32", "Keras's dtype policy", choices=("float32", "mixed_bfloat16", "mixed_float16")
    )
    deterministic: bool = setting(
        False, "deterministic operations: every run gives the same bits (slower)"
    )
    steps_per_execution: int | None = setting(
        None,
        "steps in one call of the graph; null: as many as take 0.2 s, or one if a callback acts on batches",
        low=1,
    )
    jit_compile: bool = setting(False, "compile the forward and backward pass with XLA")
    class_weights: str | Settings | None = setting(  # noqa: RUF009
        None,
        "class weights in the training loss: balanced, or a mapping {0: 1.0, 1: 5.0}, by number or name",
    )
    ema: float | None = setting(
        None, "validate and save a moving average of the weights, with this decay"
    )
    weight_decay: float = setting(
        0.0, "L2 penalty: add this times each kernel to its gradient", low=0
    )
    rates: Settings | None = setting(  # noqa: RUF009
        None, "factors for the learning rate, by name of layer or variable"
    )
    remat: bool = setting(False, "recompute activations in the backward pass, to save memory")
    sync_batch_norm: bool = setting(False, "batch normalization over the batches of all ranks")


@dataclass
class DataConfig:
    """Settings that apply to any data set; its own are in the group `dataset`."""

    uneven: str = setting(
        "auto",
        "examples that fill no batch on all ranks: left out, in short batches, or an error",
        choices=("auto", "trim", "pad", "error"),
    )
    on_error: str = setting("stop", "if an example cannot be read", choices=("stop", "skip"))
    bucket_by_length: int | list[int] = setting(  # noqa: RUF009
        0,
        "batch texts of similar length, in this many buckets; a list: the longest length of each; 0: off",
        low=0,
    )
    one_batch: bool = setting(False, "train on one batch only, without augment and callbacks")
    augment_on: str = setting("cpu", "the device of augment's layers", choices=("cpu", "device"))


@dataclass
class CommConfig:
    """Communication between ranks."""

    tune: bool = setting(False, "try settings of the reduction first, and keep the fastest")


@dataclass
class ProfileConfig:
    """Tracing of steps, and measurement of the gradient noise scale."""

    timeline: bool = setting(False, "trace some steps and log the time of their operations")
    first_step: int = setting(50, "steps after this start before tracing begins", low=0)
    steps: int = setting(20, "number of traced steps", low=1)
    noise_scale_every: int = setting(0, "gradient noise scale every N steps; 0: never", low=0)


@dataclass
class RunFolderConfig:
    """The folder for the run's results."""

    dir: str | None = setting(None, "run folder; default: runs/DATE_TIME-NAME on all ranks")
    name: str | None = setting(None, "end of the default folder's name; null: MODEL-DATASET")
    report: bool = setting(True, "write report.html and curves.png at the end")


@dataclass
class CheckpointConfig:
    """Intervals at which rank 0 writes checkpoints, and rules for which ones it keeps."""

    every_epochs: int | None = setting(1, "after every N epochs; null: off", low=1)
    every_steps: int | None = setting(None, "after every N steps too", low=1)
    every_minutes: float | None = setting(None, "after every N minutes of training too", low=0.001)
    keep: int = setting(2, "newest checkpoints to keep, besides the best one", low=1)
    keep_every_epochs: int | None = setting(None, "keep the last of every N epochs for good", low=1)
    keep_every_hours: float | None = setting(
        None, "keep the last of every N hours for good (UTC)", low=0.001
    )
    copies: int = setting(0, "copies of a checkpoint on another host: 0 or 1", low=0)
    best: str | None = setting(
        None, "metric of the best checkpoint; null: the task's, in validation"
    )
    on_error: str = setting("stop", "if a checkpoint cannot be written", choices=("stop", "warn"))


@dataclass
class GuardConfig:
    """Checks during training. An interval of 0 or `false` turns a check off."""

    every: int = setting(500, "compare ranks' weights and slots every N steps; 0: never", low=0)
    finite: bool = setting(True, "stop all ranks before a non-finite gradient changes weights")
    layers: bool = setting(False, "name the first layer with a non-finite value or gradient (slow)")
    recompute_every: int = setting(
        0,
        "every N steps, recompute one rank's gradient on all ranks, to check the devices; 0: never",
        low=0,
    )
    batches: bool = setting(True, "stop if two ranks read the same first batch")
    data: bool = setting(True, "refuse data that have changed since the checkpoint")


@dataclass
class MetricsConfig:
    """Export of a run's current metrics in Prometheus's text format."""

    port: int | None = setting(None, "serve them on this port of rank 0; 0: any; null: off", low=0)
    address: str = setting("127.0.0.1", "address of that port")
    file: str | None = setting(None, "write them to NAME.prom on rank 0's host; null: off")


@dataclass
class WatchdogConfig:
    """Time limit for ranks that make no progress."""

    abort_seconds: float = setting(600.0, "end a run stuck for this long; 0: never", low=0)


@dataclass
class ModelOptions:
    """Settings that every model has, in the group `model` beside those of its builder.

    They are not passed to builders.
    """

    weights: str | None = setting(
        None, "start from the weights of a .keras or .weights.h5 file, a run or a keras-hub preset"
    )
    weights_except: str | list[str] | None = setting(  # noqa: RUF009
        None, "layers or variables not to load, by name or path: [aspp*,decoder*]"
    )
    freeze: str | list[str] | None = setting(  # noqa: RUF009
        None, "layers or variables that do not train, by name or path: [conv*,*/bias]"
    )
    shard_embeddings: str | list[str] | None = setting(  # noqa: RUF009
        None,
        "embedding layers whose rows are spread over the ranks: names, or a minimum number of rows: [user*,1000000]",
    )
    lora_rank: int | None = setting(
        None,
        "train only the head and two matrices of this rank for each dense or embedding kernel",
        low=1,
    )


MODEL_OPTIONS = tuple(item.name for item in fields(ModelOptions))


@dataclass
class RunConfig:
    """All settings of a run."""

    model: Settings
    dataset: Settings
    optimizer: Settings  # Its learning_rate is that of one rank, before scaling.
    schedule: Settings
    strategy: Settings
    task: Settings
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: Settings = field(default_factory=dict)  # Layers by name, in the order of use.
    run: RunFolderConfig = field(default_factory=RunFolderConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    callbacks: Settings = field(default_factory=dict)
    tracker: Settings = field(default_factory=dict)
    notify: str | list[str] | None = setting(  # noqa: RUF009
        None,
        "apprise addresses that get a notice at the end, on failure or preemption; null: those in HVTRAIN_NOTIFY",
    )
    comm: CommConfig = field(default_factory=CommConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    resume: str = setting(
        "auto",
        "resume from the newest valid checkpoint; available: even if an absent host has a newer one",
        choices=("auto", "available", "never"),
    )
    seed: int = setting(1, "seed of weights, shuffling and augmentation", low=0)
    verbose: bool = setting(False, "show messages of TensorFlow, CUDA and oneDNN")
    tracebacks: bool = setting(False, "show tracebacks for input errors too")

    @cached_property
    def record(self) -> Settings:
        """All settings as plain nested dictionaries with secrets redacted, for records and checkpoints."""
        return redacted(asdict(self))

    @cached_property
    def model_options(self) -> ModelOptions:
        """The ModelOptions given in the group `model`.

        Raises ConfigError if one of them is invalid.
        """
        values = {name: self.model[name] for name in MODEL_OPTIONS if name in self.model}
        options: ModelOptions = typed(ModelOptions, values, "model.")
        for name in ("freeze", "weights_except", "shard_embeddings"):
            patterns = getattr(options, name)
            if isinstance(patterns, str):
                setattr(options, name, [patterns])
        if options.weights_except and not options.weights:
            raise ConfigError(
                "model.weights_except needs model.weights, which is not set; set it to the source of the other weights"
            )
        return options

    @cached_property
    def flat(self) -> Settings:
        """The record as one flat dictionary, keyed by dotted names."""
        return flatten(self.record)


def from_dict(tree: Settings) -> RunConfig:
    """Turns Hydra's composed tree into a RunConfig.

    Raises:
        ConfigError: A setting is unknown, of the wrong type, out of range or in conflict with
            another. The message names it, its value and what is allowed.
    """
    config: RunConfig = typed(RunConfig, tree)
    for group in GROUPS:
        _check_group(group, getattr(config, group))
    for group in SEVERAL:
        for name, choice in getattr(config, group).items():
            _check_group(f"{group}.{name}", choice if isinstance(choice, dict) else {})
    _ = config.model_options  # Validates them.
    for pattern, factor in (config.train.rates or {}).items():
        if not is_number(factor) or not 0 < factor < float("inf"):
            raise ConfigError(
                f"train.rates.{pattern}={factor} is not a finite number above 0; to freeze these variables, use "
                f"model.freeze=[{pattern}]"
            )
    _check_optimizer(config.optimizer)

    ema = config.train.ema
    if ema is not None and not 0 < ema < 1:
        raise ConfigError(
            f"train.ema={ema} is out of range; it must be between 0 and 1, such as 0.999"
        )
    copies = config.checkpoint.copies
    if copies > 1:
        raise ConfigError(f"checkpoint.copies={copies} is out of range; it must be 0 or 1")
    if config.train.max_time is not None:
        parse_duration("train.max_time", config.train.max_time)
    if config.train.accumulate > 1:
        _align_with_accumulation(config)
    if config.data.one_batch:
        # Training on one batch tests whether the model can overfit it. Mixed targets (mix_up) would
        # keep the loss above 0, and a callback might monitor a metric that is not computed.
        config.augment = {}
        config.callbacks = {}
    return config


def default_run_dir(config: RunConfig, parent: str = "runs") -> str:
    """Returns the run folder used when run.dir is not set: <parent>/DATE_TIME-NAME, with the current time."""
    return f"{parent}/{datetime.now():%Y-%m-%d_%H-%M-%S}-{config.run.name or 'run'}"


def round_up_to_accumulation(steps: int, accumulate: int) -> int:
    """Rounds a number of steps up to a multiple of `accumulate`.

    >>> round_up_to_accumulation(500, 1), round_up_to_accumulation(500, 3), round_up_to_accumulation(0, 3)
    (500, 501, 0)
    """
    return -(-steps // accumulate) * accumulate


def _check_group(name: str, group: Settings) -> None:
    target = group.get("_target_")
    if not isinstance(target, str) or "." not in target:
        raise ConfigError(
            f"{name}._target_={target!r} names no class or function; "
            "it must be a dotted path such as package.module.name"
        )
    for key, value in flatten(group, f"{name}.").items():
        if value == "???":  # OmegaConf's marker for a mandatory value.
            raise ConfigError(f"{key} is not set and has no default; give {key}=VALUE")


def _check_optimizer(optimizer: Settings) -> None:
    steps = optimizer.get("gradient_accumulation_steps")
    if steps:
        # The guard would compare gradients that each rank is still accumulating on its own;
        # train.accumulate aligns the guard's interval.
        raise ConfigError(
            f"optimizer.gradient_accumulation_steps={steps} is set by the run; give train.accumulate={steps} instead"
        )

    rate = optimizer.get("learning_rate")
    if not is_number(rate) or not 0 < rate <= sys.float_info.max:
        raise ConfigError(
            f"optimizer.learning_rate={rate} is not a finite number above 0; give the rate for one rank"
        )
    optimizer["learning_rate"] = float(rate)  # Keras 3 rejects an integer.


def _align_with_accumulation(config: RunConfig) -> None:
    """Aligns intervals in steps with train.accumulate.

    Ranks differ within an accumulation, so they may stop, compare weights and save only at its end.
    """
    train = config.train
    accumulate = train.accumulate
    # With padding, an epoch has as many steps as the largest shard needs, which may
    # not be a multiple of `accumulate`.
    if config.data.uneven == "pad":
        raise ConfigError(
            f"train.accumulate={accumulate} and data.uneven=pad exclude each other; choose data.uneven=trim"
        )

    # Intervals that the user has given are refused rather than changed. train.steps is checked only
    # if it is not divided by the number of ranks: make_plan() rounds the quotient.
    intervals = {
        "train.steps": None if train.divide_steps_by_size else train.steps,
        "train.validate_every_steps": train.validate_every_steps,
        "checkpoint.every_steps": config.checkpoint.every_steps,
    }
    for name, steps in intervals.items():
        if steps and steps % accumulate:
            choices = [steps - steps % accumulate, round_up_to_accumulation(steps, accumulate)]
            raise ConfigError(
                f"{name}={steps} is not a multiple of train.accumulate={accumulate}; "
                f"choose {' or '.join(map(str, filter(None, choices)))}"
            )

    config.guard.every = round_up_to_accumulation(config.guard.every, accumulate)
    commit_steps = config.strategy.get("commit_steps")
    if isinstance(commit_steps, int):
        config.strategy["commit_steps"] = round_up_to_accumulation(commit_steps, accumulate)
