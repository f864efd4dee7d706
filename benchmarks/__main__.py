"""`python -m benchmarks`: how fast this machine trains with hvtrain and with its alternatives."""

import argparse
import os
import signal
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from benchmarks.contenders import CONTENDERS, TRAIN, WORKLOADS, named
from benchmarks.input import WORKS, Inputs
from benchmarks.scaling import Scaling
from benchmarks.steps import Steps
from hvtrain.errors import ConfigError
from hvtrain.system.command import Parser, at_least, enter, make_output

DATA = ("synthetic", "fashion_mnist")
STARTUP = "hvtrain-mpi,loop-mpi,hvtrain-1,keras"


def main() -> int:
    """Runs rounds of one kind of measurement; prints a table and writes it to files."""
    # So that the processes that it started end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = parser().parse_args()
    # Threads are set once, for the run that has the fewest cores for each rank.
    most_ranks = max(options.ranks) if options.kind == "scaling" else options.ranks
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // most_ranks)
    subject = options.images if options.kind == "input" else options.workload
    name = f"bench/{datetime.now():%Y-%m-%d_%H-%M-%S}-{options.kind}-{subject}"
    folder = Path(options.output or name).absolute()
    experiment = make_experiment(options, folder, threads)

    make_output(folder)
    experiment.run(options.rounds)
    experiment.write()
    experiment.plot()
    print("\n" + "\n".join(experiment.table()))
    print(f"results in {folder}")
    return 0


def make_experiment(
    options: argparse.Namespace, folder: Path, threads: int
) -> Inputs | Scaling | Steps:
    """The experiment that the options describe. Raises ConfigError."""
    if options.kind == "input":
        return Inputs(folder, threads, options.sizes, options.works, options.images, options.steps)

    workload = WORKLOADS[options.workload]
    if options.kind == "scaling":
        return Scaling(
            folder, threads, workload, options.data, options.ranks, options.steps or workload.steps
        )

    names = options.contenders.split(",")
    contenders = [named(name) for name in names]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"{','.join(names)} names a contender twice; the first runs twice a round anyway"
        )

    figure = "step_seconds"
    if options.kind == "startup":
        # Only the first step is compared.
        workload = replace(workload, warmup_steps=1, steps=2)
        figure = "first_step_seconds"

    return Steps(
        folder,
        threads,
        workload,
        options.data,
        options.ranks,
        contenders,
        options.steps or workload.steps,
        figure,
        options.epochs,
    )


def parser() -> Parser:
    """The parser of the whole command line; its --help has that of each kind too."""
    parsers: dict[str, Parser] = {}

    top = Parser(
        "python -m benchmarks",
        description="""\
Times the same work with several contenders, which take turns, round by round, and prints the ratios of the same
rounds, because a machine that others share is slower for minutes at a time.""",
        more_help=lambda: "".join(f"\n{kind.format_help()}" for kind in parsers.values()),
    )
    kinds = top.add_subparsers(dest="kind", required=True, metavar="KIND")

    def add_kind(name: str, about: str, description: str) -> Parser:
        parsers[name] = kinds.add_parser(name, help=about, description=description)
        return parsers[name]

    steps = add_kind(
        "steps",
        "trainings: the runner, hand-written loops, TensorFlow's own strategies",
        "Trainings of one workload. Losses must agree before a time counts.",
    )
    steps.epilog = _contenders_and_workloads()
    _add_training(steps)
    _add_contenders(steps, ",".join(TRAIN))
    epochs = "of all steps of the synthetic data set, so that their ends are timed too; default: 1"
    steps.add_argument("--epochs", type=at_least(1), default=1, metavar="N", help=epochs)

    images = add_kind(
        "input",
        "image files: hvtrain, Keras's image_dataset_from_directory, and tf.data by hand",
        "How fast JPEG files, TFRecord and Parquet become batches when no model waits for them, on the same threads.",
    )
    images.set_defaults(ranks=1)
    sizes = "height and width of the files; default: 224x224,375x500"
    images.add_argument(
        "--sizes", type=_sizes, default=[(224, 224), (375, 500)], metavar="HxW,HxW", help=sizes
    )
    works = f"what becomes of files of another size than 224x224; default: {','.join(WORKS)}"
    images.add_argument("--works", type=_works, default=list(WORKS), metavar="A,B", help=works)
    images.add_argument(
        "--images", type=at_least(64), default=1000, metavar="N", help="default: 1000"
    )
    images.add_argument(
        "--steps", type=at_least(1), default=100, metavar="N", help="timed steps; default: 100"
    )

    startup = add_kind(
        "startup",
        "from the command to the first step",
        "Seconds from the command to the end of the first step.",
    )
    startup.set_defaults(epochs=1)
    _add_training(startup)
    _add_contenders(startup, STARTUP)

    scaling = add_kind(
        "scaling",
        "the runner on 1, 2, 4 ranks",
        "Throughput and efficiency by ranks: the same batch per rank (weak), and the same in all (strong).",
    )
    _add_training(scaling)
    scaling.add_argument(
        "--ranks", "-np", type=_counts, default=[1, 2], metavar="N,N", help="default: 1,2"
    )

    for kind in parsers.values():
        kind.add_argument("--rounds", type=at_least(1), default=7, metavar="N", help="default: 7")
        threads = "TensorFlow's threads of a rank; default: cores / ranks"
        kind.add_argument("--threads", type=at_least(1), metavar="N", help=threads)
        kind.add_argument("--output", metavar="DIR", help="default: bench/DATE_TIME-KIND-...")

    return top


def _add_training(kind: Parser) -> None:
    kind.add_argument("--workload", choices=WORKLOADS, default="cnn", help="default: cnn")
    kind.add_argument(
        "--steps", type=at_least(1), metavar="N", help="timed steps; default: the workload's"
    )
    kind.add_argument("--data", choices=DATA, default=DATA[0], help="default: synthetic")


def _add_contenders(kind: Parser, default: str) -> None:
    kind.add_argument("--contenders", default=default, metavar="A,B", help=f"default: {default}")
    kind.add_argument("--ranks", "-np", type=at_least(1), default=2, metavar="N", help="default: 2")


def _contenders_and_workloads() -> str:
    contenders = "\n".join(
        f"  {contender.name:<18}{contender.about}" for contender in CONTENDERS.values()
    )
    workloads = "\n".join(
        f"  {work.name:<18}{work.about}, batch {work.batch_size}" for work in WORKLOADS.values()
    )

    return f"""\
contenders:
{contenders}
  NAME@SETTING=VALUE@... runs one with settings of its own: variables (HOROVOD_CYCLE_TIME=0.2),
  settings of the runner (guard.every=0), data=fashion_mnist, or output=terminal
workloads:
{workloads}"""


def _counts(text: str) -> list[int]:
    return [at_least(1)(number) for number in text.split(",")]


def _works(text: str) -> list[str]:
    works = text.split(",")
    if not set(works) <= WORKS.keys():
        raise argparse.ArgumentTypeError(f"{text} is not a list of some of {','.join(WORKS)}")
    return works


def _sizes(text: str) -> list[tuple[int, int]]:
    sides = [tuple(map(at_least(1), size.split("x"))) for size in text.split(",")]
    if any(len(pair) != 2 for pair in sides):
        raise argparse.ArgumentTypeError(f"{text} is not a list of sizes such as 224x224,300x400")
    return [(height, width) for height, width in sides]


if __name__ == "__main__":
    enter(main)
