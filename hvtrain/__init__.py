"""hvtrain: Keras 3 training with Horovod.

`python -m hvtrain` is the command line, and `hvtrain.keras` is the library.

In scripts and notebooks, `hvtrain.train(hvtrain.compose(["model=mlp", "run.dir=runs/mine"]))` trains, and
`hvtrain.load("runs/mine").model` is the result. TensorFlow is imported when a function first needs it.
`hvtrain.run_ranks(2, function)` calls a function on ranks; after `%load_ext hvtrain`, `%%ranks 2`
runs a cell on ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hvtrain.core import VERSION
from hvtrain.core.commands import refuse_old_form

if TYPE_CHECKING:
    from hvtrain.config.schema import RunConfig
    from hvtrain.finished.finished_run import FinishedRun
    from hvtrain.system.run_files import RunRecord

__version__ = VERSION
__all__ = ["compose", "load", "run_ranks", "train"]
Value = TypeVar("Value")

refuse_old_form()


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the settings that `python -m hvtrain` would use with these overrides.

    Raises ConfigError if the command would refuse them.
    """
    from hvtrain.config.compose import composed

    return composed(list(overrides))


def train(config: RunConfig) -> RunRecord:
    """Trains and evaluates the model, and writes the run folder.

    Under a launcher, every rank must call it. Returns the content of result.json. Raises UserError for anything
    that the user can fix.
    """
    from hvtrain.runner import train as run

    return run(config)


def load(run: str | Path, overrides: Sequence[str] = (), trust: bool = False) -> FinishedRun:
    """Opens a finished run in this process: its model with the best checkpoint's weights, its data and its task.

    Args:
        run: the run folder.
        overrides: changes to the run's settings; "checkpoint=last" takes the last checkpoint.
        trust: execute code that the run's settings name, even if it is neither hvtrain's nor Keras's.

    Raises:
        UserError: the run cannot be opened.
    """
    from hvtrain.finished.finished_run import open_alone

    return open_alone([f"run={run}", *overrides], trust)


def run_ranks(
    num_ranks: int,
    function: Callable[..., Value],
    *args: Any,
    hosts: str | None = None,
    **kwargs: Any,
) -> list[Value]:
    """Calls a function on ranks that the launcher starts, and returns their results in rank order.

    The function may be defined in a notebook. Each rank is a new process, in which the function starts
    Horovod itself, as a script would, or calls `train`. Rank 0's output is shown, and every rank's
    output is kept in launch/. The ranks end when this process is interrupted or ends.

    Args:
        num_ranks: the number of ranks.
        function: the function to call with *args and **kwargs.
        hosts: hosts and slots as for `hvtrain launch -H`, such as "s1:2,s2:2"; None: this host.

    Raises:
        ConfigError: the function cannot be sent to the ranks.
        RankError: a rank ended with an error; the message is that of the first rank that failed.
    """
    from hvtrain.launch import notebook

    return notebook.run_ranks(num_ranks, function, *args, hosts=hosts, **kwargs)


def load_ipython_extension(shell: Any) -> None:
    """Registers the cell magic %%ranks; `%load_ext hvtrain` calls it."""
    from hvtrain.launch import notebook

    shell.register_magic_function(notebook.ranks, magic_kind="cell")
