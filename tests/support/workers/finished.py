"""Runs on each rank: trainings and commands on the finished runs, one after the other, in one start of the ranks.

argv[1]: a JSON file with [[NAME, COMMAND, WORD, ...], ...]. COMMAND is the name of one, such as evaluate, or train;
"alone:evaluate" is run by rank 0 as a single process, and "mark RUN STEP" makes that checkpoint the best. Paths
are relative to the file's folder.
argv[2]: where rank 0 writes {NAME: {"printed": ..., "error": ..., "code": ...}}.
"""

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path

import fast_keras  # noqa: F401

import hvtrain.keras as hvd
from hvtrain import runner
from hvtrain.checkpoint.writer import mark_best
from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.core.commands import COMMANDS
from hvtrain.errors import UserError
from hvtrain.finished import finished_run
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.horovod import HorovodStrategy


class Staying(HorovodStrategy):
    """Leaves the other ranks only when all work is done, and watches nobody: that would begin anew each time."""

    def stop(self):
        pass

    def start_watchdog(self, abort_seconds):
        pass


class Alone(Strategy):
    """One process, though a launcher started it and others."""

    def __init__(self, **_):
        super().__init__()

    def start_watchdog(self, abort_seconds):
        pass


def work(command, arguments):
    if command == "train":
        # All steps have full batches, whatever the size of the data.
        config = from_dict(compose(["data.uneven=trim", *arguments]))
        runner.train(config)
        return 0
    if command == "mark":
        if hvd.rank() == 0:
            mark_best(Path(arguments[0]) / "checkpoints", int(arguments[1]), "val_accuracy", 1.0)
        return 0
    sys.argv = [command, *arguments]
    return COMMANDS[command].load()()


def main():
    tasks = json.loads(Path(sys.argv[1]).read_text())
    target = Path(sys.argv[2])
    os.chdir(Path(sys.argv[1]).parent)
    sys.path.insert(0, ".")  # Models of the tests' own.
    hvd.init()
    # A training, replay and bisect take the strategy that the run's settings name.
    HorovodStrategy.stop, HorovodStrategy.start_watchdog = Staying.stop, Staying.start_watchdog
    results = {}
    for name, command, *arguments in tasks:
        began, alone = time.monotonic(), command.startswith("alone:")
        finished_run.HorovodStrategy = Alone if alone else Staying
        printed, error, code = io.StringIO(), None, None
        if not alone or hvd.rank() == 0:
            try:
                with contextlib.redirect_stdout(printed):
                    code = work(command.removeprefix("alone:"), arguments)
            except UserError as failed:
                error = f"{type(failed).__name__}: {failed}"
        if hvd.rank() == 0:
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        results[name] = {"printed": printed.getvalue(), "error": error, "code": code}
    if hvd.rank() == 0:
        target.write_text(json.dumps(results))
    hvd.shutdown()


main()
