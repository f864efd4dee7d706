"""The trials of a sweep, one run of N ranks after the other, watched by their epochs."""

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from hvtrain.compare.measure import exit_at_signals, progress, read_result
from hvtrain.config.compose import override
from hvtrain.core.run_files import EpochRecord, read_history, read_starts
from hvtrain.errors import INTERRUPTED, LostRankError
from hvtrain.launch.child import SECONDS_TO_SAVE, end, ends_within, failure, started
from hvtrain.search.search_space import Goal
from hvtrain.search.study import (
    IsHopeless,
    Study,
    best_of,
    in_short,
    result_lines,
    train_command,
    trial_record,
    write_picture,
    write_results,
)
from hvtrain.system.text import duration

SECONDS_BETWEEN_LOOKS = 0.5


@dataclass
class Trials:
    """Runs the trials of a study, and keeps the files of the sweep up to date.

    Attributes:
        study: chooses settings, and remembers trials.
        goal: the metric.
        launcher: options of `hvtrain launch`.
        overrides: settings of all runs.
        folder: of the output.
        num_trials: results to reach, those of an earlier start included.
        results: the content of sweep.json.
    """

    study: Study
    goal: Goal
    launcher: tuple[str, ...]
    overrides: tuple[str, ...]
    folder: Path
    num_trials: int
    results: dict[str, Any] = field(default_factory=dict)

    def run(self) -> int:
        """Tries until there are enough results; however it ends, the files have all of them.

        Returns:
            The exit code.
        """
        exit_at_signals()
        self._collect()
        # Results of an earlier start count, so the same command goes on with a sweep.
        already = len(self.results["trials"])
        note = f"; {already} of them are there" if already else ""
        num_ranks = self.results["num_ranks"]
        print(
            f"{self.num_trials} trials of {num_ranks} ranks{note}; results go to {self.folder}",
            flush=True,
        )

        is_interrupted = False
        try:
            while len(self.results["trials"]) < self.num_trials:
                self._run_next()
        except KeyboardInterrupt:
            is_interrupted = True

        # The files of values are up to date after each trial; the picture takes a while, and is drawn once.
        files = "sweep.csv, sweep.json"
        if any(trial["value"] is not None for trial in self.results["trials"]):
            write_picture(self.results, self.folder / "sweep.png")
            files += ", sweep.png"

        print("\n" + "\n".join([*result_lines(self.results), "", f"results in {self.folder}: {files}"]))
        if is_interrupted:
            print(
                "hvtrain: interrupted; all trials so far are kept, and the same command goes on",
                file=sys.stderr,
            )
            return INTERRUPTED

        return 0 if self.results["best"] else 1

    def _run_next(self) -> None:
        title = f"{len(self.results['trials']) + 1} of {self.num_trials}"

        def run_trial(number: int, settings: dict[str, Any], is_hopeless: IsHopeless) -> float | None:
            values = ", ".join(f"{name} {in_short(value)}" for name, value in settings.items())
            trial_title = f"{title}: trial {number} ({values})"
            progress(f"{trial_title}; {self._so_far()} ...")

            def judge(epoch: int, value: float) -> bool:
                progress(f"{trial_title}, epoch {epoch}: {self.goal.metric} {value:.5g}; {self._so_far()} ...")
                return is_hopeless(epoch, value)

            return train_trial(self._command(number, settings), self._run_folder(number), self.goal, judge)

        self.study.try_next(run_trial)
        progress("")
        self._collect()
        trial = self.results["trials"][-1]
        outcome = trial["error"]
        if trial["value"] is not None:
            outcome = f"{self.goal.metric} {trial['value']:.5g}"
        print(
            f"{title}: trial {trial['number']} {trial['state']}, {outcome}; {self._so_far()}",
            flush=True,
        )

    def _command(self, number: int, settings: dict[str, Any]) -> list[str]:
        searched = [override(name, value) for name, value in settings.items()]
        # A sweep is one piece of work for the user, so its trials send no notices.
        own = [override("run.dir", str(self._run_folder(number))), "notify=[]"]
        # By the launcher, which ends all ranks of a trial that is pruned.
        launch = [sys.executable, "-m", "hvtrain", "launch", *self.launcher, "--"]
        return [*launch, *self.overrides, *searched, *own]

    def _run_folder(self, number: int) -> Path:
        return self.folder / f"trial-{number}"

    def _so_far(self) -> str:
        """The best value so far, and an estimate of the time left."""
        best = self.results["best"]
        trials = self.results["trials"]
        seconds = [trial["seconds"] for trial in trials if trial["seconds"]]
        left = "left: not known yet"
        if seconds:
            left = f"left: about {duration((self.num_trials - len(trials)) * mean(seconds))}"

        if best is None:
            return left
        return f"best {best['value']:.5g} of trial {best['number']}; {left}"

    def _collect(self) -> None:
        """Brings the results and their files up to date."""
        trials = [
            trial_record(trial, self.study.settings(trial), self._run_folder(trial.number))
            for trial in self.study.trials()
        ]
        best = best_of(trials, self.goal.direction)
        if best:
            best = {
                **best,
                "line": train_command(self.launcher, self.overrides, best["settings"]),
            }
        self.results |= {
            "trials": trials,
            "best": best,
            "importances": self.study.importances(),
        }
        write_results(self.results, self.folder)


def train_trial(command: Sequence[str], folder: Path, goal: Goal, is_hopeless: IsHopeless) -> float | None:
    """Runs one trial in processes of its own, watched by its epochs.

    Args:
        command: starts the run.
        folder: its run folder; its output goes to a file beside it.
        goal: the metric.
        is_hopeless: says after an epoch whether to prune the run.

    Returns:
        The best value of its epochs, or None if it was pruned.

    Raises:
        LostRankError: the run failed, or no value is finite.
        ConfigError: the run does not have the metric.
    """
    # Beside the run folder, which the run makes itself.
    log = folder.with_suffix(".txt")

    # Epochs are reported once each, whenever the file is read.
    newest = 0
    with started(command, log) as process:
        has_ended = False
        while not has_ended:
            # Asked before the history is read: what the last epoch wrote is then seen too.
            has_ended = ends_within(process, SECONDS_BETWEEN_LOOKS)
            history = read_history(folder)
            starts = read_starts(folder)
            values = goal.values(history)
            # Raised within the block, so that the run ends: each trial would fail in the same way.
            goal.check(starts)

            # Each new epoch is reported, also if the first of them is hopeless: later trials are judged by all.
            verdicts = [is_hopeless(epoch, value) for epoch, value in values.items() if epoch > newest]
            newest = max(values, default=newest)
            # A run that has ended anyway keeps its result.
            if any(verdicts) and not has_ended and not _is_trained(history, starts):
                _stop(process)
                return None

    if process.returncode:
        raise LostRankError(failure(log.read_text(errors="replace"), process.returncode))
    read_result(folder)  # A launcher that ended well without a result has not trained.
    if not values:
        raise LostRankError(f"the run ended well, but {goal.metric} was never a finite number")

    return goal.best(list(values.values()))


def _is_trained(history: Sequence[EpochRecord], starts: Sequence[dict[str, Any]]) -> bool:
    """True after the last step: ending the run would save nothing."""
    return bool(history and starts) and history[-1].step >= starts[-1].get("num_steps", math.inf)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the launcher to end all ranks; ends them by force if it does not."""
    # SIGTERM: all ranks save and stop together.
    process.terminate()
    if not ends_within(process, SECONDS_TO_SAVE):
        end(process)
