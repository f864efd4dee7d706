"""Runs all checks, from the start of the ranks to their end."""

import logging

from hvtrain.config.instantiate import build
from hvtrain.config.schema import RunConfig
from hvtrain.errors import RankError
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.horovod import HorovodStrategy
from hvtrain.system import console
from hvtrain.verify.check import run_checks
from hvtrain.verify.library import library_checks
from hvtrain.verify.own_run import own_run_checks


def verify(config: RunConfig, own_run: bool) -> bool:
    """True if every check passes on every rank. own_run: also check the model, data and optimizer of config."""
    strategy: Strategy = build("strategy", config.strategy) if own_run else HorovodStrategy()
    try:
        topology = strategy.start()
        if topology.size == 1:
            raise RankError("one rank was started and at least two are needed; start them with horovodrun -np 2")
        console.start_log(topology.is_chief)
        logging.getLogger("hvtrain").setLevel(logging.WARNING)
        checks = list(library_checks(strategy))
        if own_run:
            checks += own_run_checks(config, strategy)
        passed = run_checks(checks, strategy)
        strategy.stop()
    except BaseException as error:
        strategy.report_failure(error)
        raise
    return passed
