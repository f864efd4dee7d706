"""Starts a job over ssh, and restarts it from its newest checkpoint if that can help."""

import os
import re
import signal
import socket
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvtrain.errors import RESTART_HELPS, RankError, message_of
from hvtrain.launch import environment, remote_hosts
from hvtrain.launch.first_failure import Ending
from hvtrain.launch.job import Host, Hosts, Job, hosts_option, launcher_command, place_ranks
from hvtrain.launch.output import RankOutput
from hvtrain.launch.remote_hosts import HostCalls
from hvtrain.launch.supervisor import Launch, Signals
from hvtrain.system import checkpoint_notes as notes
from hvtrain.system import console, drawing
from hvtrain.system.run_files import remove_if_empty
from hvtrain.system.run_lock import is_held

LONGEST_PAUSE_SECONDS = 60.0
# A host at fault for this many failures is left out, if the others have enough slots.
MAX_HOST_FAILURES = 2


def run(
    job: Job,
    logs: Path,
    run_dir: Path | None,
    max_restarts: int = 0,
    min_ranks: int | None = None,
    is_new_run: bool = False,
) -> int:
    """Starts the job, and restarts it as long as that can help.

    Returns the exit code of the last attempt. If a signal arrives during a pause, returns 128 + the signal for
    SIGINT and SIGHUP, and RESTART_HELPS for other signals.

    Args:
        job: what to start.
        logs: the folder for the ranks' output; with max_restarts, one folder inside it per attempt.
        run_dir: the folder with the job's checkpoints, if it is known here.
        max_restarts: how many attempts may follow the first.
        min_ranks: the minimum number of ranks for a restart; None: all of them.
        is_new_run: True if run_dir did not exist before this launch; it is removed if the run is refused.

    Raises UserError if an attempt cannot start.
    """
    signals = Signals()
    num_failures: Counter[str] = Counter()
    had_no_checkpoint = not _has_checkpoint(run_dir)
    current = replace(job, environment={**job.environment, **_note_for_ranks(run_dir)})
    for attempt in range(max_restarts + 1):
        if attempt:
            # Exponential backoff, starting with one second.
            seconds = min(LONGEST_PAUSE_SECONDS, 2.0 ** (attempt - 1))
            remaining, plan = _plan_restart(
                job, run_dir, min_ranks or job.num_ranks, num_failures, seconds
            )
            console.say_error(f"restart {attempt} of {max_restarts} {plan}")

            # Ctrl-C ends the pause.
            signals.received.wait(seconds)
            if signals.first in (signal.SIGINT, signal.SIGHUP):
                return 128 + signals.first
            if signals.first is not None:
                return RESTART_HELPS
            if remaining is None:
                continue
            current = remaining
            if had_no_checkpoint and _has_checkpoint(run_dir):
                current = replace(current, command=_resume_command(job.command))

        run_attempt = _run_again if attempt else _run_once
        attempt_logs = _attempt_folder(logs) if max_restarts else logs
        ending = run_attempt(current, attempt_logs, signals)
        # A second launch with this run.dir, started at the same time, may be training in the folder.
        if ending.is_shown and is_new_run and run_dir and not is_held(run_dir):
            remove_if_empty(run_dir)
        # Any other failure would happen again, and a signal means that the launch should end.
        if ending.code != RESTART_HELPS or signals.first is not None:
            return ending.code
        num_failures[ending.host] += 1
    return RESTART_HELPS


def _attempt_folder(logs: Path) -> Path:
    """Returns the folder of the next attempt's logs, numbered after those of earlier launches."""
    # Not their count, since a user may have deleted some of them.
    matches = [re.fullmatch(r"attempt-(\d+)", path.name) for path in logs.glob("attempt-*")]
    number = 1 + max((int(match[1]) for match in matches if match), default=0)
    return logs / f"attempt-{number:04d}"


def _has_checkpoint(run_dir: Path | None) -> bool:
    """Returns True if this host has a checkpoint of the run, or a note of one on another host."""
    if run_dir is None:
        return False
    note = notes.read(run_dir)
    return notes.newest_step(run_dir) is not None or bool(note and note.step)


def _note_for_ranks(run_dir: Path | None) -> dict[str, str]:
    """Returns the variable that tells the ranks which host has the newest checkpoint that this host knows of."""
    if run_dir is None:
        return {}
    step = notes.newest_step(run_dir)
    if step is not None:
        return notes.to_environment(step, socket.gethostname())
    note = notes.read(run_dir)
    return notes.to_environment(note.step, note.host) if note else {}


def _resume_command(command: Sequence[str]) -> tuple[str, ...]:
    """Returns the command with resume=auto in place of resume=never, which refuses this launch's checkpoints."""
    return tuple("resume=auto" if part == "resume=never" else part for part in command)


def _plan_restart(
    job: Job, run_dir: Path | None, min_ranks: int, num_failures: Mapping[str, int], seconds: float
) -> tuple[Job | None, str]:
    """Returns the job on the remaining hosts (None if there are too few) and a message about the restart.

    The ranks are told which checkpoint is the newest on this host. The hosts of an elastic job are
    those that its discovery script prints.
    """
    hosts = job.hosts
    num_ranks = job.num_ranks
    if hosts:
        # A host that is down is left out until it answers again.
        absent = remote_hosts.absent([host.name for host in hosts], job.ssh)
        choice = choose_hosts(hosts, num_ranks, min_ranks, num_failures, absent)
        if choice is None:
            return (
                None,
                f"is skipped, since {min_ranks} ranks need more hosts: {'; '.join(absent.values())}",
            )
        hosts, num_ranks = choice

    checkpoint = "the newest checkpoint"
    step = notes.newest_step(run_dir) if run_dir else None
    if step is not None:
        # Other hosts may have a newer checkpoint. The run looks for it
        # on all hosts, and reports which one it uses.
        checkpoint = f"{checkpoint} (here: {notes.folder_name(step)})"
    remaining = replace(
        job,
        hosts=hosts,
        num_ranks=num_ranks,
        environment={**job.environment, **_note_for_ranks(run_dir)},
    )
    host_names = hosts_option(hosts) or f"the hosts that {job.discovery_script} lists"
    return remaining, f"in {seconds:g} s, from {checkpoint}, on {host_names}"


def choose_hosts(
    hosts: Sequence[Host],
    num_ranks: int,
    min_ranks: int,
    num_failures: Mapping[str, int],
    absent: Collection[str],
) -> tuple[Hosts, int] | None:
    """Chooses the hosts and the number of ranks to continue with; None if too few hosts are left.

    A host that has failed often is left out if enough remain without it.
    """
    present = tuple(host for host in hosts if host.name not in absent)
    good = tuple(host for host in present if num_failures.get(host.name, 0) < MAX_HOST_FAILURES)
    # A restart with a host that fails often is better than none.
    for candidates in (good, present):
        ranks = min(num_ranks, sum(host.slots for host in candidates))
        if ranks >= min_ranks:
            return candidates, ranks
    return None


def _run_again(job: Job, logs: Path, signals: Signals) -> Ending:
    """Runs a restart. Another one can help if a host that answered before the pause no longer does."""
    try:
        ending = _run_once(job, logs, signals)
    except RankError as error:
        console.say_error(message_of(error))
        return Ending(RESTART_HELPS)
    # No rank was started, and the launcher has said why. The next restart checks the hosts again.
    if ending.code == RankError.exit_code and not ending.message:
        return Ending(RESTART_HELPS)
    return ending


def _run_once(job: Job, logs: Path, signals: Signals) -> Ending:
    """Runs one attempt, prints why it ended, and returns its ending."""
    rank_hosts = () if job.discovery_script else place_ranks(job)
    network = None
    # Horovod's launcher checks the hosts itself.
    if job.mpirun:
        network = remote_hosts.check(rank_hosts, job.ssh)

    output = RankOutput(logs, rank_hosts)
    job = replace(job, environment={**job.environment, **drawing.request(drawing.can_draw())})
    variables = environment.for_launcher(os.environ, job.environment)
    with tempfile.TemporaryDirectory(prefix="hvtrain-") as name:
        folder = Path(name)
        if job.mpirun:
            HostCalls(rank_hosts, network.oom_kills if network else {}, job.ssh).write(folder)
        launch = Launch(
            launcher_command(job, network, folder),
            variables,
            output,
            folder,
            job.roles.label,
            job.seconds_to_begin,
        )
        ending = launch.run(signals)

    # An error that all ranks share has already been shown, and the logs contain nothing more.
    if ending.message and not ending.is_shown:
        console.say_error(f"what each rank said is in {output.folder}")
        console.say_error(ending.message)
    return ending
