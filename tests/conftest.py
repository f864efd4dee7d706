"""Order of the tests: two files run at a time, so those whose ranks take minutes come first."""

import sys

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("distributed") is None)


@pytest.fixture(autouse=True, scope="module")
def precision_of_one_file():
    """Sets Keras's precision back after a file that trained with another: the files that follow share the process."""
    yield
    if keras := sys.modules.get("keras"):
        keras.config.set_dtype_policy("float32")
