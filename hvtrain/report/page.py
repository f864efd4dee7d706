"""report.html and curves.png of a run, made from the files in its folder alone."""

import logging
import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from hvtrain.config.validate import flatten
from hvtrain.core.proof import proof_in_words
from hvtrain.core.records import write_atomic
from hvtrain.core.starts import STARTS_FILE
from hvtrain.errors import in_one_line
from hvtrain.report.curves import charts_of, scatter_svg, svg, write_png
from hvtrain.report.run_files import RunFiles, read_run
from hvtrain.version import VERSION

log = logging.getLogger(__name__)

REPORT_FILE, CURVES_FILE = "report.html", "curves.png"
# Lines of the summary that the page shows elsewhere.
_SHOWN = ("versions", "devices", "differs", "run folder", "resumed", "changed")


def write_report(folder: Path, with_diff: bool = True) -> None:
    """Writes both files into the run folder. An error is only a warning, since the run itself has finished.

    with_diff: show the changes of the user's checkout that are not committed.
    """
    try:
        run = replace(read_run(folder), state="finished")  # This process still holds the lock.
        write_atomic(folder / REPORT_FILE, html(run, with_diff))
        if charts := charts_of(run):
            write_png(charts, folder / CURVES_FILE)
    except Exception as error:
        log.warning(
            "%s is not written: %s; python -m hvtrain report %s tries again", REPORT_FILE, in_one_line(error), folder
        )


def html(run: RunFiles, with_diff: bool = True) -> str:
    """The page of a run, with or without the changes of the user's checkout that are not committed."""
    start: dict[str, Any] = run.starts[-1] if run.starts else {}
    git = start.get("git")
    if git and not with_diff:
        git = {**git, "diff": f"Their diff is left out here, since a tracker gets this page; {STARTS_FILE} has it."}
    described = start.get("described", {})
    split = run.result.get("split")
    proof = run.result.get("proof")
    return render(
        "page.html.j2",
        title=run.name,
        run=run,
        state=in_words(run),
        numbers=_numbers(run),
        drawn=[(chart.title, svg(chart)) for chart in charts_of(run)],
        figures=[{**one, "drawn": scatter_svg(one)} if one.get("kind") == "scatter" else one for one in run.review],
        proof=[line[:1].upper() + line[1:] for line in proof_in_words(proof).split("; ")] if proof else [],
        differences=run.result.get("differences", []),
        split=_split(split) if split else [],
        slowest=_slowest(run.result) if split else "",
        command=start.get("command"),
        again=_again(run, start),
        place=start.get("folder"),
        described=[(name, text) for name, text in described.items() if name not in _SHOWN],
        starts=run.starts,
        changes=_changes(run.result),
        messages=run.messages,
        environment=_environment(run, start, described),
        git=git,
        settings=[(name, text_of(value)) for name, value in flatten(run.config).items()],
    )


def render(template: str, **values: Any) -> str:
    """A template of this folder as a page. Text in the values is escaped; drawn SVG is not."""
    return (
        _environment_of_templates()
        .get_template(template)
        .render(
            style=(Path(__file__).parent / "style.css").read_text(encoding="utf-8"),
            version=VERSION,
            made=f"{datetime.now():%Y-%m-%d %H:%M}",
            **values,
        )
    )


@cache
def _environment_of_templates() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=jinja2.select_autoescape(default=True, default_for_string=True),
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def in_words(run: RunFiles) -> str:
    """The state of a run: "finished", "stopped at 40%, resumable"."""
    part = f" at {run.progress:.0%}" if run.progress is not None and run.state != "finished" else ""
    return f"{run.state}{part}{', resumable' if run.is_resumable else ''}"


def duration(seconds: float) -> str:
    """Seconds, in at most two units.

    >>> duration(4.21), duration(312), duration(7380)
    ('4.2 s', '5 min 12 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _numbers(run: RunFiles) -> list[tuple[str, str, str]]:
    """The large figures: name, value, and a line below it."""
    result, rows = run.result, run.history
    tested = sorted((result.get("metrics") or {}).items(), key=lambda item: item[0] == "test_loss")
    found = [(name, f"{value:.4g}", "") for name, value in tested]
    if best := result.get("best"):
        found.append((f"best {best['metric']}", f"{best['value']:.4g}", f"step {best['step']:,}"))
    elif not result and run.score:
        found.append((run.score[0], f"{run.score[1]:.4g}", "so far"))
    if rate := run.examples_per_second:
        ranks = run.num_ranks
        found.append(("examples per second", f"{rate:,.0f}", f"over {ranks} rank{'s' * (ranks != 1)}" if ranks else ""))
    if (split := result.get("split")) and result.get("num_ranks", 1) > 1 and split["efficiency"] is not None:
        found.append(("efficiency", f"{split['efficiency']:.0%}", "of a run whose reductions take no time"))
    if result:
        found.append(("time in all", duration(result["seconds"]), f"{result['num_steps']:,} steps"))
    elif rows:
        found.append(("epochs", f"{rows[-1].epoch:,}", f"{rows[-1].step:,} steps"))
    if parameters := result.get("num_parameters"):
        found.append(("parameters", f"{parameters:,}", ""))
    return found


def _split(split: dict[str, Any]) -> list[tuple[str, float, str, int]]:
    """The parts of a step's time: name, share, milliseconds, color."""
    parts = {name: split[f"{name}_seconds"] or 0.0 for name in ("data", "compute", "communication")}
    whole = sum(parts.values()) or 1.0
    return [
        (name, seconds / whole, f"{1000 * seconds:.2f} ms", color)
        for color, (name, seconds) in zip((3, 1, 2), parts.items())
        if seconds
    ]


def _slowest(result: dict[str, Any]) -> str:
    split = result["split"]
    if result["num_ranks"] == 1:
        return ""
    return (
        f"Means over {result['num_ranks']} ranks. Slowest: rank {split['slowest_rank']} on {split['slowest_host']}, "
        f"with {1000 * split['slowest_seconds']:.2f} ms of its own work in a step; the median is "
        f"{1000 * split['median_seconds']:.2f} ms."
    )


def _again(run: RunFiles, start: dict[str, Any]) -> str:
    """The command that repeats the run in a new folder."""
    processes = sum(start.get("hosts", {}).values())
    launcher = ["horovodrun", "-np", str(processes)] if processes > 1 else []
    return shlex.join([*launcher, "python", "-m", "hvtrain", "--config-dir", str(run.folder)])


def _changes(result: dict[str, Any]) -> list[tuple[Any, str, str, str]]:
    return [
        (change["step"], name, text_of(before), text_of(now))
        for change in result.get("changes", [])
        for name, (before, now) in change["changed"].items()
    ]


def _environment(run: RunFiles, start: dict[str, Any], described: dict[str, str]) -> Sequence[tuple[str, str]]:
    versions, system, git = (start.get(key) or {} for key in ("versions", "system", "git"))
    versions = versions or run.result.get("versions", {})
    hosts = start.get("hosts", {})
    rows = {
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "hosts": ", ".join(f"{host} ({number} rank{'s' * (number > 1)})" for host, number in hosts.items()),
        "devices": described.get("devices", ""),
        "processor": f"{system['processor']}, {system['cores']} cores" if system else "",
        "system": system.get("system", ""),
        "git commit": f"{git['commit']} ({git['branch']})" if git else "",
        "run folder": str(run.folder),
    }
    return [(name, text) for name, text in rows.items() if text]


def text_of(value: Any) -> str:
    """A setting as YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
