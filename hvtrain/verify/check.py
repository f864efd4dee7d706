"""How checks are run: one after the other on all ranks, a line each, and a deadline so that none can hang."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hvtrain.strategies.base import Strategy

SECONDS_FOR_A_CHECK = 120.0


class CheckError(Exception):
    """What was found, and what to look at. Raise it after the last collective of a check, not between two."""


@dataclass(frozen=True)
class Check:
    """run does the check on every rank and returns what it found, in a few words, or raises CheckError."""

    name: str
    run: Callable[[], str]


def run_checks(checks: Iterable[Check], strategy: Strategy) -> bool:
    """Prints a line for each check on the chief; True when all passed on all ranks (every rank)."""
    began, failed, count = time.monotonic(), 0, 0
    for check in checks:
        finding, own_error = _attempt(check)
        errors = strategy.comm.gather(own_error)
        shown = [f"rank {rank}: {found}" if rank else found for rank, found in enumerate(errors) if found is not None]
        error = shown[0] if shown else None
        count += 1
        failed += error is not None
        _say(strategy, f"{'PASS' if error is None else 'FAIL'}  {check.name:<22} {error or finding}")
    seconds = time.monotonic() - began
    outcome = f"{count - failed} checks passed, {failed} failed" if failed else f"all {count} checks passed"
    _say(strategy, f"{outcome} on {strategy.topology.size} rank(s) in {seconds:.0f} s")
    return not failed


def _attempt(check: Check) -> tuple[str, str | None]:
    def too_late() -> None:
        sys.stderr.write(
            f"FAIL  {check.name}: {socket.gethostname()} waited {SECONDS_FOR_A_CHECK:.0f} s for the other ranks; "
            "one of them has stopped or left: look at its output\n"
        )
        os._exit(1)

    deadline = threading.Timer(SECONDS_FOR_A_CHECK, too_late)
    deadline.daemon = True
    deadline.start()
    try:
        return check.run(), None
    except CheckError as error:
        return "", str(error)
    except Exception as error:
        return "", " ".join(f"{type(error).__name__}: {error}".split())
    finally:
        deadline.cancel()


def _say(strategy: Strategy, line: str) -> None:
    if strategy.topology.is_chief:
        # One write: launchers put their mark before each piece of what is printed.
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
