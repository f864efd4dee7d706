"""What ranks print, told apart: rank 0's goes to the console as it is, every rank's into a file of its own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

# horovodrun --gloo marks lines [3]<stdout>:, mpirun [1,3]<stdout>: (job, rank).
_MARK = re.compile(r"\[(?:\d+,)?(\d+)\]<(stdout|stderr)>:(.*)", re.DOTALL)
# Said by the launchers about ranks that say it better themselves.
_NOISE = re.compile(r"Process \d+ exit with status code|Terminating remaining workers after failure")


class RankOutput:
    """Takes a launcher's lines. Files: folder/rank-0003-s2.log, of standard and error output together.

    Rank 0's lines go on without their mark; those of other ranks, which speak only when something is wrong,
    with their rank and host before them; so does what no rank said.
    """

    def __init__(self, folder: Path, hosts: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._hosts = hosts
        self._files: dict[int, TextIO] = {}
        for rank in range(len(hosts)):
            self.path(rank).write_text("", encoding="utf-8")

    def path(self, rank: int) -> Path:
        host = f"-{self._hosts[rank]}" if rank < len(self._hosts) else ""
        return self.folder / f"rank-{rank:04d}{host}.log"

    def take(self, lines: Iterable[str]) -> None:
        """Passes on all lines until their end."""
        for line in lines:
            self._take(line)
        for file in self._files.values():
            file.close()

    def _take(self, line: str) -> None:
        found = _MARK.fullmatch(line)
        if not found:
            if not _NOISE.match(line):
                _say(sys.stderr, line)
            return
        rank, text = int(found[1]), found[3]
        if rank not in self._files:
            self._files[rank] = self.path(rank).open("a", encoding="utf-8")
        self._files[rank].write(text)
        self._files[rank].flush()
        if rank == 0:
            _say(sys.stdout if found[2] == "stdout" else sys.stderr, text)
        elif text.strip():
            host = f" {self._hosts[rank]}" if rank < len(self._hosts) else ""
            _say(sys.stderr, f"[rank {rank}{host}] {text}")


def _say(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()
