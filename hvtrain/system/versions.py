"""Versions of this process's software, for the header, records and checkpoints."""

import platform
from importlib.metadata import version

import keras
import tensorflow as tf

from hvtrain import __version__


def versions() -> dict[str, str]:
    return {
        "hvtrain": __version__,
        "horovod": version("horovod"),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": platform.python_version(),
    }
