"""What is nightly: choices beside those that a test makes by default, and runs that only nightly tests read."""

import time
from collections.abc import Iterable
from typing import Any

import pytest


def mostly_nightly(names: Iterable[str], *by_default: str) -> list[Any]:
    """Parameters of a test, nightly but for those that are named."""
    return [
        name if name in by_default else pytest.param(name, marks=pytest.mark.nightly)
        for name in names
    ]


def with_nightly(request: pytest.FixtureRequest) -> bool:
    """True if a nightly test of the fixture's module is selected, and there is time for it."""
    return _selected(request, "nightly") and not time_is_up(request.config)


def time_is_up(config: pytest.Config) -> bool:
    """True if no nightly test may start any more: see --nightly-until."""
    until = config.getoption("--nightly-until")
    return until is not None and time.time() > until


def with_release(request: pytest.FixtureRequest) -> bool:
    """True if a test of the fixture's module is selected that is for releases."""
    return _selected(request, "release")


def _selected(request: pytest.FixtureRequest, marker: str) -> bool:
    items = [item for item in request.session.items if item.path == request.path]
    return any(item.get_closest_marker(marker) for item in items)
