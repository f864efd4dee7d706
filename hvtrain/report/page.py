"""Writes a run's report.html and curves.png, using nothing but the files in its folder."""

import json
import logging
import shlex
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from hvtrain.core import VERSION
from hvtrain.core.step_plan import MOST_LEFT_OUT, share_of_progress
from hvtrain.errors import in_one_line
from hvtrain.report.charts import run_charts, scatter_svg, svg, write_png
from hvtrain.report.run_files import RunFiles, read_run
from hvtrain.system.files import write_atomic
from hvtrain.system.run_files import proof_in_words
from hvtrain.system.text import counted, duration, flatten

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
REPORT_FILE = "report.html"
CURVES_FILE = "curves.png"


def write_report(folder: Path, with_diff: bool = True) -> None:
    """Writes report.html and curves.png into the folder of a run that has just finished (chief only).

    An error is only logged as a warning, since the run itself has succeeded.

    Args:
        folder: the run folder.
        with_diff: True to show the uncommitted changes in the user's checkout.
    """
    try:
        # This process still holds the folder's lock, so read_run() considers the run still running.
        run = replace(read_run(folder), state="finished")
        write_page(run, folder / REPORT_FILE, with_diff)
    except Exception as error:  # Matplotlib and templates may raise anything.
        log.warning(
            f"{REPORT_FILE} is not written: {in_one_line(error)}; run python -m hvtrain report {folder} to try again"
        )


def write_page(run: RunFiles, path: Path, with_diff: bool = True) -> list[Path]:
    """Writes a run's page and, if the run has curves, their picture beside it. Returns the paths of the files."""
    write_atomic(path, html(run, with_diff))
    charts = run_charts(run)
    if not charts:
        return [path]
    curves = path.parent / CURVES_FILE
    write_png(charts, curves)
    return [path, curves]


def html(run: RunFiles, with_diff: bool = True) -> str:
    """Returns a run's page as HTML, with or without the uncommitted changes in the user's checkout."""
    start = run.last_start
    return render(
        "report/page.html.j2",
        run=run,
        start=start,
        with_diff=with_diff,
        drawn=[(chart.title, svg(chart)) for chart in run_charts(run)],
        repeat_command=_repeat_command(run),
        hosts=[
            f"{host} ({counted(number, 'rank')})" for host, number in start.get("hosts", {}).items()
        ],
        settings=flatten(run.config).items(),
    )


def render(template: str, **values: Any) -> str:
    """Renders a template as a page with the style sheet of this folder.

    Text in the values is escaped, except SVG, which the templates mark as safe.

    Args:
        template: the template's path in hvtrain, such as report/page.html.j2. It may extend
            report/base.html.j2.
        **values: the template's variables.
    """
    page = _environment().get_template(template)
    return page.render(
        # Inlined, so that the page can be shared as one file.
        style=(FOLDER / "style.css").read_text("utf-8"),
        version=VERSION,
        made=f"{datetime.now():%Y-%m-%d %H:%M}",
        **values,
    )


@cache
def _environment():
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER.parent),
        autoescape=True,
        # A run that failed early lacks much of the data; undefined values are shown as empty.
        undefined=jinja2.ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        yaml=yaml_text,
        scatter=scatter_svg,
        state=state_text,
        duration=duration,
        proof_in_words=proof_in_words,
    )
    environment.globals.update(share_of_progress=share_of_progress, MOST_LEFT_OUT=MOST_LEFT_OUT)
    return environment


def state_text(run: RunFiles) -> str:
    """Describes a run's state and progress, such as "finished" or "stopped at 40%, resumable"."""
    text = run.state
    if run.progress is not None and run.state != "finished":
        text += f" at {run.progress:.0%}"
    if run.is_resumable:
        text += ", resumable"
    return text


def yaml_text(value: Any) -> str:
    """Formats a setting's value as in YAML."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _repeat_command(run: RunFiles) -> str:
    """Returns the command that repeats the run in a new folder."""
    command = ["python", "-m", "hvtrain", "--config-dir", str(run.folder)]
    # Counts processes, not replicas: those of strategy=mirrored are in one process.
    hosts = run.last_start.get("hosts", {})
    processes = sum(hosts.values())
    if processes > 1:
        launcher = ["horovodrun", "-np", str(processes)]
        if len(hosts) > 1:
            launcher += ["-H", ",".join(f"{host}:{slots}" for host, slots in hosts.items())]
        command = [*launcher, *command]

    return shlex.join(command)
