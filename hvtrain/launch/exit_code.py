"""How ranks ended: what Horovod's launchers say of it, and the code that a shell would give. Pure."""

from __future__ import annotations

import re


def failed_rank(text: str) -> tuple[str | None, int] | None:
    """The name and exit code of the first rank that failed, from Horovod's error; None where it speaks of no code.

    >>> failed_rank("Process name: 3 Exit code: -9")
    ('3', -9)
    """
    name = re.search(r"Process name: (\S+)", text)
    code = re.search(r"[Ee]xit code:? (-?\d+)", text)
    return (name[1] if name else None, int(code[1])) if code else None


def of_shell(code: int) -> int:
    """A child that a signal ended has a negative code in Python; shells say 128 + the signal's number.

    >>> of_shell(7), of_shell(-9)
    (7, 137)
    """
    return code if code >= 0 else 128 - code
