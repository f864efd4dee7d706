"""The commands on a finished run: `python -m hvtrain evaluate`, `predict`, `export` and `generate`.

evaluate and predict give the same results on any number of ranks; export and generate run in one process.
"""

from pathlib import Path
from typing import Any

from hvtrain.errors import ConfigError, DataError
from hvtrain.finished.arguments import SPLITS, parse_command
from hvtrain.finished.hugging_face import open_hub, upload
from hvtrain.system import console
from hvtrain.system.command import at_least, not_negative
from hvtrain.system.files import page_path, read_json, write_json
from hvtrain.system.run_files import RESULT_FILE, restore_nan
from hvtrain.system.storage.runs import Output


def evaluate() -> int:
    """Evaluates a finished run on a split and prints the metrics; with --output, writes them as JSON."""
    options, finished = parse_command(
        "evaluate",
        "[split=SPLIT] [checkpoint=best|last] [--output FILE]",
        """\
Evaluates a finished run, by default its best checkpoint on the test data, and changes nothing. SPLIT is train,
validation or test (default).""",
        """\
  python -m hvtrain evaluate runs/first
  horovodrun -np 2 python -m hvtrain evaluate runs/first split=validation checkpoint=last --output metrics.json
""",
        "split",
        output={"metavar": "FILE", "help": "write the metrics as JSON"},
    )
    split = finished.choice("split", SPLITS, "test")
    with console.quiet_import(finished.config.verbose):
        from hvtrain.finished.finished_run import opened
        from hvtrain.finished.outputs import evaluate_split

    with opened(finished) as run:
        if options.output:
            comm = run.strategy.comm
            # An output that cannot be written is refused now, not after a long evaluation.
            output = comm.all_or_raise(lambda: Output(options.output, replaces=True))
            comm.on_chief(lambda: page_path(output.path))
        results = evaluate_split(run, split)  # Every rank takes part; the chief prints.
        if run.is_chief:
            for problem in results["skipped"]:
                print(f"left out: {problem}")
            metrics = ", ".join(f"{name} {value:.4f}" for name, value in results["metrics"].items())
            noun = "example" if results["examples"] == 1 else "examples"
            examples = f"{results['examples']:,} {split} {noun} of {results['dataset']}"
            print(f"{results['checkpoint']}, {examples}: {metrics}")
            if options.output:
                write_json(output.path, {"run": str(finished.folder), **results}, indent=2)
                output.send()

    return 0


OUTPUT_HELP = """\
FILE.csv or FILE.parquet, or a folder for masks, also as s3://...; default: predictions.csv or masks, in this folder"""


def predict() -> int:
    """Predicts the examples of a split or of files; the chief writes the predictions."""
    options, finished = parse_command(
        "predict",
        "[split=SPLIT | input=PATH] [checkpoint=best|last] [--output FILE]",
        """\
Writes what a finished run predicts for each example, in order, and changes nothing in the run. SPLIT is train,
validation or test (default).""",
        """\
  python -m hvtrain predict runs/first --output predictions.parquet
  horovodrun -np 2 python -m hvtrain predict runs/leaves input=new_pictures --output leaves.csv
""",
        "split",
        "input",
        output={"metavar": "FILE", "help": OUTPUT_HELP},
    )
    split = finished.choice("split", SPLITS, "test")
    path = finished.arguments.get("input")
    if path == "":
        raise ConfigError("input= has no value; give a file or a folder, or leave it out")
    # Only an explicit split conflicts with input=; the default does not.
    if path and "split" in finished.arguments:
        raise ConfigError(f"split={split} and input={path} exclude each other; give one of them")
    with console.quiet_import(finished.config.verbose):
        from hvtrain.data.sources.table import Table
        from hvtrain.finished.finished_run import opened
        from hvtrain.finished.inputs import input_examples, split_examples, tables_in
        from hvtrain.finished.outputs import predictions, writer_for

    with opened(finished, uses_split=path is None) as run:
        comm = run.strategy.comm
        examples = comm.all_or_raise(
            lambda: input_examples(run, Path(path)) if path else split_examples(run, split)
        )
        if not examples.total:
            raise DataError(f"input={path} holds no examples; give a file that has some")

        # Masks are images, which do not fit into the rows of a table.
        has_masks = run.task.targets_are_masks
        name = options.output or ("masks" if has_masks else "predictions.csv")
        output = comm.all_or_raise(lambda: Output(name, replaces=not has_masks))
        writer: Any = None

        def open_writer():
            nonlocal writer
            inputs: list[Any] = [path, run.config.dataset]
            if isinstance(run.source, Table):
                inputs.append(tables_in(inputs))
            writer = writer_for(output.path, has_masks, inputs)

        # Only the chief writes, so the path is checked on its host alone.
        comm.on_chief(open_writer)

        num_examples = 0
        try:
            for rows in predictions(run, examples):
                # All ranks get the same rows; only the chief writes them.
                num_examples += len(rows["example"])
                comm.on_chief(lambda: writer.add(rows))  # noqa: B023, called immediately
            comm.on_chief(lambda: writer.close())  # Other ranks have none.
            comm.on_chief(output.send)
        except BaseException:  # Even Ctrl-C must leave no half-written file.
            if run.is_chief:
                writer.discard()
            raise

        skipped = run.skipped_items()  # Every rank takes part.
        if run.is_chief:
            for item in skipped:
                print(f"left out: {item.location}: {item.problem}")
            noun = "prediction" if num_examples == 1 else "predictions"
            print(
                f"{run.checkpoint}: {num_examples:,} {noun} of {examples.name} in {name}{examples.note}"
            )

    return 0


# Suffixes by format. SavedModels and models for the Hugging Face Hub are folders, without a suffix.
SUFFIXES = {"keras": ".keras", "savedmodel": "", "onnx": ".onnx", "tflite": ".tflite", "hf": ""}


def export() -> int:
    """Exports a finished run's model, and prints how far the export's outputs differ from the model's."""
    options, finished = parse_command(
        "export",
        f"format={'|'.join(SUFFIXES)} [checkpoint=best|last] [repo=hf://USER/NAME] [--output PATH]",
        """\
Writes the model of a finished run, in float32 and with its preprocessing, and a description beside it (digits.json
for digits.onnx). The exported model is first compared with the run's own on examples of its data. format=hf writes a
folder with a model card, as on the Hugging Face Hub, and repo= uploads it.""",
        """\
  python -m hvtrain export runs/first format=savedmodel
  python -m hvtrain export runs/first format=onnx checkpoint=last --output digits.onnx
  python -m hvtrain export runs/first format=hf repo=hf://USER/digits
""",
        "format",
        "repo",
        output={
            "metavar": "PATH",
            "help": "the exported model; default: the run's name, in this folder",
        },
    )
    model_format = finished.choice("format", tuple(SUFFIXES), "")
    _refuse_launcher("export")
    output = _export_output(options.output, model_format, finished.folder.name)
    path = output.path
    repo = finished.arguments.get("repo")
    if repo == "":
        raise ConfigError("repo= has no value; give hf://USER/NAME, or leave it out")
    if repo and model_format != "hf":
        raise ConfigError(f"repo={repo} needs format=hf; add format=hf, or leave repo out")
    api = open_hub(repo) if repo else None

    with console.quiet_import(finished.config.verbose):
        from hvtrain.finished.exported import export_checked
        from hvtrain.finished.finished_run import opened

    # One process is enough; more would only write the same file.
    with opened(finished, alone=True, uses_split=False) as run:
        result = restore_nan(read_json(finished.folder / RESULT_FILE, dict))
        verdict = export_checked(run, model_format, path, result, repo or path.name)
        output.send()
        print(f"{run.checkpoint} in {options.output or path}; {verdict}")

    if repo:
        upload(api, path, repo)
        print(f'uploaded; keras.saving.load_model("{repo}") loads it')

    return 0


def _export_output(given_path: str | None, model_format: str, run_name: str) -> Output:
    """Returns the output for the exported model. Raises ConfigError if the path cannot be used."""
    suffix = SUFFIXES[model_format]
    output = Output(given_path or f"{run_name}{suffix}")
    path = output.path
    # The default path is not checked: a run named lr0.1 gives the SavedModel lr0.1, which
    # only looks as if it had a suffix.
    if given_path and path.suffix != suffix:
        needed = f"PATH{suffix}" if suffix else "a folder"
        raise ConfigError(f"--output {path} does not fit format={model_format}; give {needed}")
    # An existing path may be another export, so it is never replaced.
    if path.exists():
        raise ConfigError(f"--output {path} exists already; choose another path")
    page_path(path)

    return output


def _refuse_launcher(command: str) -> None:
    if console.is_launched():
        raise ConfigError(
            f"{command} runs in one process; start python -m hvtrain {command} without a launcher"
        )


def generate() -> int:
    """Prints a prompt and the continuation that a finished run's language model generates."""
    options, finished = parse_command(
        "generate",
        "prompt=TEXT [checkpoint=best|last] [OPTION ...]",
        "Prints the prompt and the trained model's continuation. The same seed gives the same text.",
        """\
  python -m hvtrain generate runs/tales "prompt=The statement" --tokens 100 --temperature 0.5
""",
        "prompt",
        tokens={
            "type": at_least(1),
            "default": 64,
            "metavar": "N",
            "help": "maximum number of tokens to write; default: 64",
        },
        temperature={
            "type": not_negative,
            "default": 0.7,
            "metavar": "T",
            "help": "sampling temperature, 0: greedy; default: 0.7",
        },
        seed={
            "type": at_least(0),
            "default": 0,
            "metavar": "N",
            "help": "seed for sampling; default: 0",
        },
    )
    # An empty prompt gives no token to continue from.
    prompt = finished.arguments.get("prompt")
    if not prompt:
        raise ConfigError("prompt=TEXT is missing; give the beginning of a text, in quotes")
    _refuse_launcher("generate")
    with console.quiet_import(finished.config.verbose):
        from hvtrain.finished.finished_run import opened
        from hvtrain.tasks.language import continuation

    with opened(finished, alone=True, uses_split=False) as run:
        source = run.source
        tokens = source.tokens_of(prompt)
        facts = source.facts()
        # In training, a model that is not causal saw the tokens that follow, so it cannot continue
        # a text.
        if not tokens or not facts.get("causal"):
            raise ConfigError(
                f"the run of {source.name} has no tokenizer, or is not causal; choose a run of dataset=text with "
                "dataset.objective=causal and without a label"
            )

        written = continuation(
            run.model,
            tokens,
            options.tokens,
            facts["length"],
            options.temperature,
            options.seed,
            source.end_token,
        )
        print(source.text_of([*tokens, *written]))

    return 0
