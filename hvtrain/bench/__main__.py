"""`python -m hvtrain.bench`: how fast is this machine with hvtrain, and with what else one could use?"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from hvtrain.bench.allreduce import MEANS, SIZES, Collectives
from hvtrain.bench.contenders import CONTENDERS, named
from hvtrain.bench.plots import plot_allreduce, plot_scaling, plot_steps
from hvtrain.bench.scaling import Scaling
from hvtrain.bench.steps import Session, table, write
from hvtrain.bench.workloads import WORKLOADS, Workload
from hvtrain.cli import Parser, enter
from hvtrain.errors import ConfigError

DATA = ("synthetic", "fashion_mnist")


def main() -> None:
    """Runs the command line and exits."""
    enter(bench, help_text)


def help_text() -> str:
    """What --help prints: all of it."""
    top, kinds = parsers()
    return "\n\n".join(parser.format_help().rstrip() for parser in (top, *kinds))


def bench() -> int:
    """Rounds of one kind of measurement; prints a table, and writes it to files."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that what was started is ended too.
    options = parsers()[0].parse_args()
    many = max(options.ranks) if options.kind == "scaling" else options.ranks
    options.threads = options.threads or max(1, len(os.sched_getaffinity(0)) // many)
    what = options.transport if options.kind == "allreduce" else options.workload
    folder = Path(options.output or f"bench/{datetime.now():%Y-%m-%d_%H-%M-%S}-{options.kind}-{what}").absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--output {folder} is not empty; choose another folder")
    print("\n" + "\n".join(KINDS[options.kind](options, folder)))
    print(f"results in {folder}")
    return 0


def steps(options: argparse.Namespace, folder: Path) -> list[str]:
    """`bench steps`."""
    return compared(options, folder, options.contenders.split(","), WORKLOADS[options.workload])


def startup(options: argparse.Namespace, folder: Path) -> list[str]:
    """`bench startup`."""
    workload = replace(WORKLOADS[options.workload], warmup_steps=1, steps=2)
    return compared(options, folder, options.contenders.split(","), workload, "first_step_seconds")


def data(options: argparse.Namespace, folder: Path) -> list[str]:
    """`bench input`."""
    workload = WORKLOADS[options.workload]
    needed = [name for name in options.contenders.split(",") if name]
    return compared(options, folder, [*(f"batches@data={name}" for name in options.data.split(",")), *needed], workload)


def compared(
    options: argparse.Namespace, folder: Path, names: list[str], workload: Workload, figure: str = "step_seconds"
) -> list[str]:
    """A session of contenders that take turns."""
    contenders = [named(name) for name in names]
    if len(set(names)) < len(names):
        raise ConfigError(f"{','.join(names)} names one twice; the first runs twice a round anyway")
    given = options.data if options.data in DATA else DATA[0]
    num_steps = options.steps or workload.steps
    session = Session(workload, given, options.ranks, options.threads, contenders, folder, num_steps, figure)
    session.run(options.rounds)
    write(session)
    plot_steps(session)
    return table(session)


def scaling(options: argparse.Namespace, folder: Path) -> list[str]:
    """`bench scaling`."""
    workload = WORKLOADS[options.workload]
    steps = options.steps or workload.steps
    session = Scaling(workload, options.data, options.ranks, options.threads, folder, steps)
    session.run(options.rounds)
    session.write()
    plot_scaling(session)
    return session.table()


def allreduce(options: argparse.Namespace, folder: Path) -> list[str]:
    """`bench allreduce`."""
    sizes = tuple(size for size in SIZES if size <= options.largest << 20)
    session = Collectives(options.ranks, options.transport, options.threads, folder, sizes)
    session.run(options.rounds)
    session.write()
    plot_allreduce(session)
    return session.table()


KINDS = {"steps": steps, "allreduce": allreduce, "input": data, "startup": startup, "scaling": scaling}


def parsers() -> tuple[argparse.ArgumentParser, list[argparse.ArgumentParser]]:
    """The whole command line's, and those of its kinds."""
    top = Parser(
        "python -m hvtrain.bench",
        description="Times the same work by several means, which take turns, round by round, and prints the ratios of "
        "the same rounds: a machine that others share is slower for minutes at a time.",
    )
    kinds = top.add_subparsers(dest="kind", required=True, metavar="KIND")
    contenders = "\n".join(f"  {contender.name:<18}{contender.about}" for contender in CONTENDERS.values())
    workloads = "\n".join(f"  {w.name:<18}{w.about}, batch {w.batch_size}" for w in WORKLOADS.values())
    made = {
        name: kinds.add_parser(
            name, help=about, description=more, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        for name, about, more, epilog in (
            (
                "steps",
                "trainings: the runner, hand-written loops, TensorFlow's own strategies",
                "Trainings of one workload. Losses must agree before a time counts.",
                f"contenders:\n{contenders}\n  NAME@SETTING=VALUE@... runs one with settings of its own: variables "
                "(HOROVOD_CYCLE_TIME=0.2),\n  words of the runner (guard.every=0), or data=fashion_mnist\n"
                f"workloads:\n{workloads}",
            ),
            (
                "allreduce",
                "the reduction alone, by size, against mpi4py and memcpy",
                "Latency, algorithm and bus bandwidth of a reduction over all ranks.",
                "",
            ),
            (
                "input",
                "the data alone, and what trainings need of them",
                "How fast each rank's batches come where no model waits for them, beside a training of the workload.",
                "",
            ),
            ("startup", "from the command to the first step", "Seconds from the command to the first step's end.", ""),
            (
                "scaling",
                "the runner on 1, 2, 4 ranks",
                "Throughput and efficiency by ranks: the same batch a rank (weak), and the same in all (strong).",
                "",
            ),
        )
    }
    for name, kind in made.items():
        if name != "allreduce":
            kind.add_argument("--workload", choices=WORKLOADS, default="cnn", help="default: cnn")
            kind.add_argument("--steps", type=_positive, metavar="N", help="timed; default: what the workload says")
        if name in _COMPARES:
            default = _COMPARES[name]
            kind.add_argument("--contenders", default=default, metavar="A,B", help=f"default: {default or 'none'}")
        if name in ("steps", "startup", "scaling"):
            kind.add_argument("--data", choices=DATA, default=DATA[0], help="default: synthetic")
    made["input"].add_argument(
        "--data", default=",".join(DATA), metavar="A,B", help="default: all of synthetic,fashion_mnist"
    )
    made["allreduce"].add_argument("--transport", choices=MEANS, default="mpi", help="default: mpi")
    made["allreduce"].add_argument("--largest", type=_positive, default=256, metavar="MIB", help="default: 256")
    made["scaling"].add_argument("--ranks", "-np", type=_counts, default=[1, 2], metavar="N,N", help="default: 1,2")
    for name, kind in made.items():
        if name != "scaling":
            kind.add_argument("--ranks", "-np", type=_positive, default=2, metavar="N", help="default: 2")
        kind.add_argument("--rounds", type=_positive, default=7, metavar="N", help="default: 7")
        kind.add_argument("--threads", type=_positive, metavar="N", help="TensorFlow's, a rank; default: cores / ranks")
        kind.add_argument("--output", metavar="DIR", help="default: bench/DATE_TIME-KIND-...")
    return top, list(made.values())


# What each kind compares where nothing else is said.
_COMPARES = {
    "steps": ",".join(name for name, contender in CONTENDERS.items() if contender.trains),
    "startup": "hvtrain-mpi,loop-mpi,hvtrain-1,keras",
    "input": "independent",
}


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} came where a number above 0 was needed")
    return number


def _counts(text: str) -> list[int]:
    return [_positive(word) for word in text.split(",")]


if __name__ == "__main__":
    main()
