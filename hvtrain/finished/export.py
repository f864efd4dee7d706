"""`python -m hvtrain export`: writes a finished run's model in another format, and checks its outputs."""

import sys
from pathlib import Path

from hvtrain.errors import ConfigError
from hvtrain.finished.run_words import SETTINGS, add_trust, finished_config
from hvtrain.system import console
from hvtrain.system.command import Parser

FORMATS = {"keras": ".keras", "savedmodel": "", "onnx": ".onnx", "tflite": ".tflite"}
"""Suffixes by format; a SavedModel is a folder."""
EPILOG = f"""\
{SETTINGS}

examples:
  python -m hvtrain export run=runs/first format=savedmodel
  python -m hvtrain export run=runs/first format=onnx checkpoint=last --output digits.onnx
"""


def main() -> int:
    """Opens the run in this process, exports its model, and says how far its outputs differ."""
    parser = Parser(
        "python -m hvtrain export",
        usage=f"%(prog)s run=DIR format={'|'.join(FORMATS)} [checkpoint=best|last] [--output PATH] [SETTING=VALUE ...]",
        description="""\
Writes the model of a finished run, in float32 and with its preprocessing, and a description beside it (digits.json
for digits.onnx). The exported model is first compared with the run's own on examples of its data.""",
        epilog=EPILOG,
    )
    parser.add_argument("--output", metavar="PATH", help="the exported model; default: the run's name, in this folder")
    add_trust(parser)
    options = parser.parse_with_words(sys.argv[1:])
    finished = finished_config(options.words, "format", trust=options.trust)
    chosen = finished.choice("format", tuple(FORMATS), "")
    if console.is_launched():
        raise ConfigError("an export takes one process; start python -m hvtrain export without a launcher")
    path = Path(options.output or f"{finished.folder.name}{FORMATS[chosen]}")
    if options.output and path.suffix != FORMATS[chosen]:
        needed = f"PATH{FORMATS[chosen]}" if FORMATS[chosen] else "a folder"
        raise ConfigError(f"--output {path} does not fit format={chosen}; give {needed}")
    if path.exists() or not path.absolute().parent.is_dir():
        why = "exists already" if path.exists() else "is in a folder that does not exist"
        raise ConfigError(f"--output {path} {why}; choose another path")
    with console.quiet_import(finished.config.verbose):
        from hvtrain.finished.exported import export_checked
        from hvtrain.finished.finished_run import on_ranks, open_run
        from hvtrain.strategies.base import Strategy
    with on_ranks(finished.config, Strategy()) as strategy:
        run = open_run(finished, strategy, uses_split=False)
        print(f"{run.checkpoint} in {path}; {export_checked(run, chosen, path)}")
    return 0
