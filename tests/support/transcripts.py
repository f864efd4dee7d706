"""What each launcher really says when a rank or a host fails: recorded once, replayed by tests without any rank.

    python tests/support/transcripts.py [NAME ...]    as root: records all, or these, into tests/launch/transcripts

A transcript is what the front (hvtrain launch or horovodrun) read from the launcher, its child: lines in the order in
which they came, marked with their stream, and the names of signals where they came to the front. Process ids, Open
MPI's numbers of jobs and paths are replaced on recording.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from hvtrain.launch import supervisor
from hvtrain.launch.output import MARK

FOLDER = Path(__file__).parents[1] / "launch" / "transcripts"
ROOT = Path(__file__).parents[2]
# Fate of a rank (launched/fate.py), the rank; or what happens to the launch or to a host.
FATES = {
    "sigkill-of-rank-0": ("SIGKILL", "0"),
    "sigkill-of-rank-1": ("SIGKILL", "1"),
    "rank-0-raises": ("raise", "0"),
    "rank-1-raises": ("raise", "1"),
    "rank-1-exits-with-7": ("exit7", "1"),
    "sigterm": ("wait", "0"),
    "sigterm-twice": ("deaf", "0"),
    "s2-stops": ("wait", "0"),
    "s2-is-cut-off": ("wait", "0"),
}
RETURN = "\\r"
_REPLACED = {
    r"with PID \d+": "with PID 50",
    r"\[\[\d+,": "[[7529,",
    r"(?m)^(\[s\d):\d+\]": r"\1:50]",
    r"\bline \d+, in": "line 40, in",
    r"resource_tracker.py:\d+": "resource_tracker.py:50",
}
# Of a rank that is ended because another one failed, and of what it leaves: whether this still comes is chance.
_CHANCE = re.compile(
    r"Terminated$|Process \d exit with status code (143|255)|.*resource_tracker|  warnings\.warn"
)


class Recorded(supervisor.Launch):
    """A launch that notes what it reads, in the file that HVTRAIN_TRANSCRIPT names."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self._noted: list[str] = []
        self._lost: list[str] = []
        super().__init__(*arguments, **more)
        names = ["both"] if len(self._streams) == 1 else ["stderr", "stdout"]
        self._streams = [self._tap(name, stream) for name, stream in zip(names, self._streams)]

    def _tap(self, name: str, stream: IO[str]) -> IO[str]:
        """A stream with the same text, which is noted as it passes."""
        read, write = os.pipe()

        def pass_on() -> None:
            begun = b""
            while data := os.read(stream.fileno(), 65536):
                *lines, begun = (begun + data).split(b"\n")
                self._note(name, lines)
                os.write(write, data)
            self._note(name, [begun] if begun else [])
            os.close(write)

        threading.Thread(target=pass_on, daemon=True).start()
        return os.fdopen(read, encoding="utf-8", errors="replace")

    def _note(self, name: str, lines: list[bytes]) -> None:
        # ssh ends its lines with a carriage return too.
        self._noted.extend(f"{name}|{line.decode().replace(chr(13), RETURN)}" for line in lines)

    def _handle_signal(self, number: int) -> None:
        self._noted.append(signal.Signals(number).name)
        super()._handle_signal(number)

    def _clean_up(self) -> dict[str, Any]:
        answers = super()._clean_up()
        self._lost = [host for host, answer in answers.items() if answer is None]
        return answers

    def run(self, signals: supervisor.Signals) -> supervisor.Ending:
        ending = super().run(signals)
        head = f"unreachable hosts: {' '.join(self._lost) or 'none'}\nexit code: {self._child.returncode}\n\n"
        Path(os.environ["HVTRAIN_TRANSCRIPT"]).write_text(
            head + "".join(f"{line}\n" for line in self._noted)
        )
        return ending


def without_places(text: str, folders: Iterable[str]) -> str:
    """The transcript without what differs from machine to machine and from run to run."""
    places = {
        str(ROOT): "/hvtrain",
        sys.base_prefix: "/python",
        **dict.fromkeys(folders, "/folder"),
    }
    for folder, name in places.items():
        text = text.replace(folder, name)
    for pattern, replacement in _REPLACED.items():
        text = re.sub(pattern, replacement, text)
    return text


def said(transcript: str) -> set[tuple[str, str]]:
    """A transcript's lines, each with the mark of its rank, in no order and without what is chance."""
    head, _, body = transcript.partition("\n\n")
    texts: dict[str, str] = {}
    for line in body.splitlines():
        name, _, text = line.partition("|")
        # Open MPI marks each piece that a rank writes.
        own, *marked = re.split(rf"({MARK.pattern})", f"{text}\n")
        for mark, piece in (("", own), *zip(marked[::4], marked[3::4])):
            texts[name + mark] = texts.get(name + mark, "") + piece
    # A process of Horovod's that is killed as it complains leaves the beginning of a line.
    texts = {source: text.replace("Exception in thread ", "") for source, text in texts.items()}
    lines = {(source, line) for source, text in texts.items() for line in text.splitlines() if line}
    return {("", line) for line in head.splitlines()} | {
        entry for entry in lines if not _CHANCE.match(entry[1])
    }


def record(lab: Any, how: str, name: str) -> str:
    """The transcript of a launch of two ranks, on s1 and s2 of the lab, that meet this fate."""
    from launcher_lab import HOW, fate, line, signalled, started, wait_for

    what, rank = FATES[name]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        # Else MPI's own farewell waits for the others.
        mpi = ["mpi"] if "mpi" in how and what in ("SIGKILL", "deaf") else []
        command = line(how, "s1:1,s2:1", *fate(folder, what, rank, *mpi))
        front = ["launch"] if how.startswith("launch") else ["horovodrun"]
        # The option that chooses the launcher comes after the program's own words.
        own = command.index(HOW[how][-1])
        noted = folder / "transcript"
        command = [
            "env",
            f"HVTRAIN_TRANSCRIPT={noted}",
            sys.executable,
            __file__,
            *front,
            *command[own:],
        ]
        if name.startswith("sigterm"):
            signalled(lab, command, folder, *(["TERM"] * (1 + name.endswith("twice"))))
        elif what == "wait":
            launched = started(lab, command)
            wait_for(folder / "rank-0")
            wait_for(folder / "rank-1")
            time.sleep(2)  # Until what they said has come.
            lab(*(["stop", "s2"] if name == "s2-stops" else ["net", "s2", "down"]))
            launched.communicate(timeout=560)
        else:
            lab.run("s1", *command)
        return without_places(noted.read_text(), [made, str(lab.state)])


def run_front(front: str) -> None:
    """hvtrain launch or horovodrun with this process's arguments, recorded."""
    from hvtrain.launch import command, horovodrun, restart
    from hvtrain.system.command import enter

    del sys.argv[1]
    restart.Launch = horovodrun.Launch = Recorded
    if front == "launch":
        enter(command.main)
    else:
        horovodrun.main()


def main(chosen: list[str]) -> None:
    """Records into tests/launch/transcripts."""
    from lab import Lab
    from launcher_lab import HOW

    for how in HOW:
        for name in FATES:
            if chosen and not {how, name, f"{how}/{name}"} & set(chosen):
                continue
            with Lab(2) as lab:
                text = record(lab, how, name)
            (FOLDER / how).mkdir(parents=True, exist_ok=True)
            (FOLDER / how / f"{name}.txt").write_text(text)
            print(shlex.join([how, name]), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] in (["launch"], ["horovodrun"]):
        run_front(sys.argv[1])
    else:
        main(sys.argv[1:])
