"""A run as a value: everything decided before its model is built, with its batches and its summary."""

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvtrain.checkpoint.store import Arrays, Checkpoint
from hvtrain.config.schema import RunConfig
from hvtrain.core import VERSION
from hvtrain.core.step_plan import MOST_LEFT_OUT, StepPlan
from hvtrain.core.topology import Topology
from hvtrain.data.description import header, percent
from hvtrain.data.pipeline.streams import regroup
from hvtrain.data.source import Phrases, Source, StreamRequest
from hvtrain.models.parts import describe_tables, describe_trainable, num_parameters
from hvtrain.strategies.base import Strategy
from hvtrain.system.checkpoint_notes import NoteKeeper
from hvtrain.system.run_lock import RunLock
from hvtrain.system.storage.runs import RunStore
from hvtrain.system.text import counted
from hvtrain.tasks import Task
from hvtrain.training.augment import describe_augmentation
from hvtrain.training.notice import Notice


@dataclass
class RunState:
    """State that survives a restart of the ranks.

    Args:
        began: time.monotonic() at the beginning of the run.
        folder: The run folder, once it is open.
        is_new_folder: True if this run created its folder, which is removed again if no step was begun.
        settings: The content of config.yaml (chief only).
        lock: The folder's lock.
        signals: Signals that this rank has received.
        checkpoint: The last commit to memory, in an elastic job.
        run_id: The run's identifier, the same in all checkpoints of all its starts.
        note_keeper: Keeps a note on this host of where the newest checkpoint is.
        notice: Sends a notice of the run's end.
        store: Where the run folder is uploaded, if run.dir is an address.
    """

    began: float
    folder: Path | None = None
    is_new_folder: bool = False
    settings: str = ""
    lock: RunLock = field(default_factory=RunLock)
    signals: list[int] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    run_id: str | None = None
    note_keeper: NoteKeeper = field(default_factory=NoteKeeper)
    notice: Notice = field(default_factory=Notice)
    store: RunStore = field(default_factory=RunStore)


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to resume from.

    Every rank has its meta. Only the chief has the checkpoint with its arrays; in an elastic job, every rank
    has it. host is the host on whose disk the checkpoint is; empty if it was in memory.
    """

    name: str
    step: int
    meta: dict[str, Any]
    checkpoint: Checkpoint | None = None
    host: str = ""


@dataclass(frozen=True)
class Start:
    """The point from which a run starts: step 0, or a checkpoint.

    Args:
        name: The checkpoint's name; None: the run begins at step 0.
        step: Number of steps done before.
        ended: True if a user's callback has ended the training, so that nothing is left to do.
        num_ranks: Number of ranks that wrote the checkpoint.
        plan_ranks: Number of ranks that the checkpoint's plan was made for.
        rank_state: This rank's own state, see model_state.rank_state.
        callbacks: Numbers and best weights of the user's callbacks, by their names.
        unlogged: Results of a validation that are in no epoch's logs yet.
    """

    name: str | None = None
    step: int = 0
    ended: bool = False
    num_ranks: int = 0
    plan_ranks: int = 0
    rank_state: Arrays = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    unlogged: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One attempt at a run: its ranks are started and its data set is open.

    Args:
        config: All settings.
        strategy: The started strategy.
        topology: This rank's place among the ranks, with the weights by which the data are sharded.
        source: The data set.
        task: What the model learns.
        plan: Steps and batches, which continue those of a resumed run.
        folder: The run folder.
        meta: Facts that each checkpoint of the run records.
        state: State that survives a restart of the ranks.
        changed: Settings that differ from the checkpoint's, {name: [before, now]}.
        described: The description of the data set's contents, in phrases by label.
    """

    config: RunConfig
    strategy: Strategy
    topology: Topology
    source: Source
    task: Task
    plan: StepPlan
    folder: Path
    meta: dict[str, Any]
    state: RunState
    changed: dict[str, list[Any]]
    described: Phrases

    @property
    def best(self) -> str:
        """The metric whose best checkpoint is kept."""
        return self.config.checkpoint.best or f"val_{self.task.best}"

    def batches_from(self, step: int) -> tf.data.Dataset:
        """Returns this rank's endless stream of batches, beginning at a step of the run.

        Its elements are pairs (batch, weight) if batches of different ranks or steps differ in size.
        """
        one_batch = self.config.data.one_batch
        if one_batch:
            step = self.plan.shift  # The first step of the plan, wherever the run resumes.
        batches = self.stream_from(step, augmented=True)
        if not self.plan.is_even:
            batches = with_rank_weights(batches, self.plan, self.topology.rank, step)
        if one_batch:
            # Cached, so that the input pipeline does not slow down debugging.
            batches = batches.take(1).cache().repeat()
        return batches

    def stream_from(self, step: int, augmented: bool = False) -> tf.data.Dataset:
        """Returns this rank's batches from a step on, unweighted and by default not augmented."""
        return training_batches(
            self.source, self.plan, self.topology, self.config.seed, step, augmented
        )

    def evaluation_data(self, split: str) -> tf.data.Dataset | None:
        """Returns this rank's shard of a split, up to train.evaluation_steps batches; None if the split is empty."""
        steps = self.config.train.evaluation_steps
        batch_size = self.config.train.evaluation_batch_size
        dataset = evaluation_batches(self.source, split, self.topology, batch_size)
        if dataset is not None and steps:
            dataset = dataset.take(steps)
        return dataset


def evaluation_batches(
    source: Source,
    split: str,
    topology: Topology,
    batch_size: int,
) -> tf.data.Dataset | None:
    """Returns this rank's shard of a split in batches; None if the split is empty.

    The number of batches is known unless data.on_error=skip.
    """
    if not source.num_examples(split):
        return None
    num_batches = math.ceil(source.shard_size(split, topology) / batch_size)
    dataset = source.evaluation(split, topology, batch_size)
    if num_batches and source.skips:
        return dataset  # Its length is unknown: it may have fewer batches.
    return dataset.apply(tf.data.experimental.assert_cardinality(num_batches))


def training_batches(
    source: Source,
    plan: StepPlan,
    topology: Topology,
    seed: int,
    step: int,
    augmented: bool = True,
) -> tf.data.Dataset:
    """Returns this rank's endless stream of the plan's batches, beginning at a step of the run."""
    first_step = step - plan.shift

    def share_stream(rank):
        share = plan.shares[rank]
        request = StreamRequest(
            replace(topology, rank=rank, size=len(plan.shares), weights=plan.weights),
            share.batch_size,
            seed,
            first_step,
            share.steps,
            share.num_examples,
            plan.shares,
        )
        batches = source.training(request)
        if augmented and source.augmentation:
            batches = source.augmentation.augment_stream(batches, request)
        return batches

    if plan.is_resized:
        # The data keep the order that they have for the ranks with which the run began; each
        # current rank takes a part of those ranks' joint batches.
        return regroup(share_stream, plan, topology, first_step)
    return share_stream(topology.rank)


def with_rank_weights(
    batches: tf.data.Dataset,
    plan: StepPlan,
    rank: int,
    start_step: int,
) -> tf.data.Dataset:
    """Turns a stream of batches that begins at start_step into pairs (batch, float32 weight).

    The mean of the ranks' mean gradients is the mean gradient of the joint batch only if all batches have
    the same size. Otherwise a rank with n of the step's N examples needs the weight n x ranks / N. The
    step (prepared_step.py) applies it only to the gradient, so losses and metrics still count examples.
    """

    def add(step, batch):
        step_in_epoch = (step - plan.shift) % plan.steps_per_epoch
        return batch, tf.cast(plan.weight(rank, step_in_epoch), tf.float32)

    return batches.enumerate(start_step).map(add)


def summary(lines: dict[str, str]) -> str:
    """Formats the run's description as an aligned block that ends with a newline."""
    width = max(map(len, lines))
    # The second and later lines of a text are aligned with its first.
    next_line = "\n" + " " * (width + 2)
    rows = [(name, text.replace("\n", next_line)) for name, text in lines.items()]
    return "".join(f"{name:<{width}}  {text}\n" for name, text in rows)


def describe(run: Run, model: keras.Model, start: Start) -> dict[str, str]:
    """Returns the lines of the run's summary as {name: text}, without lines that have no text."""
    config = run.config
    strategy = run.strategy
    source = run.source
    plan = run.plan

    splits = ", ".join(f"{size:,} {split}" for split, size in source.split_sizes().items())
    if len(set(plan.batch_sizes)) == 1:
        # The plan counts all replicas of a process as one rank, with their joint batch.
        num_units = plan.size * strategy.num_replicas
        product = f"{num_units} x {plan.global_batch // num_units} = {plan.global_batch}"
        batch = f"{product} ({strategy.unit} x batch)"
    else:
        batch = f"{' + '.join(map(str, plan.batch_sizes))} = {plan.global_batch} (by rank)"
    if plan.accumulate > 1:
        joint_batch = plan.accumulate * plan.global_batch
        batch += f"; {plan.accumulate} of them per weight update, {joint_batch} in all"

    schedule = config.schedule["_target_"].split(".")[-1].lower()
    left_out = plan.num_examples - plan.examples_per_epoch
    left_out_text = ""
    if left_out > MOST_LEFT_OUT * plan.num_examples:
        share = percent(left_out / plan.num_examples)
        left_out_text = (
            f"{left_out:,} of {plan.num_examples:,} examples ({share}), different ones in each epoch "
            "(data.uneven=trim)"
        )

    # A line is left out if its text is "", None, False or empty settings.
    lines: dict[str, Any] = {
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
        "ranks": f"{plan.size} ({strategy.description()})",
        "differs": "; ".join(strategy.differences),
        "devices": device_map(strategy.devices),
        "model": f"{config.model['_target_']}, {num_parameters(model):,} parameters, {config.train.precision}",
        "tables": describe_tables(model),
        "trained": describe_trainable(model),
        "dataset": f"{source.name}: {splits}",
        "from": source.origin,
        **header(run.described),
        "trained on": config.data.one_batch and "the first batch in every step (data.one_batch)",
        "evaluated on": config.train.evaluation_steps
        and f"the first batches of each rank, at most {config.train.evaluation_steps} (train.evaluation_steps)",
        "augmentation": config.augment and describe_augmentation(config, source),
        "global batch": batch,
        "learning rate": (
            f"{plan.base_learning_rate:g} x {plan.learning_rate_factor:g} = {plan.peak_learning_rate:g} "
            f"(base x {config.train.learning_rate_scale} scale), {schedule}"
        ),
        "steps": f"{plan.num_steps:,} ({plan.steps_per_epoch:,} per epoch)",
        "left out": left_out_text,
        "run folder": str(run.folder),
    }

    if start.name:
        done = f"{start.step:,} of {plan.num_steps:,} steps were done"
        lines["resumed"] = f"{start.name}: {done}{describe_resize(start, plan)}"
        if start.step >= plan.num_steps:
            lines["resumed"] += "; nothing is left to train"
        elif start.ended:
            # The callback's stop is part of the run's result, so more steps need another run.
            lines["resumed"] += (
                "; a callback ended the training there, so nothing is left to train; to train on, "
                f"start another run with model.weights={run.folder}"
            )
        lines["changed"] = "; ".join(
            f"{name} {format_setting(before)} -> {format_setting(now)}"
            for name, (before, now) in run.changed.items()
        )

    return {name: text for name, text in lines.items() if text}


def format_setting(value: Any) -> Any:
    """Returns a setting's value as messages show it: null for None, as in YAML and on the command line."""
    return "null" if value is None else value


def describe_resize(start: Start, plan: StepPlan) -> str:
    """Describes what another number of ranks changes in a resumed run; empty if nothing changes."""
    ranks = f", on {counted(start.num_ranks, 'rank')}; on {plan.size} now"
    batch = f"global batch {plan.global_batch}"
    # True with train.resize=scale, which makes a new plan for the current
    # ranks (see planned_batch_sizes).
    if start.plan_ranks != len(plan.shares):
        epoch = plan.position(start.step)[0] + 1
        rate = f"learning rate {plan.peak_learning_rate:g}"
        return f"{ranks}: {batch} and {rate} from epoch {epoch} on (train.resize=scale)"
    if start.num_ranks == plan.size:
        return ""
    text = f"{ranks}: {batch} and learning rate as before"
    if plan.size > 1:
        text += f" ({' + '.join(map(str, plan.batch_sizes))})"
    if plan.ends_early:
        text += f" up to step {plan.num_steps:,}, then train.resize=scale"
    return text


def device_map(devices: Sequence[str]) -> str:
    """Lists the ranks with their devices, grouped by device.

    >>> device_map(["s1 CPU", "s1 CPU", "s2 CPU"])
    '0-1 s1 CPU, 2 s2 CPU'
    >>> device_map(["s1 CPU", "s2 CPU", "s1 CPU"])
    '0+2 s1 CPU, 1 s2 CPU'
    """
    ranks: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(device, []).append(rank)
    parts = []
    for device, numbers in ranks.items():
        is_span = len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1
        span = f"{numbers[0]}-{numbers[-1]}" if is_span else "+".join(map(str, numbers))
        parts.append(f"{span} {device}")
    return ", ".join(parts)


def versions() -> dict[str, str]:
    """Returns the versions of this process's software, for the summary, records and checkpoints."""
    return {
        "hvtrain": VERSION,
        "horovod": version("horovod"),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": platform.python_version(),
    }
