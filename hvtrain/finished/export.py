"""`python -m hvtrain export`: writes a finished run's model in another format, and checks its outputs."""

from pathlib import Path

from hvtrain.errors import ConfigError
from hvtrain.finished.arguments import parse_command
from hvtrain.system import console

# By format; a SavedModel is a folder.
SUFFIXES = {"keras": ".keras", "savedmodel": "", "onnx": ".onnx", "tflite": ".tflite"}
ABOUT = """\
Writes the model of a finished run, in float32 and with its preprocessing, and a description beside it (digits.json
for digits.onnx). The exported model is first compared with the run's own on examples of its data."""
EXAMPLES = """\
  python -m hvtrain export run=runs/first format=savedmodel
  python -m hvtrain export run=runs/first format=onnx checkpoint=last --output digits.onnx
"""


def main() -> int:
    """Opens the run in this process, exports its model, and says how far its outputs differ."""
    options, finished = parse_command(
        "export",
        f"format={'|'.join(SUFFIXES)} [checkpoint=best|last] [--output PATH]",
        ABOUT,
        EXAMPLES,
        "format",
        output={"metavar": "PATH", "help": "the exported model; default: the run's name, in this folder"},
    )
    model_format = finished.choice("format", tuple(SUFFIXES), "")
    if console.is_launched():
        raise ConfigError("an export takes one process; start python -m hvtrain export without a launcher")
    path = output_path(options.output, finished.folder.name, model_format)

    with console.quiet_import(finished.config.verbose):
        from hvtrain.finished.exported import export_checked
        from hvtrain.finished.finished_run import on_ranks, open_run
        from hvtrain.strategies.base import Strategy

    # Another process could only write the same file.
    with on_ranks(finished.config, Strategy()) as strategy:
        run = open_run(finished, strategy, uses_split=False)
        print(f"{run.checkpoint} in {path}; {export_checked(run, model_format, path)}")

    return 0


def output_path(output: str | None, run_name: str, model_format: str) -> Path:
    """Returns where the exported model goes.

    Args:
        output: the user's choice.
        run_name: of which the default is made.
        model_format: one of SUFFIXES.

    Raises:
        ConfigError: the path has another suffix, exists, or is in no folder.
    """
    suffix = SUFFIXES[model_format]
    path = Path(output or f"{run_name}{suffix}")
    # A default path may have any suffix: the folder lr0.1 of a run becomes the SavedModel lr0.1.
    if output and path.suffix != suffix:
        needed = f"PATH{suffix}" if suffix else "a folder"
        raise ConfigError(f"--output {path} does not fit format={model_format}; give {needed}")

    if path.exists():
        raise ConfigError(f"--output {path} exists already; choose another path")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--output {path} is in a folder that does not exist; choose another path")

    return path
