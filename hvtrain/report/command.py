"""`python -m hvtrain report RUN...`: writes the report of a run again, or compares several runs."""

import sys
from pathlib import Path

from hvtrain.core.records import write_atomic
from hvtrain.errors import ConfigError
from hvtrain.report import comparison, page
from hvtrain.report.curves import charts_of, write_png
from hvtrain.report.run_files import read_run
from hvtrain.system.command import Parser

COMPARISON_FILE = "comparison.html"


def main() -> int:
    """Reads the run folders and writes the page."""
    options = _parser().parse_args(sys.argv[1:])
    runs = [read_run(Path(folder)) for folder in options.runs]
    is_one = len(runs) == 1
    path = (
        Path(options.output)
        if options.output
        else runs[0].folder / page.REPORT_FILE
        if is_one
        else Path(COMPARISON_FILE)
    )
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}; make it, or choose another file")
    write_atomic(path, page.html(runs[0]) if is_one else comparison.html(runs))
    written = [str(path)]
    if is_one and (charts := charts_of(runs[0])):
        write_png(charts, path.parent / page.CURVES_FILE)
        written.append(str(path.parent / page.CURVES_FILE))
    print(" and ".join(written))
    return 0


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain report",
        description="""\
Writes the report of a run again, report.html and curves.png, from the files in its folder; also of a run that is still
going or has failed. Several runs are compared on one page: a sortable table of figures, curves in common charts, and
the settings that differ.""",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder; python -m hvtrain runs lists them")
    text = f"the page; default: RUN/{page.REPORT_FILE}, for several runs {COMPARISON_FILE} in this folder"
    parser.add_argument("--output", metavar="FILE", help=text)
    return parser
