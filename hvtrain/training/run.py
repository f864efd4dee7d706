"""A run as a value: everything that is decided before its model is built; and its summary before the first step."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvtrain.config.schema import RunConfig
from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology
from hvtrain.data.pipeline.streams import regrouped
from hvtrain.data.source import Source, StreamRequest
from hvtrain.models.parts import trained_in_words
from hvtrain.strategies.base import Strategy
from hvtrain.tasks import Task
from hvtrain.training.resume import RunState, Start
from hvtrain.version import VERSION


@dataclass(frozen=True)
class Run:
    """One attempt at a run, whose ranks are started and whose data set is opened.

    topology has the weights by which the data are sharded. meta is in each checkpoint of the run. state survives a
    restart of the ranks. changed has the settings that differ from the checkpoint's: {name: [before, now]}.
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

    @property
    def best(self) -> str:
        """The metric whose best checkpoint is kept."""
        return self.config.checkpoint.best or f"val_{self.task.best}"

    def batches_from(self, step: int) -> tf.data.Dataset:
        """This rank's endless stream of batches from a step of the run on, with weights if they differ in size."""
        is_one = self.config.data.one_batch
        step = self.plan.shift if is_one else step
        batches = training_batches(self.source, self.plan, self.topology, self.config.seed, step)
        if not self.plan.is_even:
            batches = with_rank_weights(batches, self.plan, self.topology.rank, step)
        return batches.take(1).cache().repeat() if is_one else batches

    def stream_from(self, step: int) -> tf.data.Dataset:
        """Batches from a step on as the source has them, without augmentation and weights."""
        return training_batches(self.source, self.plan, self.topology, self.config.seed, step, augmented=False)

    def evaluation_data(self, split: str) -> tf.data.Dataset | None:
        """This rank's shard of a split, or its first train.evaluation_steps batches; None if the split is empty."""
        steps = self.config.train.evaluation_steps
        data = evaluation_batches(self.source, split, self.topology, self.config.train.evaluation_batch_size)
        return data.take(steps) if data is not None and steps else data


def evaluation_batches(source: Source, split: str, topology: Topology, batch_size: int) -> tf.data.Dataset | None:
    """This rank's shard of a split, of known length; None if the split is empty."""
    if not source.num_examples(split):
        return None
    shard_sizes = source.shard_sizes(split, topology.size, topology.weights)
    num_batches = -(-shard_sizes[topology.rank] // batch_size)
    dataset = source.evaluation(split, topology, batch_size)
    if num_batches and source.on_error == "skip":
        return dataset  # Its length is unknown: it may have fewer batches.
    return dataset.apply(tf.data.experimental.assert_cardinality(num_batches))


def training_batches(
    source: Source, plan: StepPlan, topology: Topology, seed: int, step: int, augmented: bool = True
) -> tf.data.Dataset:
    """This rank's endless stream of the plan's batches, from a step of the run on."""

    def stream_of(rank: int) -> tf.data.Dataset:
        share = plan.shares[rank]
        place = replace(topology, rank=rank, size=len(plan.shares), weights=plan.weights)
        request = StreamRequest(place, share.batch_size, seed, step - plan.shift, share.steps, share.num_examples)
        batches = source.training(request)
        return source.augmentation.of_stream(batches, request) if augmented and source.augmentation else batches

    if plan.is_resized:
        return regrouped(stream_of, plan, topology, step - plan.shift)
    return stream_of(topology.rank)


def with_rank_weights(batches: tf.data.Dataset, plan: StepPlan, rank: int, start_step: int) -> tf.data.Dataset:
    """Turns batches, from start_step on, into (batch, weight float32).

    The mean over ranks of their mean gradients is the joint batch's only if batches are equal. Otherwise a rank with n
    of the step's N examples needs the weight n x ranks / N. The step (prepared_step.py) applies it to the gradient
    alone, so that losses and metrics still count examples.
    """
    steps = tf.data.Dataset.range(start_step, 2**62)

    def add(step: tf.Tensor, batch: Any) -> tuple[Any, tf.Tensor]:
        step_in_epoch = (step - plan.shift) % plan.steps_per_epoch
        return batch, tf.cast(plan.weight(rank, step_in_epoch, tf.minimum), tf.float32)

    return tf.data.Dataset.zip(steps, batches).map(add)


def summary(lines: dict[str, str]) -> str:
    """What described returns, in some ten lines, without the closing newline."""
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items()) + "\n"


def described(run: Run, model: keras.Model, start: Start) -> dict[str, str]:
    """What the run is: the summary's lines, by their names."""
    config, strategy, source, plan = run.config, run.strategy, run.source, run.plan
    splits = {split: source.num_examples(split) for split in ("train", "validation", "test")}
    rate = f"{plan.base_learning_rate:g} x {plan.learning_rate_factor:g} = {plan.peak_learning_rate:g}"
    sizes, accumulate, some = plan.batch_sizes, plan.accumulate, config.train.evaluation_steps
    batch, by = " + ".join(map(str, sizes)), "by rank"
    if len(set(sizes)) == 1:
        batch, by = f"{plan.size} x {sizes[0]}", "ranks x batch"
    joint = f"; {accumulate} of them for each change of weights, {accumulate * plan.global_batch} in all"
    lines = {
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
        "ranks": f"{plan.size} ({strategy.description()})",
        "differs": "; ".join(strategy.differences),
        "devices": device_map(strategy.devices),
        "model": f"{config.model['_target_']}, {model.count_params():,} parameters, {config.train.precision}",
        "trained": trained_in_words(model),
        "dataset": f"{source.name}: {', '.join(f'{count:,} {split}' for split, count in splits.items() if count)}",
        "from": source.origin,
        "trained on": "the first batch in every step (data.one_batch)" * config.data.one_batch,
        "evaluated on": f"at most {some} batches of a rank (train.evaluation_steps)" if some else "",
        "augmentation": ", ".join(config.augment) and f"{', '.join(config.augment)} (on the {config.data.augment_on})",
        "global batch": f"{batch} = {plan.global_batch} ({by}){joint * (accumulate > 1)}",
        "learning rate": f"{rate} (base x {config.train.learning_rate_scale} scale), "
        f"{config.schedule['_target_'].split('.')[-1].lower()}",
        "steps": f"{plan.num_steps:,} ({plan.steps_per_epoch:,} an epoch)",
        "run folder": str(run.folder),
    }
    if start.name:
        lines["resumed"] = f"{start.name}: {start.step:,} of {plan.num_steps:,} steps were done{resized(start, plan)}"
        if start.ended or start.step >= plan.num_steps:
            lines["resumed"] += "; nothing is left to train"
        shown = {name: ["null" if value is None else value for value in pair] for name, pair in run.changed.items()}
        lines["changed"] = "; ".join(f"{name} {before} -> {now}" for name, (before, now) in shown.items())
    return {name: text for name, text in lines.items() if text}


def resized(start: Start, plan: StepPlan) -> str:
    """Consequences of resuming on another number of ranks; empty for the same number."""
    ranks = f", on {start.num_ranks} rank{'s' * (start.num_ranks > 1)}; on {plan.size} now"
    batch = f"global batch {plan.global_batch}"
    if start.plan_ranks != len(plan.shares):
        rate, epoch = f"learning rate {plan.peak_learning_rate:g}", plan.position(start.step)[0] + 1
        return f"{ranks}: {batch} and {rate} from epoch {epoch} on (train.resize=scale)"
    if start.num_ranks == plan.size:
        return ""
    parts = f" ({' + '.join(map(str, plan.batch_sizes))})" if plan.size > 1 else ""
    end = f" up to step {plan.num_steps:,}, then train.resize=scale" if plan.ends_early else ""
    return f"{ranks}: {batch} and learning rate as before{parts}{end}"


def device_map(devices: Sequence[str]) -> str:
    """Ranks and their devices, the ranks of one device together: "0-3 s1 CPU"."""
    ranks: dict[str, list[str]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(device, []).append(str(rank))
    return ", ".join(f"{'-'.join(dict.fromkeys([own[0], own[-1]]))} {device}" for device, own in ranks.items())


def versions() -> dict[str, str]:
    """Versions of this process's software, for the header, records and checkpoints."""
    return {
        "hvtrain": VERSION,
        "horovod": version("horovod"),
        "tensorflow": tf.VERSION,
        "keras": keras.VERSION,
        "python": platform.python_version(),
    }
