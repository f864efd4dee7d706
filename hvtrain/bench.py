"""`python -m hvtrain.bench`: how fast is this machine with hvtrain, and with what else one could use?"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from datetime import datetime
from pathlib import Path

from hvtrain.benchmark.allreduce import MEANS, SIZES, Collectives
from hvtrain.benchmark.contenders import CONTENDERS, named
from hvtrain.benchmark.steps import Session, table, write
from hvtrain.benchmark.workloads import WORKLOADS
from hvtrain.door import Parser, enter
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
    options.threads = options.threads or max(1, len(os.sched_getaffinity(0)) // options.ranks)
    what = options.workload if options.kind == "steps" else options.transport
    folder = Path(options.output or f"bench/{datetime.now():%Y-%m-%d_%H-%M-%S}-{options.kind}-{what}").absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--output {folder} is not empty; choose another folder")
    lines = (steps if options.kind == "steps" else allreduce)(options, folder)
    print("\n" + "\n".join(lines))
    print(f"results in {folder}")
    return 0


def steps(options: argparse.Namespace, folder: Path) -> list[str]:
    """`bench steps`."""
    names = options.contenders.split(",")
    contenders = [named(name) for name in names]
    if len(set(names)) < len(names):
        raise ConfigError(f"--contenders {options.contenders} names one twice; the first runs twice a round anyway")
    workload = WORKLOADS[options.workload]
    num_steps = options.steps or workload.steps
    session = Session(workload, options.data, options.ranks, options.threads, contenders, folder, num_steps)
    session.run(options.rounds)
    write(session)
    return table(session)


def allreduce(options: argparse.Namespace, folder: Path) -> list[str]:
    """`bench allreduce`."""
    sizes = tuple(size for size in SIZES if size <= options.largest << 20)
    session = Collectives(options.ranks, options.transport, options.threads, folder, sizes)
    session.run(options.rounds)
    session.write()
    return session.table()


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
    of_steps = kinds.add_parser(
        "steps",
        help="trainings: the runner, hand-written loops, TensorFlow's own strategies",
        description="Trainings of one workload. Losses must agree before a time counts.",
        epilog=f"contenders:\n{contenders}\n  NAME@SETTING=VALUE@... runs one with settings of its own: variables "
        "(HOROVOD_CYCLE_TIME=0.2),\n  words of the runner (guard.every=0), or data=fashion_mnist\n"
        f"workloads:\n{workloads}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    of_steps.add_argument("--workload", choices=WORKLOADS, default="cnn", help="default: cnn")
    of_steps.add_argument("--data", choices=DATA, default=DATA[0], help="default: synthetic")
    of_steps.add_argument("--steps", type=_positive, metavar="N", help="timed steps; default: what the workload says")
    of_steps.add_argument("--contenders", default=",".join(CONTENDERS), metavar="A,B", help="default: all")
    of_sizes = kinds.add_parser(
        "allreduce",
        help="the reduction alone, by size, against mpi4py and memcpy",
        description="Latency, algorithm and bus bandwidth of a reduction over all ranks.",
    )
    of_sizes.add_argument("--transport", choices=MEANS, default="mpi", help="default: mpi")
    of_sizes.add_argument("--largest", type=_positive, default=256, metavar="MIB", help="default: 256")
    for kind in (of_steps, of_sizes):
        kind.add_argument("--ranks", type=_positive, default=2, metavar="N", help="default: 2")
        kind.add_argument("--rounds", type=_positive, default=7, metavar="N", help="default: 7")
        kind.add_argument("--threads", type=_positive, metavar="N", help="TensorFlow's, a rank; default: cores / ranks")
        kind.add_argument("--output", metavar="DIR", help="default: bench/DATE_TIME-KIND-...")
    return top, [of_steps, of_sizes]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} came where a number above 0 was needed")
    return number


if __name__ == "__main__":
    main()
