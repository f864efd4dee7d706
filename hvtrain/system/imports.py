"""Leaves packages out when others import them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(package: str) -> Iterator[None]:
    """Makes a package look as if it were not installed, unless it is already imported.

    Keras imports scikit-learn for wrappers that no rank uses; it takes a quarter of the time of `import tensorflow`.
    """
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
