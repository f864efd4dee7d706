"""`python -m hvtrain compare`: runs the same training under several strategies and draws conclusions."""

import argparse
import json
import math
import os
import platform
import shlex
import signal
import socket
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from hvtrain.compare import longer
from hvtrain.compare.contest import Contest
from hvtrain.compare.contestants import JOINT, RANK, Contestant, contestants
from hvtrain.compare.one_run import Starting
from hvtrain.compare.pictures import write_png
from hvtrain.compare.summary import aligned, rows, summary
from hvtrain.compare.web_page import html
from hvtrain.core.records import write_atomic
from hvtrain.errors import INTERRUPTED, ConfigError
from hvtrain.system.command import RUN_SETTINGS, Parser, at_least, make_output
from hvtrain.system.host_facts import versions
from hvtrain.system.secrets import without_secrets

EPILOG = f"""\
{RUN_SETTINGS}
A strategy with settings of its own is written NAME@SETTING=VALUE@...

examples:
  python -m hvtrain compare strategy=single,horovod,multi_worker_mirrored -np 2 model=cnn dataset=fashion_mnist
  python -m hvtrain compare strategy=horovod,horovod@compression=fp16 -np 8 -H s1:4,s2:4 --speed-only model=resnet50 ...

docs/compare.md has the method, and measured comparisons.
"""


def main() -> int:
    """Checks all runs, then starts them one after the other. Returns 1 if one of them failed."""
    options = _parser().parse_with_words(sys.argv[1:])
    target = _target(options.target) if options.target else None
    taking_part = contestants(options.words, options.np, options.single_batch)
    if not taking_part:
        return 0
    contest = _contest(options, taking_part)
    make_output(contest.folder)
    facts = _facts(options)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # Then the run that it started ends too.
    print(f"{len(contest.schedule())} runs of {options.np} ranks; results go to {contest.folder}", flush=True)
    stopped: BaseException | None = None
    try:
        contest.run()
    except (KeyboardInterrupt, SystemExit) as error:
        stopped = error
    found = {**facts, "interrupted": stopped is not None}
    found |= summary(taking_part, contest.rounds, contest.whole, contest.errors, options.np, target)
    found["conclusion"] += facts["warnings"]
    write(found, contest.folder)
    if options.plan and not stopped and (line := longer.plan_line(found, options.plan)):
        found["conclusion"] += longer.extend(line, contest.folder / "plan")
        write(found, contest.folder)
    print("\n" + "\n".join(aligned(rows(found))) + "\n\n" + "\n".join(found["conclusion"]))
    print(f"\nresults in {contest.folder}: compare.html, compare.json, compare.png")
    if isinstance(stopped, KeyboardInterrupt):
        print("hvtrain: interrupted; what was measured so far is written", file=sys.stderr)
        return INTERRUPTED
    if stopped:
        raise stopped
    return 1 if contest.errors else 0


def _contest(options: argparse.Namespace, taking_part: list[Contestant]) -> Contest:
    folder = Path(options.output or f"compare/{datetime.now():%Y-%m-%d_%H-%M-%S}").absolute()
    hosts = ["-H", options.hosts] if options.hosts else []
    hosts += ["--hostfile", options.hostfile] if options.hostfile else []
    starting = Starting(options.np, tuple(hosts), options.num_ps, options.single_cores)
    return Contest(taking_part, starting, folder, options.rounds, options.speed_steps, options.speed_only)


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    """Facts about this start, for the results."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return {
        "command": shlex.join(["python", "-m", "hvtrain", "compare", *without_secrets(sys.argv[1:])]),
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        "machine": machine(load, cores),
        "versions": {name: version for name, version in versions().items() if version},
        "num_rounds": options.rounds,
        "speed_steps": options.speed_steps,
        "warnings": busy(load, cores),
    }


def write(found: dict[str, Any], folder: Path) -> None:
    """Writes compare.json, compare.html and, if anything was measured, compare.png."""
    shown = [{**one, "words": without_secrets(one["words"])} for one in found["strategies"]]
    write_atomic(folder / "compare.json", json.dumps({**found, "strategies": shown}, indent=1) + "\n")
    write_atomic(folder / "compare.html", html(found))
    if any(one["rounds"] or one["curve"] for one in found["strategies"]):
        write_png(found, folder / "compare.png")


def machine(load: float, cores: int) -> dict[str, str]:
    """This host, for the record."""
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "host": socket.gethostname(),
        "processor": f"{name}, {cores} cores",
        "memory": f"{memory / 1e9:.0f} GB",
        "load before": f"{load:.1f} processes on average",
    }


def busy(load: float, cores: int) -> list[str]:
    """A warning if others use this machine. load: processes that ran before the first run, on average.

    >>> busy(0.2, 2)
    []
    >>> busy(3.1, 2)
    ['This machine was busy before the first run (load 3.1 on 2 cores); repeat this when it is idle.']
    """
    said = f"This machine was busy before the first run (load {load:.1f} on {cores} cores)"
    return [f"{said}; repeat this when it is idle."] if load > cores / 2 else []


def _target(text: str) -> tuple[str, float]:
    metric, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not metric or not math.isfinite(number):
        raise ConfigError(f"--target {text} is not a metric and its value; write it as val_accuracy=0.97")
    return metric, number


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain compare",
        usage="%(prog)s strategy=A,B,... [OPTION ...] [GROUP=CHOICE ...] [SETTING=VALUE ...]",
        description="""\
Runs the same training under each strategy: short runs that take turns, for the speed, then one whole run of each.
Prints a table and the conclusions, and writes compare.html, compare.json and compare.png.""",
        epilog=EPILOG,
    )
    option = parser.add_argument
    option("-np", type=at_least(1), default=2, metavar="N", help="ranks, workers or replicas; default: 2")
    parser.add_hosts()
    option("--num-ps", type=at_least(1), metavar="P", help="parameter servers, for strategies that have some")
    rounds = "rounds of short runs; 6 rounds give intervals of 97%% confidence; default: 6"
    option("--rounds", type=at_least(1), default=6, metavar="N", help=rounds)
    option("--speed-steps", type=at_least(2), default=100, metavar="N", help="steps of a short run; default: 100")
    option("--speed-only", action="store_true", help="only the short runs: no losses, no accuracy")
    target = "measure the time to this value; default: the best value that all strategies reach"
    option("--target", metavar="METRIC=VALUE", help=target)
    batch = f"batch of strategy=single: that of all ranks together ({JOINT}, default) or of one rank ({RANK})"
    option("--single-batch", choices=(JOINT, RANK), default=JOINT, help=batch)
    option("--single-cores", type=at_least(1), metavar="N", help="cores that strategy=single may use; default: all")
    plan = "ranks up to which hvtrain plan extends the result; 0: not at all; default: 16"
    option("--plan", type=at_least(0), default=16, metavar="N", help=plan)
    option("--output", metavar="DIR", help="default: compare/DATE_TIME")
    return parser
