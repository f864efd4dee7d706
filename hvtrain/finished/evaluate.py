"""`python -m hvtrain evaluate`: the metrics of a finished run, the same on any number of ranks."""

import json
import sys
from pathlib import Path

from hvtrain.core.records import write_atomic
from hvtrain.finished.run_words import SETTINGS, SPLITS, add_trust, finished_config
from hvtrain.system import console
from hvtrain.system.command import Parser

EPILOG = f"""\
{SETTINGS}

examples:
  python -m hvtrain evaluate run=runs/first
  horovodrun -np 2 python -m hvtrain evaluate run=runs/first split=validation checkpoint=last --output metrics.json
"""


def main() -> int:
    """Opens the run, evaluates it, prints the metrics, and writes them where asked."""
    parser = Parser(
        "python -m hvtrain evaluate",
        usage="%(prog)s run=DIR [split=SPLIT] [checkpoint=best|last] [--output FILE] [SETTING=VALUE ...]",
        description="""\
Evaluates a finished run, by default its best checkpoint on the test data, and changes nothing. SPLIT is train,
validation or test (default).""",
        epilog=EPILOG,
    )
    parser.add_argument("--output", metavar="FILE", help="write the metrics as JSON")
    add_trust(parser)
    options = parser.parse_with_words(sys.argv[1:])
    finished = finished_config(options.words, "split", trust=options.trust)
    split = finished.choice("split", SPLITS, "test")
    with console.quiet_import(finished.config.verbose):
        from hvtrain.finished.finished_run import on_ranks, open_run
        from hvtrain.finished.metrics import metrics_of
    with on_ranks(finished.config) as strategy:
        run = open_run(finished, strategy)
        found = metrics_of(run, split)
        if run.is_chief:
            for item in found["skipped"]:
                print(f"left out: {item}")
            words = ", ".join(f"{name} {value:.4f}" for name, value in found["metrics"].items())
            print(f"{found['checkpoint']}, {found['examples']:,} {split} examples of {found['dataset']}: {words}")
            if options.output:
                write_atomic(Path(options.output), json.dumps({"run": str(finished.folder), **found}, indent=2) + "\n")
    return 0
