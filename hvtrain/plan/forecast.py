"""A run on many ranks without starting it: step plan, learning rate, model and bytes. It neither trains nor reduces."""

from collections.abc import Sequence
from dataclasses import dataclass

from hvtrain.config.instantiate import build
from hvtrain.config.schema import RunConfig
from hvtrain.core.buckets import in_buckets
from hvtrain.core.planning import batch_sizes_by_rank, make_plan
from hvtrain.core.schedule import Schedule
from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import reduced
from hvtrain.data.source import Source
from hvtrain.data.sources.synthetic import Synthetic
from hvtrain.errors import ConfigError, DataError
from hvtrain.plan.costs.step import Gradient
from hvtrain.plan.footprint import Footprint, footprint, gradients
from hvtrain.strategies.base import Strategy
from hvtrain.training.setup import build_model, build_schedule, seed_everything


@dataclass(frozen=True)
class Forecast:
    """Everything that follows from the configuration and the number of ranks."""

    config: RunConfig
    plan: StepPlan
    schedule: Schedule
    source: Source
    footprint: Footprint
    gradients: Sequence[Gradient]
    model_name: str

    @property
    def bucket_bytes(self) -> int:
        """Size of the messages that are reduced while others are computed; 0: one message, at the end."""
        return int(self.config.strategy.get("bucket_mib", 0) * (1 << 20))

    @property
    def messages(self) -> Sequence[Gradient]:
        """The gradients, grouped into messages as the run does."""
        buckets = [[*range(len(self.gradients))]]
        if self.bucket_bytes:
            buckets = in_buckets([one.num_bytes for one in self.gradients], self.bucket_bytes)
        members = [[self.gradients[position] for position in bucket] for bucket in buckets]
        return [Gradient(sum(one.num_bytes for one in own), sum(one.work for one in own)) for own in members]

    @property
    def batch_size(self) -> int:
        """The largest batch of any rank."""
        return max(self.plan.batch_sizes)


def forecast(
    config: RunConfig, num_ranks: int, ranks_per_host: int, examples: int | None, classes: int | None
) -> Forecast:
    """Forecasts the run on num_ranks ranks.

    Args:
        examples: number of training examples of a data set that is not on this machine; nothing is opened then.
        classes: its number of classes, if the data set's settings do not say.

    Raises ConfigError or DataError as the run itself would.
    """
    seed_everything(config, rank=0)
    source = _source(config, examples, classes)
    hosts = [f"host{rank // ranks_per_host}" for rank in range(num_ranks)]
    batch_sizes = batch_sizes_by_rank(config.train.batch_size, hosts)
    shards = source.shard_sizes("train", num_ranks, reduced(batch_sizes))
    rate = config.optimizer["learning_rate"]
    plan = make_plan(config.train, rate, shards, source.name, batch_sizes, config.data.uneven)
    schedule = build_schedule(config, plan)
    model = build_model(config, source, plan, Strategy())
    largest = max(plan.batch_sizes)
    return Forecast(config, plan, schedule, source, footprint(model, largest), gradients(model), model.name)


def _source(config: RunConfig, examples: int | None, classes: int | None) -> Source:
    if examples is None:
        try:
            source: Source = build("dataset", config.dataset)
        except DataError as error:
            raise DataError(f"{error}; for a data set on other machines give --examples N") from error
        return source
    name = str(config.dataset["_target_"]).split(".")[-1]
    if "image_shape" not in config.dataset:
        raise ConfigError(
            f"--examples was given and {name} has no setting image_shape, which the model needs; leave --examples out, "
            f"or give dataset=synthetic dataset.image_shape=[28,28,1] dataset.num_train={examples}"
        )
    num_classes = classes or config.dataset.get("num_classes") or 1000
    stand_in = Synthetic(config.dataset["image_shape"], num_classes, num_train=examples)
    stand_in.name = name
    return stand_in


def key_steps(forecast: Forecast) -> list[tuple[str, int]]:
    """Steps at which to show the learning rate, each with a label.

    These are the start, the end of the warm-up, the milestones of a step schedule (else the middle), and the end.
    """
    schedule, last = forecast.schedule, forecast.plan.num_steps - 1
    steps = {0: "step "}
    warmup = getattr(schedule, "warmup_steps", 0)
    if 0 < warmup <= last:
        steps[warmup] = "the end of warm-up, step "
    milestones = [round(epoch * forecast.plan.steps_per_epoch) for epoch in getattr(schedule, "at_epochs", ())]
    steps |= {step: "step " for step in milestones if 0 < step <= last}
    if not milestones:
        steps.setdefault((min(warmup, last) + last) // 2, "step ")
    steps.setdefault(last, "the last step, ")
    return [(about, step) for step, about in sorted(steps.items())]
