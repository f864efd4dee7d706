"""How figures are said. Pure."""

from __future__ import annotations

import sys

from hvtrain.bench.statistics import Ratio


def in_words(found: Ratio) -> str:
    """The median and its interval, with how sure it is where that is less than 95 percent.

    >>> in_words(Ratio(0.9, 0.8, 1.0, 0.75))
    '0.900 [0.800, 1.000, 75% sure]'
    """
    sure = "" if found.coverage >= 0.95 else f", {found.coverage:.0%} sure"
    return f"{found.median:.3f} [{found.low:.3f}, {found.high:.3f}{sure}]"


def human_bytes(number: int) -> str:
    """In powers of 1024.

    >>> human_bytes(4096), human_bytes(256 << 20), human_bytes(4)
    ('4 KiB', '256 MiB', '4 B')
    """
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number} {unit}"
        number //= 1024
    return f"{number} GiB"


def progress(text: str) -> None:
    """What is being done, on a terminal alone, until the next; "" clears it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()
