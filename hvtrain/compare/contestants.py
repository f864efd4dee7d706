"""The strategies of a comparison, each with the settings that make it train the same as the others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvtrain.config.compose import CONFIGS, compose, own_folders
from hvtrain.config.schema import RunConfig, from_dict, round_up_to_accumulation
from hvtrain.config.validate import nearest
from hvtrain.errors import ConfigError

SINGLE = "single"
JOINT = "joint"
RANK = "rank"
# Law 1: data is sharded, then shuffled, so the shards of all ranks are another order than one shard.
ORDER = "takes the examples in another order, since its data is one shard"
# A short run only takes steps, and all of them: validation and checkpoints would be timed too.
_ONLY_STEPS = (
    "train.divide_steps_by_size=false",
    "train.validate_every_epochs=null",
    "train.validate_every_steps=null",
    "checkpoint.every_epochs=null",
    "checkpoint.every_steps=null",
    "checkpoint.every_minutes=null",
)


@dataclass(frozen=True)
class Contestant:
    """One strategy of a comparison.

    Attributes:
        name: as the user wrote it, with its own settings: "horovod@compression=fp16".
        strategy: the choice of `strategy=`.
        overrides: all settings of its run.
        accumulate: train.accumulate, of which a run's steps are a multiple.
        has_servers: True for strategies with parameter servers.
        differences: the inequalities that the comparison itself makes; those of the strategy are in
            the record of its run.
    """

    name: str
    strategy: str
    overrides: tuple[str, ...]
    accumulate: int = 1
    has_servers: bool = False
    differences: tuple[str, ...] = ()

    @property
    def is_single(self) -> bool:
        """True for one process, which needs no launcher."""
        return self.strategy == SINGLE

    def speed_overrides(self, num_steps: int) -> list[str]:
        """Settings of a short run, which is timed."""
        steps = round_up_to_accumulation(num_steps, self.accumulate)
        return [*self.overrides, f"train.steps={steps}", *_ONLY_STEPS]


def contestants(overrides: Sequence[str], num_ranks: int, single_batch: str = JOINT) -> list[Contestant]:
    """Composes and checks the run of each strategy.

    Args:
        overrides: `strategy=A,B,...` and settings of the run.
        num_ranks: of all strategies but `single`.
        single_batch: JOINT if `single` takes the batch of all ranks, RANK for that of one.

    Returns:
        The contestants; none if the overrides only ask Hydra to print the run.

    Raises:
        ConfigError: fewer than two strategies, an unknown one, or a wrong setting.
    """
    choice = ""
    common = []
    for override in overrides:
        if override.startswith("strategy="):
            choice = override
        else:
            common.append(override)

    names = choice.partition("=")[2].split(",")
    if len(names) < 2:
        raise ConfigError(
            f"{choice or 'no strategy=A,B'} came where at least two strategies were needed; "
            "for example: strategy=single,horovod"
        )

    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated:
        raise ConfigError(
            f"{choice} names {repeated} twice; write each once, or give one settings: {repeated}@NAME=VALUE"
        )

    folder = next((override for override in overrides if override.startswith("run.")), None)
    if folder:
        raise ConfigError(f"{folder} came, and each strategy has a run folder of its own; choose --output DIR instead")

    # All runs are composed before the first one starts, so no mistake shows up hours later.
    composed = [_contestant(name, common, num_ranks, single_batch) for name in names]

    return [contestant for contestant in composed if contestant]


def _contestant(name: str, common: list[str], num_ranks: int, single_batch: str) -> Contestant | None:
    strategy, *settings = name.split("@")
    # The user's own strategies, from --config-dir, take part too.
    folders = (CONFIGS, *own_folders(common))
    known = sorted(path.stem for folder in folders for path in (folder / "strategy").glob("*.yaml"))
    if strategy not in known:
        raise ConfigError(f"strategy={strategy} is not a strategy; {nearest(strategy, known)}")

    overrides = [*common, f"strategy={strategy}"]

    # In horovod@compression=fp16 a setting without a group is the strategy's.
    for setting in settings:
        if "." not in setting.partition("=")[0]:
            setting = f"strategy.{setting}"
        overrides.append(setting)

    trees = compose(overrides)
    if not trees:
        return None

    config = from_dict(trees[0])
    if not isinstance(config.train.batch_size, int):
        raise ConfigError(
            f"train.batch_size={config.train.batch_size} has a number for each rank; compare needs one number for all"
        )

    differences: tuple[str, ...] = ()
    if strategy == SINGLE and single_batch == RANK:
        differences = (ORDER, "takes the batch and the learning rate of one rank")
    elif strategy == SINGLE:
        overrides += joint_overrides(config, num_ranks)
        compose(overrides)  # Raises if the added settings do not fit.
        differences = (ORDER,)
        if learning_rate_factor(config, num_ranks) != 1 and config.schedule.get("warmup_epochs"):
            differences += ("has no warm-up: its learning rate begins at the peak",)

    return Contestant(
        name,
        strategy,
        tuple(overrides),
        config.train.accumulate,
        has_servers="num_ps" in config.strategy,
        differences=differences,
    )


def joint_overrides(config: RunConfig, num_ranks: int) -> list[str]:
    """Returns the settings with which one process trains as num_ranks ranks would.

    It takes the batch of all ranks, their peak learning rate, and as many steps as each of them.
    """
    train = config.train
    assert isinstance(train.batch_size, int)
    peak = config.optimizer["learning_rate"] * learning_rate_factor(config, num_ranks)
    overrides = [
        f"train.batch_size={train.batch_size * num_ranks}",
        f"optimizer.learning_rate={peak!r}",
    ]
    # The user gave the steps that one process would take, which the ranks divide among them.
    if train.steps and train.divide_steps_by_size:
        overrides.append(f"train.steps={max(1, train.steps // num_ranks)}")

    return overrides


def learning_rate_factor(config: RunConfig, num_ranks: int) -> float:
    """Returns by how much num_ranks ranks multiply the learning rate of one."""
    # As core/step_plan.py has it, for the number of ranks alone: accumulation is the same for one process.
    factors = {"linear": num_ranks, "sqrt": math.sqrt(num_ranks), "none": 1}
    return factors[config.train.learning_rate_scale]
