"""Sends the probe to all hosts at once and takes their answers. This host runs it without ssh."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvtrain.checks import probe
from hvtrain.errors import RankError
from hvtrain.launch.remote_hosts import is_local
from hvtrain.launch.ssh import LOADER, SSH_FAILED, Ssh, answer, request
from hvtrain.system import host_facts, interfaces

MAX_AT_ONCE = 64
_PROBE = (host_facts, interfaces, probe)
# Exit codes of _SCRIPT.
_TIMED_OUT = 124
_NO_PYTHON = 86
# Where the environment is missing, any Python 3 tells what else is there. Nothing may outlast its
# time by much.
_SCRIPT = (
    'limit=; command -v timeout >/dev/null && limit="timeout -k 1 $2"; '
    'if [ -x "$0" ]; then exec $limit "$0" -c "$1"; fi; '
    f'command -v python3 >/dev/null || exit {_NO_PYTHON}; exec $limit python3 -c "$1"'
)


@dataclass(frozen=True)
class Answer:
    """The answer of one host.

    Attributes:
        facts: The probe's result; None if it did not run.
        trouble: Why it did not run and what to do, in one line.
        clock: Seconds that the host's clock is ahead of this one's, and the error: half of the time
            that ssh took.
    """

    facts: dict[str, Any] | None = None
    trouble: str = ""
    clock: tuple[float, float] = (0.0, 0.0)


def facts_request(names: list[str], run_dir: str = "runs", dataset: str | None = None) -> dict[str, Any]:
    """The request for a host's facts, in this process's environment and folder.

    Args:
        names: All hosts; each host looks up the addresses of all.
        run_dir: The run folder, relative to this process's folder.
        dataset: A data set's file or folder, relative to this process's folder.
    """
    return {
        "work": "facts",
        "folder": str(Path.cwd()),
        # Ranks get it from the launcher, whatever a login on the host sets.
        "python_path": [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path],
        "python": sys.executable,
        "names": names,
        "run_dir": run_dir,
        "dataset": dataset,
    }


def ask(requests: Mapping[str, Mapping[str, Any]], ssh: Ssh, seconds: float) -> dict[str, Answer]:
    """Sends each host its request and returns the answers, within about `seconds`."""
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        answers = pool.map(lambda host: _ask(host, requests[host], ssh, seconds), requests)
        return dict(zip(requests, answers))


def _ask(host: str, host_request: Mapping[str, Any], ssh: Ssh, seconds: float) -> Answer:
    text = request(_PROBE, "answer", host_request)
    command = ["sh", "-c", _SCRIPT, sys.executable, LOADER, f"{seconds:.0f}"]
    # The limit on the host ends the probe first; this one is for ssh itself.
    timeout = seconds + 3
    # Read just before the call: the error of the clock is half of the time in between.
    began = time.time()

    try:
        local = is_local(host)
        if local:
            done = subprocess.run(
                command,
                input=text,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        else:
            done = ssh.run(host, command, text, timeout=timeout)
    except RankError as error:
        return Answer(trouble=str(error))
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(command, _TIMED_OUT)

    ended = time.time()

    if done.returncode == _TIMED_OUT:
        return Answer(trouble=f"host {host} did not answer in {seconds:.0f} s; look at its load, disks and DNS")
    if done.returncode == _NO_PYTHON:
        return Answer(trouble=f"host {host} has neither {sys.executable} nor a python3; put hvtrain there")
    if done.returncode == SSH_FAILED and not local:
        return Answer(trouble=ssh.trouble(host, done.stderr))

    # A login shell may have printed a greeting before the answer.
    facts = answer(done.stdout)
    if facts is None:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        return Answer(trouble=f"the probe failed on host {host}: {lines[-1]}; try: ssh {host} {sys.executable} -V")

    # A host's clock that is ahead makes the way there look longer and the way back shorter.
    seconds_there = facts["began"] - began
    seconds_back = ended - facts["ended"]
    return Answer(facts, "", ((seconds_there - seconds_back) / 2, (seconds_there + seconds_back) / 2))
