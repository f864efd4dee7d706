"""The cell magic `%%ranks N`: runs the cell on N ranks. IPython itself is not imported."""

import linecache
import re
from typing import Any

from hvtrain.errors import ConfigError
from hvtrain.launch.ranks import run_ranks

FILE_NAME = "%%ranks cell"  # In tracebacks.


def load(shell: Any) -> None:
    """Adds the magic to IPython's shell."""
    shell.register_magic_function(ranks, magic_kind="cell")


def ranks(line: str, cell: str) -> None:
    """`%%ranks 2` or `%%ranks 4 -H s1:2,s2:2`: runs the cell on so many ranks, without the notebook's variables."""
    if not (found := re.fullmatch(r"(\d+)(?:\s+-H\s+(\S+))?", line.strip())):
        raise ConfigError(f"%%ranks {line}: a number of ranks is needed; write %%ranks 2, or %%ranks 4 -H s1:2,s2:2")
    compile(cell, FILE_NAME, "exec")  # A wrong cell is refused before any rank starts.
    run_ranks(int(found[1]), run_cell, cell, hosts=found[2])


def run_cell(cell: str) -> None:
    """Runs the text on this rank."""
    linecache.cache[FILE_NAME] = (len(cell), None, cell.splitlines(keepends=True), FILE_NAME)
    exec(compile(cell, FILE_NAME, "exec", dont_inherit=True), {"__name__": "__main__"})
