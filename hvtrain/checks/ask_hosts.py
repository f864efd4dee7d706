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

from hvtrain.checks import probe, probe_network
from hvtrain.errors import RankError
from hvtrain.launch.reach import is_local
from hvtrain.launch.ssh import LOADER, SSH_FAILED, Ssh, answer, request
from hvtrain.system import host_facts, interfaces

MAX_AT_ONCE = 64
_PROBE = (host_facts, interfaces, probe_network, probe)
# Where the environment is missing, any Python 3 tells what else is there. Nothing may outlast its time by much.
_SCRIPT = (
    'limit=; command -v timeout >/dev/null && limit="timeout -k 1 $2"; '
    'if [ -x "$0" ]; then exec $limit "$0" -c "$1"; fi; '
    'command -v python3 >/dev/null || exit 86; exec $limit python3 -c "$1"'
)


@dataclass(frozen=True)
class Answer:
    """What the probe found on one host; if facts is None, trouble says in one line why it did not run, and what to do.

    clock: seconds that the host's clock is ahead of this one's, and the error: half of the time under way.
    """

    facts: dict[str, Any] | None = None
    trouble: str = ""
    clock: tuple[float, float] = (0.0, 0.0)


def facts_request(names: list[str], run_dir: str = "runs", dataset: str | None = None) -> dict[str, Any]:
    """The request for a host's facts, in this process's environment and folder.

    names: all hosts, whose addresses each looks up. run_dir and dataset: what it looks at, relative to the folder.
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
    """Each host's answer to its request, within about so many seconds."""
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        answers = pool.map(lambda host: _ask(host, requests[host], ssh, seconds), requests)
        return dict(zip(requests, answers))


def _ask(host: str, asked: Mapping[str, Any], ssh: Ssh, seconds: float) -> Answer:
    text = request(_PROBE, "answer", asked)
    words = ["sh", "-c", _SCRIPT, sys.executable, LOADER, f"{seconds:.0f}"]
    began = time.time()
    try:
        if local := is_local(host):
            done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=seconds + 3, check=False)
        else:
            done = ssh.run(host, words, text, timeout=seconds + 3)
    except RankError as error:
        return Answer(trouble=str(error))
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(words, 124)
    ended = time.time()
    if done.returncode == 124:
        return Answer(trouble=f"host {host} did not answer in {seconds:.0f} s; look at its load, disks and DNS")
    if done.returncode == 86:
        return Answer(trouble=f"host {host} has neither {sys.executable} nor a python3; put hvtrain there")
    if done.returncode == SSH_FAILED and not local:
        return Answer(trouble=ssh.trouble(host, done.stderr))
    if (facts := answer(done.stdout)) is None:
        said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it said nothing")
        return Answer(trouble=f"the probe failed on host {host}: {said.strip()}; try: ssh {host} {sys.executable} -V")
    before, after = facts["began"] - began, ended - facts["ended"]  # the ways there and back, by two clocks
    return Answer(facts, "", ((before - after) / 2, (before + after) / 2))
