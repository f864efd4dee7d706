"""Ranks for a notebook: calls a function of this process on ranks that the launcher starts, and returns its values.

`%%ranks N` does so with a cell. IPython itself is not imported.
"""

import io
import linecache
import os
import re
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
from hvtrain.launch.child import failure, started
from hvtrain.launch.rank_main import FUNCTION_FILE, read_object, value_file, write_object

CELL_NAME = "%%ranks cell"  # In tracebacks.
SECONDS_FOR_LAST_LINES = 5.0
LINES_KEPT = 200
# What the launcher shows of other ranks, and what the error will say.
_NOT_SHOWN = re.compile(r"\[rank [1-9]\d* \S+\] |hvtrain: (what each rank said|FIRST FAILURE)")


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    hosts: str | None = None,
    **kwargs: Any,
) -> Any:
    """See hvtrain.run_ranks."""
    folder = _new_folder()
    line = [sys.executable, "-m", "hvtrain", "launch", "-np", str(num_ranks)]
    if hosts:
        line += ["-H", hosts]
    # Gloo, which needs no ssh on this host, nor leave to run as root.
    line += [
        "--gloo",
        "--logs",
        str(folder),
        "--",
        "python",
        "-m",
        "hvtrain.launch.rank_main",
        str(folder),
    ]
    try:
        write_object(folder / FUNCTION_FILE, (function, args, kwargs, _cell_sources()))
        _launch(line, folder)
        return [_value(folder, rank) for rank in range(num_ranks)]
    finally:
        for path in folder.glob("*.pickle"):
            path.unlink()
        with suppress(OSError):  # Nothing is left of a launch that was refused.
            folder.rmdir()


def load_magic(shell: Any) -> None:
    """Adds the magic to IPython's shell."""
    shell.register_magic_function(ranks, magic_kind="cell")


def ranks(line: str, cell: str) -> None:
    """`%%ranks 2` or `%%ranks 4 -H s1:2,s2:2`: runs the cell on so many ranks, without the notebook's variables."""
    match = re.fullmatch(r"(\d+)(?:\s+-H\s+(\S+))?", line.strip())
    if not match:
        raise ConfigError(f"%%ranks {line}: a number of ranks is needed; write %%ranks 2, or %%ranks 4 -H s1:2,s2:2")

    compile(cell, CELL_NAME, "exec")  # A cell with a syntax error is refused before any rank starts.
    run_ranks(int(match[1]), run_cell, cell, hosts=match[2])


def run_cell(cell: str) -> None:
    """Runs the text on this rank."""
    linecache.cache[CELL_NAME] = (len(cell), None, cell.splitlines(keepends=True), CELL_NAME)
    exec(compile(cell, CELL_NAME, "exec", dont_inherit=True), {"__name__": "__main__"})


def _new_folder() -> Path:
    """A folder for the launch, below that of the notebook: ranks on other hosts may share that one."""
    try:
        Path("launch").mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{datetime.now():%Y-%m-%d_%H-%M-%S}-", dir="launch")).absolute()
    except OSError as error:
        raise ConfigError(
            f"{Path.cwd()}/launch cannot be written: {error.strerror}; start the notebook in a folder of your own"
        ) from error


def _cell_sources() -> dict[str, Any]:
    """The text of the notebook's cells, which are not files: AutoGraph and tracebacks need it on the ranks."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def _launch(line: list[str], folder: Path) -> None:
    """Runs the launcher to its end; Ctrl-C ends it and all ranks. Raises RankError with the first failure."""
    # Ranks import what this process can; "" is the folder that it is in, and theirs.
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    last_lines: deque[str] = deque(maxlen=LINES_KEPT)
    reader = None
    try:
        with started(line, None, environment={**os.environ, "PYTHONPATH": paths}) as process:
            assert process.stdout
            output = io.TextIOWrapper(process.stdout, errors="replace")
            reader = threading.Thread(target=_show, args=[output, last_lines], daemon=True)
            reader.start()
            process.wait()
    finally:
        if reader:
            reader.join(SECONDS_FOR_LAST_LINES)

    if process.returncode:
        cause = failure("".join(last_lines), process.returncode).removeprefix("FIRST FAILURE ")
        rank = re.match(r"rank \d+ ", cause)
        sys.stderr.writelines(line for line in last_lines if rank and line.startswith(f"[{rank[0]}"))
        if any(folder.glob("*.log")):
            cause = f"{cause}; what each rank said is in {folder}"
        raise RankError(cause)


def _show(lines: Iterable[str], last_lines: deque[str]) -> None:
    """Shows rank 0's lines as they arrive, and keeps the last lines of all ranks."""
    for line in lines:
        last_lines.append(line)
        if not _NOT_SHOWN.match(line):
            sys.stdout.write(line)
            sys.stdout.flush()


def _value(folder: Path, rank: int) -> Any:
    try:
        return read_object(value_file(folder, rank))
    except FileNotFoundError as error:
        raise RankError(f"rank {rank} ended well before the function returned; let it return, without exit") from error
