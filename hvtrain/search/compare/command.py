"""`python -m hvtrain compare`: runs the same training under several strategies and draws conclusions."""

import argparse
import math
import os
import socket
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from hvtrain.errors import INTERRUPTED, ConfigError
from hvtrain.launch.child import exit_at_signals
from hvtrain.search.compare.conclusion import plan_arguments, plan_conclusions
from hvtrain.search.compare.contest import JOINT, RANK, Contest, contestants
from hvtrain.search.compare.results import html, summary, table, write_png
from hvtrain.system.command import RUN_SETTINGS, Parser, add_number, at_least, make_output
from hvtrain.system.files import write_atomic, write_json
from hvtrain.system.host_facts import processor, versions
from hvtrain.system.secrets import command_line, without_secrets
from hvtrain.system.text import aligned, counted


def main() -> int:
    """Checks all runs, then starts them one after another. Returns the exit code.

    It is 1 if a run failed, and INTERRUPTED after Ctrl-C.
    """
    options = _parser().parse_with_overrides()
    target = parse_target(options.target) if options.target else None
    strategies = contestants(options.overrides, options.np, options.single_batch)
    folder = Path(options.output or f"compare/{datetime.now():%Y-%m-%d_%H-%M-%S}").absolute()
    contest = Contest(
        strategies,
        options.np,
        folder,
        options.rounds,
        options.speed_steps,
        options.speed_only,
        options.hosts,
        options.num_ps,
        options.single_cores,
    )
    # Created only now, so that a mistake on the command line leaves no folder behind.
    make_output(folder)
    # Measured before the first run, which makes the machine busy.
    facts = _facts(options)
    exit_at_signals()
    print(
        f"{len(contest.schedule())} runs of {counted(options.np, 'rank')}; results go to {folder}",
        flush=True,
    )

    ended_by = None
    try:
        contest.run()
    except (KeyboardInterrupt, SystemExit) as error:
        ended_by = error

    # After an interruption, the finished runs still have results.
    comparison = {**facts, "interrupted": ended_by is not None, **summary(contest, target)}
    # Shown with the conclusions, which the warnings qualify.
    comparison["conclusion"] += facts["warnings"]
    # Written before the plan is made, which takes a while and can fail.
    write(comparison, folder)
    if options.plan and ended_by is None:
        arguments = plan_arguments(comparison, options.plan)
        if arguments:
            comparison["conclusion"] += plan_conclusions(arguments, folder / "plan")
            write(comparison, folder)

    print("\n" + "\n".join([*aligned(table(comparison)), "", *comparison["conclusion"]]))
    files = [
        name for name in ("compare.html", "compare.json", "compare.png") if (folder / name).exists()
    ]
    print(f"\nresults in {folder}: {', '.join(files)}")
    if isinstance(ended_by, KeyboardInterrupt):
        sys.stderr.write("hvtrain: interrupted; the results so far have been saved\n")
        return INTERRUPTED

    # exit_at_signals raises SystemExit with 128 plus the signal's number.
    if ended_by:
        raise ended_by

    # Some results are better than none, but a script should see the failure.
    return 1 if contest.errors else 0


def write(comparison: dict[str, Any], folder: Path) -> None:
    """Writes compare.json, compare.html and, if anything was measured, compare.png."""
    # Only the JSON contains the settings, and people share it as they share the page.
    public = [
        {**entry, "overrides": without_secrets(entry["overrides"])}
        for entry in comparison["strategies"]
    ]
    write_json(folder / "compare.json", {**comparison, "strategies": public})
    write_atomic(folder / "compare.html", html(comparison))
    write_png(comparison, folder / "compare.png")


def parse_target(text: str) -> tuple[str, float]:
    """Parses METRIC=VALUE. Raises ConfigError if the text is anything else."""
    metric, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        # Rejected below, like every value that is not finite.
        number = math.nan

    if not metric or not math.isfinite(number):
        raise ConfigError(
            f"--target {text} is not a metric with a finite value; write it as val_accuracy=0.97"
        )

    return metric, number


def busy_warning(load: float, cores: int) -> list[str]:
    """Returns a warning if other processes use more than half of the cores, else nothing.

    Args:
        load: the load average over the minute before the first run, in processes.
        cores: the number of cores that this process may use.

    >>> busy_warning(0.2, 2)
    []
    >>> busy_warning(3.1, 2)
    ['This machine was busy before the first run (load 3.1 on 2 cores); repeat the comparison when it is idle.']
    """
    if load <= cores / 2:
        return []
    return [
        f"This machine was busy before the first run (load {load:.1f} on {cores} cores); "
        "repeat the comparison when it is idle."
    ]


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    """Returns facts about this comparison and its machine, for the results."""
    load = os.getloadavg()[0]  # Over the last minute.
    # The cores of this process: a container or a job may use fewer than the host has.
    cores = len(os.sched_getaffinity(0))

    return {
        "command": command_line("compare", sys.argv[1:]),
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        "machine": {
            "host": socket.gethostname(),
            "processor": f"{processor()}, {cores} cores",
            "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
            "load before": f"{load:.1f} processes on average",
        },
        "versions": {name: version for name, version in versions().items() if version},
        "num_rounds": options.rounds,
        "speed_steps": options.speed_steps,
        # Also shown with the conclusions, because warnings say how far the conclusions can be trusted.
        "warnings": busy_warning(load, cores),
    }


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain compare",
        usage="%(prog)s strategy=A,B,... [OPTION ...] [GROUP=CHOICE ...] [SETTING=VALUE ...]",
        description="""\
Runs the same training under each strategy: short runs that take turns, for the speed, then one whole run of each.
Prints a table and the conclusions, and writes compare.html, compare.json and compare.png.""",
        epilog=f"""\
{RUN_SETTINGS}
To give a strategy its own settings, write it as NAME@SETTING=VALUE@...

examples:
  python -m hvtrain compare strategy=single,horovod,multi_worker_mirrored -np 2 model=cnn dataset=fashion_mnist
  python -m hvtrain compare strategy=horovod,horovod@compression=fp16 -np 8 -H s1:4,s2:4 --speed-only model=resnet50 ...

docs/compare.md has the method, and measured comparisons.
""",
    )
    add_number(parser, "-np", at_least(1), "ranks, workers or replicas", 2)
    parser.add_hosts()
    add_number(
        parser,
        "--num-ps",
        at_least(1),
        "parameter servers, for strategies that use them",
        metavar="P",
    )
    add_number(
        parser,
        "--rounds",
        at_least(1),
        "rounds of short runs; 6 rounds give intervals of 97%% confidence",
        6,
    )
    add_number(parser, "--speed-steps", at_least(2), "steps of a short run", 100)
    parser.add_argument(
        "--speed-only", action="store_true", help="only the short runs: no losses, no accuracy"
    )
    parser.add_argument(
        "--target",
        metavar="METRIC=VALUE",
        help="measure the time to this value; default: the best value that all strategies reach",
    )
    parser.add_argument(
        "--single-batch",
        choices=(JOINT, RANK),
        default=JOINT,
        help=f"batch of strategy=single: that of all ranks together ({JOINT}, default) or of one rank ({RANK})",
    )
    add_number(
        parser, "--single-cores", at_least(1), "cores that strategy=single may use; default: all"
    )
    add_number(
        parser,
        "--plan",
        at_least(0),
        "ranks up to which hvtrain plan extrapolates the result; 0: not at all",
        16,
    )
    parser.add_argument(
        "--output", metavar="DIR", help="folder of the results; default: compare/DATE_TIME"
    )

    return parser
