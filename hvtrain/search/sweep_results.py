"""The results of a sweep: the records of its trials, and the table, files and picture that show them."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from hvtrain.config.compose import override, override_value
from hvtrain.core.files import csv_text, write_atomic, write_json
from hvtrain.report.charts import BLUE, GREY, ORANGE, Panel, write_panels
from hvtrain.search.search_space import MAX
from hvtrain.system.secrets import without_secrets
from hvtrain.system.text import aligned

FINISHED = "finished"
PRUNED = "pruned"
FAILED = "failed"
_STATES = {"COMPLETE": FINISHED, "PRUNED": PRUNED, "FAIL": FAILED}
_ORDER = (FINISHED, PRUNED, FAILED)
_COLORS = {FINISHED: BLUE, PRUNED: GREY}
MOST_ROWS = 30
# Searched settings in the picture; of more, those that matter most.
MOST_PANELS = 8
_PANEL_SIZE = (4.4, 3.4)  # Inches.

# A trial as sweep.json has it.
Trial = Mapping[str, Any]
# The content of sweep.json.
Results = Mapping[str, Any]


def trial_record(trial: Any, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Describes an optuna trial that has ended.

    Its value is the best of a finished trial, the last of a pruned one, and None for a failed one.
    """
    seconds = trial.duration.total_seconds() if trial.duration else None
    return {
        "number": trial.number,
        "state": _STATES[trial.state.name],
        "value": trial.value,
        # Keys of JSON are texts.
        "epochs": {str(epoch): value for epoch, value in sorted(trial.intermediate_values.items())},
        "seconds": seconds and round(seconds, 1),
        "settings": dict(settings),
        "error": trial.user_attrs.get("error"),
        "run": str(folder),
    }


def ranked(trials: Sequence[Trial], direction: str) -> list[Trial]:
    """Sorts trials: finished ones from the best to the worst, then pruned ones, then those that failed."""
    sign = -1 if direction == MAX else 1

    # Trials of the same value stand in the order in which they ran.
    def key(trial: Trial) -> tuple[int, float, int]:
        return _ORDER.index(trial["state"]), sign * (trial["value"] or 0.0), trial["number"]

    return sorted(trials, key=key)


def best_of(trials: Sequence[Trial], direction: str) -> Trial | None:
    """Returns the best finished trial, if there is one."""
    return next((trial for trial in ranked(trials, direction) if trial["state"] == FINISHED), None)


def train_command(launcher: Sequence[str], overrides: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Returns the command that trains with these settings again, in a run folder of its own."""
    searched = [override(name, value) for name, value in settings.items()]
    # The line is printed and written, so the user has to fill in what is secret.
    public = without_secrets([*overrides, *searched])
    return shlex.join(["python", "-m", "hvtrain", "launch", *launcher, "--", *public])


def table(results: Results) -> list[list[str]]:
    """Returns the table: its header first, and the best trial below it."""
    names = list(results["space"])
    rows = [["trial", results["metric"], "epochs", "s", *names]]

    for trial in ranked(results["trials"], results["direction"])[:MOST_ROWS]:
        value = FAILED if trial["value"] is None else f"{trial['value']:.5g}"
        if trial["state"] == PRUNED:
            value += f" ({PRUNED})"
        settings = [in_short(trial["settings"].get(name)) for name in names]
        epochs = str(_epochs(trial))
        seconds = f"{trial['seconds'] or 0:.0f}"
        rows.append([str(trial["number"]), value, epochs, seconds, *settings])

    return rows


def _epochs(trial: Trial) -> int:
    return max(map(int, trial["epochs"]), default=0)


def in_short(value: Any) -> str:
    """A setting for a table: numbers to four digits."""
    return f"{value:.4g}" if isinstance(value, float) else override_value(value)


def result_lines(results: Results) -> list[str]:
    """Returns the table, errors, and the command that repeats the best trial."""
    lines = aligned(table(results))
    hidden = len(results["trials"]) - MOST_ROWS
    if hidden > 0:
        lines.append(f"... and {hidden} more in sweep.csv")
    lines += [f"trial {trial['number']} failed: {trial['error']}" for trial in results["trials"] if trial["error"]]

    if results["importances"]:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in results["importances"].items())
        lines += ["", f"share in the variance of finished trials (fANOVA): {shares}"]

    best = results["best"]
    if best is None:
        return [*lines, "", "no trial finished, so there is no best one"]
    value = f"{results['metric']} {best['value']:.5g}"

    return [*lines, "", f"best: trial {best['number']} with {value}; again by", best["line"]]


def write(results: Results, folder: Path) -> None:
    """Writes sweep.json and sweep.csv."""
    write_json(folder / "sweep.json", results)

    names = list(results["space"])
    rows = [["trial", "state", results["metric"], "epochs", "seconds", *names, "error"]]

    for trial in results["trials"]:
        settings = [trial["settings"].get(name) for name in names]
        numbers = [trial["value"], _epochs(trial), trial["seconds"]]
        rows.append([trial["number"], trial["state"], *numbers, *settings, trial["error"]])

    write_atomic(folder / "sweep.csv", csv_text(rows))


def write_png(results: Results, path: Path) -> None:
    """Draws the values by trial and over each setting. At least one trial has a value.

    optuna's own plots leave out pruned trials, and show the numbers of choices, since it stores no
    lists (study.py).
    """
    # By importance, as soon as there are enough trials to know it.
    names = list(results["importances"] or results["space"])[:MOST_PANELS]
    panels: list[Panel] = [(f"{results['metric']} by trial", partial(_draw_history, results=results))]

    for name in names:
        share = results["importances"].get(name)
        title = name if share is None else f"{name} ({share:.0%})"
        panels.append((title, partial(_draw_setting, results=results, name=name)))

    write_panels(panels, path, min(3, len(panels)), _PANEL_SIZE)


def _draw_trials(axes: Any, results: Results, position: Callable[[Trial], Any]) -> None:
    """Draws the values of finished and of pruned trials over a position."""
    for state, color in _COLORS.items():
        trials = [trial for trial in results["trials"] if trial["state"] == state and trial["value"] is not None]
        positions = [position(trial) for trial in trials]
        axes.plot(positions, [trial["value"] for trial in trials], "o", color=color, markersize=4, label=state)


def _draw_history(axes: Any, results: Results) -> None:
    _draw_trials(axes, results, lambda trial: trial["number"])
    finished = [trial for trial in results["trials"] if trial["state"] == FINISHED]
    better = max if results["direction"] == MAX else min
    bests = list(accumulate((trial["value"] for trial in finished), better))
    numbers = [trial["number"] for trial in finished]
    axes.step(numbers, bests, where="post", color=ORANGE, linewidth=1.3, label="best so far")

    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=8)


def _draw_setting(axes: Any, results: Results, name: str) -> None:
    setting = results["space"][name]
    choices = setting.get("choices")
    if not choices:
        _draw_trials(axes, results, lambda trial: trial["settings"][name])
        if setting.get("log"):
            axes.set_xscale("log")
        return

    # Choices need not be numbers, so each has a place of its own.
    _draw_trials(axes, results, lambda trial: choices.index(trial["settings"][name]))
    labels = [in_short(choice) for choice in choices]
    rotation = 30 if max(map(len, labels)) > 6 else 0  # Longer labels would overlap.
    axes.set_xticks(range(len(labels)), labels, rotation=rotation)
    axes.set_xlim(-0.5, len(labels) - 0.5)
