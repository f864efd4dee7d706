"""`python -m hvtrain inspect dataset=...`: what a data set holds, and what a training would refuse, before one starts.

Prints it, and writes one page with pictures, masks and texts. One process; nothing is trained.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.core.files import write_atomic
from hvtrain.errors import ConfigError
from hvtrain.system import console
from hvtrain.system.command import RUN_SETTINGS, Parser

if TYPE_CHECKING:
    from hvtrain.checks.examine_data import Findings

PAGE_FILE = "inspect.html"
DEFAULT_LIMIT = 10_000
MAX_LINES = 20
EPILOG = f"""\
{RUN_SETTINGS}

examples:
  python -m hvtrain inspect dataset=table dataset.file=houses.csv dataset.target=price
  python -m hvtrain inspect dataset=image_folder dataset.dir=leaves limit=500
"""


def main() -> int:
    """Composes the data set, examines it, prints and writes what was found; 2 if something is refused."""
    options = _parser().parse_with_overrides(sys.argv[1:])
    limit = _take_limit(options.overrides)
    path = Path(options.output)
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--output {path}: there is no folder {path.parent}; make it, or choose another file")
    has_task = any(argument.startswith(("task=", "task.", "experiment=")) for argument in options.overrides)

    for tree in compose(options.overrides):
        config = from_dict(tree)
        with console.quiet_import(config.verbose):
            from hvtrain.checks.data_figures import figures_of
            from hvtrain.checks.examine_data import examine
        findings = examine(config, limit, has_task)
        write_atomic(path, _page(findings, [asdict(figure) for figure in figures_of(findings)]))
        _print(findings)
        print(f"{path} has it with pictures, rows and texts")
        if findings.refused:
            return ConfigError.exit_code
    return 0


def _take_limit(overrides: list[str]) -> int:
    """Takes limit=NUMBER out of the settings. Raises ConfigError for anything but a number of at least 1."""
    texts = [argument.partition("=")[2] for argument in overrides if argument.startswith("limit=")]
    overrides[:] = [argument for argument in overrides if not argument.startswith("limit=")]
    if not texts:
        return DEFAULT_LIMIT
    if not texts[-1].isdecimal() or not int(texts[-1]):
        raise ConfigError(f"limit={texts[-1]} came where a whole number of at least 1 was needed")
    return int(texts[-1])


def _page(findings: "Findings", figures: list[dict[str, Any]]) -> str:
    # Imported here, so that --help needs no template engine.
    from hvtrain.report.page import render

    phrases = {label: texts for label, texts in findings.described.phrases.items() if label != "warnings"}
    return render(
        "inspect.html.j2",
        folder=Path(__file__).parent,
        title=findings.source.name,
        origin=findings.source.origin,
        data=[(label, ", ".join(texts)) for label, texts in phrases.items()],
        warnings=findings.warnings,
        refused=findings.refused,
        figures=figures,
    )


def _print(findings: "Findings") -> None:
    from rich.console import Console
    from rich.table import Table as Grid

    from hvtrain.checks.data_figures import scope, tables_of
    from hvtrain.training.run import summary

    # What users write may hold [brackets], which are no markup.
    output = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
    counts = ", ".join(f"{facts.num_examples:,} {facts.name}" for facts in findings.splits)
    lines = {
        "dataset": f"{findings.source.name}: {counts or 'no examples'}",
        "from": findings.source.origin,
        **findings.described.header(),
        "read": scope(findings).removeprefix("Read: ") if findings.splits else "",
    }
    lines.pop("warnings", None)
    output.print(summary({name: text for name, text in lines.items() if text}))

    for table in tables_of(findings):
        grid = Grid(*table.columns, box=None, pad_edge=False, header_style="")
        for row in table.rows:
            grid.add_row(*row)
        output.print(grid)
        output.print()

    for heading, texts in (("look at", findings.warnings), ("refused", findings.refused)):
        for text in texts[:MAX_LINES]:
            output.print(f"{heading}: {text}")
        if len(texts) > MAX_LINES:
            output.print(f"{heading}: and {len(texts) - MAX_LINES:,} more, see the page")


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain inspect",
        usage="%(prog)s [dataset=CHOICE] [dataset.SETTING=VALUE ...] [limit=NUMBER] [--output FILE]",
        description=f"""\
Reads a data set without training: kinds and ranges of its inputs, classes of each split, sizes of images, repeated
examples, examples that are in train and in test too, and what a training would refuse (exit code 2). At most
limit={DEFAULT_LIMIT} examples of a split are read. With task=CHOICE the targets are checked for that task.""",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--output",
        default=PAGE_FILE,
        metavar="FILE",
        help=f"the page, with pictures, masks, rows and texts; default: {PAGE_FILE} in this folder",
    )
    return parser
