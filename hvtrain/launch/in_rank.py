"""`python -m hvtrain.launch.in_rank FOLDER`: one rank, which calls the function in the folder."""

import linecache
import signal
import socket
import sys
import threading
from pathlib import Path

from hvtrain.errors import ConfigError
from hvtrain.launch import private_file
from hvtrain.system import console
from hvtrain.system.command import enter

FUNCTION_FILE = "function.pickle"
_is_interrupted = threading.Event()


def call() -> int:
    """Calls the function, and leaves what it returned in the folder."""
    folder = Path(sys.argv[1])
    with console.quiet_import(verbose=False):
        import hvtrain.keras  # noqa: F401  (here, so that TensorFlow's notes do not stand in the notebook)
    try:
        function, args, kwargs, sources = private_file.read(folder / FUNCTION_FILE)
    except FileNotFoundError as error:
        where = f"{folder} is not on {socket.gethostname()}"
        raise ConfigError(f"{where}; work in a folder that all hosts have at the same place") from error
    linecache.cache.update(sources)
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        if _is_interrupted.is_set():  # It broke off what TensorFlow or another rank did.
            raise KeyboardInterrupt from error
        raise
    try:
        private_file.write(value_file(folder, console.launched_rank()), value)
    except ConfigError as error:
        raise ConfigError(f"the function returned a {type(value).__name__}: {error}") from error
    return 0


def _interrupt(*_: object) -> None:
    _is_interrupted.set()
    raise KeyboardInterrupt


def value_file(folder: Path, rank: int) -> Path:
    """Holds what the function returned on that rank."""
    return folder / f"value-{rank:04d}.pickle"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _interrupt)
    enter(call)
