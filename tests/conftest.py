"""Order of the tests, and what a file leaves behind in the process that it shares with others.

Two files run at a time. Those that take longest come first, so that no worker ends alone with a long one: by the
seconds that tests/durations.txt has for each file. `pytest --record-durations` writes it anew.
"""

import faulthandler
import gc
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiers import time_is_up

# TensorFlow's threads write the tracebacks of functions that tests let fail after pytest has stopped to capture.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

DURATIONS = Path(__file__).parent / "durations.txt"
ROOT = Path(__file__).parents[1]
STDERR = pytest.StashKey[int]()
SECONDS_TO_TEAR_DOWN = 300
SECONDS_TO_FINISH = 120


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "write the seconds of each file to tests/durations.txt, longest first"
    parser.addoption("--record-durations", action="store_true", help=text)
    text = "seconds since the epoch; nightly tests that would start later are skipped"
    parser.addoption("--nightly-until", type=float, metavar="TIME", help=text)


def pytest_configure(config: pytest.Config) -> None:
    # A copy of the file number, since pytest captures what tests write to it.
    config.stash[STDERR] = os.dup(2)
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


class Recorder:
    """Adds up the seconds of each file, of all workers."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        longest_first = sorted(self.seconds.items(), key=lambda item: -item[1])
        lines = [f"{seconds:6.1f} {path}\n" for path, seconds in longest_first if seconds >= 1]
        DURATIONS.write_text("".join(lines))


def recorded_seconds() -> dict[str, float]:
    """File -> the seconds that its tests took when they were recorded."""
    if not DURATIONS.exists():
        return {}
    rows = [line.split(maxsplit=1) for line in DURATIONS.read_text().splitlines()]
    return {path: float(seconds) for seconds, path in rows}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seconds = recorded_seconds()

    def order(item: pytest.Item) -> tuple[float, bool]:
        path = item.path.relative_to(ROOT).as_posix() if item.path.is_relative_to(ROOT) else ""
        return -seconds.get(path, 0), item.get_closest_marker("distributed") is None

    items.sort(key=order)


def pytest_collection_finish() -> None:
    # TensorFlow alone makes a million objects that live until the end. Without them each collection takes far less.
    gc.collect()
    gc.freeze()
    # An exception's frames keep the iterator over a data set. If a thread of tf.data that calls Python collects that
    # iterator, it waits for itself for ever. So the main thread collects, after each file.
    gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Ends a worker whose test hangs where pytest-timeout's signal is not handled, such as in TensorFlow's C++.

    The stacks of all threads are printed; xdist names the test, and tries it again in a new worker, twice at most.
    """
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit + 60, file=item.config.stash[STDERR], exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Gives what a test or its file leaves behind less time than a test, with the same end."""
    faulthandler.dump_traceback_later(
        SECONDS_TO_TEAR_DOWN, file=item.config.stash[STDERR], exit=True
    )
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Ends a process that hangs when all tests have ended: a run without its summary would say nothing."""
    file = session.config.stash[STDERR]
    faulthandler.dump_traceback_later(SECONDS_TO_FINISH, file=file, exit=True)
    try:
        return (yield)
    finally:
        if hasattr(session.config, "workerinput"):
            faulthandler.cancel_dump_traceback_later()  # It now waits for the other worker.


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A machine that is slow for an hour costs some nightly tests, and not the whole run."""
    if item.get_closest_marker("nightly") and time_is_up(item.config):
        pytest.skip("no time left for nightly tests (--nightly-until)")


@pytest.fixture(autouse=True, scope="module")
def state_of_one_file():
    """Sets back what a file has changed for its process, which it shares with the files that follow.

    That is Keras's precision, and hvtrain's loggers, which a run takes to its console and away from pytest.
    """
    yield
    gc.collect()
    if keras := sys.modules.get("keras"):
        keras.config.set_dtype_policy("float32")
    logging.captureWarnings(False)
    for name in ("hvtrain", "py.warnings"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
        logger.handlers = []
