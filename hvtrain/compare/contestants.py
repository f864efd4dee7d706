"""The strategies of a comparison, each with the settings that make it train the same as the others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvtrain.config.accumulation import whole
from hvtrain.config.compose import CONFIGS, compose, own_folders
from hvtrain.config.schema import RunConfig, from_dict
from hvtrain.config.validate import nearest
from hvtrain.errors import ConfigError

SINGLE = "single"
JOINT, RANK = "joint", "rank"
ORDER = "takes the examples in another order, since its data is one shard"
# Short runs, which are timed, neither validate nor save.
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
    """One strategy. name is what the user wrote; words are all settings of its run.

    differences: those that the comparison itself makes; the strategy's own are in the run's record.
    """

    name: str
    strategy: str
    words: tuple[str, ...]
    accumulate: int = 1
    has_servers: bool = False
    differences: tuple[str, ...] = ()

    @property
    def is_single(self) -> bool:
        """True for one process, which needs no launcher."""
        return self.strategy == SINGLE

    def speed_words(self, num_steps: int) -> list[str]:
        """Settings of a short run, which is timed."""
        return [*self.words, f"train.steps={whole(num_steps, self.accumulate)}", *_ONLY_STEPS]


def contestants(words: Sequence[str], num_ranks: int, single_batch: str = JOINT) -> list[Contestant]:
    """The contestants of these words, `strategy=A,B,...` and settings of the run; all are composed and checked.

    Empty if the words only ask Hydra to print the run. Raises ConfigError.
    """
    given = [word for word in words if word.partition("=")[0] == "strategy"]
    names = given[-1].partition("=")[2].split(",") if given else []
    if len(names) < 2:
        came = f"{given[-1]} came" if given else "no strategy=A,B came"
        raise ConfigError(f"{came} where at least two strategies were needed; for example: strategy=single,horovod")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{given[-1]} names {twice} twice; write each once, or give one settings: {twice}@NAME=VALUE")
    if folder := next((word for word in words if word.startswith("run.")), None):
        raise ConfigError(f"{folder} came, and each strategy has a run folder of its own; choose --output DIR instead")
    common = [word for word in words if word not in given]
    found = [_contestant(name, common, num_ranks, single_batch) for name in names]
    return [one for one in found if one]


def _contestant(name: str, common: list[str], num_ranks: int, single_batch: str) -> Contestant | None:
    strategy, *settings = name.split("@")
    known = sorted(
        path.stem for folder in (CONFIGS, *own_folders(common)) for path in (folder / "strategy").glob("*.yaml")
    )
    if strategy not in known:
        raise ConfigError(f"strategy={strategy} is not a strategy; {nearest(strategy, known)}")
    own = [f"strategy.{one}" if "." not in one.partition("=")[0] else one for one in settings]
    words = [*common, f"strategy={strategy}", *own]
    if not (trees := compose(words)):
        return None
    config = from_dict(trees[0])
    if not isinstance(config.train.batch_size, int):
        listed = config.train.batch_size
        raise ConfigError(f"train.batch_size={listed} has a number for each rank; compare needs one number for all")
    unequal: tuple[str, ...] = ()
    if strategy == SINGLE:
        joint, unequal = single_words(config, num_ranks, single_batch)
        words += joint
        compose(words)
    return Contestant(name, strategy, tuple(words), config.train.accumulate, "num_ps" in config.strategy, unequal)


def single_words(config: RunConfig, num_ranks: int, single_batch: str) -> tuple[list[str], tuple[str, ...]]:
    """Settings with which one process trains as num_ranks ranks would, and the differences that remain.

    JOINT: it takes the batch of all ranks and their peak learning rate. RANK: the batch and rate of one rank.
    """
    if single_batch == RANK:
        return [], (ORDER, "takes the batch and the learning rate of one rank")
    train: Any = config.train
    factor = {"linear": num_ranks, "sqrt": math.sqrt(num_ranks), "none": 1}[train.learning_rate_scale]
    words = [f"train.batch_size={train.batch_size * num_ranks}"]
    words.append(f"optimizer.learning_rate={config.optimizer['learning_rate'] * factor!r}")
    if train.steps and train.divide_steps_by_size:
        words.append(f"train.steps={max(1, train.steps // num_ranks)}")
    has_warmup = factor != 1 and config.schedule.get("warmup_epochs")
    return words, (ORDER, *(("has no warm-up: its learning rate begins at the peak",) if has_warmup else ()))
