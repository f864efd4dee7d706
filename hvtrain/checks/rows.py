"""One row of the doctor's table, for all hosts or for the one at fault. Pure."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The facts of the hosts that answered, by name, in the order of -H. Others are compared with the first.
Cluster = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """One line of the table; its status is PASS, FAIL or SKIP.

    found: or why it was skipped. host: the one at fault; None for a row on all of them. fix: what to do, as a command
    to type where possible.
    """

    check: str
    status: str
    found: str
    host: str | None = None
    fix: str | None = None

    def text(self) -> str:
        """The row as printed, with the fix below."""
        first = f"{self.status}  {self.check:<13} {f'{self.host}: ' if self.host else ''}{self.found}"
        return f"{first}\n{'':<20}fix: {self.fix}" if self.fix else first


def fail(check: str, host: str | None, found: str, fix: str) -> Row:
    return Row(check, "FAIL", found, host, fix)


def skip(check: str, reason: str, host: str | None = None) -> Row:
    return Row(check, "SKIP", reason, host)


def all_or(failures: list[Row], check: str, found: str) -> list[Row]:
    """The failures; if there are none, one row that passes."""
    return failures or [Row(check, "PASS", found)]


def copy_to(path: str, first: str, host: str, is_file: bool = False, delete: bool = True) -> str:
    """The command that copies a folder or a file from the first host. delete: remove what the first does not have."""
    slash = "" if is_file else "/"
    options = ["--delete"] if delete and not is_file else []
    return f"on {first}: {shlex.join(['rsync', '-a', *options, f'{path}{slash}', f'{host}:{path}{slash}'])}"


def environment(facts: Mapping[str, Any]) -> str:
    """The folder of the Python environment that starts ranks."""
    return str(Path(facts["python"]["wanted"]).parents[1])
