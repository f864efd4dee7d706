"""Passes a launch's output on, rank by rank; the listener learns from it which rank failed first."""

import codecs
import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TextIO

from hvtrain.errors import ConfigError
from hvtrain.launch.first_failure import RULER, Listener
from hvtrain.system import drawing, verdict
from hvtrain.system.live_display import LiveDisplay

# horovodrun --gloo marks lines [3]<stdout>:, mpirun [1,3]<stdout>: (job, rank).
MARK = re.compile(r"\[(?:\d+,)?(\d+)\]<(stdout|stderr)>:")
MARK_BEGUN = re.compile(r"\[[\d,]*(?:\](?:<\w*>?)?)?$")
# Said by the launchers about ranks that say it better themselves.
_NOISE = re.compile(r"Process \d+ exit with status code|Terminating remaining workers after failure")
# A shell about a rank that a signal ended.
_BY_SHELL = ("Killed\n", "Terminated\n")


class RankOutput:
    """Both outputs of a launcher. Each rank's lines go to folder/rank-0003-s2.log.

    On the console, rank 0's lines stand without their mark, and its drawings as a live display; lines of other ranks,
    which speak only when something is wrong, with rank and host before them. Raises ConfigError if the folder cannot be
    written.
    """

    merged = True

    def __init__(self, folder: Path, hosts: Sequence[str]) -> None:
        self.folder = folder
        self.listener = Listener()
        self.takers: list[Callable[[IO[str]], None]] = [self.take]
        self._hosts = hosts
        self._display = LiveDisplay()
        self._files: dict[int, TextIO] = {}
        self._given_up: set[int] = set()
        self._begun: dict[tuple[int, str], str] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for rank in range(len(hosts)):
                self.path(rank).unlink(missing_ok=True)  # A link would be followed.
                self.path(rank).write_text("", encoding="utf-8")
        except OSError as error:
            why = f"cannot be written to {folder}: {error.strerror}"
            raise ConfigError(f"the ranks' logs {why}; give another place with --logs") from error

    def path(self, rank: int) -> Path:
        host = f"-{self._hosts[rank]}" if rank < len(self._hosts) else ""
        return self.folder / f"rank-{rank:04d}{host}.log"

    def take(self, lines: Iterable[str]) -> None:
        """Passes on all lines until their end."""
        self._display.prepare()
        for line in lines:
            # mpirun marks each piece that a rank writes, so a mark may stand in the middle of a line.
            own, *marked = MARK.split(line)
            if own.strip() and not _NOISE.match(own):
                write(sys.stderr, self.listener.launcher(own if own.endswith("\n") else f"{own}\n"))
            for rank, stream, text in zip(marked[::3], marked[1::3], marked[2::3]):
                self._take(int(rank), stream, text)
        write(sys.stderr, self.listener.rest())
        for (rank, stream), text in list(self._begun.items()):
            self._take(rank, stream, "\n" if text else "")
        self._display.stop()
        for file in self._files.values():
            with suppress(OSError):  # Of a log that was given up.
                file.close()

    def _take(self, rank: int, stream: str, text: str) -> None:
        """Holds a rank's text back until its line is whole."""
        text = self._begun.pop((rank, stream), "") + text
        if not text.endswith("\n"):
            self._begun[rank, stream] = text
            return
        if stream == "stderr" and self.listener.rank(rank, text):
            return
        text, drawn = drawing.cut(text)
        if drawn:
            self._display.show(drawn)
        if not text:
            return
        self._log(rank, text)
        if rank == 0 and text not in _BY_SHELL:
            write(sys.stdout if stream == "stdout" else sys.stderr, text)
        elif text.strip() and text not in _BY_SHELL:
            host = f" {self._hosts[rank]}" if rank < len(self._hosts) else ""
            write(sys.stderr, f"[rank {rank}{host}] {text}")

    def _log(self, rank: int, text: str) -> None:
        """Gives up a log that cannot be written: without a reader, ranks would wait for ever to be read."""
        if rank in self._given_up:
            return
        try:
            if rank not in self._files:
                self._files[rank] = self.path(rank).open("a", encoding="utf-8")
            self._files[rank].write(text)
            self._files[rank].flush()
        except OSError as error:
            self._given_up.add(rank)
            advice = "raise it with ulimit -n" if error.errno in (errno.EMFILE, errno.ENFILE) else "make room there"
            write(sys.stderr, f"hvtrain: {self.path(rank)} is no longer written: {error.strerror}; {advice}\n")


class Relay:
    """A launcher's error output, passed on as it comes, marks too; the launcher writes its standard output itself."""

    merged = False

    def __init__(self) -> None:
        self.listener = Listener()
        self.takers: list[Callable[[IO[str]], None]] = [self.take]
        self._begun = ""
        self._begun_by: dict[str, str] = {}
        self._shown = 0

    def take(self, stream: IO[str]) -> None:
        """Passes on all of the stream until its end."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while data := os.read(stream.fileno(), 65536):
            write(sys.stderr, self.text(decoder.decode(data)))
        write(sys.stderr, self._begun[self._shown :] + self.listener.rest())

    def text(self, text: str) -> str:
        """The text to show now: whole lines, and a begun one that can become neither a ruler nor a verdict."""
        *lines, begun = (self._begun + text).split("\n")
        shown = []
        for line in lines:
            shown.append(self._line(f"{line}\n")[self._shown :])
            self._shown = 0
        self._begun = begun
        last = MARK.split(begun)[-1][: len(verdict.PREFIX)]
        is_held = RULER.startswith(begun) or verdict.PREFIX.startswith(last) or MARK_BEGUN.search(begun)
        if not is_held and not self.listener.held:
            shown.append(begun[self._shown :])
            self._shown = len(begun)
        return "".join(shown)

    def _line(self, line: str) -> str:
        own, *marked = MARK.split(line)
        if not marked:
            return self.listener.launcher(own)
        for rank, text in zip(marked[::3], marked[2::3]):
            whole = self._begun_by.pop(rank, "") + text
            if not whole.endswith("\n"):
                self._begun_by[rank] = whole
            elif self.listener.rank(int(rank), whole):
                before = line[: [found.start() for found in MARK.finditer(line)][-1]]
                line = f"{before}\n" if before else ""
        return line


def write(stream: TextIO, text: str) -> None:
    """Writes to the console whatever it can take. The run goes on in any case, and so do the logs."""
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError as error:  # A terminal of another encoding.
            stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        stream.flush()
    except OSError:  # Nobody reads any more (| head), or the disk is full (> FILE).
        to_nowhere(stream)


def to_nowhere(stream: TextIO) -> None:
    """Sends what the stream holds, and all that follows, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
