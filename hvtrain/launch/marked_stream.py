"""Reads the marks by which launchers tell apart what ranks write: who wrote which line, in whatever pieces it arrives.

horovodrun --gloo marks lines with [3]<stdout>:, mpirun --tag-output with [1,3]<stdout>: (job,
rank). mpirun marks each piece that a rank writes, so that marks may stand in the middle of a line,
and pieces of several ranks in one.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

# With --prefix-output-with-timestamp, the time stands before the brackets.
MARK = re.compile(r"(?:\w{3} \w{3} [ \d]\d [\d:]{8} \d{4})?\[(?:\d+,)?(\d+)\]<(stdout|stderr)>:")
BEGUN_MARK = re.compile(r"\[[\d,]*(?:\](?:<\w*>?)?)?\Z")


Source = tuple[int | None, str]
"""Whose text it is: a rank's on one of its streams, or the launcher's."""


class Line(NamedTuple):
    """A line, or what has arrived of it. rank: who wrote it; None: the launcher. mark: the last one; "" if none."""

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
    """Yields lines as they grow: each time with all of their text so far, the last time with the end of the line.

    The state is the writer of the text that follows. At the start that is the launcher.

    | writer   | after a mark                                      | after the end of a line |
    |----------|---------------------------------------------------|-------------------------|
    | launcher | that rank; what the launcher has begun is a line  | launcher                |
    | a rank   | that rank; what the first has begun is kept       | launcher                |

    `begun` has the lines that have no end so far.

    >>> stream = MarkedStream()
    >>> for line in stream.feed("[1,0]<stdout>:Epoch [1,1]<stdout>:one\\n[1,0]<stdout>:1\\n"):
    ...     print(line.rank, repr(line.text))
    0 'Epoch '
    1 'one\\n'
    0 'Epoch 1\\n'
    """

    def __init__(self) -> None:
        self.begun: dict[Source, Line] = {}
        self._writer = LAUNCHER
        self._begun_mark = ""

    def feed(self, text: str) -> Iterator[Line]:
        """Yields the lines that the text begins, continues or ends.

        What may be the beginning of a mark waits for the next text.
        """
        text = self._begun_mark + text
        cut = BEGUN_MARK.search(text)
        self._begun_mark = cut[0] if cut else ""
        text = text[: len(text) - len(self._begun_mark)]

        position = 0
        for mark in MARK.finditer(text):
            yield from self._add(text[position : mark.start()])
            # The launcher's text does not go on behind a rank's: a process that dies as it complains
            # leaves half a line, and a ruler of Open MPI's behind it would not be recognized.
            begun = self.begun.pop(LAUNCHER.source, None)
            if begun:
                yield begun._replace(text=f"{begun.text}\n")
            self._writer = Line(int(mark[1]), mark[2], mark[0], "")
            position = mark.end()
        yield from self._add(text[position:])

    def end(self) -> Iterator[Line]:
        """Yields a line that waited for a mark, at the end of the stream."""
        yield from self._add(self._begun_mark)

    def _add(self, text: str) -> Iterator[Line]:
        for part in re.findall(r"[^\n]*\n|[^\n]+", text):
            begun = self.begun.pop(self._writer.source, LAUNCHER)
            line = self._writer._replace(text=begun.text + part)
            if line.is_whole:
                self._writer = LAUNCHER
            else:
                self.begun[line.source] = line
            yield line
