"""`python -m hvtrain.plan`: a run on many ranks, on paper: batch, steps, memory, and how fast it will be."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hvtrain.cli import Parser, enter
from hvtrain.config.compose import compose
from hvtrain.config.schema import RunConfig, from_dict
from hvtrain.errors import ConfigError
from hvtrain.plan.costs.algorithms import ALGORITHMS
from hvtrain.plan.costs.calibration import Measured
from hvtrain.plan.costs.links import LINK_SHARE, NETWORK_SECONDS, PCIE_SECONDS
from hvtrain.plan.costs.step import MIB, Cost, Rules, Work, rank_counts, step_cost
from hvtrain.plan.machine import Found, machine_of, read
from hvtrain.system import console
from hvtrain.system.imports import without

if TYPE_CHECKING:
    from hvtrain.plan.forecast import Forecast

DEFAULTS = Rules(fusion_bytes=0)
USAGE = f"""\
python -m hvtrain.plan -np N [OPTION ...] [WORDS]

Says before anything is started what a run on N ranks will be: global batch, learning rate, steps, memory, checkpoints
and the line that starts it; and, from one rank's step time and the links, how long a step takes on 1 to N ranks.
Nothing is trained or reduced. WORDS are those of python -m hvtrain.
  python -m hvtrain.plan -np 512 --ranks-per-host 4 --step-seconds 0.3 --link-gbits 25 \\
      model=resnet50 dataset=synthetic train.batch_size=64
  python -m hvtrain.plan -np 2 --measure --calibrate bench/.../allreduce.json model=cnn

OPTIONS
  -np N                  ranks
  --ranks-per-host N     default: 4
  --examples N           training examples of a data set that is not on this machine; --classes C: of how many classes,
                         where WORDS do not say so (1000)
  --output DIR           where plan.json and plan.png go; default: plan/DATE_TIME-npN-MODEL

  how long one rank's step takes, of the batch in WORDS; without it no step is predicted
  --step-seconds S       given
  --measure              measured: a short training of one rank on this machine, in a process of its own

  the machine
  --link-gbits G         of a host's link to the others, nominal; default: 25
  --latency-us T         of one step of a ring between hosts; default: {1e6 * NETWORK_SECONDS:.1f}
  --inside-gbytes G      between ranks of a host, in one direction, nominal; default: 15.75 (PCIe 3.0 x16)
  --inside-latency-us T  default: {1e6 * PCIE_SECONDS:.1f} (PCIe; about 6.5 with NVLink)
  --link-share X         of the nominal speeds, what an allreduce gets; default: {LINK_SHARE}
  --calibrate FILE       the allreduce.json of python -m hvtrain.bench allreduce, in place of a link's figures: of the
                         link between hosts if it has more ranks than a host; repeatable, for several numbers of ranks

  how ranks reduce
  --algorithm NAME       ring, tree, hierarchical, or best of these; default: the better of ring and tree, as NCCL does
  --fusion-mib N         messages that are ready at once are joined to N; default: {DEFAULTS.fusion_bytes}, as runs do
  --straggler X          deviation of the ranks' step times from their mean; default: {DEFAULTS.deviation}

docs/plan.md has the model, its sources, and how near it comes to published runs of up to 512 GPUs.
"""


def main() -> None:
    """Runs the command line and exits."""
    enter(plan, lambda: USAGE)


def plan() -> int:
    """Composes the run, then prints, draws and writes what it would be."""
    options = _parse(sys.argv[1:])
    trees = compose(options.words)
    if not trees:
        return 0
    config = from_dict(trees[0])
    measured = [read(Path(path)) for path in options.calibrate]
    if not config.verbose:
        console.quiet_tensorflow()
    with console.native_notes_held(not config.verbose), without("sklearn"):
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


def _parse(words: list[str]) -> argparse.Namespace:
    parser = Parser("python -m hvtrain.plan", add_help=False, allow_abbrev=False)
    parser.add_argument("-np", type=_count, required=True)
    parser.add_argument("--ranks-per-host", type=_count, default=4)
    parser.add_argument("--examples", type=_count)
    parser.add_argument("--classes", type=_count)
    parser.add_argument("--output")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--step-seconds", type=_positive)
    step.add_argument("--measure", action="store_true")
    parser.add_argument("--link-gbits", type=_positive, default=25.0)
    parser.add_argument("--latency-us", type=_at_least_0, default=1e6 * NETWORK_SECONDS)
    parser.add_argument("--inside-gbytes", type=_positive, default=15.75)
    parser.add_argument("--inside-latency-us", type=_at_least_0, default=1e6 * PCIE_SECONDS)
    parser.add_argument("--link-share", type=_positive, default=LINK_SHARE)
    parser.add_argument("--calibrate", action="append", default=[], metavar="FILE")
    parser.add_argument("--algorithm", choices=(*ALGORITHMS, "best"))
    parser.add_argument("--fusion-mib", type=_at_least_0, default=DEFAULTS.fusion_bytes / MIB)
    parser.add_argument("--straggler", type=_at_least_0, default=DEFAULTS.deviation)
    return parser.parse_with_words(words)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} came where a whole number above 0 was needed")
    return int(text)


def _positive(text: str) -> float:
    number = _at_least_0(text)
    if number == 0:
        raise argparse.ArgumentTypeError(f"{text} came where a number above 0 was needed")
    return number


def _at_least_0(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} came where a number of 0 or more was needed")
    return number


if __name__ == "__main__":
    main()
