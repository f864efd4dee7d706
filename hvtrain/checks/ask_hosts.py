"""Runs the probe on all hosts in parallel, over ssh except on this host, and collects their answers."""

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hvtrain.checks import probe
from hvtrain.errors import RankError
from hvtrain.launch.remote_hosts import (
    LOADER,
    NO_PYTHON,
    SSH_FAILED,
    Ssh,
    answer,
    capture,
    is_local,
    request,
)
from hvtrain.system import host_facts

Facts = dict[str, Any]

_PROBE = (host_facts, probe)
# The exit code with which `timeout` reports that it ended the probe.
_TIMED_OUT = 124
# Runs the probe on a host. Arguments: this process's Python, the code to run, and the time limit
# in seconds. If the host lacks that Python, any Python 3 can report the other facts. `timeout` ends
# a probe that hangs.
_SCRIPT = (
    'limit=; command -v timeout >/dev/null && limit="timeout -k 1 $2"; '
    'if [ -x "$0" ]; then exec $limit "$0" -c "$1"; fi; '
    f'command -v python3 >/dev/null || exit {NO_PYTHON}; exec $limit python3 -c "$1"'
)


def facts_request(names: list[str], run_dir: str = "runs", dataset: str | None = None) -> Facts:
    """Returns the argument of probe.facts(): this process's Python and folders, and the names to resolve.

    Args:
        names: The names of all hosts, which each host resolves.
        run_dir: The run folder, relative to this process's folder.
        dataset: A data set's file or folder, relative to this process's folder.
    """
    return {
        "folder": str(Path.cwd()),
        # Ranks inherit PYTHONPATH from the launcher, whatever a login shell on the host sets.
        "python_path": [
            path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path
        ],
        "python": sys.executable,
        "names": names,
        "run_dir": run_dir,
        "dataset": dataset,
    }


def ask(
    function: str, requests: Mapping[str, Facts], ssh: Ssh, seconds: float
) -> tuple[dict[str, Facts], dict[str, str]]:
    """Calls a function of the probe on all hosts in parallel, and collects the results within about `seconds`.

    Args:
        function: "facts" or "exchange".
        requests: The function's argument on each host.
        ssh: How the hosts are reached.
        seconds: The time limit.

    Returns:
        The answers by host, and for each host without one the reason and what to do, in one line.
    """
    answers = {}
    # One unreachable host must not hide the answers of the others.
    failures = {}
    # In parallel, since hosts also try each other's ports.
    with ThreadPoolExecutor(len(requests)) as pool:
        calls = {
            host: pool.submit(_ask, host, function, host_request, ssh, seconds)
            for host, host_request in requests.items()
        }
    for host, call in calls.items():
        try:
            answers[host] = call.result()
        except RankError as error:
            failures[host] = str(error)
    return answers, failures


def _ask(host: str, function: str, host_request: Facts, ssh: Ssh, seconds: float) -> Facts:
    """Calls the function on one host and returns its answer. Raises RankError if there is none."""
    text = request(_PROBE, function, host_request)
    command = ["sh", "-c", _SCRIPT, sys.executable, LOADER, f"{seconds:.0f}"]
    # The limit on the host ends the probe first; this one is for ssh itself.
    timeout = seconds + 3
    run = capture if is_local(host) else partial(ssh.run, host)
    try:
        result = run(command, text, timeout)
    except subprocess.TimeoutExpired:
        result = subprocess.CompletedProcess(command, _TIMED_OUT)

    if result.returncode == _TIMED_OUT:
        raise RankError(
            f"host {host} did not answer in {seconds:.0f} s; check its load, disks and DNS"
        )
    if result.returncode == NO_PYTHON:
        raise RankError(
            f"host {host} has neither {sys.executable} nor a python3; install hvtrain there"
        )
    if result.returncode == SSH_FAILED:
        raise RankError(ssh.explain_failure(host, result.stderr))

    # A login shell may have printed a greeting before the answer.
    facts = answer(result.stdout)
    if facts is None:
        last_line = result.stderr.strip().rpartition("\n")[2] or "no error message"
        raise RankError(
            f"the probe failed on host {host}: {last_line}; run {sys.executable} -V there"
        )
    return facts
