"""`python -m hvtrain plan`: forecasts batch, steps, memory and speed of a run on many ranks, without using them."""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hvtrain.config.compose import composed, override
from hvtrain.config.schema import round_up_to_accumulation
from hvtrain.errors import ConfigError
from hvtrain.launch.child import ONLY_STEPS, train
from hvtrain.plan.algorithms import ALGORITHMS, NETWORK_SECONDS, PCIE_SECONDS, Machine
from hvtrain.plan.machine import Measured, machine_of, read
from hvtrain.plan.methods import (
    METHODS,
    CompressionCost,
    Method,
    Wire,
    measure_compression,
    method_cost,
    method_of,
)
from hvtrain.plan.step_cost import Cost, Rules, Work, rank_counts
from hvtrain.system import console
from hvtrain.system.command import (
    RUN_SETTINGS,
    Parser,
    add_number,
    at_least,
    make_output,
    not_negative,
    positive,
)
from hvtrain.system.files import write_json
from hvtrain.system.resources import cores_of_each

if TYPE_CHECKING:
    from hvtrain.plan.forecast import Forecast

# Enough to measure: a run's speed leaves out the first ten steps as warm-up
# (training/callbacks/epochs.py).
MEASURED_STEPS = 30


def main() -> int:
    """Composes the run, then prints and writes its plan."""
    options = _parser().parse_with_overrides()
    config = composed(options.overrides)
    if options.advise and (options.np == 1 or not (options.step_seconds or options.measure)):
        raise ConfigError(
            "--advise compares steps of several ranks; give -np 2 or more, and --step-seconds S or --measure"
        )

    # Read before TensorFlow is imported, so that an unusable file is refused immediately.
    measurements = [measurement for path in options.calibrate for measurement in read(Path(path))]

    # Imported only now, because importing TensorFlow takes seconds.
    with console.quiet_import(config.verbose):
        from hvtrain.plan import report
        from hvtrain.plan.forecast import forecast

    run = forecast(config, options.np, options.ranks_per_host, options.examples, options.classes)
    folder = Path(
        options.output or f"plan/{datetime.now():%Y-%m-%d_%H-%M-%S}-np{options.np}-{run.model_name}"
    )

    make_output(folder, may_hold_files=True)
    print("\n".join(report.run_lines(run, options)), flush=True)

    # Measured after the lines above are printed, since measuring takes a while and may fail.
    step_seconds = _measure_step(options, run) if options.measure else options.step_seconds
    rules = _rules(options, run)
    machine: Machine | None = None
    costs: list[Cost] = []
    method_costs: dict[Method, Cost] = {}
    if step_seconds:
        machine, costs, method_costs = _print_costs(options, run, step_seconds, rules, measurements)
    else:
        print(
            f"{'step':<15}unknown; give one rank's step time with --step-seconds S, or measure it here with --measure"
        )

    content = report.as_json(run, options, rules, costs, method_costs, machine)
    write_json(folder / "plan.json", content)
    print(f"results in {folder}")
    return 0


def _print_costs(
    options: argparse.Namespace,
    run: "Forecast",
    step_seconds: float,
    rules: Rules,
    measurements: Sequence[Measured],
) -> tuple[Machine, list[Cost], dict[Method, Cost]]:
    """Predicts and prints the cost of a step, with --advise also for each method that fits the run.

    Returns the machine, the costs on 1, 2, 4, ... ranks, and those of the methods on all ranks.
    """
    from hvtrain.plan import report

    accumulate = run.config.train.accumulate
    machine, links = machine_of(options, measurements, rules.algorithms)
    work = Work(step_seconds, run.messages)
    own = method_of(run.config.strategy)
    methods = [method for method in METHODS if options.advise and method.fits(run.config)]
    compression_costs = _measure_compression(options, run, [own, *methods])

    def cost(method: Method, num_ranks: int) -> Cost:
        return method_cost(method, work, compression_costs, num_ranks, machine, rules, accumulate)

    costs = [cost(own, num_ranks) for num_ranks in rank_counts(options.np)]
    method_costs = {method: cost(method, options.np) for method in methods}
    print("\n".join(report.step_lines(run, costs, links, rules)))
    if options.noise_scale:
        print(report.progress_line(run, costs[-1], options.noise_scale))
    if method_costs:
        print("\n".join(report.advice_lines(run, method_costs, work, compression_costs)))
    return machine, costs, method_costs


def _measure_compression(
    options: argparse.Namespace, run: "Forecast", methods: Sequence[Method]
) -> dict[Wire, CompressionCost]:
    """Measures the cost of the methods' compression here, with one rank's share of the cores."""
    num_threads = cores_of_each(min(options.np, options.ranks_per_host))
    shapes = [[run.gradients[position].shape for position in bucket] for bucket in run.buckets]
    return measure_compression(shapes, methods, num_threads)


def _rules(options: argparse.Namespace, run: "Forecast") -> Rules:
    # The default algorithms are those from which NCCL chooses.
    choices = {None: Rules.algorithms, "best": tuple(ALGORITHMS)}
    return Rules(
        overlap=run.bucket_bytes > 0,
        fusion_bytes=0,  # hvtrain's runs send buckets, which Horovod does not fuse.
        # Measured times already include the wait for Horovod's cycle.
        cycle_seconds=0.0 if options.calibrate else Rules.cycle_seconds,
        deviation=options.straggler,
        algorithms=choices.get(options.algorithm, (options.algorithm,)),
    )


def _measure_step(options: argparse.Namespace, run: "Forecast") -> float:
    """Measures the step time of the run on one rank of this machine, in seconds.

    If the data set is not on this machine, synthetic data of the same shape takes its place.
    """
    overrides = options.overrides
    if options.examples is not None:
        shape = run.source.fact("image_shape", "the command that measures this run on one rank")
        overrides = [
            *_with_choice(overrides, "dataset=synthetic"),
            override("dataset.image_shape", [*shape]),
            f"dataset.num_classes={run.source.num_classes}",
            # Callbacks may monitor validation, although none takes place.
            "dataset.num_validation=1",
        ]
        if "random_resized_crop" in run.config.augment:
            overrides.append("~augment.random_resized_crop")
    return measured_step_seconds(overrides, max(run.plan.batch_sizes), run.config.train.accumulate)


def _with_choice(overrides: list[str], choice: str) -> list[str]:
    """Replaces a group's choice and its settings with another choice, such as "strategy=single"."""
    group, _, _ = choice.partition("=")
    overrides = [text for text in overrides if not re.match(rf"[+~]*{group}[=.]", text)]
    overrides.append(choice)
    # An experiment may set what only another choice takes, such as dataset.flip.
    known = getattr(composed([choice]), group)
    unknown = getattr(composed(overrides), group).keys() - known.keys()
    return [*overrides, *(f"~{group}.{name}" for name in sorted(unknown))]


def measured_step_seconds(overrides: list[str], batch_size: int, accumulate: int) -> float:
    """Trains briefly in a separate process, and returns one rank's step time in seconds.

    The process has all cores of this machine, and does not start Horovod.

    Args:
        overrides: The run's settings.
        batch_size: Examples in the rank's batch.
        accumulate: The run's train.accumulate.

    Raises:
        LostRankError: The training failed. The message quotes the line of its output that says why.
    """
    # The run's folder and trackers must not be touched.
    overrides = [text for text in overrides if not re.match(r"[+~]*(run\.dir=|tracker)", text)]
    settings = [
        # Without Horovod, a single rank takes its steps without interruption.
        *_with_choice(overrides, "strategy=single"),
        f"train.steps={round_up_to_accumulation(MEASURED_STEPS, accumulate)}",
        *ONLY_STEPS,
        "train.max_time=null",
        # With the run's own value, this short run might make only one call, which would be all warm-up.
        "train.steps_per_execution=null",
        "train.learning_rate_scale=none",
        f"train.batch_size={batch_size}",
        # This training is part of the command, so it sends no notices.
        "notify=[]",
    ]
    with tempfile.TemporaryDirectory(prefix="hvtrain-plan-") as folder:
        settings.append(override("run.dir", f"{folder}/run"))
        command = [sys.executable, "-m", "hvtrain", *settings]
        training = train(command, os.sched_getaffinity(0), Path(folder))
    return float(training.result["step_seconds"])


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain plan",
        usage="%(prog)s -np N [OPTION ...] [GROUP=CHOICE ...] [SETTING=VALUE ...]",
        description="""\
Forecasts a run on N ranks before anything is started: global batch, learning rate, steps, memory, checkpoints and the
command that starts it. Given one rank's step time and the link speeds, it also forecasts the step time on 1 to N ranks.
Without --measure, nothing is trained.""",
        epilog=f"""\
{RUN_SETTINGS}

examples:
  python -m hvtrain plan -np 512 --ranks-per-host 4 --step-seconds 0.3 --link-gbits 25 \\
      model=resnet50 dataset=synthetic train.batch_size=64
  python -m hvtrain plan -np 2 --measure --calibrate allreduce/.../allreduce.json model=cnn

docs/plan.md has the model, its sources, and a comparison with published runs of up to 512 GPUs.
""",
    )
    parser.add_argument("-np", type=at_least(1), required=True, metavar="N", help="number of ranks")
    add_number(parser, "--ranks-per-host", at_least(1), "ranks on each host", 4)
    add_number(
        parser,
        "--examples",
        at_least(1),
        "number of training examples, for a data set that is not on this machine",
    )
    add_number(
        parser,
        "--classes",
        at_least(1),
        "number of classes in that data set; default: from its settings, or 1000",
        metavar="C",
    )
    parser.add_argument(
        "--output", metavar="DIR", help="where plan.json goes; default: plan/DATE_TIME-npN-MODEL"
    )

    group = parser.add_argument_group(
        "step time of one rank (without it, no step times are forecast)"
    )
    step = group.add_mutually_exclusive_group()
    add_number(
        step, "--step-seconds", positive, "in seconds, with the run's batch size", metavar="S"
    )
    step.add_argument(
        "--measure",
        action="store_true",
        help="measure it here, with a short training in a separate process",
    )

    group = parser.add_argument_group("the machine")
    add_number(
        group, "--link-gbits", positive, "nominal bandwidth between hosts, Gbit/s", 25.0, "G"
    )
    add_number(
        group,
        "--latency-us",
        not_negative,
        "latency of one ring step between hosts, in microseconds",
        1e6 * NETWORK_SECONDS,
        "T",
    )
    add_number(
        group,
        "--inside-gbytes",
        positive,
        "bandwidth between ranks on a host, GB/s in one direction; PCIe 3.0 x16 has 15.75",
        15.75,
        "G",
    )
    add_number(
        group,
        "--inside-latency-us",
        not_negative,
        "latency of one ring step inside a host, in microseconds; PCIe has 10.8, NVLink about 6.5",
        1e6 * PCIE_SECONDS,
        "T",
    )
    group.add_argument(
        "--calibrate",
        action="append",
        default=[],
        metavar="FILE",
        help="allreduce.json from hvtrain allreduce, which replaces the link figures: those inside a host, or those "
        "between hosts if it was measured on more ranks than one host has; repeatable",
    )

    group = parser.add_argument_group("how ranks reduce")
    group.add_argument(
        "--advise",
        action="store_true",
        help="compare the settings that help on a slow network; measures compression here, for about half a minute",
    )
    add_number(
        group,
        "--noise-scale",
        positive,
        "gradient noise scale in examples, as reported by a run with profile.noise_scale_every=16; also prints "
        "how much the larger global batch speeds up learning",
        metavar="B",
    )
    group.add_argument(
        "--algorithm",
        choices=(*ALGORITHMS, "best"),
        help="best: the best of the others; default: the better of ring and tree, as in NCCL",
    )
    add_number(
        group,
        "--straggler",
        not_negative,
        "standard deviation of the ranks' step times, as a fraction of their mean",
        Rules.deviation,
        "X",
    )
    return parser
