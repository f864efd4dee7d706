"""The runs of a comparison: short ones in turns for the speed, then a whole one of each strategy."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from hvtrain.compare.contestants import Contestant
from hvtrain.compare.one_run import Launcher, Training, train
from hvtrain.compare.rounds import in_turns, progress
from hvtrain.errors import LostRankError
from hvtrain.system.text import duration

# In place of the number of a round: a whole run.
WHOLE = 0
# Removed from short runs, of which there are many; whole runs keep them.
_LARGE = ("checkpoints", "model.keras", "best.keras")


@dataclass
class Contest:
    """Starts the runs one after the other, and keeps what was measured so far.

    Attributes:
        contestants: the strategies.
        launcher: how their runs are started.
        folder: of the output.
        num_rounds: of short runs.
        speed_steps: steps of a short run.
        speed_only: True leaves out the whole runs.
        rounds: short runs by contestant and number of the round.
        whole: whole runs by contestant.
        errors: of contestants that failed.
    """

    contestants: Sequence[Contestant]
    launcher: Launcher
    folder: Path
    num_rounds: int
    speed_steps: int
    speed_only: bool = False
    rounds: dict[str, dict[int, Training]] = field(default_factory=dict)
    whole: dict[str, Training] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def schedule(self) -> list[tuple[Contestant, int]]:
        """Returns all runs in their order, each with the number of its round, or WHOLE."""
        runs = [
            (contestant, number)
            for number, order in in_turns(self.contestants, self.num_rounds)
            for contestant in order
        ]
        if not self.speed_only:
            runs += [(contestant, WHOLE) for contestant in self.contestants]

        return runs

    def run(self) -> None:
        """Starts one run after the other. A contestant that fails takes no part in later runs."""
        schedule = self.schedule()
        for index, (contestant, number) in enumerate(schedule):
            if contestant.name in self.errors:  # What has failed once would fail again.
                continue
            about = "the whole run" if number == WHOLE else f"round {number} of {self.num_rounds}"
            title = f"run {index + 1} of {len(schedule)}: {contestant.name}, {about}"
            progress(f"{title}; {self.time_left(schedule[index:])} ...")
            try:
                outcome = _in_short(self._train(contestant, number))
            except LostRankError as error:
                log = self._folder(contestant, number) / "output.txt"
                self.errors[contestant.name] = f"{about}: {error}; its output is in {log}"
                outcome = "failed"

            progress("")
            # The results stand below each other, as in a table.
            print(f"{title:<58} {outcome}; {self.time_left(schedule[index + 1 :])}", flush=True)

    def time_left(self, schedule: Sequence[tuple[Contestant, int]]) -> str:
        """Estimates the time left from the runs so far. Whole runs are unknown until one has ended."""
        short_runs = [training for rounds in self.rounds.values() for training in rounds.values()]

        known_seconds = 0.0
        num_known = 0
        num_unknown = 0
        for contestant, number in schedule:
            if contestant.name in self.errors:
                continue
            similar = list(self.whole.values()) if number == WHOLE else short_runs
            # A short run says nothing about a whole one, which trains, validates and saves.
            if similar:
                known_seconds += mean(training.seconds for training in similar)
                num_known += 1
            else:
                num_unknown += 1

        parts = [f"about {duration(known_seconds)}"] if num_known else []
        if num_unknown:
            parts.append(f"{num_unknown} runs of unknown length")

        return f"left: {' and '.join(parts) or 'nothing'}"

    def _train(self, contestant: Contestant, number: int) -> Training:
        folder = self._folder(contestant, number)
        overrides: Sequence[str] = contestant.overrides
        if number != WHOLE:
            overrides = contestant.speed_overrides(self.speed_steps)
        command = self.launcher.command(contestant, overrides, folder / "run")
        training = train(command, self.launcher.cores(contestant), folder)
        if number == WHOLE:
            self.whole[contestant.name] = training
            return training

        self.rounds.setdefault(contestant.name, {})[number] = training
        for path in (folder / "run" / name for name in _LARGE):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

        return training

    def _folder(self, contestant: Contestant, number: int) -> Path:
        if number == WHOLE:
            return self.folder / contestant.name
        return self.folder / f"round-{number}" / contestant.name


def _in_short(training: Training) -> str:
    rate = training.result["examples_per_second"]
    # The warm-up is not timed, and in a short run there may be nothing after it.
    speed = f"{rate:,.0f} examples/s" if rate else "too few steps to time"
    return f"{speed}, {training.seconds:.0f} s"
