"""The table that doctor and verify print: a row for each check, or for each host on which it fails."""

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvtrain.errors import UserError

# The facts of the hosts that answered, by name, in the order of -H. Others are compared with the
# first.
Facts = Mapping[str, Any]
Cluster = Mapping[str, Facts]
# What is wrong with a host, and the fix.
Problem = tuple[str, str] | None
# By its name, a check on all ranks: returns what it found, in a few words, or raises CheckError
# (every rank).
Checks = dict[str, Callable[[], str]]


class CheckError(UserError):
    """A failed check: what was found, and what to look at.

    Raise it after the check's last collective: other ranks would wait in those that follow.
    """


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        check: Name of the check.
        status: PASS, FAIL or SKIP.
        finding: What was found, or why the check was skipped.
        host: The host at fault; None for a row on all hosts.
        fix: What to do, as a command to type where possible.
    """

    check: str
    status: str
    finding: str
    host: str | None = None
    fix: str | None = None

    def text(self, width: int) -> str:
        """The row as printed, the check's name in `width` columns and the fix on a line below."""
        host = f"{self.host}: " if self.host else ""
        line = f"{self.status}  {self.check:<{width}} {host}{self.finding}"
        if self.fix is None:
            return line
        return f"{line}\n{'':<{width + 7}}fix: {self.fix}"

    def as_json(self) -> dict[str, str | None]:
        return {
            "check": self.check,
            "status": self.status,
            "found": self.finding,
            "host": self.host,
            "fix": self.fix,
        }


@dataclass
class CheckTable:
    """Prints rows as they come and keeps them.

    Attributes:
        width: Columns of the check's name.
        is_quiet: Print nothing: rows are wanted as JSON, or another rank prints them.
    """

    width: int
    is_quiet: bool
    rows: list[Row] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def failed_checks(self) -> list[str]:
        """The names of the failed checks, each once."""
        return list(dict.fromkeys(row.check for row in self.rows if row.status == "FAIL"))

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.rows.append(row)
            self._print(row.text(self.width))

    def end(self, outcome: str) -> None:
        """Prints the last line: the outcome and how long all checks took."""
        self._print(f"{outcome} in {time.monotonic() - self.began:.0f} s")

    def _print(self, line: str) -> None:
        if self.is_quiet:
            return
        # One write with the newline in it: launchers put the rank before each piece of output.
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def passed(check: str, finding: str) -> Row:
    return Row(check, "PASS", finding)


def fail(check: str, host: str | None, finding: str, fix: str | None = None) -> Row:
    return Row(check, "FAIL", finding, host, fix)


def skip(check: str, reason: str, host: str | None = None) -> Row:
    return Row(check, "SKIP", reason, host)


def judge(
    check: str,
    hosts: Mapping[str, Any],
    problem: Callable[[str, Any], Problem],
    finding: str,
    others: Sequence[Row] = (),
) -> list[Row]:
    """Looks at each host by itself.

    Args:
        check: Name of the check.
        hosts: What is known of each host, by name.
        problem: Gets a host's name and what is known of it.
        finding: For the row of a check that passes.
        others: Rows of the check that are known already.

    Returns:
        Those rows, and a failed one for each host with a problem; one that passed if there are none.
    """
    problems = {host: problem(host, facts) for host, facts in hosts.items()}
    rows = [*others, *(fail(check, host, *pair) for host, pair in problems.items() if pair)]
    return rows or [passed(check, finding)]


def differences(here: Mapping[str, Any], first: str, there: Mapping[str, Any]) -> str:
    """How a host's versions differ from the first host's; empty if they do not.

    >>> differences({"keras": "3.15", "numpy": None}, "s1", {"keras": "3.14", "numpy": "2.4"})
    'keras 3.15, s1 3.14; numpy none, s1 2.4'
    """
    names = [name for name in {**there, **here} if here.get(name) != there.get(name)]
    return "; ".join(f"{name} {here.get(name) or 'none'}, {first} {there.get(name) or 'none'}" for name in names)


def copy_to(path: str, first: str, host: str, is_file: bool = False, delete: bool = True) -> str:
    """The command that copies a folder or a file from the first host to another.

    delete: also remove from a folder what the first host does not have.
    """
    slash = "" if is_file else "/"
    options = ["--delete"] if delete and not is_file else []
    command = shlex.join(["rsync", "-a", *options, f"{path}{slash}", f"{host}:{path}{slash}"])
    return f"on {first}: {command}"


def environment(facts: Facts) -> str:
    """The folder of the Python environment that starts ranks."""
    return str(Path(facts["python"]["wanted"]).parents[1])
