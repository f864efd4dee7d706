"""Reads a Dockerfile and a .dockerignore, as far as this repository's use them. Pure."""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Stage:
    """A build stage: the image or stage that it starts from, and its instructions as (word, rest of the line)."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        """The rest of each line that starts with the word, in order."""
        return [rest for name, rest in self.instructions if name == instruction]


def stages(text: str) -> dict[str, Stage]:
    """Each stage by its name, in order. An ARG before the first has its default in the FROM lines.

    >>> stages("FROM debian AS a\\nRUN x \\\\\\n  && y")
    {'a': Stage(base='debian', instructions=[('RUN', 'x   && y')])}
    >>> stages("ARG BASE=debian\\nFROM ${BASE} AS a")
    {'a': Stage(base='debian', instructions=[])}
    """
    by_name: dict[str, Stage] = {}
    arguments: dict[str, str] = {}
    uncommented = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in filter(None, uncommented.replace("\\\n", "").splitlines()):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            by_name[name] = Stage(_replaced(base, arguments))
        elif instruction == "ARG" and not by_name:
            arguments |= assignments(rest, {})
        else:
            next(reversed(by_name.values())).instructions.append((instruction, rest))
    return by_name


def assignments(rest: str, known: dict[str, str]) -> dict[str, str]:
    """The variables that an ENV line sets; $NAME stands for what was known before the line.

    >>> assignments("A=1 PATH=/x:$PATH", {"PATH": "/bin"})
    {'A': '1', 'PATH': '/x:/bin'}
    """
    pairs = (assignment.partition("=") for assignment in shlex.split(rest))
    return {name: _replaced(value, known) for name, _, value in pairs}


def _replaced(text: str, known: dict[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda use: known.get(use[1], ""), text)


def is_sent(path: str, rules: Iterable[str]) -> bool:
    """Whether a file goes into the build context: the last rule that matches it, or a folder above it, decides.

    >>> is_sent("conf/a.yaml", ["*", "!conf"]), is_sent("tests/a.py", ["*", "!conf"])
    (True, False)
    >>> is_sent("conf/__pycache__/a.pyc", ["*", "!conf", "**/__pycache__"])
    False
    """
    parts = path.split("/")
    sent = True
    for rule in filter(None, map(str.strip, rules)):
        pattern = rule.lstrip("!").strip("/")
        if any(_matches("/".join(parts[:end]), pattern) for end in range(1, len(parts) + 1)):
            sent = rule.startswith("!")
    return sent


def _matches(path: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        tail = pattern.removeprefix("**/")
        parts = path.split("/")
        return any(_matches("/".join(parts[start:]), tail) for start in range(len(parts)))
    # A star stays within one folder.
    names, patterns = path.split("/"), pattern.split("/")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))
