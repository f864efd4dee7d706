"""`python -m hvtrain.plan`: what a run on many ranks will be, without them: batch, steps, memory and speed."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hvtrain.cli import RUN_SETTINGS, Parser, at_least, enter, not_negative, positive
from hvtrain.config.compose import compose
from hvtrain.config.schema import RunConfig, from_dict
from hvtrain.errors import ConfigError
from hvtrain.plan.costs.algorithms import ALGORITHMS
from hvtrain.plan.costs.calibration import Measured
from hvtrain.plan.costs.links import LINK_SHARE, NETWORK_SECONDS, PCIE_SECONDS
from hvtrain.plan.costs.step import MIB, Cost, Rules, Work, rank_counts, step_cost
from hvtrain.plan.machine import Found, machine_of, read
from hvtrain.system import console

if TYPE_CHECKING:
    from hvtrain.plan.forecast import Forecast

DEFAULTS = Rules(fusion_bytes=0)
EPILOG = f"""\
{RUN_SETTINGS}

examples:
  python -m hvtrain.plan -np 512 --ranks-per-host 4 --step-seconds 0.3 --link-gbits 25 \\
      model=resnet50 dataset=synthetic train.batch_size=64
  python -m hvtrain.plan -np 2 --measure --calibrate bench/.../allreduce.json model=cnn

docs/plan.md has the model, its sources, and how near it comes to published runs of up to 512 GPUs.
"""


def main() -> None:
    """Runs the command line and exits."""
    enter(plan)


def plan() -> int:
    """Composes the run, then prints, draws and writes its plan."""
    options = _parser().parse_with_words(sys.argv[1:])
    trees = compose(options.words)
    if not trees:
        return 0
    config = from_dict(trees[0])
    measured = [read(Path(path)) for path in options.calibrate]
    with console.quiet_import(config.verbose):
        from hvtrain.plan import report
        from hvtrain.plan.forecast import forecast
        from hvtrain.plan.plot import draw
    run = forecast(config, options.np, options.ranks_per_host, options.examples, options.classes)
    rules = _rules(options, run)
    folder = _folder(options, run)
    print("\n".join(report.of_the_run(run, options.words, options.ranks_per_host)), flush=True)
    step_seconds = options.step_seconds or _measured(options, config, run)
    costs: list[Cost] = []
    found = None
    if step_seconds:
        found, rules, costs, faster = _predict(options, measured, run, rules, step_seconds)
        print("\n".join(report.of_the_step(run, costs, found, rules, step_seconds, faster)))
    else:
        print(f"{'step':<15}unknown; --step-seconds S says what one rank takes, --measure tries it here")
    draw(run, costs, folder / "plan.png")
    content = report.as_json(run, options.words, options.ranks_per_host, rules, costs, found)
    (folder / "plan.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    print(f"results in {folder}")
    return 0


def _predict(
    options: argparse.Namespace, measured: list[list[Measured]], run: Forecast, rules: Rules, step_seconds: float
) -> tuple[Found, Rules, list[Cost], float | None]:
    """The machine, the rules on it, the cost on 1, 2, 4, ... ranks, and the last one's if hosts reduced first."""
    work = Work(step_seconds, run.messages)
    found = machine_of(options, measured, rules.algorithms)
    if found.is_measured:
        rules = replace(rules, cycle_seconds=0.0)
    costs = [step_cost(work, number, found.machine, rules) for number in rank_counts(options.np)]
    by_hosts = step_cost(work, options.np, found.machine, replace(rules, algorithms=("hierarchical",))).step_seconds
    helps = options.np > options.ranks_per_host > 1 and by_hosts < 0.99 * costs[-1].step_seconds
    return found, rules, costs, by_hosts if helps else None


def _measured(options: argparse.Namespace, config: RunConfig, run: Forecast) -> float | None:
    if not options.measure:
        return None
    from hvtrain.plan.one_rank import measured_step_seconds

    words = list(options.words)
    if options.examples is not None:
        words = [word for word in words if not word.startswith(("dataset=", "dataset."))]
        shape = ",".join(map(str, run.source.image_shape))
        words += [
            "dataset=synthetic",
            f"dataset.image_shape=[{shape}]",
            f"dataset.num_classes={run.source.num_classes}",
        ]
    return measured_step_seconds(words, run.batch_size)


def _rules(options: argparse.Namespace, run: Forecast) -> Rules:
    names = {"best": tuple(ALGORITHMS), None: DEFAULTS.algorithms}.get(options.algorithm, (options.algorithm,))
    return replace(
        DEFAULTS,
        overlap=run.bucket_bytes > 0,
        fusion_bytes=options.fusion_mib * MIB,
        deviation=options.straggler,
        algorithms=names,
    )


def _folder(options: argparse.Namespace, run: Forecast) -> Path:
    name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}-np{options.np}-{run.model_name}"
    folder = Path(options.output or f"plan/{name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {folder} cannot be made: {error.strerror}; choose another folder") from error
    return folder


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain.plan",
        usage="%(prog)s -np N [OPTION ...] [GROUP=CHOICE ...] [SETTING=VALUE ...]",
        description="""\
Says before anything is started what a run on N ranks will be: global batch, learning rate, steps, memory, checkpoints
and the line that starts it; and, from one rank's step time and the links, how long a step takes on 1 to N ranks.
Nothing is trained or reduced.""",
        epilog=EPILOG,
    )
    option = parser.add_argument
    option("-np", type=at_least(1), required=True, metavar="N", help="ranks")
    option("--ranks-per-host", type=at_least(1), default=4, metavar="N", help="default: 4")
    option(
        "--examples", type=at_least(1), metavar="N", help="training examples of a data set that is not on this machine"
    )
    option("--classes", type=at_least(1), metavar="C", help="its classes, if the settings do not say so; default: 1000")
    option("--output", metavar="DIR", help="where plan.json and plan.png go; default: plan/DATE_TIME-npN-MODEL")
    step = parser.add_argument_group(
        "time of one rank's step, of the batch that is set; without it no step is predicted"
    )
    step = step.add_mutually_exclusive_group()
    step.add_argument("--step-seconds", type=positive, metavar="S", help="given")
    step.add_argument(
        "--measure", action="store_true", help="measured: a short training of one rank here, in a process of its own"
    )
    option = parser.add_argument_group("the machine").add_argument
    option("--link-gbits", type=positive, default=25.0, metavar="G", help="nominal speed between hosts; default: 25")
    option(
        "--latency-us",
        type=not_negative,
        default=1e6 * NETWORK_SECONDS,
        metavar="T",
        help="of one step of a ring between hosts; default: %(default).1f",
    )
    option(
        "--inside-gbytes",
        type=positive,
        default=15.75,
        metavar="G",
        help="nominal speed between ranks of a host, in one direction; default: 15.75 (PCIe 3.0 x16)",
    )
    option(
        "--inside-latency-us",
        type=not_negative,
        default=1e6 * PCIE_SECONDS,
        metavar="T",
        help="default: %(default).1f (PCIe; about 6.5 with NVLink)",
    )
    option(
        "--link-share",
        type=positive,
        default=LINK_SHARE,
        metavar="X",
        help="share of the nominal speeds that an allreduce gets; default: %(default)s",
    )
    option(
        "--calibrate",
        action="append",
        default=[],
        metavar="FILE",
        help="the allreduce.json of hvtrain.bench allreduce, instead of a link's figures: of the link between hosts if "
        "it has more ranks than a host; repeatable, for several numbers of ranks",
    )
    option = parser.add_argument_group("how ranks reduce").add_argument
    option(
        "--algorithm",
        choices=(*ALGORITHMS, "best"),
        help="best: the best of the others; default: the better of ring and tree, as in NCCL",
    )
    option(
        "--fusion-mib",
        type=not_negative,
        default=DEFAULTS.fusion_bytes / MIB,
        metavar="N",
        help="messages that are ready at once are joined to N MiB; default: %(default).0f, as in runs",
    )
    option(
        "--straggler",
        type=not_negative,
        default=DEFAULTS.deviation,
        metavar="X",
        help="deviation of the ranks' step times from their mean; default: %(default)s",
    )
    return parser


if __name__ == "__main__":
    main()
