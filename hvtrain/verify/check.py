"""Runs checks one after the other on all ranks, with a line and a deadline for each, so that none can hang."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from hvtrain.strategies.base import Strategy

SECONDS_PER_CHECK = 120.0

# By its name, a check on all ranks: returns what it found, in a few words, or raises CheckError (every rank).
Checks = dict[str, Callable[[], str]]


class CheckError(Exception):
    """A failed check: what was found, and what to look at. Raise it after the check's last collective, not between."""


def run_checks(checks: Checks, strategy: Strategy) -> bool:
    """Prints a line for each check on the chief; True if all passed on all ranks (every rank)."""

    def say(line: str) -> None:
        if strategy.topology.is_chief:
            sys.stdout.write(f"{line}\n")  # One write: launchers add their prefix to each one.
            sys.stdout.flush()

    def time_out(name: str) -> None:
        sys.stderr.write(
            f"FAIL  {name}: {socket.gethostname()} waited {SECONDS_PER_CHECK:.0f} s for the other ranks; "
            "one of them has stopped or left: look at its output\n"
        )
        os._exit(1)

    began, failed = time.monotonic(), 0
    for name, check in checks.items():
        finding, own_error = "", None
        deadline = threading.Timer(SECONDS_PER_CHECK, time_out, [name])
        deadline.daemon = True
        deadline.start()
        try:
            finding = check()
        except CheckError as error:
            own_error = str(error)
        except Exception as error:
            own_error = " ".join(f"{type(error).__name__}: {error}".split())
        finally:
            deadline.cancel()
        errors = enumerate(strategy.comm.gather(own_error))
        failure = next((f"rank {rank}: {text}" if rank else text for rank, text in errors if text is not None), None)
        failed += failure is not None
        say(f"{'PASS' if failure is None else 'FAIL'}  {name:<22} {failure or finding}")
    outcome = f"{len(checks) - failed} checks passed, {failed} failed" if failed else f"all {len(checks)} checks passed"
    say(f"{outcome} on {strategy.topology.size} rank(s) in {time.monotonic() - began:.0f} s")
    return not failed
