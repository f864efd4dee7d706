"""Which tests are selected: the runs that only nightly tests read are made if one of those is selected."""

import pytest


def with_nightly(request: pytest.FixtureRequest) -> bool:
    """True if a nightly test of the fixture's module is selected."""
    items = [item for item in request.session.items if item.path == request.path]
    return any(item.get_closest_marker("nightly") for item in items)
