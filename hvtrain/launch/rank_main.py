"""`python -m hvtrain.launch.rank_main FOLDER`: one rank, which calls the function that a notebook left in the folder.

The function and what it returns are pickles. A pickle can run any code when it is read, so a file
that another user could have written is refused. Nothing else in hvtrain unpickles.
"""

import linecache
import os
import signal
import socket
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle  # Horovod needs it, so it is there.

from hvtrain.errors import ConfigError
from hvtrain.system import console
from hvtrain.system.command import enter

FUNCTION_FILE = "function.pickle"
_is_interrupted = threading.Event()


def main() -> int:
    """Calls the function, and leaves what it returned in the folder."""
    folder = Path(sys.argv[1])
    with console.quiet_import(verbose=False):
        import hvtrain.keras  # noqa: F401  (here, so that TensorFlow's notes do not stand in the notebook)
    try:
        function, args, kwargs, sources = read_object(folder / FUNCTION_FILE)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} is not on {socket.gethostname()}; work in a folder that all hosts have at the same place"
        ) from error

    # The text of the notebook's cells, for AutoGraph and tracebacks.
    linecache.cache.update(sources)
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        # TensorFlow, or another rank that ends, turns the interrupt into an error of its own.
        if _is_interrupted.is_set():
            raise KeyboardInterrupt from error
        raise

    try:
        write_object(value_file(folder, console.launched_rank()), value)
    except ConfigError as error:
        raise ConfigError(f"the function returned a {type(value).__name__}: {error}") from error
    return 0


def value_file(folder: Path, rank: int) -> Path:
    """The file for what the function returned on that rank."""
    return folder / f"value-{rank:04d}.pickle"


def write_object(path: Path, value: Any) -> None:
    """Writes a new file of this user alone. Raises ConfigError if the value cannot be pickled."""
    try:
        data = cloudpickle.dumps(value)
    except Exception as error:
        raise ConfigError(
            f"it cannot be sent to another process ({type(error).__name__}: {error}); send numbers, arrays or paths"
        ) from error

    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(data)


def read_object(path: Path) -> Any:
    """The object in the file.

    Raises ConfigError if the file is not this user's own, OSError if it cannot be opened.
    """
    # Neither a link nor a pipe: both could lead to what another user wrote.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if not stat.S_ISREG(status.st_mode) or not is_own:
            raise ConfigError(f"{path} is not a file that only this user can write; work in a folder of your own")
        return cloudpickle.load(file)


def _interrupt(*_: object) -> None:
    _is_interrupted.set()
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _interrupt)
    enter(main)
