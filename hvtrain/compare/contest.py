"""The runs of a comparison: short ones in turns for the speed, then a whole one of each strategy."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from hvtrain.compare.contestants import Contestant
from hvtrain.compare.one_run import Starting, Training, train
from hvtrain.compare.rounds import in_turns, progress
from hvtrain.errors import LostRankError
from hvtrain.system.text import duration

WHOLE = 0
# Removed from short runs; whole runs keep them.
_LARGE = ("checkpoints", "model.keras", "best.keras")


@dataclass
class Contest:
    """What was measured so far. rounds: by contestant and number of the round; errors: of contestants that failed."""

    contestants: Sequence[Contestant]
    starting: Starting
    folder: Path
    num_rounds: int
    speed_steps: int
    speed_only: bool = False
    rounds: dict[str, dict[int, Training]] = field(default_factory=dict)
    whole: dict[str, Training] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    _lasted: dict[bool, list[float]] = field(default_factory=dict)

    def schedule(self) -> list[tuple[Contestant, int]]:
        """All runs in their order, each with the number of its round; WHOLE for a whole run."""
        rounds = [(one, number) for number, order in in_turns(self.contestants, self.num_rounds) for one in order]
        return rounds if self.speed_only else [*rounds, *((one, WHOLE) for one in self.contestants)]

    def run(self) -> None:
        """Starts one run after the other. A contestant that fails takes no part in later runs."""
        schedule = self.schedule()
        for at, (one, number) in enumerate(schedule):
            if one.name in self.errors:
                continue
            about = f"round {number} of {self.num_rounds}" if number else "the whole run"
            title = f"run {at + 1} of {len(schedule)}: {one.name}, {about}"
            progress(f"{title}; {self.time_left(schedule[at:])} ...")
            found = self._once(one, number, about)
            progress("")
            print(f"{title:<58} {_in_short(found)}; {self.time_left(schedule[at + 1 :])}", flush=True)

    def _once(self, one: Contestant, number: int, about: str) -> Training | None:
        words = one.speed_words(self.speed_steps) if number else one.words
        folder = (self.folder / f"round-{number}" if number else self.folder) / one.name
        try:
            found = train(self.starting.command(one, words, folder / "run"), self.starting.cores(one), folder)
        except LostRankError as error:
            self.errors[one.name] = f"{about}: {error}; its output is in {folder / 'output.txt'}"
            return None
        self._lasted.setdefault(bool(number), []).append(found.seconds)
        if number:
            self.rounds.setdefault(one.name, {})[number] = found
            for path in (folder / "run" / name for name in _LARGE):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        else:
            self.whole[one.name] = found
        return found

    def time_left(self, schedule: Sequence[tuple[Contestant, int]]) -> str:
        """Estimates the time left from the runs so far. Whole runs count as unknown until one has ended."""
        kinds = [bool(number) for one, number in schedule if one.name not in self.errors]
        known = [mean(self._lasted[kind]) for kind in kinds if kind in self._lasted]
        parts = [f"about {duration(sum(known))}"] if known else []
        if unknown := len(kinds) - len(known):
            parts.append(f"{unknown} runs of unknown length")
        return f"left: {' and '.join(parts) or 'nothing'}"


def _in_short(found: Training | None) -> str:
    if found is None:
        return "failed"
    rate = found.result["examples_per_second"]
    return f"{f'{rate:,.0f} examples/s' if rate else 'too few steps to time'}, {found.seconds:.0f} s"
