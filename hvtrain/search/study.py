"""The optuna study of a sweep, and its results: records of trials, and the table, files and picture that show them.

The study is stored in a file in the output folder, so that it survives the process.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from hvtrain.config.compose import override, override_value
from hvtrain.errors import ConfigError, LostRankError, in_one_line
from hvtrain.report.charts import BLUE, GREY, ORANGE, write_panels
from hvtrain.search.search_space import MAX, Setting
from hvtrain.system.files import csv_text, refuse_link, write_atomic, write_json
from hvtrain.system.text import aligned

STUDY_FILE = "sweep.db"
FIRST_PRUNED_EPOCH = 2  # The first epoch often falls into the warm-up.
# The attribute of a failed trial that holds its error.
ERROR = "error"
# With fewer different values, importances would be meaningless.
MIN_VALUES = 8

# Takes an epoch and the metric's value, and returns True if the trial should be pruned.
ShouldPrune = Callable[[int, float], bool]
# Takes a trial's number, its settings and a ShouldPrune; returns the trial's value, or None if it was pruned.
RunTrial = Callable[[int, dict[str, Any], ShouldPrune], float | None]

FINISHED = "finished"
PRUNED = "pruned"
FAILED = "failed"
_STATES = {"COMPLETE": FINISHED, "PRUNED": PRUNED, "FAIL": FAILED}
# The order of trials in the table.
_ORDER = list(_STATES.values())
_COLORS = {FINISHED: BLUE, PRUNED: GREY}

# The picture shows at most this many of the searched settings: the most important ones, once known.
MAX_PANELS = 8

# Settings or facts by name.
Values = Mapping[str, Any]
# A trial as in sweep.json.
Trial = Values
# The content of sweep.json.
Results = Values


class Study:
    """The trials of one search space, stored in a file.

    An interrupted trial does not count, and its settings are tried again. A failed one counts.

    Args:
        folder: the folder of the study's file.
        facts: what all trials have in common, such as the metric, its direction, the ranks, the
            settings, and the searched settings as `space`.
        seed: the seed for choosing settings.
        prune_after: number of trials that must have finished before the median of their values
            prunes others; None: no pruning.

    Raises:
        ConfigError: the folder holds another sweep or other files.
    """

    def __init__(self, folder: Path, facts: Values, seed: int, prune_after: int | None) -> None:
        import optuna

        # optuna's log lines would be mixed with those of the sweep.
        optuna.logging.set_verbosity(optuna.logging.ERROR)

        self._states = optuna.trial.TrialState
        self._space = facts["space"]
        self._distributions = {
            name: _distribution(setting) for name, setting in self._space.items()
        }
        self._study = _open_study(folder, facts)

        # The folder is locked, so no other process is running these trials: a sweep that was killed
        # has left them behind.
        for trial in self._trials_in(self._states.RUNNING):
            self._try_again_later(trial)

        # After a restart, the same seed would choose the same settings again.
        self._study.sampler = optuna.samplers.TPESampler(seed=seed + len(self._study.trials))
        if prune_after is None:
            # Must be set, since optuna prunes by default.
            self._study.pruner = optuna.pruners.NopPruner()
        else:
            self._study.pruner = optuna.pruners.MedianPruner(
                prune_after, n_warmup_steps=FIRST_PRUNED_EPOCH
            )

    def trials(self) -> list[Any]:
        """Returns the trials that are finished, pruned or failed, in the order in which they ran."""
        states = self._states
        ended = self._trials_in(states.COMPLETE, states.PRUNED, states.FAIL)
        # Optuna has no state for an interrupted trial, so it is stored as failed without an error.
        return [trial for trial in ended if trial.state != states.FAIL or ERROR in trial.user_attrs]

    def settings(self, trial: Any) -> dict[str, Any]:
        """Returns the searched settings of a trial."""
        values = {}
        for name, value in trial.params.items():
            choices = self._space[name].get("choices")
            values[name] = choices[value] if choices else value

        return values

    def importances(self) -> dict[str, float]:
        """Returns each setting's share of the variance of the finished trials' values (fANOVA, Hutter et al. 2014).

        Empty if there are fewer than MIN_VALUES different values.
        """
        values = {trial.value for trial in self._trials_in(self._states.COMPLETE)}
        if len(values) < MIN_VALUES:
            return {}
        from optuna.importance import FanovaImportanceEvaluator, get_param_importances

        # fANOVA's trees are random; with a seed, the same trials give the same shares.
        return get_param_importances(self._study, evaluator=FanovaImportanceEvaluator(seed=0))

    def try_next(self, run: RunTrial) -> Any:
        """Chooses settings for the next trial, runs it, and returns it when it has ended.

        If `run` raises LostRankError, the trial counts as failed. Any other exception is raised again, and
        the trial's settings are tried again later.
        """
        trial = self._study.ask(self._distributions)

        def should_prune(epoch: int, value: float) -> bool:
            trial.report(value, epoch)
            return trial.should_prune()

        try:
            value = run(trial.number, self.settings(trial), should_prune)
        except LostRankError as error:
            # The settings may be the cause, such as a batch that does not fit, so this is a result.
            trial.set_user_attr(ERROR, str(error))
            return self._study.tell(trial, state=self._states.FAIL)
        except BaseException:  # Ctrl-C, a signal, or a user error that ends the sweep.
            self._try_again_later(trial)
            raise

        if value is None:
            return self._study.tell(trial, state=self._states.PRUNED)

        return self._study.tell(trial, value)

    def _try_again_later(self, trial) -> None:
        # A later trial gets the same settings, and its own run folder.
        self._study.tell(trial.number, state=self._states.FAIL)
        self._study.enqueue_trial(trial.params)

    def _trials_in(self, *states) -> list[Any]:
        return self._study.get_trials(deepcopy=False, states=states)


def _distribution(setting: Setting):
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if "choices" in setting:
        # By index, since a choice may be a list, which optuna cannot store.
        return CategoricalDistribution(range(len(setting["choices"])))
    # `log` counts as whole, since in Python a bool is an int.
    is_whole = all(isinstance(value, int) for value in setting.values())
    distribution = IntDistribution if is_whole else FloatDistribution

    return distribution(**setting)


def _open_study(folder: Path, facts: Values):
    """Opens the study in the folder, or creates one with these facts. Raises ConfigError."""
    import optuna

    path = folder / STUDY_FILE
    refuse_link(path, ConfigError, "choose another --output")
    # Hidden files are ignored, since the folder's lock is one.
    has_files = any(not file.name.startswith(".") for file in folder.iterdir())
    if has_files and not path.exists():
        raise ConfigError(
            f"--output {folder} is not empty and holds no sweep; choose another folder"
        )
    try:
        study = optuna.create_study(
            storage=f"sqlite:///{path}",
            study_name="sweep",
            direction="maximize" if facts["direction"] == MAX else "minimize",
            load_if_exists=True,
        )
    except Exception as error:  # sqlalchemy and sqlite raise errors of many types.
        raise ConfigError(
            f"{path} cannot be used as the file of a sweep: {in_one_line(error)}; choose another --output"
        ) from error

    known = study.user_attrs
    for name, value in facts.items():
        if name not in known:
            study.set_user_attr(name, value)
        elif known[name] != value:
            raise ConfigError(
                f"--output {folder} holds a sweep of other settings ({name}: {known[name]}, not {value}); "
                "choose another folder, or give the same settings"
            )

    return study


def trial_record(trial: Any, settings: Values, folder: Path) -> dict[str, Any]:
    """Describes an optuna trial that has ended, as in sweep.json.

    Its value is the best one of a finished trial, the last one of a pruned trial, and None for a failed
    trial.
    """
    return {
        "number": trial.number,
        "state": _STATES[trial.state.name],
        "value": trial.value,
        "epochs": dict(sorted(trial.intermediate_values.items())),
        "seconds": round(trial.duration.total_seconds(), 1),
        "settings": settings,
        "error": trial.user_attrs.get(ERROR),
        "run": str(folder),
    }


def sort_trials(trials: Sequence[Trial], direction: str) -> list[Trial]:
    """Sorts trials: first the finished ones from best to worst, then the pruned ones, then the failed ones."""
    sign = -1 if direction == MAX else 1
    # Trials of equal value keep the order in which they ran.
    return sorted(
        trials, key=lambda trial: (_ORDER.index(trial["state"]), sign * (trial["value"] or 0.0))
    )


def as_overrides(settings: Values) -> list[str]:
    """Formats the searched settings for a trial's command line."""
    return [override(name, value) for name, value in settings.items()]


def results_table(results: Results) -> list[list[str]]:
    """Returns the table of trials as rows of cells: the header, then the trials from best to worst."""
    names = results["space"]
    rows = [["trial", results["metric"], "epochs", "s", *names]]

    for trial in sort_trials(results["trials"], results["direction"]):
        value = FAILED if trial["value"] is None else f"{trial['value']:.5g}"
        if trial["state"] == PRUNED:
            value += f" ({PRUNED})"
        settings = [short_value(trial["settings"][name]) for name in names]
        numbers = (trial["number"], value, _epochs(trial), f"{trial['seconds']:.0f}")
        rows.append([*map(str, numbers), *settings])

    return rows


def _epochs(trial: Trial) -> int:
    return max(trial["epochs"], default=0)


def short_value(value: Any) -> str:
    """Formats a setting's value for a table, floats with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else override_value(value)


def result_lines(results: Results) -> list[str]:
    """Returns the lines to print at the end: the table, errors, and the command that repeats the best trial."""
    lines = aligned(results_table(results))
    lines += [
        f"trial {trial['number']} failed: {trial['error']}"
        for trial in results["trials"]
        if trial["error"]
    ]

    if results["importances"]:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in results["importances"].items())
        lines += ["", f"share of the variance of finished trials (fANOVA): {shares}"]

    best = results["best"]
    if best is None:
        return [*lines, "", "no trial finished, so there is no best one"]
    result = f"trial {best['number']} with {results['metric']} {best['value']:.5g}"
    return [*lines, "", f"best: {result}; to train with its settings again:", best["line"]]


def write_results(results: Results, folder: Path) -> None:
    """Writes sweep.json and sweep.csv."""
    write_json(folder / "sweep.json", results)

    names = results["space"]
    rows = [["trial", "state", results["metric"], "epochs", "seconds", *names, "error"]]

    for trial in results["trials"]:
        settings = [trial["settings"][name] for name in names]
        numbers = [trial["value"], _epochs(trial), trial["seconds"]]
        rows.append([trial["number"], trial["state"], *numbers, *settings, trial["error"]])

    write_atomic(folder / "sweep.csv", csv_text(rows))


def write_picture(results: Results, path: Path) -> None:
    """Draws the metric's values by trial, and over each setting. At least one trial must have a value.

    optuna's own plots are not used: they leave out pruned trials, and would show the index of a choice
    instead of the choice.
    """
    # Ordered by importance, once there are enough trials to know it.
    names = list(results["importances"] or results["space"])[:MAX_PANELS]
    panels = [(f"{results['metric']} by trial", partial(_draw_history, results=results))]

    for name in names:
        share = results["importances"].get(name)
        title = name if share is None else f"{name} ({share:.0%})"
        panels.append((title, partial(_draw_setting, results=results, name=name)))

    write_panels(panels, path, 3, (4.4, 3.4))


def _draw_trials(axes, results: Results, position: Callable[[Trial], Any]) -> None:
    """Draws the values of finished and pruned trials, each at its position on the horizontal axis."""
    for state, color in _COLORS.items():
        trials = [trial for trial in results["trials"] if trial["state"] == state]
        axes.plot(
            [position(trial) for trial in trials],
            [trial["value"] for trial in trials],
            "o",
            color=color,
            markersize=4,
            label=state,
        )


def _draw_history(axes, results: Results) -> None:
    _draw_trials(axes, results, lambda trial: trial["number"])
    finished = [trial for trial in results["trials"] if trial["state"] == FINISHED]
    better = max if results["direction"] == MAX else min
    bests = list(accumulate((trial["value"] for trial in finished), better))
    numbers = [trial["number"] for trial in finished]
    axes.step(numbers, bests, where="post", color=ORANGE, linewidth=1.3, label="best so far")

    axes.locator_params("x", integer=True)
    axes.legend(frameon=False, fontsize=8)


def _draw_setting(axes, results: Results, name: str) -> None:
    setting = results["space"][name]
    choices = setting.get("choices")
    if not choices:
        _draw_trials(axes, results, lambda trial: trial["settings"][name])
        if setting.get("log"):
            axes.set_xscale("log")
        return

    # Choices need not be numbers, so each gets its own position.
    _draw_trials(axes, results, lambda trial: choices.index(trial["settings"][name]))
    labels = [short_value(choice) for choice in choices]
    has_long_label = max(map(len, labels)) > 6
    # Long labels would overlap.
    axes.set_xticks(range(len(labels)), labels, rotation=30 if has_long_label else 0)
    axes.set_xlim(-0.5, len(labels) - 0.5)
