"""Command line of the runner, `python -m hvtrain`: composes and checks the settings, trains, and exits."""

from __future__ import annotations

import os
import sys

from hvtrain.cli import enter
from hvtrain.config.compose import CONFIGS, compose, own_folders
from hvtrain.config.help import help_text
from hvtrain.config.schema import from_dict
from hvtrain.errors import RESTART_HELPS, ConfigError
from hvtrain.system import console
from hvtrain.system.imports import without


def main() -> None:
    """Runs the command line and exits."""
    # Before training there is nothing to save; later Interruption takes the signals.
    console.take_signals(lambda *_: os._exit(RESTART_HELPS))
    enter(compose_and_run, lambda: help_text([CONFIGS, *own_folders(sys.argv)]))


def compose_and_run() -> int:
    """Composes the settings with Hydra, checks them, and trains."""
    if {"-m", "--multirun"} & set(sys.argv):
        raise ConfigError("--multirun asks for several runs in one process; use one command for each run instead")
    for tree in compose():
        config = from_dict(tree)
        if not config.verbose:
            console.quiet_tensorflow()
        with console.native_notes_held(not config.verbose), without("sklearn"):
            from hvtrain.runner import train
        train(config)
    return 0


if __name__ == "__main__":
    main()
