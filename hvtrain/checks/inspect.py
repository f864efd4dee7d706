"""`python -m hvtrain inspect dataset=...`: shows what a data set holds, and what training would refuse.

Prints a summary and writes a page with pictures, masks and texts, in one process and without training.
"""

from dataclasses import asdict

from hvtrain.config.compose import composed
from hvtrain.errors import ConfigError
from hvtrain.system import console
from hvtrain.system.command import RUN_SETTINGS, Parser, add_number, at_least
from hvtrain.system.files import page_path, write_atomic
from hvtrain.system.text import aligned

PAGE_FILE = "inspect.html"
DEFAULT_LIMIT = 10_000
MAX_LINES = 20
EPILOG = f"""\
{RUN_SETTINGS}

examples:
  python -m hvtrain inspect dataset=table dataset.file=houses.csv dataset.target=price
  python -m hvtrain inspect dataset=image_folder dataset.dir=leaves augment=[random_crop] --limit 500
"""


def main() -> int:
    """Examines the data set, prints a summary and writes the page.

    Returns 2 if training would refuse something, else 0. Raises UserError if the data set cannot be opened.
    """
    options = _parser().parse_with_overrides()
    path = page_path(options.output)
    has_task = any(text.startswith(("task=", "task.", "experiment=")) for text in options.overrides)

    config = composed(options.overrides)
    with console.quiet_import(config.verbose):
        from hvtrain.checks.data_figures import figures_of
        from hvtrain.checks.examine_data import examine
        from hvtrain.report.page import render
    findings = examine(config, options.limit, has_task)
    page = render(
        "checks/inspect.html.j2",
        title=findings.source.name,
        origin=findings.source.origin,
        # Joined by semicolons, since phrases may contain commas.
        data=[
            (label, "; ".join(phrases))
            for label, phrases in findings.described.items()
            if label != "warnings"
        ],
        warnings=findings.warnings,
        refused=findings.refused,
        figures=[asdict(figure) for figure in figures_of(findings)],
    )
    write_atomic(path, page)
    _print(findings)
    print(f"{path} shows the same with pictures, rows and texts")
    return ConfigError.exit_code if findings.refused else 0


def _print(findings) -> None:
    from hvtrain.checks.data_figures import scope, tables_of
    from hvtrain.data.description import header
    from hvtrain.training.run import summary

    counts = ", ".join(f"{facts.num_examples:,} {facts.name}" for facts in findings.splits)
    lines = {
        "dataset": f"{findings.source.name}: {counts or 'no examples'}",
        "from": findings.source.origin,
        **header(findings.described),
        "read": scope(findings).removeprefix("Read: "),
        # Printed below: findings.warnings includes them.
        "warnings": "",
    }
    print(summary({name: text for name, text in lines.items() if text}))
    for table in tables_of(findings):
        print(*aligned([table.columns, *table.rows]), "", sep="\n")

    for heading, texts in (("look at", findings.warnings), ("refused", findings.refused)):
        for text in texts[:MAX_LINES]:
            print(f"{heading}: {text}")
        if len(texts) > MAX_LINES:
            print(f"{heading}: and {len(texts) - MAX_LINES:,} more, see the page")


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain inspect",
        usage="%(prog)s [OPTION ...] [dataset=CHOICE] [dataset.SETTING=VALUE ...]",
        description="""\
Describes a data set without training: kinds and ranges of its inputs, classes of each split, sizes of images, repeated
examples, examples of other splits that are in train too, and what training would refuse (exit code 2). The page shows
images as training and validation give them to the model. With task=CHOICE the targets are checked for that task.""",
        epilog=EPILOG,
    )
    add_number(
        parser,
        "--limit",
        at_least(1),
        "maximum number of examples to read from each split",
        DEFAULT_LIMIT,
        "NUMBER",
    )
    parser.add_argument(
        "--output",
        default=PAGE_FILE,
        metavar="FILE",
        help=f"the page, with pictures, masks, rows and texts; default: {PAGE_FILE} in this folder",
    )
    return parser
