"""Calls a function of this process on ranks that the launcher starts, and gives back what each of them returned."""

import linecache
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hvtrain.errors import ConfigError, RankError
from hvtrain.launch import private_file
from hvtrain.launch.child import end, failure, going_with
from hvtrain.launch.in_rank import FUNCTION_FILE, value_file
from hvtrain.system.console import signals_held

SECONDS_FOR_LAST_LINES = 5.0
LINES_KEPT = 200
# What the launcher shows of other ranks, and what the error will say.
_NOT_SHOWN = re.compile(r"\[rank [1-9]\d* \S+\] |hvtrain: (what each rank said|FIRST FAILURE)")


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, hosts: str | None = None, **kwargs: Any) -> Any:
    """See hvtrain.run_ranks."""
    folder = _new_folder()
    line = [sys.executable, "-m", "hvtrain", "launch", "-np", str(num_ranks), *(["-H", hosts] if hosts else [])]
    # Gloo, which needs no ssh on this host, nor leave to run as root.
    line += ["--gloo", "--logs", str(folder), "--", "python", "-m", "hvtrain.launch.in_rank", str(folder)]
    try:
        private_file.write(folder / FUNCTION_FILE, (function, args, kwargs, _sources()))
        _launch(line, folder)
        return [_value(folder, rank) for rank in range(num_ranks)]
    finally:
        for path in folder.glob("*.pickle"):
            path.unlink()
        with suppress(OSError):  # Nothing is left of a launch that was refused.
            folder.rmdir()


def _new_folder() -> Path:
    """A folder for the launch, below that of the notebook: ranks on other hosts may share that one."""
    try:
        Path("launch").mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{datetime.now():%Y-%m-%d_%H-%M-%S}-", dir="launch")).absolute()
    except OSError as error:
        where = f"{Path.cwd()}/launch cannot be written: {error.strerror}"
        raise ConfigError(f"{where}; start the notebook in a folder of your own") from error


def _sources() -> dict[str, Any]:
    """Text of the notebook's cells, which are no files: AutoGraph and tracebacks need it on the ranks."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def _launch(line: list[str], folder: Path) -> None:
    """Runs the launcher to its end; Ctrl-C ends it and all ranks. Raises RankError with the first failure."""
    # Ranks import what this process can; "" is the folder that it is in, and theirs.
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    with (
        signals_held() as release,
        subprocess.Popen(
            line,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # An interrupt goes to the kernel's whole group; the launcher is told below, once.
            preexec_fn=going_with(os.getpid()),
        ) as process,
    ):
        output = _Output()
        reader = threading.Thread(target=output.take, args=[process.stdout], daemon=True)
        reader.start()
        try:
            release()
            process.wait()
        except BaseException:
            end(process)
            raise
        finally:
            reader.join(SECONDS_FOR_LAST_LINES)
    if process.returncode:
        said = failure("".join(output.lines), process.returncode).removeprefix("FIRST FAILURE ")
        failed = re.match(r"rank \d+ ", said)
        sys.stderr.writelines(line for line in output.lines if failed and line.startswith(f"[{failed[0]}"))
        raise RankError(said + (f"; what each rank said is in {folder}" if any(folder.glob("*.log")) else ""))


class _Output:
    """Shows rank 0's lines as they come, and keeps the last lines of all ranks."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=LINES_KEPT)

    def take(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.lines.append(line)
            if not _NOT_SHOWN.match(line):
                sys.stdout.write(line)
                sys.stdout.flush()


def _value(folder: Path, rank: int) -> Any:
    try:
        return private_file.read(value_file(folder, rank))
    except FileNotFoundError as error:
        raise RankError(f"rank {rank} ended well before the function returned; let it return, without exit") from error
