"""What is left out when heavy packages are imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(package: str) -> Iterator[None]:
    """In the block the package, unless it was imported before, is as if it were not installed.

    Keras imports scikit-learn, a quarter of the time that `import tensorflow` takes, for wrappers that no rank uses.
    """
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
