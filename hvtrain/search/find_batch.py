"""`python -m hvtrain find_batch`: trains some steps with ever larger batches, and says which fit and which is fastest.

All sizes are tried in one process for each rank, which is started once: memory is read as a peak that is reset before
each size, and sizes only grow, so what an earlier one left behind is never the larger part. batch_search measures,
batch_sizes judges.
"""

import sys
from dataclasses import replace
from functools import partial

from hvtrain.config.compose import compose
from hvtrain.config.schema import RunConfig, from_dict
from hvtrain.errors import ConfigError
from hvtrain.search.find_lr import as_trial
from hvtrain.system import console
from hvtrain.system.command import RUN_SETTINGS, Parser, at_least, positive

EPILOG = f"""\
{RUN_SETTINGS}

examples:
  python -m hvtrain find_batch model=cnn dataset=fashion_mnist           one process
  horovodrun -np 4 python -m hvtrain find_batch model=resnet50 --largest 512    four ranks
"""
# Weights hardly change, so that no size diverges.
LEARNING_RATE = 1e-9
# Calls of the graph with each size, of --steps steps each. The first is a warm-up.
CALLS = 4


def main() -> int:
    """Composes the run, tries the sizes, and prints the result on rank 0."""
    options = _parser().parse_with_overrides(sys.argv[1:])
    if options.largest is not None and options.first > options.largest:
        raise ConfigError(f"--first {options.first} exceeds --largest {options.largest}; lower it, or raise the other")
    for tree in compose(options.overrides):
        config = as_search(from_dict(tree), options.first, options.steps)
        with console.quiet_import(config.verbose):
            from hvtrain import runner
            from hvtrain.search.batch_search import try_sizes
        limit_bytes = options.memory and int(options.memory * 2**30)
        attempt = partial(try_sizes, largest=options.largest, limit_bytes=limit_bytes, overrides=options.overrides)
        runner.on_all_ranks(config, attempt)

    return 0


def as_search(config: RunConfig, first_size: int, call_steps: int) -> RunConfig:
    """Returns the run as a trial that begins with the first size.

    Args:
        config: the user's run.
        first_size: examples of a step and a rank.
        call_steps: steps of a call of the graph, rounded up to whole accumulations.
    """
    trial = as_trial(
        config,
        call_steps,
        optimizer={**config.optimizer, "learning_rate": LEARNING_RATE},
        # All batches are whole then, so each step has the memory and the time of its size.
        data=replace(config.data, uneven="trim"),
    )
    steps = trial.train.steps or call_steps
    train = replace(
        trial.train,
        batch_size=first_size,
        steps=CALLS * steps,
        steps_per_execution=steps,
    )

    return replace(trial, train=train)


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain find_batch",
        usage="%(prog)s [OPTION ...] [GROUP=CHOICE ...] [SETTING=VALUE ...]",
        description="""\
Trains some steps on all ranks with 1, 2, 4, ... examples per rank, until a size does not fit into memory or is more
than the data set has. Prints examples/s of all ranks and the peak memory of a rank for each size, the largest size
that fits, and the fastest: the smallest within 3% of the most examples/s. Writes batch.json and a picture, batch.png.
A size that would exceed the memory of the host or of its container is not begun.""",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--first",
        type=at_least(1),
        default=1,
        metavar="N",
        help="first size, of a rank; default: 1",
    )
    parser.add_argument(
        "--largest",
        type=at_least(1),
        metavar="N",
        help="largest size to try; default: as many as fit",
    )
    parser.add_argument(
        "--steps",
        type=at_least(1),
        default=5,
        metavar="N",
        help=f"steps of a call; a size takes {CALLS} calls; default: 5",
    )
    parser.add_argument(
        "--memory",
        type=positive,
        metavar="GIB",
        help="memory of all ranks of a host; default: what is free",
    )

    return parser
