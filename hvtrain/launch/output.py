"""What ranks print, told apart: rank 0's goes to the console as it is, every rank's into a file of its own."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from hvtrain.errors import ConfigError
from hvtrain.launch.listen import Listener

# horovodrun --gloo marks lines [3]<stdout>:, mpirun [1,3]<stdout>: (job, rank).
MARK = re.compile(r"\[(?:\d+,)?(\d+)\]<(stdout|stderr)>:")
# Said by the launchers about ranks that say it better themselves.
_NOISE = re.compile(r"Process \d+ exit with status code|Terminating remaining workers after failure")
# A shell about a rank that a signal ended.
_OF_SHELL = ("Killed\n", "Terminated\n")


class RankOutput:
    """Takes a launcher's lines. Files: folder/rank-0003-s2.log, of standard and error output together.

    Rank 0's lines go on without their mark; those of other ranks, which speak only when something is wrong,
    with their rank and host before them; so does what no rank said, but for what the listener keeps.
    Raises ConfigError where the folder cannot be written.
    """

    merged = True

    def __init__(self, folder: Path, hosts: Sequence[str]) -> None:
        self.folder = folder
        self.listener = Listener()
        self._hosts = hosts
        self._files: dict[int, TextIO] = {}
        self._begun: dict[tuple[int, str], str] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for rank in range(len(hosts)):
                self.path(rank).unlink(missing_ok=True)  # A link would be followed.
                self.path(rank).write_text("", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"the ranks' logs cannot be written to {folder}: {error.strerror}; give another place with --logs"
            ) from error

    def path(self, rank: int) -> Path:
        host = f"-{self._hosts[rank]}" if rank < len(self._hosts) else ""
        return self.folder / f"rank-{rank:04d}{host}.log"

    def take(self, lines: Iterable[str]) -> None:
        """Passes on all lines until their end."""
        for line in lines:
            # mpirun marks each piece that a rank writes, so a mark may stand in the middle of a line.
            own, *marked = MARK.split(line)
            if own.strip() and not _NOISE.match(own):
                _say(sys.stderr, self.listener.launcher(own if own.endswith("\n") else f"{own}\n"))
            for rank, stream, text in zip(marked[::3], marked[1::3], marked[2::3]):
                self._take(int(rank), stream, text)
        _say(sys.stderr, self.listener.rest())
        for (rank, stream), text in list(self._begun.items()):
            self._take(rank, stream, "\n" if text else "")
        for file in self._files.values():
            file.close()

    def _take(self, rank: int, stream: str, text: str) -> None:
        """Holds what a rank wrote back until its line is whole."""
        text = self._begun.pop((rank, stream), "") + text
        if not text.endswith("\n"):
            self._begun[rank, stream] = text
            return
        if rank not in self._files:
            self._files[rank] = self.path(rank).open("a", encoding="utf-8")
        self._files[rank].write(text)
        self._files[rank].flush()
        if stream == "stderr":
            self.listener.rank(rank, text)
        if rank == 0 and text not in _OF_SHELL:
            _say(sys.stdout if stream == "stdout" else sys.stderr, text)
        elif text.strip() and text not in _OF_SHELL:
            host = f" {self._hosts[rank]}" if rank < len(self._hosts) else ""
            _say(sys.stderr, f"[rank {rank}{host}] {text}")


def _say(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        # Nobody reads any more (| head). The run goes on, and so do the logs.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
