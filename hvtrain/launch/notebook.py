"""Calls a notebook's function on ranks that the launcher starts, and returns its value on each rank.

`%%ranks N` runs a cell in the same way. IPython itself is not imported. `python -m hvtrain.launch.notebook
FOLDER` runs one rank, which calls the function that the notebook left in the folder.

The function and its return values are pickled. Unpickling can run arbitrary code, so a file
that another user could have written is refused. No other module of hvtrain unpickles.
"""

import linecache
import os
import re
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import cloudpickle  # Installed, since Horovod depends on it.

from hvtrain.errors import ConfigError, RankError
from hvtrain.launch.child import failure, started
from hvtrain.system import console
from hvtrain.system.command import enter

CELL_NAME = "%%ranks cell"  # The file name in tracebacks.
LAUNCHER_LOG = "launcher.log"
POLL_SECONDS = 0.1
MAX_FAILURE_LINES = 200
# Lines that are not shown: output of ranks other than 0, and text that the error repeats.
_HIDDEN_LINE = re.compile(r"\[rank [1-9]\d* \S+\] |hvtrain: (what each rank said|FIRST FAILURE)")

FUNCTION_FILE = "function.pickle"
# Set on a rank once it has received Ctrl-C.
_is_interrupted = threading.Event()


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    hosts: str | None = None,
    **kwargs: Any,
) -> Any:
    """See hvtrain.run_ranks."""
    folder = _new_folder()
    # Gloo needs neither ssh on this host nor permission to run as root.
    launcher = f"-m hvtrain launch -np {num_ranks} --gloo --logs".split()
    host_options = ["-H", hosts] if hosts else []
    rank_command = ["python", "-m", "hvtrain.launch.notebook", str(folder)]
    command = [sys.executable, *launcher, str(folder), *host_options, "--", *rank_command]
    try:
        # The source of the notebook's cells, which are not files: AutoGraph
        # and tracebacks on ranks need it.
        sources = {
            name: entry
            for name, entry in linecache.cache.items()
            if len(entry) == 4 and entry[1] is None
        }
        write_object(
            folder / FUNCTION_FILE,
            (function, args, kwargs, sources),
            "the function or one of its arguments",
        )
        _launch(command, folder)
        return [_value(folder, rank) for rank in range(num_ranks)]
    finally:
        for path in (*folder.glob("*.pickle"), folder / LAUNCHER_LOG):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # The folder is empty only if no rank has written a log.
            folder.rmdir()


def ranks(line: str, cell: str) -> None:
    """Runs the cell on N ranks, without the notebook's variables: `%%ranks 2`, or `%%ranks 4 -H s1:2,s2:2`."""
    match = re.fullmatch(r"(\d+)(?:\s+-H\s+(\S+))?", line.strip())
    if not match:
        raise ConfigError(
            f"%%ranks {line}: a number of ranks is needed; write %%ranks 2, or %%ranks 4 -H s1:2,s2:2"
        )

    # A cell with a syntax error is refused before any rank starts.
    compile(cell, CELL_NAME, "exec")
    run_ranks(int(match[1]), run_cell, cell, hosts=match[2])


def run_cell(cell: str) -> None:
    """Runs the text of a cell on this rank."""
    linecache.cache[CELL_NAME] = (len(cell), None, cell.splitlines(keepends=True), CELL_NAME)
    exec(compile(cell, CELL_NAME, "exec", dont_inherit=True), {"__name__": "__main__"})


def _new_folder() -> Path:
    """Makes a folder for the launch inside the notebook's folder, which other hosts may share."""
    try:
        Path("launch").mkdir(exist_ok=True)
        return Path(
            tempfile.mkdtemp(prefix=f"{datetime.now():%Y-%m-%d_%H-%M-%S}-", dir="launch")
        ).absolute()
    except OSError as error:
        raise ConfigError(
            f"{Path.cwd()}/launch cannot be written: {error.strerror}; start the notebook in a folder of your own"
        ) from error


def _launch(command: list[str], folder: Path) -> None:
    """Runs the launcher until it ends; Ctrl-C ends the launcher and all ranks.

    Raises RankError with the first failure.
    """
    # Ranks can import whatever this process can; "" stands for the working
    # directory of this process, in which the ranks run too.
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    log = folder / LAUNCHER_LOG
    with log.open("w+", errors="replace") as text:
        try:
            with started(command, log, environment={**os.environ, "PYTHONPATH": paths}) as process:
                while process.poll() is None:
                    time.sleep(POLL_SECONDS)
                    _show(text)
        finally:
            # The last lines, including those that ranks print while they are being ended.
            _show(text)

    if process.returncode:
        lines = log.read_text(errors="replace").splitlines(keepends=True)
        # The launcher's heading is dropped, since the cause becomes the text of an error.
        cause = failure("".join(lines), process.returncode).removeprefix("FIRST FAILURE ")
        # The failed rank's output, which the launcher marks, contains the traceback.
        rank = re.match(r"rank \d+ ", cause)
        sys.stderr.writelines(
            line for line in lines[-MAX_FAILURE_LINES:] if rank and line.startswith(f"[{rank[0]}")
        )
        if any(folder.glob("rank-*.log")):
            cause = f"{cause}; what each rank said is in {folder}"
        raise RankError(cause)


def _show(lines: Iterable[str]) -> None:
    """Shows the lines of rank 0 and of the launcher."""
    sys.stdout.writelines(line for line in lines if not _HIDDEN_LINE.match(line))
    sys.stdout.flush()


def _value(folder: Path, rank: int):
    try:
        return read_object(value_file(folder, rank))
    except FileNotFoundError as error:
        raise RankError(
            f"rank {rank} ended without an error before the function returned; do not call exit in the function"
        ) from error


def rank_main() -> int:
    """Calls the notebook's function on this rank, and writes its return value to the folder."""
    folder = Path(sys.argv[1])
    with console.quiet_import(verbose=False):
        import hvtrain.keras  # noqa: F401  (here, to keep TensorFlow's messages out of the notebook)
    try:
        function, args, kwargs, sources = read_object(folder / FUNCTION_FILE)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} is not on {socket.gethostname()}; work in a folder that all hosts have at the same path"
        ) from error

    linecache.cache.update(sources)
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        # TensorFlow, or the end of another rank, may turn the interrupt into a different error.
        if _is_interrupted.is_set():
            raise KeyboardInterrupt from error
        raise

    name = f"the function's return value of type {type(value).__name__}"
    write_object(value_file(folder, console.launched_rank()), value, name)
    return 0


def value_file(folder: Path, rank: int) -> Path:
    """Returns the path of the file for the function's return value on that rank."""
    return folder / f"value-{rank:04d}.pickle"


def write_object(path: Path, value: Any, name: str) -> None:
    """Pickles the value to a new file that only this user can access.

    Raises ConfigError if the value, which the message calls `name`, cannot be pickled.
    """
    try:
        data = cloudpickle.dumps(value)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be sent to another process ({type(error).__name__}: {error}); "
            "send numbers, arrays or paths"
        ) from error

    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(data)


def read_object(path: Path) -> Any:
    """Unpickles the object in the file.

    Raises ConfigError if another user may have written the file, and OSError if it cannot be opened.
    """
    # Refuse links and pipes: both could lead to data that another user wrote.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if not stat.S_ISREG(status.st_mode) or not is_own:
            raise ConfigError(
                f"{path} is not a file that only this user can write; work in a folder of your own"
            )
        return cloudpickle.load(file)


def _interrupt(*_) -> None:
    _is_interrupted.set()
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _interrupt)
    enter(rank_main)
