"""`python -m hvtrain verify`: checks that ranks train together, with small built-in models and with a user's run."""

import logging
import os
import socket
import sys
from typing import TYPE_CHECKING

from hvtrain.checks.table import Checks, CheckTable, fail, passed
from hvtrain.config.compose import composed
from hvtrain.config.schema import RunConfig
from hvtrain.errors import RankError, UserError, in_one_line
from hvtrain.system import console
from hvtrain.system.command import RUN_SETTINGS, Parser

if TYPE_CHECKING:
    from hvtrain.strategies.base import Strategy

SECONDS_PER_CHECK = 120.0
EPILOG = f"""\
{RUN_SETTINGS}

examples:
  python -m hvtrain verify                                         this host, with two ranks
  horovodrun -np 16 -H s1:4,s2:4,... python -m hvtrain verify      a cluster
  horovodrun -np 2 python -m hvtrain verify model=... dataset=...  with your own model and data set too
"""


def main() -> int:
    """Checks the library and, if the command line has settings of a run, that run; returns the exit code."""
    Parser(
        "python -m hvtrain verify",
        usage="%(prog)s [GROUP=CHOICE ...] [SETTING=VALUE ...]",
        description="""\
Shows in about half a minute whether ranks train together, one line for each check: PASS, or FAIL with what to look at.
Exits with 1 when a check fails.""",
        epilog=EPILOG,
    ).parse_known_args()
    arguments = sys.argv[1:]
    if not console.is_launched():
        # verify needs at least two ranks.
        horovodrun = f"{sys.prefix}/bin/horovodrun"
        command = [horovodrun, "-np", "2", sys.executable, "-m", "hvtrain", "verify", *arguments]
        os.execv(horovodrun, command)

    # Hydra's options, such as --config-dir, are not settings of a run.
    has_own_run = any("=" in argument and not argument.startswith("--") for argument in arguments)
    return 0 if verify(composed(), has_own_run) else 1


def verify(config: RunConfig, has_own_run: bool) -> bool:
    """Returns True if every check passes on every rank.

    Args:
        config: The settings; with has_own_run, their strategy, model and data are checked.
        has_own_run: True to check the run too, not only the library.

    Raises:
        RankError: Only one rank was started.
    """
    with console.quiet_import(config.verbose):
        import tensorflow as tf

        from hvtrain.checks.rank_checks import library_checks, own_run_checks
        from hvtrain.config.instantiate import build
        from hvtrain.strategies.base import Strategy, report_failures
        from hvtrain.strategies.horovod import HorovodStrategy

    strategy: Strategy = build(config, "strategy", Strategy) if has_own_run else HorovodStrategy()
    # With the ten bits of TF32, healthy GPUs from Ampere on differ by up to 2.5e-3 where these
    # checks allow 1e-5.
    tf.config.experimental.enable_tensor_float_32_execution(False)

    with report_failures(strategy):
        topology = strategy.start()
        if topology.size == 1:
            raise RankError(
                "one rank was started and at least two are needed; start them with horovodrun -np 2"
            )

        # Log lines of a run would appear between the rows.
        console.start_log(topology.is_chief, logging.WARNING)
        own_checks = own_run_checks(config, strategy) if has_own_run else {}
        has_passed = run_checks(library_checks(strategy, config) | own_checks, strategy)
        strategy.stop()

    return has_passed


def run_checks(checks: Checks, strategy: "Strategy") -> bool:
    """Runs the checks (every rank), and prints a line for each on the chief.

    Returns True if all passed on all ranks. Each check has a deadline, so that none can hang.
    """
    table = CheckTable(width=22, is_quiet=not strategy.topology.is_chief)

    for name, check in checks.items():
        # If a rank is gone, the others would wait in a collective forever.
        deadline = console.call_later(SECONDS_PER_CHECK, _time_out, name)
        finding = ""
        own_error = None

        try:
            finding = check()
        # Any error fails only this check; the next ones still run.
        except Exception as error:
            own_error = str(error) if isinstance(error, UserError) else in_one_line(error)
        finally:
            deadline.cancel()

        # Every rank enters this collective, including one that failed.
        errors = strategy.comm.gather(own_error)
        failed_ranks = [rank for rank, error in enumerate(errors) if error is not None]
        if failed_ranks:
            first = failed_ranks[0]
            # An error of rank 0 may be that of all ranks, so no rank is named.
            host = f"rank {first}" if first else None
            table.add([fail(name, host, errors[first])])
        else:
            table.add([passed(name, finding)])

    num_failed = len(table.failed_checks)
    outcome = f"all {len(checks)} checks passed"
    if num_failed:
        outcome = f"{len(checks) - num_failed} checks passed, {num_failed} failed"

    table.end(f"{outcome} on {strategy.topology.size} rank(s)")
    return num_failed == 0


def _time_out(check_name: str) -> None:
    """Ends this rank, which is stuck in a collective.

    The launcher then ends the others.
    """
    sys.stderr.write(
        f"FAIL  {check_name}: {socket.gethostname()} waited {SECONDS_PER_CHECK:.0f} s for the other ranks; "
        "one of them has stopped or left: look at its output\n"
    )
    os._exit(1)
