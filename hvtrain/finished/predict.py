"""`python -m hvtrain predict`: a prediction for every example, once and in order, on any number of ranks."""

from pathlib import Path

from hvtrain.errors import ConfigError, DataError
from hvtrain.finished.arguments import SPLITS, parse_command
from hvtrain.system import console

ABOUT = """\
Writes what a finished run predicts for each example, in order, and changes nothing in the run. SPLIT is train,
validation or test (default)."""
OUTPUT_HELP = "FILE.csv or FILE.parquet, or a folder for masks; default: predictions.csv or masks, in this folder"
EXAMPLES = """\
  python -m hvtrain predict run=runs/first --output predictions.parquet
  horovodrun -np 2 python -m hvtrain predict run=runs/leaves input=new_pictures --output leaves.csv
"""


def main() -> int:
    """Opens the run, predicts, and writes the predictions on the chief."""
    options, finished = parse_command(
        "predict",
        "[split=SPLIT | input=PATH] [checkpoint=best|last] [--output FILE]",
        ABOUT,
        EXAMPLES,
        "split",
        "input",
        output={"metavar": "FILE", "help": OUTPUT_HELP},
    )
    split = finished.choice("split", SPLITS, "test")
    path = finished.arguments.get("input")
    if path is not None and "split" in finished.arguments:
        raise ConfigError(f"split={split} and input={path} exclude each other; give one of them")
    with console.quiet_import(finished.config.verbose):
        from hvtrain.finished.finished_run import on_ranks, open_run
        from hvtrain.finished.inputs import of_input, of_split
        from hvtrain.finished.outputs import predictions
        from hvtrain.finished.writers import writer_for

    with on_ranks(finished.config) as strategy:
        comm = strategy.comm
        run = open_run(finished, strategy, uses_split=path is None)
        examples = comm.all_or_raise(lambda: of_input(run, Path(path)) if path else of_split(run, split))
        if not examples.total:
            raise DataError(f"input={path} holds no examples; give a file that has some")

        has_masks = run.task.targets_are_masks
        output = Path(options.output or ("masks" if has_masks else "predictions.csv"))
        # The files of the data set are settings of it; which ones differs, so all texts count as paths.
        settings = (path, *run.config.dataset.values())
        inputs = [Path(value) for value in settings if isinstance(value, str)]
        writer = comm.all_or_raise(lambda: writer_for(output, has_masks, inputs))

        num_examples = 0
        try:
            for rows in predictions(run, examples):
                num_examples += len(rows["example"])
                comm.on_chief(lambda: writer.add(rows))  # noqa: B023, called at once
            comm.on_chief(writer.close)
        except BaseException:  # Also a Ctrl-C leaves no half-written file.
            if run.is_chief:
                writer.discard()
            raise

        skipped = run.left_out()
        if run.is_chief:
            for item in skipped:
                print(f"left out: {item.location}: {item.problem}")
            print(f"{run.checkpoint}: {num_examples:,} predictions of {examples.name} in {output}{examples.note}")

    return 0
