"""Passes on the output of a launcher and its ranks; a listener finds out from it which rank failed first.

Launchers mark the output of ranks: horovodrun --gloo with [3]<stdout>:, mpirun --tag-output with
[1,3]<stdout>: (job, rank). mpirun marks each piece that a rank writes, so marks may appear in the
middle of a line, and one line may hold pieces from several ranks. MarkedStream finds the writer
of each line, whatever pieces the output arrives in.

`hvtrain launch` uses RankOutput, and horovodrun PlainOutput. Both have:

- listener: receives the launcher's own lines and the ranks' stderr.
- readers: functions, each of which reads one pipe from the launcher to its end, stderr's first. With a single
  reader, the launcher's stdout and stderr come through one pipe.
"""

import codecs
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, TextIO

from hvtrain.errors import ConfigError
from hvtrain.launch.first_failure import RULER, Listener
from hvtrain.system import drawing
from hvtrain.system.console import write
from hvtrain.system.drawing import Drawing, LiveDisplay

# With --prefix-output-with-timestamp, the time comes before the brackets.
MARK = re.compile(r"(?:\w{3} \w{3} [ \d]\d [\d:]{8} \d{4})?\[(?:\d+,)?(\d+)\]<(stdout|stderr)>:")
PARTIAL_MARK = re.compile(r"\[[\d,]*(?:\](?:<\w*>?)?)?\Z")

Source = tuple[int | None, str]
"""Where text comes from: a rank and one of its streams, or the launcher (None)."""

# Launcher messages about ranks whose own output explains the failure better.
_NOISE = re.compile(
    r"Process \d+ exit with status code|Terminating remaining workers after failure"
)
# Lines that a shell writes about a rank that was killed by a signal.
_BY_SHELL = ("Killed\n", "Terminated\n")
# The part of an unfinished line that may turn out to be a verdict or a drawing.
_MAY_BE_HIDDEN = re.compile(
    rf"(?:hvtrain-.*|{'|'.join('hvtrain'[:length] for length in range(7, 0, -1))})$", re.DOTALL
)


class Line(NamedTuple):
    """A line, or the part of it that has arrived.

    rank: its writer; None: the launcher. mark: the line's last mark, or "".
    """

    rank: int | None
    stream: str
    mark: str
    text: str

    @property
    def source(self) -> Source:
        return self.rank, self.stream

    @property
    def is_whole(self) -> bool:
        return self.text.endswith("\n")


LAUNCHER = Line(None, "", "", "")


class MarkedStream:
    """Splits a stream into lines, and yields a line each time that it grows, with all of its text so far.

    The state is the writer of the text that follows. At the start that is the launcher.

    | writer   | after a mark                                        | after a line break |
    |----------|-----------------------------------------------------|--------------------|
    | launcher | the marked rank; the launcher's text becomes a line | launcher           |
    | a rank   | the marked rank; the other rank's text is kept      | launcher           |

    `unfinished` holds the unfinished lines, by source.

    >>> stream = MarkedStream()
    >>> for line in stream.feed("[1,0]<stdout>:Epoch [1,1]<stdout>:one\\n[1,0]<stdout>:1\\n"):
    ...     print(line.rank, repr(line.text))
    0 'Epoch '
    1 'one\\n'
    0 'Epoch 1\\n'
    """

    _writer = LAUNCHER
    _partial_mark = ""

    def __init__(self) -> None:
        self.unfinished: dict[Source, Line] = {}

    def feed(self, text: str) -> Iterator[Line]:
        """Yields the lines that the text begins, continues or ends.

        Text that may be the beginning of a mark is held back until the next call.
        """
        text = self._partial_mark + text
        cut = PARTIAL_MARK.search(text)
        self._partial_mark = cut[0] if cut else ""
        text = text[: len(text) - len(self._partial_mark)]

        position = 0
        for mark in MARK.finditer(text):
            yield from self._add(text[position : mark.start()])
            # The launcher's text does not continue after a rank's: a process that
            # dies while writing leaves half a line, and a ruler from Open MPI
            # after it would not be recognized.
            unfinished = self.unfinished.pop(LAUNCHER.source, None)
            if unfinished:
                yield unfinished._replace(text=f"{unfinished.text}\n")
            self._writer = Line(int(mark[1]), mark[2], mark[0], "")
            position = mark.end()
        yield from self._add(text[position:])

    def end(self) -> Iterator[Line]:
        """Yields the line with the text that was held back, at the end of the stream."""
        yield from self._add(self._partial_mark)

    def _add(self, text: str) -> Iterator[Line]:
        for part in re.findall(r"[^\n]*\n|[^\n]+", text):
            unfinished = self.unfinished.pop(self._writer.source, LAUNCHER)
            line = self._writer._replace(text=unfinished.text + part)
            if line.is_whole:
                self._writer = LAUNCHER
            else:
                self.unfinished[line.source] = line
            yield line


class RankOutput:
    """Shows a launcher's stdout and stderr, and writes each rank's lines to a log such as folder/rank-0003-s2.log.

    On the console, rank 0's lines have no mark, and its drawings become a live display. Lines of
    other ranks, which write only when something is wrong, are prefixed with rank and host.

    Args:
        folder: the folder for the logs; those of an earlier launch are deleted. Raises ConfigError
            if the folder cannot be written.
        hosts: each rank's host; empty if unknown.
    """

    def __init__(self, folder: Path, hosts: Sequence[str]) -> None:
        self.folder = folder
        self.listener = Listener()
        self.readers = [self.read]
        self._hosts = hosts
        self._display = LiveDisplay()
        # The logs by rank; None for a log that could not be written and was given up.
        self._files: dict[int, TextIO | None] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Delete the logs of an earlier launch, which may have had other ranks.
            # Overwriting them would follow a symbolic link.
            for path in folder.glob("rank-[0-9]*.log"):
                path.unlink()
            for rank in range(len(hosts)):
                self.path(rank).write_text("", "utf-8")
        except OSError as error:
            raise ConfigError(
                f"the ranks' logs cannot be written to {folder}: {error.strerror}; choose another folder with --logs"
            ) from error

    def path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:04d}{self._host_suffix('-', rank)}.log"

    def read(self, lines: Iterable[str]) -> None:
        """Passes on all lines until the end of the stream."""
        marked = MarkedStream()
        for text in lines:
            for line in marked.feed(text):
                if line.is_whole:
                    self._show(line)

        list(marked.end())
        # Killed processes may have left unfinished lines; only whole lines are read and shown.
        for line in marked.unfinished.values():
            self._show(line._replace(text=f"{line.text}\n"))
        write(sys.stderr, self.listener.flush())

        self._display.stop()
        for file in filter(None, self._files.values()):
            with suppress(OSError):
                file.close()

    def _show(self, line: Line) -> None:
        if line.rank is None:
            if line.text.strip() and not _NOISE.match(line.text):
                write(sys.stderr, self.listener.read_launcher(line.text))
            return
        if line.stream == "stderr" and self.listener.read_rank(line.rank, line.text):
            return

        text, picture = drawing.split_line(line.text)
        if picture:
            self._display.show(picture)
        if not text:
            return

        self._log(line.rank, text)
        # A shell's messages go only to the log, since the verdict on the console says more.
        if text in _BY_SHELL:
            return
        # Rank 0 reports for all ranks, so its lines look like those of a single process.
        if line.rank == 0:
            write(getattr(sys, line.stream), text)
        # Other ranks write only when something is wrong; their empty lines are left out.
        elif text.strip():
            write(sys.stderr, f"[rank {line.rank}{self._host_suffix(' ', line.rank)}] {text}")

    def _host_suffix(self, separator: str, rank: int) -> str:
        return f"{separator}{self._hosts[rank]}" if rank < len(self._hosts) else ""

    def _log(self, rank: int, text: str) -> None:
        """Appends to the rank's log.

        A log that cannot be written is given up, since the ranks' output must still be read.
        """
        try:
            if rank not in self._files:
                self._files[rank] = self.path(rank).open("a", encoding="utf-8")
            file = self._files[rank]
            if file:
                file.write(text)
                file.flush()
        except OSError as error:
            # Reported once: every further line would fail in the same way.
            self._files[rank] = None
            write(
                sys.stderr,
                f"hvtrain: {self.path(rank)} is no longer written: {error.strerror}; make room there, or raise "
                "ulimit -n\n",
            )


class PlainOutput:
    """Shows horovodrun's stdout and stderr, each from its own pipe: rank 0's text without marks, its progress as bars.

    keeps_marks: rank 0's text keeps its marks too (--prefix).
    """

    def __init__(self, keeps_marks: bool = False) -> None:
        self.listener = Listener()
        self.readers = [self._read_errors, self._read_output]
        self.drawing = Drawing()
        self.error_stream = PlainStream(
            self._filter_error, lambda: bool(self.drawing.bars or self.listener.held), keeps_marks
        )
        self.output_stream = PlainStream(
            self._filter_output, lambda: bool(self.drawing.bars), keeps_marks
        )
        self._display = LiveDisplay()

    def _read_errors(self, stream: IO[str]) -> None:
        for text in _pieces(stream):
            write(sys.stderr, self.error_stream.feed(text))
        write(sys.stderr, self.error_stream.flush() + self.listener.flush())

    def _read_output(self, stream: IO[str]) -> None:
        shown = self.drawing
        for text in _pieces(stream):
            write(sys.stdout, self.output_stream.feed(text))
            # After the text, which may finish an earlier line: a
            # display needs whole lines above it.
            if self.drawing is not shown:
                shown = self.drawing
                self._display.show(shown)
        write(sys.stdout, self.output_stream.flush())
        self._display.stop()

    def _filter_error(self, line: Line) -> str:
        if line.rank is None:
            return self.listener.read_launcher(line.text)
        return "" if self.listener.read_rank(line.rank, line.text) else line.text

    def _filter_output(self, line: Line) -> str:
        text, picture = drawing.split_line(line.text)
        self.drawing = picture or self.drawing
        return text


@dataclass
class PlainStream:
    """One stream as the console shows it: the launcher's and rank 0's text as it arrives, other ranks' in whole lines.

    Args:
        read: returns the part of a whole line to show.
        shows_lines: returns True while only whole lines may be shown: while there are bars, or inside
            a message from Open MPI.
        keeps_marks: the text of all ranks is shown as it arrives, with marks.
    """

    read: Callable[[Line], str]
    shows_lines: Callable[[], bool]
    keeps_marks: bool = False
    _last: Source | None = None  # The source of the unfinished line at the end of the console.

    def __post_init__(self) -> None:
        self._marked = MarkedStream()
        # How many characters of each unfinished line are on the console.
        self._shown: dict[Source, int] = {}

    def feed(self, text: str) -> str:
        """Returns the text to show now."""
        return "".join(self._show(line) for line in self._marked.feed(text))

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the stream."""
        shown = "".join(self._show(line) for line in self._marked.end())
        for line in self._marked.unfinished.values():
            shown += self._place(line, line.text[self._shown.get(line.source, 0) :])
        return shown

    def _show(self, line: Line) -> str:
        begin = self._shown.pop(line.source, 0)
        if line.is_whole:
            return self._place(line, self.read(line)[begin:])

        # Text that may be hidden once its line is whole is held back,
        # and so are other ranks' lines.
        end = begin
        waits = line.rank and not self.keeps_marks
        if not (waits or self.shows_lines() or RULER.startswith(line.text)):
            hidden = _MAY_BE_HIDDEN.search(line.text)
            end = hidden.start() if hidden else len(line.text)
        # Later pieces of the line show only the text that is not on the console yet.
        self._shown[line.source] = end
        return self._place(line, line.text[begin:end])

    def _place(self, line: Line, text: str) -> str:
        """Returns the text of a line, after a line break if another source's line on the console is unfinished.

        Lines of ranks other than 0 get their mark; with keeps_marks, those of rank 0 do too.
        """
        if not text:
            return ""
        if (line.rank or self.keeps_marks) and self._last != line.source:
            text = line.mark + text
        # This text must not continue another source's unfinished line.
        if self._last not in (line.source, None):
            text = f"\n{text}"
        self._last = None if text.endswith("\n") else line.source
        return text


def _pieces(stream: IO[str]) -> Iterator[str]:
    """Yields the text of the stream in pieces as they arrive: a TextIO would wait for whole lines."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := os.read(stream.fileno(), 65536):
        yield decoder.decode(data)
