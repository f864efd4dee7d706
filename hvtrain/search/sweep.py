"""`python -m hvtrain sweep`: finds the settings with which a run learns best. Each trial is a run on N ranks.

Trials run one after another and are judged after each epoch.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

from hvtrain.config.compose import composed, override
from hvtrain.config.schema import RunConfig
from hvtrain.errors import INTERRUPTED, BusyError, ConfigError, LostRankError
from hvtrain.launch.child import (
    SECONDS_TO_SAVE,
    end,
    ends_within,
    exit_at_signals,
    read_result,
    started,
)
from hvtrain.search.search_space import MAX, MIN, Goal, SearchSpace, goal_of, read_space
from hvtrain.search.study import (
    FINISHED,
    ShouldPrune,
    Study,
    as_overrides,
    result_lines,
    short_value,
    sort_trials,
    trial_record,
    write_picture,
    write_results,
)
from hvtrain.system.command import RUN_SETTINGS, Parser, add_number, at_least, take_values
from hvtrain.system.console import progress
from hvtrain.system.files import local_folder
from hvtrain.system.run_files import EpochRecord, read_history, read_starts
from hvtrain.system.run_lock import RunLock
from hvtrain.system.secrets import command_line, without_secrets
from hvtrain.system.text import counted, duration

POLL_SECONDS = 0.5


def main() -> int:
    """Checks the request, then runs one trial after another. Returns the exit code: 1 if no trial finished."""
    # Copied first, since composing may change sys.argv, and sweep.json must hold the original command.
    arguments = sys.argv[1:]
    options = _parser().parse_with_overrides(arguments)
    path, num_trials, overrides = parse_request(options.overrides)
    # optuna is not a dependency of hvtrain, since no run needs it.
    if not find_spec("optuna"):
        raise ConfigError(
            "sweep needs optuna, which is not installed; install it from scripts/lock/sweep.txt"
        )

    space = read_space(path, overrides)
    config = _compose_examples(space, overrides)[0]
    if config.train.max_time:
        raise ConfigError(
            f"train.max_time={config.train.max_time} may end trials before they have results; set train.max_time=null"
        )
    goal = goal_of(config, options.metric, options.direction)
    # Trials are comparable only if these agree, so the study stores them.
    facts = {
        "metric": goal.metric,
        "direction": goal.direction,
        "num_ranks": options.np,
        "overrides": without_secrets(overrides),
        "space": space.settings,
    }
    results = {
        "command": command_line("sweep", arguments),
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        **facts,
    }
    shared_arguments = ["-np", str(options.np), *options.hosts, "--", *overrides]
    # The same command gets the same folder, and therefore continues the sweep.
    default_folder = f"sweeps/{space.path.stem}-{config.run.name}"
    folder = local_folder(options.output or default_folder, "--output")
    prune_after = None if options.no_pruning else options.prune_after

    # Held until the last trial has ended, because two sweeps in one folder would treat each other's
    # trials as interrupted.
    with RunLock() as lock:
        _lock_folder(lock, folder)
        study = Study(folder, facts, options.seed, prune_after)
        return Trials(study, goal, shared_arguments, folder, num_trials, results).run()


def parse_request(arguments: Sequence[str]) -> tuple[str, int, list[str]]:
    """Splits the arguments into SPACE of sweep=SPACE, N of trials=N, and the settings of the runs.

    Raises ConfigError if SPACE is missing, N is invalid, or run.dir is given.
    """
    # The rest goes to Hydra, which knows the settings.
    values, overrides = take_values(arguments, "sweep", "trials", "run.dir")
    if "run.dir" in values:
        raise ConfigError(
            f"run.dir={values['run.dir']} was given, but each trial has its own run folder; choose --output DIR instead"
        )
    if not values.get("sweep"):
        raise ConfigError("sweep=SPACE is missing; name a search space, such as sweep=optimizer")
    trials = values.get("trials", "20")
    # isdecimal also refuses signs, underscores and spaces, which int would accept.
    if not trials.isdecimal() or int(trials) < 1:
        raise ConfigError(
            f"trials={trials} is not a whole number of at least 1; give one, such as trials=20"
        )

    return values["sweep"], int(trials), overrides


def _compose_examples(space: SearchSpace, overrides: list[str]) -> list[RunConfig]:
    """Composes runs with both ends, or all choices, of each setting, so that no trial is refused hours later."""
    for argument in overrides:
        if argument.partition("=")[0] in space.settings:
            raise ConfigError(
                f"{argument} was given, but {space.path} searches that setting; remove it from the command or the file"
            )

    return [composed([*overrides, *as_overrides(example)]) for example in space.examples()]


def _lock_folder(lock: RunLock, folder: Path) -> None:
    """Creates and locks the folder, so that only one sweep uses it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Another sweep may take hours, so there is no point in waiting.
        lock.take(folder, wait_seconds=0.0)
    except BusyError as error:
        raise BusyError(
            f"--output {folder} is in use by another sweep; wait for its end, or choose another folder"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"--output {folder} cannot be written: {error.strerror}; choose another folder"
        ) from error


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain sweep",
        usage="%(prog)s sweep=SPACE [trials=N] [OPTION ...] [GROUP=CHOICE ...] [SETTING=VALUE ...]",
        description="""\
Trains with one combination of settings after another, each on N ranks, and finds good ones with optuna (TPE). Stops
trials that lag behind the median of the others. Writes sweep.csv, sweep.json and sweep.png, and prints the command that
trains with the best settings again. trials: the number of results to reach, earlier ones included; default: 20.""",
        epilog=f"""\
{RUN_SETTINGS}
SPACE is a name from conf/sweep or from the folder sweep of --config-dir, or a YAML file:
  optimizer.learning_rate: {{low: 1.0e-4, high: 1.0e-1, log: true}}
  model.dropout: {{low: 0.0, high: 0.5, step: 0.1}}
  optimizer: {{choices: [adam, sgd]}}

examples:
  python -m hvtrain sweep sweep=optimizer trials=20 -np 2 dataset=digits dataset.num_validation=300
  python -m hvtrain sweep sweep=my.yaml trials=50 -np 8 -H s1:4,s2:4 --metric val_loss model=resnet50 ...

The same command continues a sweep that was interrupted; see docs/sweep.md.
""",
    )
    option = parser.add_argument
    add_number(parser, "-np", at_least(1), "ranks of a trial", 2)
    parser.add_hosts()
    option(
        "--metric",
        metavar="NAME",
        help="a column of history.csv; default: checkpoint.best, or else the task's metric",
    )
    option(
        "--direction",
        choices=(MAX, MIN),
        help="whether the metric's highest or lowest value is best; default: judged by its name",
    )
    help_text = "finished trials before others are pruned, from epoch 2 on"
    add_number(parser, "--prune-after", at_least(1), help_text, 5)
    option("--no-pruning", action="store_true", help="let every trial train to its end")
    add_number(parser, "--seed", at_least(0), "seed for choosing settings", 0)
    option(
        "--output",
        metavar="DIR",
        help="folder of the results; default: sweeps/SPACE-RUN, with the name of the run",
    )

    return parser


@dataclass
class Trials:
    """Runs the trials of a study, and keeps the files of the sweep up to date.

    Attributes:
        study: chooses settings and stores trials.
        goal: the metric to optimize.
        shared_arguments: the arguments of `hvtrain launch` that all trials share.
        folder: the output folder.
        num_trials: number of results to reach, including those from an earlier start.
        results: the content of sweep.json.
    """

    study: Study
    goal: Goal
    shared_arguments: Sequence[str]
    folder: Path
    num_trials: int
    results: dict[str, Any]

    def run(self) -> int:
        """Runs trials until there are enough results, and returns the exit code.

        sweep.csv and sweep.json contain all results, even after an error or an interruption.
        """
        exit_at_signals()
        self._collect()
        # Results from an earlier start count, so the same command continues a sweep.
        num_done = len(self.results["trials"])
        note = f", {num_done} done already" if num_done else ""
        trials = counted(self.num_trials, "trial")
        ranks = counted(self.results["num_ranks"], "rank")
        print(f"{trials} of {ranks}{note}; results go to {self.folder}", flush=True)

        exit_code = None
        try:
            while len(self.results["trials"]) < self.num_trials:
                self._run_next()
        except KeyboardInterrupt:
            exit_code = INTERRUPTED

        # The other files are written after each trial; the picture, which takes longer, only at the end.
        files = "sweep.csv, sweep.json"
        if any(trial["value"] is not None for trial in self.results["trials"]):
            write_picture(self.results, self.folder / "sweep.png")
            files += ", sweep.png"

        print("", *result_lines(self.results), "", f"results in {self.folder}: {files}", sep="\n")
        if exit_code:
            sys.stderr.write(
                "hvtrain: interrupted; all trials so far are kept, and the same command continues the sweep\n"
            )
            return exit_code

        return 0 if self.results["best"] else 1

    def _run_next(self) -> None:
        self.study.try_next(self._run_trial)
        progress("")
        self._collect()
        trials = self.results["trials"]
        trial = trials[-1]
        outcome = trial["error"]
        if trial["value"] is not None:
            outcome = f"{self.goal.metric} {trial['value']:.5g}"
        print(
            f"{len(trials)} of {self.num_trials}: trial {trial['number']} {trial['state']}, {outcome}; "
            f"{self._status()}",
            flush=True,
        )

    def _run_trial(
        self, number: int, settings: dict[str, Any], should_prune: ShouldPrune
    ) -> float | None:
        """Runs a trial and shows its progress; returns its value, or None if it was pruned."""
        values = ", ".join(f"{name} {short_value(value)}" for name, value in settings.items())
        position = len(self.results["trials"]) + 1
        title = f"{position} of {self.num_trials}: trial {number} ({values})"
        progress(f"{title}; {self._status()} ...")

        def judge(epoch: int, value: float) -> bool:
            progress(
                f"{title}, epoch {epoch}: {self.goal.metric} {value:.5g}; {self._status()} ..."
            )
            return should_prune(epoch, value)

        folder = self._run_folder(number)
        command = [
            # Started through the launcher, which ends all ranks of a pruned trial.
            sys.executable,
            "-m",
            "hvtrain",
            "launch",
            *self._launch_arguments(settings),
            override("run.dir", str(folder)),
            # The user waits for the whole sweep, so its trials send no notices.
            "notify=[]",
        ]
        return train_trial(command, folder, self.goal, judge)

    def _launch_arguments(self, settings: dict[str, Any]) -> list[str]:
        """Returns the arguments with which `hvtrain launch` trains with these settings."""
        return [*self.shared_arguments, *as_overrides(settings)]

    def _run_folder(self, number: int) -> Path:
        return self.folder / f"trial-{number}"

    def _status(self) -> str:
        """Describes the best value so far, and the estimated time left."""
        best = self.results["best"]
        trials = self.results["trials"]
        time_left = "left: not known yet"
        if trials:
            trial_seconds = mean(trial["seconds"] for trial in trials)
            seconds_left = (self.num_trials - len(trials)) * trial_seconds
            time_left = f"left: about {duration(seconds_left)}"

        if best is None:
            return time_left
        return f"best {best['value']:.5g} of trial {best['number']}; {time_left}"

    def _collect(self) -> None:
        """Updates the results from the study, and writes their files."""
        trials = [
            trial_record(trial, self.study.settings(trial), self._run_folder(trial.number))
            for trial in self.study.trials()
        ]
        finished = [trial for trial in trials if trial["state"] == FINISHED]
        best = next(iter(sort_trials(finished, self.goal.direction)), None)
        if best:
            # The command that trains with these settings again. Secrets are hidden, since it is
            # printed and saved; the user has to fill them in.
            arguments = self._launch_arguments(best["settings"])
            best = {**best, "line": command_line("launch", arguments)}
        self.results |= {"trials": trials, "best": best, "importances": self.study.importances()}
        write_results(self.results, self.folder)


def train_trial(
    command: Sequence[str], folder: Path, goal: Goal, should_prune: ShouldPrune
) -> float | None:
    """Runs one trial in its own processes, and judges it after each epoch.

    Args:
        command: the command that starts the run.
        folder: the run folder. The output of the command goes to a file beside it.
        goal: the metric.
        should_prune: called after each epoch; returns True if the run should be pruned.

    Returns:
        The best value of its epochs, or None if it was pruned.

    Raises:
        LostRankError: the run failed, or its metric was never finite.
        ConfigError: the run does not have the metric.
    """
    # Beside the run folder, since the run creates that itself.
    log = folder.with_suffix(".txt")

    # Each epoch is judged once, however often the file is read.
    last_judged = 0
    with started(command, log) as process:
        has_ended = False
        while not has_ended:
            # Polled before the history is read, so that the last epoch is seen too.
            has_ended = ends_within(process, POLL_SECONDS)
            history = read_history(folder)
            starts = read_starts(folder)
            values = goal.values(history)
            # An error here ends the run and the sweep, because each trial would fail in the same way.
            goal.check(starts)

            # All new epochs are judged, even those after a decision to prune, because later trials are
            # compared with them.
            decisions = [
                should_prune(epoch, value) for epoch, value in values.items() if epoch > last_judged
            ]
            last_judged = max(values, default=last_judged)
            # A run that has already ended keeps its result.
            if any(decisions) and not has_ended and not _is_trained(history, starts):
                # On SIGTERM, all ranks save and stop together.
                process.terminate()
                if not ends_within(process, SECONDS_TO_SAVE):
                    end(process)
                return None

    # Raises if the launcher failed, or succeeded without a result.
    read_result(folder, process.returncode, log)
    if not values:
        raise LostRankError(f"the run succeeded, but {goal.metric} was never a finite number")

    better = max if goal.direction == MAX else min
    return better(values.values())


def _is_trained(history: Sequence[EpochRecord], starts: Sequence[dict[str, Any]]) -> bool:
    """True if the run has done its last step, so that pruning it would save no time."""
    return bool(history and starts) and history[-1].step >= starts[-1].get("num_steps", math.inf)
