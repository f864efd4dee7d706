"""Runs the strategies of a comparison, each with the settings that make it train the same as the others.

Short runs take turns to measure speed; then each strategy gets one whole run.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from hvtrain.config.compose import composed, override
from hvtrain.config.make_plan import learning_rate_factor
from hvtrain.config.schema import RunConfig, round_up_to_accumulation
from hvtrain.errors import ConfigError, LostRankError
from hvtrain.launch.child import ONLY_STEPS, Training, in_turns, train
from hvtrain.system.command import take_values
from hvtrain.system.console import progress
from hvtrain.system.files import remove
from hvtrain.system.text import counted, duration

SINGLE = "single"
JOINT = "joint"
RANK = "rank"
# Data is sharded, then shuffled, so the order of one shard differs from that of several.
ORDER = "takes the examples in another order, since its data is one shard"

# Stands for a whole run, in place of a round's number.
WHOLE = 0
# Files that are removed after each short run, since there are many short runs; whole runs keep these files.
_LARGE_FILES = ("checkpoints", "model.keras", "best.keras")


@dataclass(frozen=True)
class Contestant:
    """One strategy of a comparison.

    Attributes:
        name: as the user wrote it, with its own settings: "horovod@compression=fp16".
        strategy: the choice of `strategy=`.
        overrides: all settings of its run.
        accumulate: train.accumulate; the number of steps of a run is a multiple of it.
        has_servers: True for strategies with parameter servers.
        differences: how this training differs from the others because of the comparison; differences
            due to the strategy itself are in the record of its run.
        steady: settings without which a timed run might have only a strategy's first steps, in which
            PowerSGD does not compress and local steps are synchronous.
    """

    name: str
    strategy: str
    overrides: Sequence[str]
    accumulate: int = 1
    has_servers: bool = False
    differences: Sequence[str] = ()
    steady: Sequence[str] = ()

    def speed_overrides(self, num_steps: int) -> list[str]:
        """Returns the settings of a timed run of num_steps, rounded up to a multiple of `accumulate`."""
        steps = f"train.steps={round_up_to_accumulation(num_steps, self.accumulate)}"
        return [*self.overrides, *self.steady, steps, *ONLY_STEPS]


def contestants(
    overrides: Sequence[str], num_ranks: int, single_batch: str = JOINT
) -> list[Contestant]:
    """Returns the strategies to compare, after composing and checking the run of each one.

    Args:
        overrides: `strategy=A,B,...` and settings of the run.
        num_ranks: ranks for all strategies but `single`.
        single_batch: JOINT if `single` takes the batch of all ranks, RANK if it takes that of one.

    Raises:
        ConfigError: fewer than two strategies, an unknown one, or a wrong setting.
    """
    values, common = take_values(overrides, "strategy", "run.dir", "run.name")
    strategies = values.pop("strategy", "")
    # Commas separate strategies, so each strategy's own settings begin with @.
    names = strategies.split(",")
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(
            f"strategy={strategies} does not name two or more different strategies; give them as in "
            "strategy=single,horovod,horovod@compression=fp16"
        )

    if values:
        folders = " ".join(f"{name}={value}" for name, value in values.items())
        raise ConfigError(
            f"{folders} was given, but each strategy has its own run folder; choose --output DIR instead"
        )

    # All runs are composed before the first one starts, so no mistake shows up hours later.
    return [_contestant(name, common, num_ranks, single_batch) for name in names]


def _contestant(name: str, common: list[str], num_ranks: int, single_batch: str) -> Contestant:
    strategy, *settings = name.split("@")
    overrides = [*common, f"strategy={strategy}"]

    # A setting without a group belongs to the strategy: horovod@compression=fp16.
    for setting in settings:
        if "." not in setting.partition("=")[0]:
            setting = f"strategy.{setting}"
        overrides.append(setting)

    config = composed(overrides)
    if not isinstance(config.train.batch_size, int):
        raise ConfigError(
            f"train.batch_size={config.train.batch_size} has a number for each rank; compare needs one number for all"
        )

    if config.train.max_time:
        raise ConfigError(
            f"train.max_time={config.train.max_time} may end runs before they have results; set train.max_time=null"
        )

    if config.data.uneven == "auto":
        # Some strategies cannot pad, and all have to train on the same batches.
        overrides.insert(len(common), "data.uneven=trim")

    differences = []
    if strategy == SINGLE:
        differences.append(ORDER)
        if single_batch == RANK:
            differences.append("takes the batch and the learning rate of one rank")
        else:
            overrides += joint_overrides(config, num_ranks)
            composed(overrides)  # Raises if the added settings do not fit.
            is_scaled = learning_rate_factor(config.train, num_ranks) != 1
            # With warmup_from, the warm-up does not begin at the learning rate of one rank.
            begins_at_one_rank = config.schedule.get("warmup_from") is None
            if is_scaled and begins_at_one_rank and config.schedule.get("warmup_epochs"):
                differences.append("has no warm-up: its learning rate begins at the peak")

    first_steps = config.strategy.keys() & {"whole_steps", "warmup_steps"}
    return Contestant(
        name,
        strategy,
        overrides,
        config.train.accumulate,
        has_servers="num_ps" in config.strategy,
        differences=differences,
        steady=[f"strategy.{setting}=0" for setting in first_steps],
    )


def joint_overrides(config: RunConfig, num_ranks: int) -> list[str]:
    """Returns the settings with which one process trains as num_ranks ranks would.

    The process takes the batch of all ranks, their peak learning rate, and as many steps as each of them.
    """
    train = config.train
    assert isinstance(train.batch_size, int)
    # Scaled for the number of ranks only: accumulation is the same for one process.
    peak = config.optimizer["learning_rate"] * learning_rate_factor(train, num_ranks)
    overrides = [
        f"train.batch_size={train.batch_size * num_ranks}",
        f"optimizer.learning_rate={peak!r}",
    ]
    # The user gave the steps of one process, which the ranks divide among themselves.
    if train.steps and train.divide_steps_by_size:
        overrides.append(f"train.steps={max(1, train.steps // num_ranks)}")

    return overrides


@dataclass
class Contest:
    """Starts the runs one after the other, and keeps their measurements.

    Attributes:
        contestants: the strategies.
        num_ranks: ranks for all strategies but `single`.
        folder: the output folder.
        num_rounds: rounds of short runs.
        speed_steps: steps of a short run.
        speed_only: True leaves out the whole runs.
        host_options: -H or --hostfile, for `hvtrain launch`.
        num_ps: parameter servers, for strategies that have some.
        single_cores: cores that `single` may use; None: all.
        rounds: short runs by contestant and round number.
        whole: whole runs by contestant.
        errors: error messages, by contestant that failed.
    """

    contestants: Sequence[Contestant]
    num_ranks: int
    folder: Path
    num_rounds: int
    speed_steps: int
    speed_only: bool = False
    host_options: Sequence[str] = ()
    num_ps: int | None = None
    single_cores: int | None = None
    rounds: dict[str, dict[int, Training]] = field(default_factory=dict)
    whole: dict[str, Training] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def schedule(self) -> list[tuple[Contestant, int]]:
        """Returns all runs in order, each with the number of its round, or WHOLE."""
        runs = [
            (contestant, round_number)
            for round_number, order in in_turns(self.contestants, self.num_rounds)
            for contestant in order
        ]
        if not self.speed_only:
            runs += [(contestant, WHOLE) for contestant in self.contestants]

        return runs

    def run(self) -> None:
        """Starts one run after the other. A contestant that fails takes no part in later runs."""
        schedule = self.schedule()
        for index, (contestant, round_number) in enumerate(schedule):
            if contestant.name in self.errors:  # A contestant that failed would fail again.
                continue
            part = f"round {round_number} of {self.num_rounds}"
            if round_number == WHOLE:
                part = "the whole run"
            title = f"run {index + 1} of {len(schedule)}: {contestant.name}, {part}"
            progress(f"{title}; {self.time_left(schedule[index:])} ...")
            try:
                outcome = _outcome_text(self._train(contestant, round_number))
            except LostRankError as error:
                folder = self._folder(contestant, round_number)
                self.errors[contestant.name] = (
                    f"{part}: {error}; its output is in {folder}/output.txt"
                )
                outcome = "failed"

            progress("")
            # Padded, so that the results line up as in a table.
            print(f"{title:<58} {outcome}; {self.time_left(schedule[index + 1 :])}", flush=True)

    def command(self, contestant: Contestant, overrides: Sequence[str], folder: Path) -> list[str]:
        """Returns the command of a run that leaves its results in this folder."""
        command = [sys.executable, "-m", "hvtrain"]
        # All strategies use the same launcher, even on one host; only a single process needs none.
        if contestant.strategy != SINGLE:
            command += ["launch", "-np", str(self.num_ranks), *self.host_options]
            # The launcher refuses servers for a strategy that has none.
            if self.num_ps and contestant.has_servers:
                command += ["--num-ps", str(self.num_ps)]
            command.append("--")

        # The user waits for the comparison as a whole, so its runs send no notices.
        return [*command, *overrides, override("run.dir", str(folder)), "notify=[]"]

    def cores(self, contestant: Contestant) -> set[int]:
        """Returns the cores that the run may use; a launcher divides them among its ranks."""
        cores = sorted(os.sched_getaffinity(0))
        if contestant.strategy == SINGLE:
            cores = cores[: self.single_cores]

        return set(cores)

    def time_left(self, schedule: Sequence[tuple[Contestant, int]]) -> str:
        """Estimates the time left from the runs so far; the length of whole runs is unknown until one has ended."""
        whole_runs = list(self.whole.values())
        short_runs = [training for rounds in self.rounds.values() for training in rounds.values()]

        known_seconds = 0.0
        num_unknown = 0
        for contestant, round_number in schedule:
            if contestant.name in self.errors:
                continue
            # A short run says nothing about a whole one, which also validates and saves.
            similar_runs = whole_runs if round_number == WHOLE else short_runs
            if similar_runs:
                known_seconds += mean(training.seconds for training in similar_runs)
            else:
                num_unknown += 1

        parts = []
        if known_seconds:
            parts.append(f"about {duration(known_seconds)}")
        if num_unknown:
            parts.append(f"{counted(num_unknown, 'run')} of unknown length")

        return f"left: {' and '.join(parts) or 'nothing'}"

    def _train(self, contestant: Contestant, round_number: int) -> Training:
        folder = self._folder(contestant, round_number)
        overrides = contestant.overrides
        if round_number != WHOLE:
            overrides = contestant.speed_overrides(self.speed_steps)
        command = self.command(contestant, overrides, folder / "run")
        # The launcher divides these cores among its ranks.
        training = train(command, self.cores(contestant), folder)
        if round_number == WHOLE:
            self.whole[contestant.name] = training
            return training

        self.rounds.setdefault(contestant.name, {})[round_number] = training
        for name in _LARGE_FILES:
            remove(folder / "run" / name)

        return training

    def _folder(self, contestant: Contestant, round_number: int) -> Path:
        if round_number == WHOLE:
            return self.folder / contestant.name
        return self.folder / f"round-{round_number}" / contestant.name


def _outcome_text(training: Training) -> str:
    rate = training.result["examples_per_second"]
    # The warm-up is not timed, and in a short run there may be nothing after it.
    speed = f"{rate:,.0f} examples/s" if rate else "too few steps to time"
    return f"{speed}, {training.seconds:.0f} s"
