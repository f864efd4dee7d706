"""`python -m benchmarks`: how fast this machine trains with hvtrain and with its alternatives."""

import argparse
import os
import signal
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from benchmarks.contenders import CONTENDERS, TRAIN, named
from benchmarks.input import Inputs
from benchmarks.scaling import Scaling
from benchmarks.steps import Session
from benchmarks.workloads import WORKLOADS
from hvtrain.errors import ConfigError
from hvtrain.system.command import Parser, at_least, enter, make_output

DATA = ("synthetic", "fashion_mnist")


def main() -> int:
    """Runs rounds of one kind of measurement; prints a table and writes it to files."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the processes that it started end too.
    options = parser().parse_args()
    many = max(options.ranks) if options.kind == "scaling" else options.ranks
    options.threads = options.threads or max(1, len(os.sched_getaffinity(0)) // many)
    what = options.images if options.kind == "input" else options.workload
    folder = Path(options.output or f"bench/{datetime.now():%Y-%m-%d_%H-%M-%S}-{options.kind}-{what}").absolute()
    session: Inputs | Scaling | Session
    if options.kind == "input":
        session = Inputs(options.sizes, options.images, options.steps, options.threads, folder)
    elif options.kind == "scaling":
        work = WORKLOADS[options.workload]
        session = Scaling(work, options.data, options.ranks, options.threads, folder, options.steps or work.steps)
    else:
        session = compared(options, folder)
    make_output(folder)
    session.run(options.rounds)
    session.write()
    session.plot()
    print("\n" + "\n".join(session.table()))
    print(f"results in {folder}")
    return 0


def compared(options: argparse.Namespace, folder: Path) -> Session:
    """A session of contenders that take turns: `bench steps` or `startup`."""
    workload, figure = WORKLOADS[options.workload], "step_seconds"
    names = options.contenders.split(",")
    if options.kind == "startup":
        workload, figure = replace(workload, warmup_steps=1, steps=2), "first_step_seconds"
    contenders = [named(name) for name in names]
    if len(set(names)) < len(names):
        raise ConfigError(f"{','.join(names)} names a contender twice; the first runs twice a round anyway")
    num_steps = options.steps or workload.steps
    place = options.data, options.ranks, options.threads, contenders, folder
    return Session(workload, *place, num_steps, figure, options.epochs)


def parser() -> Parser:
    """The parser of the whole command line; its --help has that of each kind too."""
    made: dict[str, Parser] = {}
    top = Parser(
        "python -m benchmarks",
        description="""\
Times the same work with several contenders, which take turns, round by round, and prints the ratios of the same
rounds, because a machine that others share is slower for minutes at a time.""",
        more_help=lambda: "".join(f"\n{kind.format_help()}" for kind in made.values()),
    )
    kinds = top.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (about, more) in ABOUT.items():
        made[name] = kinds.add_parser(name, help=about, description=more)
    contenders = "\n".join(f"  {contender.name:<18}{contender.about}" for contender in CONTENDERS.values())
    workloads = "\n".join(f"  {w.name:<18}{w.about}, batch {w.batch_size}" for w in WORKLOADS.values())
    made["steps"].epilog = (
        f"contenders:\n{contenders}\n  NAME@SETTING=VALUE@... runs one with settings of its own: variables "
        "(HOROVOD_CYCLE_TIME=0.2),\n  settings of the runner (guard.every=0), data=fashion_mnist, or output=terminal\n"
        f"workloads:\n{workloads}"
    )
    epochs = "of all steps of the synthetic data set, so that their ends are timed too; default: 1"
    made["steps"].add_argument("--epochs", type=at_least(1), default=1, metavar="N", help=epochs)
    made["startup"].set_defaults(epochs=1)
    for name, kind in made.items():
        if name != "input":
            kind.add_argument("--workload", choices=WORKLOADS, default="cnn", help="default: cnn")
            kind.add_argument("--steps", type=at_least(1), metavar="N", help="timed steps; default: the workload's")
        if name in COMPARED:
            default = COMPARED[name]
            kind.add_argument("--contenders", default=default, metavar="A,B", help=f"default: {default}")
        if name in ("steps", "startup", "scaling"):
            kind.add_argument("--data", choices=DATA, default=DATA[0], help="default: synthetic")
        if name == "scaling":
            kind.add_argument("--ranks", "-np", type=_counts, default=[1, 2], metavar="N,N", help="default: 1,2")
        elif name == "input":
            kind.set_defaults(ranks=1)
        else:
            kind.add_argument("--ranks", "-np", type=at_least(1), default=2, metavar="N", help="default: 2")
        kind.add_argument("--rounds", type=at_least(1), default=7, metavar="N", help="default: 7")
        threads = "TensorFlow's threads of a rank; default: cores / ranks"
        kind.add_argument("--threads", type=at_least(1), metavar="N", help=threads)
        kind.add_argument("--output", metavar="DIR", help="default: bench/DATE_TIME-KIND-...")
    sizes = "height and width of the files; default: 224x224,300x400"
    made["input"].add_argument("--sizes", type=_sizes, default=[(224, 224), (300, 400)], metavar="HxW,HxW", help=sizes)
    made["input"].add_argument("--images", type=at_least(64), default=1000, metavar="N", help="default: 1000")
    made["input"].add_argument("--steps", type=at_least(1), default=100, metavar="N", help="timed steps; default: 100")
    return top


# Each kind's line in the list of kinds, and its description.
ABOUT = {
    "steps": (
        "trainings: the runner, hand-written loops, TensorFlow's own strategies",
        "Trainings of one workload. Losses must agree before a time counts.",
    ),
    "input": (
        "image files: hvtrain, Keras's image_dataset_from_directory, and tf.data by hand",
        "How fast JPEG files, TFRecord and Parquet become batches when no model waits for them, on the same threads.",
    ),
    "startup": ("from the command to the first step", "Seconds from the command to the end of the first step."),
    "scaling": (
        "the runner on 1, 2, 4 ranks",
        "Throughput and efficiency by ranks: the same batch per rank (weak), and the same in all (strong).",
    ),
}
# The contenders that each kind compares by default.
COMPARED = {
    "steps": ",".join(TRAIN),
    "startup": "hvtrain-mpi,loop-mpi,hvtrain-1,keras",
}


def _counts(text: str) -> list[int]:
    return [at_least(1)(word) for word in text.split(",")]


def _sizes(text: str) -> list[tuple[int, int]]:
    sides = [tuple(map(at_least(1), word.split("x"))) for word in text.split(",")]
    if any(len(pair) != 2 for pair in sides):
        raise argparse.ArgumentTypeError(f"{text} came where sizes such as 224x224,300x400 were needed")
    return [(height, width) for height, width in sides]


if __name__ == "__main__":
    enter(main)
