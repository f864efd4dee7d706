"""Starts a job over ssh, and restarts it from its newest checkpoint if that can help."""

import os
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvtrain.checkpoint import notes
from hvtrain.errors import RESTART_HELPS
from hvtrain.launch import environment, reach
from hvtrain.launch.job import Host, Job, hosts_word, rank_places, used_hosts
from hvtrain.launch.line import Way, start_line
from hvtrain.launch.output import RankOutput
from hvtrain.launch.start import SECONDS_TO_BEGIN, Ending, Launch, Signals
from hvtrain.system import console, drawing

LONGEST_PAUSE_SECONDS = 60.0
FAILURES_OF_A_BAD_HOST = 2


def run(
    job: Job, way: Way, logs: Path, run_dir: str | None, max_restarts: int = 0, min_ranks: int | None = None
) -> int:
    """The exit code of the last attempt. Raises ConfigError where the first cannot start.

    min_ranks: how many to restart with at least; None: all of them.
    """
    signals = Signals()
    failed: Counter[str] = Counter()
    now, needed, code = job, min_ranks or job.num_ranks, RESTART_HELPS
    for attempt in range(max_restarts + 1):
        if attempt:
            absent = reach.absent([host.name for host in job.hosts], way.ssh)
            # A discovery script finds an elastic job's hosts again.
            found = chosen(job.hosts, job.num_ranks, needed, failed, absent) if job.hosts else ((), job.num_ranks)
            # One second, then twice as long each time.
            seconds = min(LONGEST_PAUSE_SECONDS, 2.0 ** (attempt - 1))
            about = f"restart {attempt} of {max_restarts}"
            if found:
                step = notes.newest_step(Path(run_dir)) if run_dir else None
                # Other hosts may hold a newer one. The run looks there itself, and says which one it takes.
                here = "" if step is None else f" (here: {notes.folder_name(step)})"
                note = {} if step is None else notes.to_ranks(step, socket.gethostname())
                now = replace(job, hosts=found[0], num_ranks=found[1], environment={**job.environment, **note})
                about += f" in {seconds:g} s, from the newest checkpoint{here}, on {hosts_word(now.hosts)}"
            else:
                about += f" is left out, for {needed} ranks need more hosts: {'; '.join(absent.values())}"
            console.say_error(about, 0)
            signals.any_came.wait(seconds)
            if signals.first is not None:
                return 128 + signals.first if signals.first in (signal.SIGINT, signal.SIGHUP) else RESTART_HELPS
            if not found:
                continue
        # A folder for each attempt, after those of earlier launches.
        number = 1 + sum(1 for _ in logs.glob("attempt-*"))
        ending = _once(now, way, logs / f"attempt-{number:04d}" if max_restarts else logs, signals)
        code = ending.code
        if code != RESTART_HELPS or signals.first is not None:
            break
        if ending.failure:
            failed[ending.failure.host] += 1
    return code


def chosen(
    hosts: Sequence[Host], num_ranks: int, min_ranks: int, failed: Mapping[str, int], absent: Collection[str]
) -> tuple[tuple[Host, ...], int] | None:
    """The hosts and the number of ranks to go on with; None if too few hosts are there.

    A host that has failed often is left out if enough remain without it.
    """
    present = tuple(host for host in hosts if host.name not in absent)
    good = tuple(host for host in present if failed.get(host.name, 0) < FAILURES_OF_A_BAD_HOST)
    for candidates in (good, present):
        if (ranks := min(num_ranks, sum(host.slots for host in candidates))) >= min_ranks:
            return candidates, ranks
    return None


def _once(job: Job, way: Way, logs: Path, signals: Signals) -> Ending:
    """One attempt; says at the end why it ended."""
    places = () if way.discovery_script else rank_places(job)
    # horovodrun checks the hosts itself.
    paths = reach.check([host.name for host in used_hosts(places)], way.ssh) if way.mpirun else None
    known = reach.Reached(places, paths.oom_kills if paths else {}, way.ssh) if way.mpirun else None
    output = RankOutput(logs, places)
    job = replace(job, environment={**job.environment, **drawing.request(drawing.can_draw(sys.stdout))})
    variables = environment.for_launcher(os.environ, job.environment)
    with tempfile.TemporaryDirectory(prefix="hvtrain-") as folder:
        line = start_line(job, way, paths, Path(folder))
        variables["PYTHONUNBUFFERED"] = "1"
        seconds = way.seconds_to_begin or SECONDS_TO_BEGIN
        ending = Launch(line, variables, output, Path(folder), known, job.roles.label, seconds).run(signals)
    if ending.failure:
        console.say_error(f"what each rank said is in {output.folder}", 0)
        if not ending.failure.is_shown:
            console.say_error(str(ending.failure), 0)
    return ending
