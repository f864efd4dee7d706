"""The results of a sweep: one record of all trials, which the table, the files and the picture show."""

import csv
import io
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvtrain.compare.summary import aligned
from hvtrain.config.words import word
from hvtrain.core.records import write_atomic
from hvtrain.search.goal import MAX
from hvtrain.system.secrets import without_secrets

FINISHED, PRUNED, FAILED = "finished", "pruned", "failed"
_STATES = {"COMPLETE": FINISHED, "PRUNED": PRUNED, "FAIL": FAILED}
MOST_ROWS = 30


def record(trial: Any, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A trial that has ended. value: of a finished one the best, of a pruned one the last; None for a failed one."""
    seconds = trial.duration.total_seconds() if trial.duration else None
    return {
        "number": trial.number,
        "state": _STATES[trial.state.name],
        "value": trial.value,
        "epochs": {str(epoch): value for epoch, value in sorted(trial.intermediate_values.items())},
        "seconds": seconds and round(seconds, 1),
        "settings": dict(settings),
        "error": trial.user_attrs.get("error"),
        "run": str(folder),
    }


def ranked(trials: Sequence[Mapping[str, Any]], direction: str) -> list[Mapping[str, Any]]:
    """Finished trials from the best to the worst, then pruned ones, then those that failed."""
    sign, places = (-1 if direction == MAX else 1), [FINISHED, PRUNED, FAILED]
    return sorted(trials, key=lambda one: (places.index(one["state"]), sign * (one["value"] or 0.0), one["number"]))


def best_of(trials: Sequence[Mapping[str, Any]], direction: str) -> Mapping[str, Any] | None:
    """The best finished trial, if there is one."""
    first = next(iter(ranked(trials, direction)), None)
    return first if first and first["state"] == FINISHED else None


def line_of(launcher: Sequence[str], words: Sequence[str], settings: Mapping[str, Any]) -> str:
    """The command that trains with these settings again, in a run folder of its own."""
    found = [word(name, value) for name, value in settings.items()]
    return shlex.join(["python", "-m", "hvtrain", "launch", *launcher, "--", *without_secrets([*words, *found])])


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    """The table, its header first and the best trial below it."""
    names = list(found["space"])
    table = [["trial", found["metric"], "epochs", "s", *names]]
    for one in ranked(found["trials"], found["direction"])[:MOST_ROWS]:
        value = FAILED if one["value"] is None else f"{one['value']:.5g}"
        table.append(
            [
                str(one["number"]),
                f"{value} ({PRUNED})" if one["state"] == PRUNED else value,
                str(max(map(int, one["epochs"]), default=0)),
                f"{one['seconds'] or 0:.0f}",
                *(in_short(one["settings"].get(name)) for name in names),
            ]
        )
    return table


def in_short(value: Any) -> str:
    """A setting for a table: numbers to four digits."""
    return f"{value:.4g}" if isinstance(value, float) else word("", value)[1:]


def in_words(found: Mapping[str, Any]) -> list[str]:
    """The table, errors, and the line that repeats the best trial."""
    lines = aligned(rows(found))
    if (more := len(found["trials"]) - MOST_ROWS) > 0:
        lines.append(f"... and {more} more in sweep.csv")
    lines += [f"trial {one['number']} failed: {one['error']}" for one in found["trials"] if one["error"]]
    if found["importances"]:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in found["importances"].items())
        lines += ["", f"share in the variance of finished trials (fANOVA): {shares}"]
    if found["best"] is None:
        return [*lines, "", "no trial finished, so there is no best one"]
    best = found["best"]
    return [
        *lines,
        "",
        f"best: trial {best['number']} with {found['metric']} {best['value']:.5g}; again by",
        best["line"],
    ]


def write(found: Mapping[str, Any], folder: Path) -> None:
    """Writes sweep.json and sweep.csv."""
    write_atomic(folder / "sweep.json", json.dumps(found, indent=1) + "\n")
    text, names = io.StringIO(), list(found["space"])
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "state", found["metric"], "epochs", "seconds", *names, "error"])
    for one in found["trials"]:
        settings = [one["settings"].get(name) for name in names]
        epochs = max(map(int, one["epochs"]), default=0)
        writer.writerow([one["number"], one["state"], one["value"], epochs, one["seconds"], *settings, one["error"]])
    write_atomic(folder / "sweep.csv", text.getvalue())
