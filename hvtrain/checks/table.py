"""The table that doctor and verify print: a row for a check, or for each host on which it fails."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hvtrain.errors import UserError

# Checks by name. Each runs on every rank, and returns its finding in a
# few words or raises CheckError.
Checks = dict[str, Callable[[], str]]


class CheckError(UserError):
    """A failed check: what was found, and what to look at.

    Raise it only after the check's last collective, or the other ranks would wait in the next one.
    """


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        check: Name of the check.
        status: PASS, FAIL or SKIP.
        finding: What was found, or why the check was skipped.
        host: The host at fault; None for a row about all hosts.
        fix: What to do, as a command to type where possible.
    """

    check: str
    status: str
    finding: str
    host: str | None = None
    fix: str | None = None

    def text(self, width: int) -> str:
        """Returns the row as printed, the check's name padded to `width` characters and the fix on a line below."""
        host = f"{self.host}: " if self.host else ""
        fix = f"\n{'':<{width + 7}}fix: {self.fix}" if self.fix else ""
        return f"{self.status}  {self.check:<{width}} {host}{self.finding}{fix}"


@dataclass
class CheckTable:
    """Prints rows as they come and keeps them.

    Attributes:
        width: Width of a check's name, in characters.
        is_quiet: True to print nothing, since rows are wanted as JSON or another rank prints them.
    """

    width: int
    is_quiet: bool
    rows: list[Row] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def failed_checks(self) -> list[str]:
        """The names of the failed checks, each once."""
        # A check has a row for each host that fails it.
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
        print(f"{line}\n", end="", flush=True)


def passed(check: str, finding: str) -> Row:
    return Row(check, "PASS", finding)


def fail(check: str, host: str | None, finding: str, fix: str | None = None) -> Row:
    return Row(check, "FAIL", finding, host, fix)


def skip(check: str, reason: str, host: str | None = None) -> Row:
    return Row(check, "SKIP", reason, host)
