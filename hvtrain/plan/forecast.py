"""Forecasts a run on many ranks without starting it: step plan, learning rate, model, memory and messages.

Nothing is trained or reduced.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import keras
import tensorflow as tf

from hvtrain.config.instantiate import build
from hvtrain.config.make_plan import batch_sizes_by_rank, choose_uneven, make_plan
from hvtrain.config.schema import RunConfig
from hvtrain.core.buckets import in_buckets
from hvtrain.core.schedule import Schedule
from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import reduced
from hvtrain.data.source import Source
from hvtrain.data.sources.built_in import Synthetic
from hvtrain.errors import ConfigError, DataError
from hvtrain.models.memory import (
    Footprint,
    example_shape,
    footprint,
    innermost_layers,
    num_bytes,
    sharded_layers,
)
from hvtrain.plan.step_cost import Gradient
from hvtrain.strategies.base import Strategy
from hvtrain.training.setup import build_model, build_schedule, open_task, seed_everything


@dataclass(frozen=True)
class Forecast:
    """Everything about a run that follows from its configuration and the number of ranks."""

    config: RunConfig
    plan: StepPlan
    schedule: Schedule
    source: Source
    footprint: Footprint
    gradients: Sequence[Gradient]
    row_bytes: int
    """Bytes of the rows that one rank looks up in sharded tables for a batch, if all ids differ."""
    model_name: str
    num_parameters: int

    @property
    def bucket_bytes(self) -> int:
        """Size of the messages that are reduced while later gradients are computed; 0: one message at the end."""
        return int(self.config.strategy.get("bucket_mib", 0) * (1 << 20))

    @property
    def buckets(self) -> list[list[int]]:
        """Positions in `gradients` for each message, as the run groups them, in the order of their completion."""
        if not self.bucket_bytes:
            return [[*range(len(self.gradients))]]
        buckets = in_buckets([gradient.num_bytes for gradient in self.gradients], self.bucket_bytes)
        # A message is complete with its last gradient. So a bucket that mixes small gradients of
        # all layers is ready only when the first layer's gradient is.
        return sorted(buckets, key=lambda bucket: bucket[-1])

    @property
    def messages(self) -> Sequence[Gradient]:
        """The messages, each as one Gradient, in the order of their completion."""
        done = list(accumulate(gradient.work for gradient in self.gradients))
        messages = []
        earlier = 0.0
        for bucket in self.buckets:
            ready = done[bucket[-1]]
            message_bytes = sum(self.gradients[position].num_bytes for position in bucket)
            messages.append(Gradient(message_bytes, ready - earlier))
            earlier = ready
        return messages


def forecast(
    config: RunConfig,
    num_ranks: int,
    ranks_per_host: int,
    examples: int | None,
    classes: int | None,
) -> Forecast:
    """Forecasts the run on num_ranks ranks.

    Args:
        config: The run's settings.
        num_ranks: Number of ranks.
        ranks_per_host: Ranks on each host, which share its entry in train.batch_size.
        examples: Training examples of a data set that is not on this machine, and so is not opened;
            None: open the run's data set.
        classes: The number of classes of such a data set; None: from its settings, or else 1000.

    Raises:
        ConfigError: The settings are invalid, or the strategy is virtual_ranks or parameter_server.
        DataError: The data set cannot be opened.
    """
    if "virtual_ranks" in config.strategy or "num_ps" in config.strategy:
        raise ConfigError(
            "hvtrain plan models an all-reduce by the ranks of -np, which strategy=virtual_ranks and parameter_server "
            "do not use; choose strategy=horovod with as many ranks, or measure with hvtrain compare"
        )
    # Seeded as in the run, since building a model draws random numbers.
    seed_everything(config, rank=0)
    source = _source(config, examples, classes)
    # Any names will do: it only matters which ranks share a host.
    hosts = [f"host{rank // ranks_per_host}" for rank in range(num_ranks)]
    batch_sizes = batch_sizes_by_rank(config.train.batch_size, hosts)
    shards = source.shard_sizes("train", num_ranks, reduced(batch_sizes))
    rate = config.optimizer["learning_rate"]
    if config.data.uneven == "auto":
        # TensorFlow's strategies do not pad.
        can_pad = "mirrored" not in config.strategy["_target_"]
        config.data.uneven = choose_uneven(config.train, shards, batch_sizes, can_pad)
    plan = make_plan(config.train, rate, shards, source.name, batch_sizes, config.data.uneven)

    schedule = build_schedule(config, plan)
    # The base strategy is a single process, and does not start Horovod.
    model = build_model(config, source, open_task(config, source), plan, Strategy())

    batch_size = max(plan.batch_sizes)
    return Forecast(
        config,
        plan,
        schedule,
        source,
        footprint=footprint(model, batch_size, num_ranks),
        gradients=gradients(model),
        row_bytes=_row_bytes(model) * batch_size,
        model_name=model.name,
        num_parameters=model.count_params(),
    )


def _source(config: RunConfig, examples: int | None, classes: int | None) -> Source:
    """Opens the run's data set, or makes a synthetic one of the same shape if it is not on this machine."""
    if examples is None:
        try:
            return build(config, "dataset", Source)
        except DataError as error:
            raise DataError(
                f"{error}; for a data set on other machines give --examples N"
            ) from error

    # The stand-in gets the name of the data set's class.
    name = str(config.dataset["_target_"]).split(".")[-1]
    if "image_shape" not in config.dataset:
        raise ConfigError(
            f"--examples was given and {name} has no setting image_shape, which the model needs; "
            "leave --examples out, "
            f"or give dataset=synthetic dataset.image_shape=[28,28,1] dataset.num_train={examples}"
        )

    num_classes = classes or config.dataset.get("num_classes") or 1000
    # A model needs only shapes and the number of classes.
    stand_in = Synthetic(config.dataset["image_shape"], num_classes, num_train=examples)
    stand_in.name = name
    return stand_in


def key_steps(forecast: Forecast) -> list[tuple[str, int]]:
    """Returns labels and steps at which to show the learning rate.

    These are the start, the end of warm-up, the schedule's milestones (or else the middle of the rest),
    and the end.
    """
    schedule = forecast.schedule
    last = forecast.plan.num_steps - 1
    steps = {0: "step "}
    warmup = schedule.warmup_steps
    if 0 < warmup <= last:
        steps[warmup] = "the end of warm-up, step "

    milestones = [
        round(epoch * forecast.plan.steps_per_epoch) for epoch in getattr(schedule, "at_epochs", ())
    ]
    steps |= {step: "step " for step in milestones if 0 < step <= last}
    if not milestones:
        steps.setdefault((min(warmup, last) + last) // 2, "step ")

    # A step that has a label keeps it.
    steps.setdefault(last, "the last step, ")
    return [(label, step) for step, label in sorted(steps.items())]


def _row_bytes(model: keras.Model) -> int:
    """Returns the bytes that one example looks up in sharded tables; inputs of unknown shape are not counted."""
    row_bytes = 0
    for layer in sharded_layers(model):
        inputs = [node.input_tensors[0].shape[1:] for node in layer._inbound_nodes]
        num_ids = sum(math.prod(shape) for shape in inputs if None not in shape)
        row_bytes += num_ids * layer.output_dim * tf.as_dtype(layer.variable_dtype).size
    return row_bytes


def gradients(model: keras.Model) -> list[Gradient]:
    """Returns the gradients that are reduced, the last layer's first, with their layers' multiplications as work.

    Multiplications are counted for one example: each weight is used once at each position of the
    layer's output, in convolution, dense and depthwise layers alike. Layers without weights count as
    no work.
    """
    in_order = []
    sharded = sharded_layers(model)
    for layer in reversed(innermost_layers(model)):
        # The rows of sharded tables are exchanged, not reduced.
        if layer in sharded:
            continue
        variables = layer.trainable_variables
        shape = example_shape(layer)
        num_positions = math.prod(shape[:-1]) if shape else 1

        # A layer's gradients become ready together, so all of its work is put before the first.
        work = float(num_positions * sum(math.prod(variable.shape) for variable in variables))
        for variable in reversed(variables):
            in_order.append(Gradient(num_bytes([variable]), work, tuple(variable.shape)))
            work = 0.0
    return in_order
