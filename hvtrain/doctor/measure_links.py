"""Starts link_worker on one rank per host, by Horovod's launcher on Gloo, and takes what it measured."""

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvtrain.launch import environment
from hvtrain.launch.job import Host, Job
from hvtrain.launch.line import Way, start_line
from hvtrain.launch.ssh import Ssh

WORKER = "hvtrain.doctor.link_worker"
MARK = "hvtrain-links:"
START_SECONDS = 120
SECONDS_FOR_A_PAIR = 3


@dataclass(frozen=True)
class Measurement:
    """The worker's result; if there is none, the ranks' last words and the line that started them."""

    measured: dict[str, Any] | None
    said: str = ""
    line: str = ""


def measure(hosts: Sequence[str], ssh: Ssh, interfaces: str | None) -> Measurement:
    """Measures the links between the hosts, in limited time."""
    job = Job(("python", "-m", WORKER), len(hosts), tuple(Host(name, 1) for name in hosts))
    line = start_line(job, Way(ssh, interfaces=interfaces))
    # Sets of two ranks come and go while the job runs.
    settings = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    variables = environment.for_launcher(os.environ, {**environment.for_ranks(os.environ), **settings})
    limit = most_seconds(len(hosts))
    output, ended = _run(line, variables, limit)
    for text in output.splitlines():
        if MARK in text:
            return Measurement(json.loads(text.partition(MARK)[2]))
    said = f"{'' if ended else f'not ended in {limit} s; '}said last: {_last_words(output)}"
    words = [f"{name}={value}" for name, value in settings.items()]
    return Measurement(None, said, shlex.join([*words, *line]))


def most_seconds(num_hosts: int) -> int:
    """How long a measurement may take. The workers also end by then: a killed launcher cannot end them."""
    return START_SECONDS + SECONDS_FOR_A_PAIR * num_hosts**2 // 2


def _last_words(output: str) -> str:
    """The last line of the rank that failed, then the launcher's."""
    texts = [text.strip() for text in output.splitlines() if text.strip()]
    failed = re.search(r"FIRST FAILURE rank (\d+)", texts[-1]) if texts else None
    of_rank = [text for text in texts if failed and text.startswith(f"[{failed[1]}]<std")]
    return "; ".join([*of_rank[-1:], *texts[-1:]]) or "nothing"


def _run(line: list[str], variables: dict[str, str], seconds: float) -> tuple[str, bool]:
    """The line's whole output, and whether it ended by itself."""
    with subprocess.Popen(
        line,
        env={**variables, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=seconds)[0], True
        except BaseException as error:
            output = _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return output, False


def _end(process: subprocess.Popen[str]) -> str:
    """Ends the launcher, which ends its ranks on other hosts if it still can."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=8)[0]
        except subprocess.TimeoutExpired:
            continue
    return ""
