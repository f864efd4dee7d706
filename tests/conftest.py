"""Order of the tests: two files run at a time, so those whose ranks take minutes come first."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("distributed") is None)
