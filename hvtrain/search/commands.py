"""`python -m hvtrain find_lr` and `find_batch`: trial runs on all ranks, with some settings changed.

find_lr trains some steps at an increasing learning rate, and suggests a rate (Smith 2015,
arxiv.org/abs/1506.01186). The module range_test trains the run and judges its losses.

find_batch trains some steps with ever larger batches, and reports which sizes fit and which is
fastest. Each rank tries all sizes in one process, and resets its peak memory before each. Memory
left over from an earlier size does little harm: sizes only grow, so it is never the larger part. The
module batch_search measures the sizes, and batch_sizes judges them.
"""

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

from hvtrain.config.compose import composed, override
from hvtrain.config.schema import RunConfig, round_up_to_accumulation
from hvtrain.errors import ConfigError
from hvtrain.system import console
from hvtrain.system.command import RUN_SETTINGS, Parser, add_number, at_least, positive


def find_lr() -> int:
    """Trains the run with increasing learning rates, and prints the suggested one on rank 0."""
    parser = _trial_parser(
        "find_lr",
        """\
Trains some steps on all ranks while the learning rate grows from --lowest to --highest (both for the global batch),
until the loss rises to several times its lowest value. Writes the losses (range.csv) and a picture (range.png), and
prints the optimizer.learning_rate at which the loss fell fastest, for this number of ranks, batch size and optimizer.
A schedule's warm-up and decay are applied to this rate.""",
        """\
  python -m hvtrain find_lr model=cnn dataset=fashion_mnist                 one process
  horovodrun -np 4 python -m hvtrain find_lr optimizer=adam --highest 0.1   the rate for four ranks
""",
    )
    add_number(parser, "--steps", at_least(10), "steps of the test", 100)
    add_number(parser, "--lowest", positive, "first rate", 1e-5, "RATE")
    add_number(parser, "--highest", positive, "last rate", 10.0, "RATE")
    options = parser.parse_with_overrides()
    # Refused before TensorFlow is imported, which takes seconds.
    if options.lowest >= options.highest:
        raise ConfigError(
            f"--lowest {options.lowest:g} is not below --highest {options.highest:g}; widen the range"
        )
    config = as_trial(
        _compose_run(options),
        options.steps,
        # Replaces the user's schedule, whose warm-up would keep the rate low.
        schedule={
            "_target_": "hvtrain.core.schedule.RangeTest",
            "lowest": options.lowest,
            "highest": options.highest,
        },
    )
    with console.quiet_import(config.verbose):
        from hvtrain import runner
        from hvtrain.search.range_test import try_rates
    runner.run_attempts(config, try_rates)
    return 0


def as_trial(config: RunConfig, num_steps: int, **changes: Any) -> RunConfig:
    """Returns the settings of a trial run, for find_lr and find_batch.

    A trial run has no checkpoints, notices or callbacks. run.dir is not set here: a name that
    contains the time could differ between ranks, so the chief chooses it.

    Args:
        config: the user's run.
        num_steps: number of steps, rounded up to whole accumulations.
        **changes: further settings to change, as fields of RunConfig.
    """
    accumulate = config.train.accumulate
    train = replace(
        config.train,
        # A partial accumulation would not change the weights.
        steps=round_up_to_accumulation(num_steps, accumulate),
        # Each call of the graph is one update of the weights.
        steps_per_execution=accumulate,
        # The number of steps must not depend on the number of ranks.
        divide_steps_by_size=False,
        max_time=None,
        validate_every_steps=None,
        # Averages are for validation and saving, which a trial does not do.
        ema=None,
    )
    # Nobody resumes a trial, and saving would be timed too.
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


def _trial_parser(command: str, description: str, examples: str) -> Parser:
    """Returns a parser with the options that both commands share."""
    parser = Parser(
        f"python -m hvtrain {command}",
        usage="%(prog)s [OPTION ...] [GROUP=CHOICE ...] [SETTING=VALUE ...]",
        description=description,
        epilog=f"{RUN_SETTINGS}\n\nexamples:\n{examples}",
    )
    parser.add_argument(
        "--output",
        type=lambda folder: [override("run.dir", folder)],
        default=[],
        metavar="DIR",
        help=f"folder of the results, as run.dir=DIR; default: {command}/DATE_TIME-NAME",
    )
    return parser


def _compose_run(options: argparse.Namespace) -> RunConfig:
    """Composes the user's run, with the folder from --output."""
    folders = [text for text in options.overrides if text.startswith("run.dir=")]
    if options.output and folders:
        raise ConfigError(f"{folders[0]} and --output set the same folder; leave one of them out")
    return composed([*options.overrides, *options.output])


# Low enough that the weights hardly change, so that no size diverges.
LEARNING_RATE = 1e-9
# Calls of the graph for each size, of --steps steps each. The first one is the warm-up.
CALLS = 4


def find_batch() -> int:
    """Trains the run with increasing batch sizes, and prints the largest and the fastest on rank 0."""
    parser = _trial_parser(
        "find_batch",
        """\
Trains some steps on all ranks with 1, 2, 4, ... examples per rank, until a size does not fit into memory or exceeds the
data set. Prints examples/s of all ranks and the peak memory of a rank for each size, the largest size
that fits, and the fastest: the smallest within 3% of the highest examples/s. Writes batch.json and a picture,
batch.png. A size that would exceed the memory of the host or of its container is not tried.""",
        """\
  python -m hvtrain find_batch model=cnn dataset=fashion_mnist           one process
  horovodrun -np 4 python -m hvtrain find_batch model=resnet50 --largest 512    four ranks
""",
    )
    add_number(parser, "--first", at_least(1), "first size, in examples per rank", 1)
    add_number(parser, "--largest", at_least(1), "largest size to try; default: no limit")
    add_number(parser, "--steps", at_least(1), f"steps of a call; a size takes {CALLS} calls", 5)
    help_text = "memory that the ranks of a host may use together; default: all free memory"
    add_number(parser, "--memory", positive, help_text, metavar="GIB")
    options = parser.parse_with_overrides()
    config = as_search(_compose_run(options), options.first, options.steps)
    with console.quiet_import(config.verbose):
        from hvtrain import runner
        from hvtrain.search.batch_search import try_sizes
    # With None, the free memory is the only limit.
    limit_bytes = options.memory and int(options.memory * 2**30)
    attempt = partial(
        try_sizes, largest=options.largest, limit_bytes=limit_bytes, overrides=options.overrides
    )
    runner.run_attempts(config, attempt)
    return 0


def as_search(config: RunConfig, first_size: int, call_steps: int) -> RunConfig:
    """Returns the settings of find_batch's trial run, which starts with the first batch size.

    Args:
        config: the user's run.
        first_size: examples of one rank in a step.
        call_steps: steps in a call of the graph, rounded up to whole accumulations.
    """
    steps = round_up_to_accumulation(call_steps, config.train.accumulate)
    strategy = dict(config.strategy)
    if "whole_steps" in strategy:
        # Otherwise PowerSGD would compress only the later, larger batches.
        strategy["whole_steps"] = 0
    trial = as_trial(
        config,
        CALLS * steps,
        strategy=strategy,
        optimizer={**config.optimizer, "learning_rate": LEARNING_RATE},
        # With "trim" all batches are full, so each step takes the memory and time of its size.
        data=replace(config.data, uneven="trim"),
    )
    train = replace(trial.train, batch_size=first_size, steps_per_execution=steps)

    return replace(trial, train=train)
