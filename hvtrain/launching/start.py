"""Runs a launcher's line as a child process: its output told apart, signals passed on, its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from hvtrain.launching.exit_code import of_shell
from hvtrain.launching.output import RankOutput

SECONDS_TO_STOP = 15.0
SECONDS_FOR_LAST_LINES = 5.0
_RANK_MARKS = (b"HOROVOD_RANK=", b"OMPI_COMM_WORLD_RANK=")


def start(line: list[str], environment: Mapping[str, str], output: RankOutput) -> int:
    """The exit code of the line: that of the first rank that failed; 130 after Ctrl-C.

    SIGUSR1 goes on to the ranks of this host: they save, all ranks stop together, and the code is 75. Ctrl-C, SIGTERM
    and a closed terminal go on to the child; a second one, or SECONDS_TO_STOP later, ends by force all that is left.
    """
    child = subprocess.Popen(
        line,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        # In this terminal's group it would get a Ctrl-C twice.
        start_new_session=True,
    )
    came: list[int] = []
    family: set[int] = set()

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            if not ask_to_stop(child.pid):
                sys.stderr.write(
                    "hvtrain: SIGUSR1 came, and no rank runs on this host; send it to one that has ranks\n"
                )
            return
        came.append(number)
        family.update(_family(child.pid))
        if len(came) > 1:
            _end(family)
            return
        # To all of its group: horovodrun leaves a shell between itself and mpirun.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        last_resort = threading.Timer(SECONDS_TO_STOP, _end, [family])
        last_resort.daemon = True
        last_resort.start()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        # nohup has SIGHUP ignored already, and so it stays.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    # In a thread of its own: an ssh that outlives mpirun keeps the pipe open.
    reader = threading.Thread(target=output.take, args=[child.stdout], daemon=True)
    reader.start()
    code = child.wait()
    reader.join(SECONDS_FOR_LAST_LINES)
    _end(family)
    return 130 if came and came[0] == signal.SIGINT else of_shell(code)


def _family(process: int) -> set[int]:
    """The process, all in its session, and all below it: they are found before they are orphans."""
    found = {process}
    waiting = [process]
    while waiting:
        for child in _children(waiting.pop()):
            found.add(child)
            waiting.append(child)
    return found | {other for other, _, session in _processes() if session == process}


def _end(processes: set[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def ask_to_stop(launcher: int) -> int:
    """Sends SIGUSR1 to the ranks among a launcher's descendants; how many there were."""
    ranks = list(_ranks_below(launcher))
    for rank in ranks:
        with suppress(ProcessLookupError):
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
    return [child for child, parent, _ in _processes() if parent == process]


def _processes() -> Iterator[tuple[int, int, int]]:
    """Each process of this host: its id, its parent's and its session's."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything; what follows it is numbers.
            words = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            yield int(stat.parent.name), int(words[1]), int(words[3])
        except (OSError, IndexError):
            continue  # It has just ended.


def _is_rank(process: int) -> bool:
    """A Python process with the mark: shells between the launcher and the rank may carry it too."""
    folder = Path("/proc") / str(process)
    try:
        variables = (folder / "environ").read_bytes().split(b"\0")
        program = (folder / "exe").resolve().name
    except OSError:
        return False
    return program.startswith("python") and any(variable.startswith(_RANK_MARKS) for variable in variables)
