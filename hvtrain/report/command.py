"""`python -m hvtrain report RUN...`: writes the report of a run again, or compares several runs.

Everything on a page comes from the files of the run folders, so neither TensorFlow nor the data are needed.
"""

import sys
from pathlib import Path

from hvtrain.core.files import write_atomic
from hvtrain.errors import ConfigError
from hvtrain.report import comparison, page
from hvtrain.report.run_files import read_run
from hvtrain.system.command import Parser

COMPARISON_FILE = "comparison.html"


def main() -> int:
    """Reads the run folders, writes the page, and prints which files it wrote."""
    options = _parser().parse_args(sys.argv[1:])
    runs = [read_run(Path(folder)) for folder in options.runs]
    is_comparison = len(runs) > 1

    default = Path(COMPARISON_FILE) if is_comparison else runs[0].folder / page.REPORT_FILE
    path = Path(options.output or default)
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}; make it, or choose another file")

    if is_comparison:
        write_atomic(path, comparison.html(runs))
        print(path)
    else:
        written = page.write_page(runs[0], path)
        print(" and ".join(map(str, written)))

    return 0


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain report",
        description="""\
Writes the report of a run again, report.html and curves.png, from the files in its folder; also of a run that is still
going or has failed. Several runs are compared on one page: a sortable table of figures, curves in common charts, and
the settings that differ.""",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run folder; python -m hvtrain runs lists them",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=f"the page; default: RUN/{page.REPORT_FILE}, for several runs {COMPARISON_FILE} in this folder",
    )
    return parser
