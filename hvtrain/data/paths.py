"""Paths of data as users give them, and as file systems hold them."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hvtrain.errors import DataError


def user_path(text: str | Path) -> Path:
    """The path with ~ as the user's home. It stays where there is none, as for a container's user without a name."""
    path = Path(text)
    with suppress(RuntimeError):
        path = path.expanduser()
    return path


def check_names(paths: Iterable[str | Path]) -> None:
    """Raises DataError for a name that is not UTF-8, which TensorFlow cannot open, nor a record hold."""
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise DataError(f"{os.fsencode(path)!r} is a file whose name is not UTF-8; rename it") from None
