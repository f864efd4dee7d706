"""Trains with one rank in each Spark task: `python -m hvtrain spark`, or this file given to spark-submit.

The driver composes and checks the run before Spark starts. Horovod's launcher for Spark then starts a
process beside each task, which trains as `python -m hvtrain` would. `fit` does the same for a
DataFrame in a program's own Spark session, and `SparkModel` predicts on the executors with a finished run.
"""

import argparse
import functools
import itertools
import os
import re
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

if __name__ == "__main__":
    # A script's folder comes first on sys.path. Here that is hvtrain/, where `import
    # keras` would find hvtrain.keras.
    sys.path = [
        folder for folder in sys.path if Path(folder).resolve() != Path(__file__).resolve().parent
    ]

from hvtrain.config.choices import run_settings
from hvtrain.config.compose import composed
from hvtrain.config.schema import RunConfig, default_run_dir
from hvtrain.errors import ConfigError, DataError, RankError
from hvtrain.launch import environment
from hvtrain.launch.first_failure import failed_rank
from hvtrain.launch.output import MARK
from hvtrain.system import console
from hvtrain.system.command import Parser, at_least, enter
from hvtrain.system.files import local_folder
from hvtrain.system.text import counted

EXAMPLES = """\
examples:
  python -m hvtrain spark --np 4 model=mlp
  spark-submit --master yarn --num-executors 4 ... hvtrain/spark.py --np 4 model=mlp run.dir=/shared/first
  python -m hvtrain spark --np 4 strategy=parameter_server strategy.num_ps=1 model=mlp    (2 workers)
"""


def main() -> int:
    """Composes the run and checks it on the driver, then trains on Spark's executors.

    Returns the exit code of the first rank that failed, or 0.
    """
    options = parse(sys.argv[1:])
    config = composed(options.overrides)
    # One folder for all ranks, which must not be relative to an executor's working folder.
    config.run.dir = str(local_folder(config.run.dir or default_run_dir(config), "run.dir"))
    return start(config, options)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line into np (None: Spark's own number), mpi, and the run's overrides.

    Raises ConfigError.
    """
    parser = Parser(
        "python -m hvtrain spark",
        usage="%(prog)s [OPTION ...] [GROUP=CHOICE ...] [SETTING=VALUE ...]",
        description="Trains on the executors of a Spark cluster, one rank in each of N simultaneous tasks.",
        epilog=EXAMPLES,
        more_help=lambda: run_settings(arguments),
    )
    parser.add_argument(
        "--np",
        "-np",
        type=at_least(1),
        metavar="N",
        help="ranks; default: spark.default.parallelism, or N of local[N]",
    )
    controller = parser.add_mutually_exclusive_group()
    controller.add_argument("--mpi", action="store_true", help="Horovod on MPI instead of Gloo")
    controller.add_argument(
        "--gloo", dest="mpi", action="store_false", help="Horovod on Gloo (default)"
    )
    # All other options, such as --config-dir, are Hydra's.
    options, overrides = parser.parse_known_args(arguments)
    options.overrides = overrides
    return options


def start(config: RunConfig, options: argparse.Namespace) -> int:
    """Starts a Spark session and trains in its tasks.

    Returns the exit code of the first rank that failed, or 0. Raises UserError.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ConfigError(
            f"pyspark is not installed here ({error}); use spark-submit, or install pyspark from "
            "scripts/lock/spark.txt"
        ) from error
    # Spark must not retry a task: the new attempt would find the other ranks gone.
    builder = SparkSession.builder.appName("hvtrain").config("spark.task.maxFailures", 1)
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    python_path = os.environ.get("PYTHONPATH")
    if python_path:
        builder = builder.config("spark.executorEnv.PYTHONPATH", python_path)
    try:
        session = builder.getOrCreate()
    except PySparkRuntimeError as error:
        raise ConfigError(
            f"Spark did not start: {error}; see its own messages above "
            "(it needs Java 17: apt-get install openjdk-17-jre-headless)"
        ) from error
    try:
        return run_ranks(session.sparkContext, config, options.overrides, options.np, options.mpi)
    finally:
        session.sparkContext.setLogLevel("OFF")  # Executors that end would log tracebacks.
        session.stop()


def run_ranks(
    context: Any,
    config: RunConfig,
    overrides: Sequence[str],
    num_ranks: int | None,
    mpi: bool = False,
) -> int:
    """Runs one rank in each of num_ranks tasks of a SparkContext.

    Returns the exit code of the first rank that failed, or 0. Raises UserError.
    """
    import horovod.spark

    num_ranks = _choose_num_ranks(context, num_ranks)
    _patch_horovod()
    try:
        horovod.spark.run(
            train_rank,
            (config, overrides, str(Path.cwd())),
            num_proc=num_ranks,
            use_gloo=not mpi,
            use_mpi=mpi,
            env=rank_environment(mpi),
            stdout=RankLines(sys.stdout),
            stderr=RankLines(sys.stderr),
            verbose=0,
            executable=context.pythonExec,
        )
    except Exception as error:
        text = " ".join(str(error).split())
        failed = failed_rank(text)
        if failed:
            rank, code = failed
            name = f"rank {rank}" if rank else "a rank"
            sys.stderr.write(f"hvtrain spark: {name} ended with exit code {code}\n")
            return code
        if "Timed out" in text:
            raise RankError(
                f"Spark did not run {counted(num_ranks, 'task')} at once: {text}; use fewer ranks or more executors"
            ) from error
        raise
    return 0


def _choose_num_ranks(context: Any, num_ranks: int | None) -> int:
    """Returns num_ranks, or Spark's own number of tasks if it is None.

    Raises ConfigError if Spark has no such number, or cannot run that many tasks at once.
    """
    num_ranks = num_ranks or int(context.getConf().get("spark.default.parallelism", "0"))
    is_local = re.fullmatch(r"local(\[[^,]*\])?", context.master)
    if not is_local:
        # A cluster's defaultParallelism grows while executors start, so the user has to give the number.
        if not num_ranks:
            raise ConfigError(
                "the number of ranks is not set; give --np N (tasks that run at once) or set spark.default.parallelism"
            )
        return num_ranks

    num_ranks = num_ranks or context.defaultParallelism
    # Horovod would wait ten minutes for the other tasks.
    if num_ranks > context.defaultParallelism:
        raise ConfigError(
            f"{num_ranks} ranks need as many tasks at once, and Spark's master {context.master} runs "
            f"{context.defaultParallelism}; use fewer ranks, or the master local[{num_ranks}]"
        )
    return num_ranks


@dataclass(frozen=True)
class SparkModel:
    """A finished run that predicts on Spark's executors.

    Args:
        run: the run folder, which must be visible to the driver and all executors.
        trust: True if the run's settings may name code that is neither hvtrain's nor Keras's. Such code is executed.
    """

    run: str
    trust: bool = False

    def transform(self, frame: Any) -> Any:
        """Returns a Spark DataFrame with one more column, `prediction`: a struct of the columns that predict writes.

        Dots in the names of its fields become `_`. The first rows are predicted immediately, to learn the types.

        Raises DataError if there are no rows, or the model cannot take the first ones.
        """
        from pyspark.sql import Row
        from pyspark.sql.types import StructType

        predicted = frame.rdd.mapPartitions(functools.partial(predict_partition, self))
        try:
            *_, prediction = predicted.first()
        # Spark puts the executor's Python and Java stacks into the message.
        except Exception as error:
            cause = re.search(r"hvtrain\.errors\.\w+: (.*)", str(error))
            raise DataError(
                f"the rows cannot be predicted: {cause[1] if cause else error}"
            ) from error

        session = frame.sparkSession
        added = session.createDataFrame([Row(prediction=Row(**prediction))]).schema
        return session.createDataFrame(predicted, StructType([*frame.schema, *added]))


def fit(frame: Any, overrides: Sequence[str], num_ranks: int | None = None) -> SparkModel:
    """Trains on the rows of a Spark DataFrame, in tasks of its session, as `dataset=table` does on a file.

    The rows are written as Parquet to rows/ in the run folder, where the ranks read them. The same
    call with the same rows resumes a run. Returns the trained model.

    Args:
        frame: a DataFrame with columns of features and a target, as dataset=table takes them.
        overrides: settings of the run, such as "dataset.target=label", "model=mlp" and
            "run.dir=/shared/first".
        num_ranks: number of simultaneous tasks; None: spark.default.parallelism, or N of local[N].

    Raises:
        UserError: a setting is wrong, or the training has failed.
    """
    config = composed(["dataset=table", *overrides])
    run_dir = local_folder(config.run.dir or default_run_dir(config), "run.dir")
    rows = run_dir / "rows"
    # A URI with a scheme (file:), since Spark's default file system, such as HDFS,
    # is not the one that ranks read.
    frame.write.mode("overwrite").parquet(rows.as_uri())

    config.run.dir = str(run_dir)
    config.dataset["file"] = str(rows)
    code = run_ranks(frame.sparkSession.sparkContext, config, overrides, num_ranks)
    if code:
        raise RankError(
            f"the training in {run_dir} ended with exit code {code}; see the messages above"
        )
    return SparkModel(config.run.dir, trust=True)


def predict_partition(model: SparkModel, rows: Iterator[Any]) -> Iterator[Any]:
    """Yields the rows of a partition, each with a dict of its predictions (in an executor)."""
    import pyarrow as pa
    import pyarrow.parquet

    run = _open_run(model)
    from hvtrain.finished.inputs import input_examples
    from hvtrain.finished.outputs import predict_rows

    batch_size = run.config.train.evaluation_batch_size
    while part := list(itertools.islice(rows, batch_size)):
        # Goes through a file, so that columns are read and checked as by the command predict.
        with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
            pa.parquet.write_table(
                pa.Table.from_pylist([row.asDict(recursive=True) for row in part]), file.name
            )
            # There is only one batch, since the part has at most batch_size rows.
            ((inputs, _),) = input_examples(run, Path(file.name)).batches()

        columns = predict_rows(run, (inputs, {}), run.model.predict_on_batch)
        # Spark takes a dot in a name for access to a struct's field.
        lists = {name.replace(".", "_"): column.tolist() for name, column in columns.items()}
        for row, *values in zip(part, *lists.values()):
            yield (*row, dict(zip(lists, values)))


@functools.cache
def _open_run(model: SparkModel):
    """Opens a run, once in each of Spark's Python processes, since one process predicts many partitions."""
    with console.quiet_import(verbose=False):
        from hvtrain.finished.finished_run import open_alone

    # Not hvtrain.load, which would read the run's data in each executor to
    # check that they are unchanged.
    return open_alone([f"run={model.run}"], model.trust, uses_split=False)


@dataclass
class RankLines:
    """Writes the ranks' lines on the driver: removes launchers' marks, and writes each error only once."""

    stream: TextIO
    _reported: set[str] = field(default_factory=set)

    def write(self, line: str) -> None:
        line = MARK.sub("", line)
        error = re.match(r"hvtrain: (?:rank \d+: )?(.*)", line)
        if error:
            if error[1] in self._reported:
                return
            self._reported.add(error[1])
        self.stream.write(line)

    def flush(self) -> None:
        self.stream.flush()


def _patch_horovod() -> None:
    """Patches Horovod's launcher for Spark in this process: three changes, explained below."""
    from horovod.runner import launch
    from horovod.runner.common.util import network

    # To find out what it was built with, Horovod would import TensorFlow in child processes. If
    # anything is missing, the ranks report it anyway.
    launch.gloo_built = launch.mpi_built = lambda verbose=False: True

    def copy_lines(source, target):
        for line in iter(source.stream.readline, b""):
            target.write(line.decode("utf-8", "replace"))
            target.flush()

    # Horovod forwards the ranks' output in blocks of 64 KiB, so lines could appear hours late.
    network.shutil = types.SimpleNamespace(copyfileobj=copy_lines)

    # When a rank fails, Horovod cancels the Spark job, and the job's
    # thread would print a long traceback.
    def hook(args: threading.ExceptHookArgs) -> None:
        if "cancelled" not in str(args.exc_value):
            threading.__excepthook__(args)

    threading.excepthook = hook


def rank_environment(mpi: bool) -> dict[str, str]:
    """Returns the driver's environment variables for the ranks, without most paths: executors have their own."""
    variables = environment.for_ranks(os.environ)
    # OMPI_MCA_plm too, since mpirun reaches the executors through Horovod, not ssh.
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "OMPI_MCA_plm"):
        variables.pop(name, None)
    if mpi:
        # mpirun starts on the driver, so PATH stays. Its own error messages are suppressed.
        variables.setdefault("OMPI_MCA_orte_execute_quiet", "1")
    else:
        variables.pop("PATH", None)
    return variables


def train_rank(config: RunConfig, overrides: Sequence[str], folder: str) -> None:
    """Runs one rank, in its own process beside a Spark task.

    Exits with the rank's code unless it succeeds.
    """
    sys.argv[1:] = overrides
    # As with the other launchers, relative paths and imports start from the driver's folder.
    if Path(folder).is_dir():
        os.chdir(folder)
        sys.path.insert(0, folder)
    enter(lambda: _train(config))


def _train(config: RunConfig) -> int:
    from horovod.spark.task import get_available_devices

    gpus = get_available_devices()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    with console.quiet_import(config.verbose):
        from hvtrain.runner import train
    train(config)
    return 0


if __name__ == "__main__":
    # Imported by module name, so that executors can import the functions that are sent to them,
    # which is impossible for those of __main__.
    from hvtrain import spark

    enter(spark.main)
