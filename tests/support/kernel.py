"""Notebooks made from their cells' text, in a kernel of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launching import environment


def notebook(sources: Sequence[str], folder: Path, **options: Any) -> Any:
    """An nbclient.NotebookClient for these cells, which run in that folder; `execute` below runs them."""
    import nbclient
    import nbformat
    from traitlets.config import Config

    # Files in place of ports: a client whose kernel was killed connects again for ever, and would disturb the next
    # process that gets the kernel's ports, such as mpirun.
    config = Config({"KernelManager": {"transport": "ipc", "ip": str(folder / "kernel")}})
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=cells),
        timeout=560,
        kernel_manager_class="jupyter_client.KernelManager",
        resources={"metadata": {"path": str(folder)}},
        config=config,
        **options,
    )


def execute(client: Any) -> Any:
    """Runs all cells; the notebook with their output."""
    folder = Path(client.resources["metadata"]["path"], ".ipython")
    folder.mkdir()
    return client.execute(env=environment(IPYTHONDIR=str(folder)))


def text_of(cell: Any) -> str:
    """All that a cell showed: output, value and traceback."""
    shown = []
    for output in cell.outputs:
        shown.append(output.get("text", "") or output.get("data", {}).get("text/plain", ""))
        shown.append("\n".join(output.get("traceback", [])))
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(shown))
