"""`python -m hvtrain evaluate`: the metrics of a finished run, the same on any number of ranks."""

import json
from pathlib import Path

from hvtrain.core.files import write_atomic
from hvtrain.finished.arguments import SPLITS, parse_command
from hvtrain.system import console

ABOUT = """\
Evaluates a finished run, by default its best checkpoint on the test data, and changes nothing. SPLIT is train,
validation or test (default)."""
EXAMPLES = """\
  python -m hvtrain evaluate run=runs/first
  horovodrun -np 2 python -m hvtrain evaluate run=runs/first split=validation checkpoint=last --output metrics.json
"""


def main() -> int:
    """Opens the run, evaluates it, prints the metrics, and writes them if asked to."""
    options, finished = parse_command(
        "evaluate",
        "[split=SPLIT] [checkpoint=best|last] [--output FILE]",
        ABOUT,
        EXAMPLES,
        "split",
        output={"metavar": "FILE", "help": "write the metrics as JSON"},
    )
    split = finished.choice("split", SPLITS, "test")
    with console.quiet_import(finished.config.verbose):
        from hvtrain.finished.finished_run import on_ranks, open_run
        from hvtrain.finished.outputs import metrics_of

    with on_ranks(finished.config) as strategy:
        run = open_run(finished, strategy)
        results = metrics_of(run, split)  # Every rank takes part; the chief prints.
        if run.is_chief:
            for text in results["skipped"]:
                print(f"left out: {text}")
            metrics = ", ".join(f"{name} {value:.4f}" for name, value in results["metrics"].items())
            examples = f"{results['examples']:,} {split} examples of {results['dataset']}"
            print(f"{results['checkpoint']}, {examples}: {metrics}")
            if options.output:
                text = json.dumps({"run": str(finished.folder), **results}, indent=2)
                write_atomic(Path(options.output), text + "\n")

    return 0
