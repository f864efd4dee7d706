"""Runs a launcher's line as a child process: its output told apart, signals passed on, its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from hvtrain.launching.output import RankOutput

_RANK_MARKS = (b"HOROVOD_RANK=", b"OMPI_COMM_WORLD_RANK=")


def start(line: list[str], environment: Mapping[str, str], output: RankOutput) -> int:
    """The exit code of the line: that of the first rank that failed; 130 after Ctrl-C.

    SIGUSR1 goes on to the ranks of this host: they save, all ranks stop together, and the code is 75. Ctrl-C and
    SIGTERM go on to the child, once: in this terminal's group it would get a Ctrl-C twice.
    """
    interrupted = False
    child = subprocess.Popen(
        line,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted |= number == signal.SIGINT
        if number != signal.SIGUSR1:
            # To all of its group: horovodrun leaves a shell between itself and mpirun.
            os.killpg(child.pid, number)
        elif not ask_to_stop(child.pid):
            sys.stderr.write("hvtrain: SIGUSR1 came, and no rank runs on this host; send it to one that has ranks\n")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    assert child.stdout is not None
    output.take(child.stdout)
    code = child.wait()
    if interrupted:
        return 130
    # A launcher that a signal ended has a negative code here; shells say 128 + its number.
    return code if code >= 0 else 128 - code


def ask_to_stop(launcher: int) -> int:
    """Sends SIGUSR1 to the ranks among a launcher's descendants; how many there were."""
    ranks = list(_ranks_below(launcher))
    for rank in ranks:
        os.kill(rank, signal.SIGUSR1)
    return len(ranks)


def _ranks_below(process: int) -> Iterator[int]:
    """The first processes on each branch that carry a rank's mark; what they started themselves is not asked."""
    for child in _children(process):
        if _is_rank(child):
            yield child
        else:
            yield from _ranks_below(child)


def _children(process: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything; what follows it is numbers.
            parent = int(stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if parent == process:
            found.append(int(stat.parent.name))
    return found


def _is_rank(process: int) -> bool:
    """A Python process with the mark: shells between the launcher and the rank may carry it too."""
    folder = Path("/proc") / str(process)
    try:
        variables = (folder / "environ").read_bytes().split(b"\0")
        program = (folder / "exe").resolve().name
    except OSError:
        return False
    return program.startswith("python") and any(variable.startswith(_RANK_MARKS) for variable in variables)
