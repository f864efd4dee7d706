"""Launches on a lab for tests of faults: ranks with a fate, signals to the launcher, and what is left on the hosts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from pathlib import Path

from lab import PYTHON, SCRIPT, Lab
from launching import BIN, HASTY

SOON = f"PATH={HASTY}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FATE = Path(__file__).parent / "launched" / "fate.py"
HOW = {
    "launch-mpi": [PYTHON, "-m", "hvtrain", "launch", "--mpi"],
    "launch-gloo": [PYTHON, "-m", "hvtrain", "launch", "--gloo"],
    "launch-mpirun": [PYTHON, "-m", "hvtrain", "launch", "--mpirun"],
    "horovodrun-mpi": [str(BIN / "horovodrun"), "--mpi"],
    "horovodrun-gloo": [str(BIN / "horovodrun"), "--gloo"],
}


def line(how: str, hosts: str, *command: str, options: tuple[str, ...] = ()) -> list[str]:
    """A launch of two ranks that run the words."""
    between = ["--"] if how.startswith("launch") else []
    return [*HOW[how], "-np", "2", "-H", hosts, *options, *between, *command]


def fate(folder: Path, *options: str) -> list[str]:
    return ["python", str(FATE), str(folder), *options]


def signalled(lab: Lab, command: list[str], folder: Path, *signals: str) -> tuple[int, str]:
    """Exit code and output of a launch on s1 whose own process gets the signals once both ranks are there."""
    kills = "; sleep 2; ".join(f"kill -{name} $launcher" for name in signals)
    script = (
        f"{shlex.join(command)} >{folder}/said 2>&1 & launcher=$!; "
        f"until [ -e {folder}/rank-0 -a -e {folder}/rank-1 ]; do sleep 0.1; kill -0 $launcher || break; done; "
        "sleep 0.3; "
        f"{kills}; wait $launcher; code=$?; cat {folder}/said; exit $code"  # Whatever still holds that file open.
    )
    return lab.run("s1", "bash", "-c", script)


def started(lab: Lab, command: list[str], host: str = "s1") -> subprocess.Popen[str]:
    """The launch on a host, while it runs; its ssh knows at once that a host is gone."""
    return subprocess.Popen(
        [SCRIPT, "exec", host, "env", SOON, *command],
        cwd=lab.home,
        env={**os.environ, "HVTRAIN_LAB": lab.name},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(path: Path, seconds: float = 200) -> None:
    """Until it is there."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path} within {seconds} s"
        time.sleep(0.1)


def last_line(output: str) -> str:
    return output.splitlines()[-1]


def left(lab: Lab, hosts: tuple[str, ...] = ("s1", "s2")) -> str:
    """Processes of a launch and files in shared memory, on these hosts; all that may go is given 100 seconds."""
    look = "ps axo args | grep -E '[f]ate.py|[o]rted|[m]pirun|[h]orovodrun'; ls /dev/shm"
    deadline = time.monotonic() + 100
    while leftovers := "".join(lab.run(host, "bash", "-c", look)[1] for host in hosts):
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return re.sub(r"\s+", " ", leftovers)
