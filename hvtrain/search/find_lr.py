"""`python -m hvtrain find_lr`: trains some steps at a growing learning rate, and suggests a rate (Smith 2015).

The test is a run like any other, on all ranks, with another schedule (arxiv.org/abs/1506.01186). range_test trains and
judges the losses.
"""

import sys
from dataclasses import replace
from typing import Any

from hvtrain.config.compose import compose
from hvtrain.config.schema import RunConfig, from_dict, round_up_to_accumulation
from hvtrain.errors import ConfigError
from hvtrain.system import console
from hvtrain.system.command import RUN_SETTINGS, Parser, at_least, positive

EPILOG = f"""\
{RUN_SETTINGS}

examples:
  python -m hvtrain find_lr model=cnn dataset=fashion_mnist                 one process
  horovodrun -np 4 python -m hvtrain find_lr optimizer=adam --highest 0.1   the rate for four ranks
"""


def main() -> int:
    """Composes the run, trains with growing rates, and prints the suggestion on rank 0."""
    options = _parser().parse_with_overrides(sys.argv[1:])
    if options.lowest >= options.highest:
        raise ConfigError(f"--lowest {options.lowest:g} is not below --highest {options.highest:g}; widen the range")
    for tree in compose(options.overrides):
        config = from_dict(tree)
        with console.quiet_import(config.verbose):
            from hvtrain import runner
            from hvtrain.search.range_test import try_rates
        runner.on_all_ranks(as_range_test(config, options.steps, options.lowest, options.highest), try_rates)

    return 0


def as_range_test(config: RunConfig, num_steps: int, lowest: float, highest: float) -> RunConfig:
    """Returns the run as a trial whose rate grows from the lowest to the highest."""
    # Any schedule of the user's is replaced: its warm-up would hold the rate down.
    schedule = {
        "_target_": "hvtrain.core.schedule.RangeTest",
        "lowest": lowest,
        "highest": highest,
    }
    return as_trial(config, num_steps, schedule=schedule)


def as_trial(config: RunConfig, num_steps: int, **changes: Any) -> RunConfig:
    """Returns the settings of a run that only tries something out; find_batch uses it too.

    It has no checkpoints, no notices, and nothing that acts on its losses. run.dir stays as it is: a folder named by
    the clock could differ between ranks, so the chief makes the name.

    Args:
        config: the user's run.
        num_steps: rounded up to whole accumulations.
        **changes: other settings, by the fields of RunConfig.
    """
    # A call of the graph is then one update of the weights.
    accumulate = config.train.accumulate
    train = replace(
        config.train,
        steps=round_up_to_accumulation(num_steps, accumulate),
        steps_per_execution=accumulate,
        divide_steps_by_size=False,
        max_time=None,
        validate_every_steps=None,
        ema=None,
    )
    checkpoint = replace(config.checkpoint, every_epochs=None, every_steps=None, every_minutes=None)

    return replace(
        config,
        train=train,
        checkpoint=checkpoint,
        callbacks={},
        notify=[],
        resume="never",
        **changes,
    )


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain find_lr",
        usage="%(prog)s [OPTION ...] [GROUP=CHOICE ...] [SETTING=VALUE ...]",
        description="""\
Trains some steps on all ranks while the learning rate grows from --lowest to --highest (both of all ranks together),
until the loss rises to several times its lowest value. Writes the losses (range.csv) and a picture (range.png), and
prints the optimizer.learning_rate at which the loss fell fastest, for this number of ranks, batch size and optimizer.
A schedule's warm-up and decay are applied to this rate.""",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--steps",
        type=at_least(10),
        default=100,
        metavar="N",
        help="steps of the test; default: 100",
    )
    parser.add_argument(
        "--lowest",
        type=positive,
        default=1e-5,
        metavar="RATE",
        help="first rate; default: 1e-5",
    )
    parser.add_argument("--highest", type=positive, default=10.0, metavar="RATE", help="last rate; default: 10")

    return parser
