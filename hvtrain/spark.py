"""The door on Spark: `python -m hvtrain.spark`, or this file given to spark-submit. Each Spark task is one rank.

The driver composes and checks the run, as the other doors do, before Spark starts. Horovod's launcher for Spark
then starts a process beside each task, which trains as `python -m hvtrain` would there.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

if __name__ == "__main__":
    # Started as a file: its folder is hvtrain's own, in which `keras` would be hvtrain.keras.
    sys.path = [folder for folder in sys.path if Path(folder or ".").resolve() != Path(__file__).resolve().parent]

from hvtrain.cli import enter
from hvtrain.config.compose import CONFIGS, compose, own_folders
from hvtrain.config.help import help_text
from hvtrain.config.schema import RunConfig, default_run_dir, from_dict
from hvtrain.errors import ConfigError, RankError
from hvtrain.launch import environment
from hvtrain.launch.first_failure import failed_rank
from hvtrain.system import console
from hvtrain.system.imports import without

USAGE = """\
python -m hvtrain.spark [--np N] [--mpi] [GROUP=CHOICE ...] [SETTING=VALUE ...]
spark-submit --master yarn ... hvtrain/spark.py [--np N] [--mpi] [GROUP=CHOICE ...] [SETTING=VALUE ...]

Trains on the executors of a Spark cluster, one rank in each of N tasks; all tasks must run at once.
  --np N    ranks; default: spark.default.parallelism, or what local[N] says
  --mpi     Horovod on MPI instead of Gloo
The words after these are those of python -m hvtrain:

"""


@dataclass(frozen=True)
class Options:
    """What the line says besides the words of the run. num_ranks None: Spark's own number."""

    num_ranks: int | None
    mpi: bool
    words: list[str]


def main() -> None:
    """Runs the command line and exits; with the code of the rank that failed first, where one did."""
    enter(compose_and_start, lambda: USAGE + help_text([CONFIGS, *own_folders(sys.argv)]))


def compose_and_start() -> int:
    """Composes the run and checks it on the driver, then trains on Spark's executors."""
    options = parse(sys.argv[1:])
    for tree in compose(options.words):
        config = from_dict(tree)
        # The same folder for all, and not one below an executor's working folder.
        config.run.dir = str(Path(config.run.dir or default_run_dir(config)).absolute())
        return start(config, options)
    return 0


def parse(words: list[str]) -> Options:
    """The line's words. Raises ConfigError.

    >>> parse(["--np", "4", "model=mlp"])
    Options(num_ranks=4, mpi=False, words=['model=mlp'])
    """
    num_ranks, rest, mpi = None, [], False
    waiting = iter(words)
    for word in waiting:
        name, _, value = word.partition("=")
        if name in ("--np", "-np"):
            value = value or next(waiting, "")
            if not re.fullmatch(r"[1-9]\d*", value):
                raise ConfigError(f"{name} {value} is no number of ranks; write --np 4")
            num_ranks = int(value)
        elif word in ("--mpi", "--gloo"):
            mpi = word == "--mpi"
        else:
            rest.append(word)
    return Options(num_ranks, mpi, rest)


def start(config: RunConfig, options: Options) -> int:
    """Trains in Spark tasks; the exit code of the first rank that failed, or 0. Raises UserError."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    try:
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ConfigError(
            f"Spark is not to be found here ({error}); start with spark-submit, or install scripts/lock/spark.txt"
        ) from error
    # A task that is tried again would find the other ranks gone.
    builder = SparkSession.builder.appName("hvtrain").config("spark.task.maxFailures", 1)
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    if os.environ.get("PYTHONPATH"):
        builder = builder.config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"])
    try:
        session = builder.getOrCreate()
    except PySparkRuntimeError as error:
        raise ConfigError(
            f"Spark did not start: {' '.join(str(error).split())}; its own lines stand above "
            "(Java 17 is needed: apt-get install openjdk-17-jre-headless)"
        ) from error
    try:
        return run_ranks(session.sparkContext, config, options)
    finally:
        session.sparkContext.setLogLevel("OFF")  # Executors that go are not worth a traceback.
        session.stop()


def run_ranks(context: Any, config: RunConfig, options: Options) -> int:
    """One rank in each of N tasks of a SparkContext; the exit code of the first that failed, or 0. Raises UserError."""
    import horovod.spark

    num_ranks = options.num_ranks or _parallelism(context)
    _smooth_horovod()
    try:
        horovod.spark.run(
            train_rank,
            (config, options.words, str(Path.cwd())),
            num_proc=num_ranks,
            use_gloo=not options.mpi,
            use_mpi=options.mpi,
            env=rank_environment(options.mpi),
            stdout=RankLines(sys.stdout),
            stderr=RankLines(sys.stderr),
            verbose=0,
            executable=context.pythonExec,
        )
    except Exception as error:
        text = " ".join(str(error).split())
        failed = failed_rank(text)
        if failed:
            name, code = failed
            print(f"hvtrain.spark: {f'rank {name}' if name else 'a rank'} ended with exit code {code}", file=sys.stderr)
            return code
        if "Timed out" in text:
            raise RankError(f"Spark did not run {num_ranks} tasks at once: {text}") from error
        raise
    return 0


class RankLines:
    """Ranks' lines on the driver: without the launchers' marks, and what several say when a run fails, once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said: set[str] = set()

    def write(self, line: str) -> None:
        line = re.sub(r"^\[[\d,]+\]<(stdout|stderr)>:", "", line)
        error = re.match(r"hvtrain: (?:rank \d+: )?(.*)", line)
        if error and error[1] in self._said:
            return
        self._said.update([error[1]] if error else [])
        self._stream.write(line)

    def flush(self) -> None:
        self._stream.flush()


def _smooth_horovod() -> None:
    """Takes three rough edges off Horovod's launcher, in this process."""
    from horovod.runner import launch
    from horovod.runner.common.util import network

    # It finds out what it was built with by importing TensorFlow in child processes; ranks say what is missing.
    launch.gloo_built = launch.mpi_built = lambda verbose=False: True

    def copy_lines(source: Any, target: Any) -> None:
        for line in iter(source.stream.readline, b""):
            target.write(line.decode("utf-8", "replace"))
            target.flush()

    # It hands on ranks' output in blocks of 64 KiB, hours of epochs.
    network.shutil = types.SimpleNamespace(copyfileobj=copy_lines)

    # When a rank fails it cancels Spark's job, whose thread then shows a long traceback of just that.
    def hook(args: threading.ExceptHookArgs) -> None:
        if "cancelled" not in str(args.exc_value):
            threading.__excepthook__(args)

    threading.excepthook = hook


def rank_environment(mpi: bool) -> dict[str, str]:
    """What ranks get of the driver's environment; executors have places of their own."""
    found = environment.for_ranks(os.environ)
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "OMPI_MCA_plm", *([] if mpi else ["PATH"])):
        found.pop(name, None)
    if mpi:
        # mpirun starts on the driver, and reaches the executors through Horovod and not through ssh.
        found.setdefault("OMPI_MCA_orte_execute_quiet", "1")
    return found


def train_rank(config: RunConfig, words: list[str], folder: str) -> None:
    """One rank, in a process of its own beside a Spark task; exits with its code unless all is well."""
    sys.argv[1:] = words
    # As the other launchers do: relative paths, and modules beside the line, are those of the driver's folder.
    if Path(folder).is_dir():
        os.chdir(folder)
        sys.path.insert(0, folder)
    enter(lambda: _train(config), lambda: "")


def _train(config: RunConfig) -> int:
    from horovod.spark.task import get_available_devices

    gpus = get_available_devices()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if not config.verbose:
        console.quiet_tensorflow()
    with console.native_notes_held(not config.verbose), without("sklearn"):
        from hvtrain.runner import train
    train(config)
    return 0


def _parallelism(context: Any) -> int:
    """Spark's number of tasks where it is one that somebody chose: a cluster's own grows while it starts."""
    chosen = context.getConf().get("spark.default.parallelism")
    if chosen is None and not re.fullmatch(r"local(\[[^,]*\])?", context.master):
        raise ConfigError("how many ranks? give --np N (tasks that run at once) or set spark.default.parallelism")
    return int(chosen or context.defaultParallelism)


if __name__ == "__main__":
    # By its name, under which the executors find what is sent to them.
    from hvtrain.spark import main as named_main

    named_main()
