"""The trials of a sweep, one run of N ranks after the other, with their progress and results."""

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from hvtrain.compare.rounds import progress
from hvtrain.config.words import word
from hvtrain.errors import INTERRUPTED
from hvtrain.search.goal import Goal
from hvtrain.search.one_trial import value_of
from hvtrain.search.slices import write_png
from hvtrain.search.study import Study
from hvtrain.search.sweep_results import best_of, in_short, in_words, line_of, record, write
from hvtrain.system.text import duration


@dataclass
class Trials:
    """The trials of a study, one after the other. found: the record of the whole, for sweep.json."""

    study: Study
    goal: Goal
    launcher: tuple[str, ...]
    words: tuple[str, ...]
    folder: Path
    num_trials: int
    found: dict[str, Any] = field(default_factory=dict)

    def run(self) -> int:
        """Tries until there are enough results; whatever ends it, the files have all of them."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # So that the running trial ends too.
        self._collect()
        done = len(self.found["trials"])
        before = f"; {done} of them are there" if done else ""
        what = f"{self.num_trials} trials of {self.found['num_ranks']} ranks{before}"
        print(f"{what}; results go to {self.folder}", flush=True)
        is_interrupted = False
        try:
            while len(self.found["trials"]) < self.num_trials:
                self._next()
        except KeyboardInterrupt:
            is_interrupted = True
        names = "sweep.csv, sweep.json"
        if any(one["value"] is not None for one in self.found["trials"]):
            write_png(self.found, self.folder / "sweep.png")
            names += ", sweep.png"
        print("\n" + "\n".join(in_words(self.found)) + f"\n\nresults in {self.folder}: {names}")
        if is_interrupted:
            print("hvtrain: interrupted; all trials so far are kept, and the same command goes on", file=sys.stderr)
            return INTERRUPTED
        return 0 if self.found["best"] else 1

    def _next(self) -> None:
        title = f"{len(self.found['trials']) + 1} of {self.num_trials}"
        self.study.try_next(lambda *given: self._train(title, *given))
        progress("")
        self._collect()
        last = self.found["trials"][-1]
        value = last["error"] if last["value"] is None else f"{self.goal.metric} {last['value']:.5g}"
        print(f"{title}: trial {last['number']} {last['state']}, {value}; {self._so_far()}", flush=True)

    def _train(
        self, title: str, number: int, settings: dict[str, Any], is_hopeless: Callable[[int, float], bool]
    ) -> float | None:
        run = self.folder / f"trial-{number}"
        words = [*self.words, *(word(name, value) for name, value in settings.items())]
        words += [word("run.dir", str(run)), "notify=[]"]
        command = [sys.executable, "-m", "hvtrain", "launch", *self.launcher, "--", *words]
        tried = ", ".join(f"{name} {in_short(value)}" for name, value in settings.items())
        title = f"{title}: trial {number} ({tried})"
        progress(f"{title}; {self._so_far()} ...")

        def judge(epoch: int, value: float) -> bool:
            progress(f"{title}, epoch {epoch}: {self.goal.metric} {value:.5g}; {self._so_far()} ...")
            return is_hopeless(epoch, value)

        return value_of(command, run, self.goal, judge)

    def _so_far(self) -> str:
        best, trials = self.found["best"], self.found["trials"]
        seconds = [one["seconds"] for one in trials if one["seconds"]]
        left = (self.num_trials - len(trials)) * mean(seconds) if seconds else 0.0
        said = [f"best {best['value']:.5g} of trial {best['number']}"] if best else []
        return "; ".join([*said, f"left: about {duration(left)}" if seconds else "left: not known yet"])

    def _collect(self) -> None:
        """Brings the record and its files up to date."""
        ended = [(one, self.folder / f"trial-{one.number}") for one in self.study.trials()]
        trials = [record(one, self.study.settings(one), run) for one, run in ended]
        best = best_of(trials, self.goal.direction)
        line = {"line": line_of(self.launcher, self.words, best["settings"])} if best else {}
        self.found |= {"trials": trials, "best": {**best, **line} if best else None}
        self.found["importances"] = self.study.importances()
        write(self.found, self.folder)
