"""Presets of keras-hub, saved from models without a preprocessor."""

import contextlib
import sys
from pathlib import Path
from typing import Any


def save_preset(task: Any, folder: Path) -> None:
    """keras-hub 0.25, the last for Python 3.10, saves all and then fails on the preprocessor that is not there."""
    with (
        contextlib.suppress(AttributeError)
        if sys.version_info < (3, 11)
        else contextlib.nullcontext()
    ):
        task.save_to_preset(folder)
