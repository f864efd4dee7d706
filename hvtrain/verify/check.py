"""Runs checks one after the other on all ranks, with a line and a deadline for each, so that none can hang."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hvtrain.strategies.base import Strategy

SECONDS_PER_CHECK = 120.0


class CheckError(Exception):
    """A failed check: what was found, and what to look at. Raise it after the check's last collective, not between."""


@dataclass(frozen=True)
class Check:
    """A check on all ranks. `run` returns what it found, in a few words, or raises CheckError (every rank)."""

    name: str
    run: Callable[[], str]


def run_checks(checks: Iterable[Check], strategy: Strategy) -> bool:
    """Prints a line for each check on the chief; True if all passed on all ranks (every rank)."""

    def say(line: str) -> None:
        if strategy.topology.is_chief:
            sys.stdout.write(f"{line}\n")  # One write: launchers add their prefix to each one.
            sys.stdout.flush()

    began, failed, count = time.monotonic(), 0, 0
    for check in checks:
        finding, own_error = _attempt(check)
        errors = enumerate(strategy.comm.gather(own_error))
        error = next((f"rank {rank}: {text}" if rank else text for rank, text in errors if text is not None), None)
        count += 1
        failed += error is not None
        say(f"{'PASS' if error is None else 'FAIL'}  {check.name:<22} {error or finding}")
    outcome = f"{count - failed} checks passed, {failed} failed" if failed else f"all {count} checks passed"
    say(f"{outcome} on {strategy.topology.size} rank(s) in {time.monotonic() - began:.0f} s")
    return not failed


def _attempt(check: Check) -> tuple[str, str | None]:
    """The finding and the error of a check on this rank."""

    def time_out() -> None:
        sys.stderr.write(
            f"FAIL  {check.name}: {socket.gethostname()} waited {SECONDS_PER_CHECK:.0f} s for the other ranks; "
            "one of them has stopped or left: look at its output\n"
        )
        os._exit(1)

    deadline = threading.Timer(SECONDS_PER_CHECK, time_out)
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
