"""The door: `python -m hvtrain`. Hydra in, exit code out. What is wrong with the input is refused here."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, cast

from hvtrain import console
from hvtrain.config import GROUPS, UNEVEN, RunConfig, flatten, from_dict, nearest, to_dict
from hvtrain.errors import ConfigError, UserError
from hvtrain.help import help_text

SECONDS_TO_EXIT = 4.0

# conf/ stands beside the package in a checkout and inside it in a wheel.
CONFIGS = next(
    folder for folder in (Path(__file__).parent / "conf", Path(__file__).parent.parent / "conf") if folder.is_dir()
)


def main() -> None:
    """Runs the command line and exits: 0 done, 2 bad input, 130 interrupted, 1 anything else."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(help_text([CONFIGS, *_own_folders(sys.argv)]))
        return
    code = 1
    rank = console.launched_rank()
    try:
        compose_and_run()
        code = 0
    except KeyboardInterrupt:
        console.say_error("interrupted; the same line with the same run.dir goes on from the newest checkpoint", rank)
        code = 130
    except UserError as error:
        if any(word == "debug=true" for word in map(str.lower, sys.argv)):
            traceback.print_exc()
        console.say_error(" ".join(str(error).split()), rank)
        code = 2
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        _say_failure(error, rank)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # At exit Horovod may wait for ranks that wait for this one; not for longer than this.
        last_resort = threading.Timer(SECONDS_TO_EXIT, os._exit, [code])
        last_resort.daemon = True
        last_resort.start()
        sys.exit(code)


def compose_and_run() -> None:
    """Composes the run with Hydra, checks it, and trains."""
    if {"-m", "--multirun"} & set(sys.argv):
        raise ConfigError("--multirun asks for several runs in one process; start one line for each run instead")
    for tree in compose():
        config = from_dict(tree)
        if not config.verbose:
            console.quiet_tensorflow()
        with console.native_notes_held(not config.verbose):
            from hvtrain.runner import train
        train(config)


def compose() -> list[dict[str, Any]]:
    """The composed run of the command line, in a list; an empty one when Hydra only printed it (--cfg job)."""
    # Hydra would print its own errors and exit; this makes it raise them.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    import hydra
    from hydra.core.config_store import ConfigStore
    from omegaconf import DictConfig, OmegaConf

    ConfigStore.instance().store("hvtrain_schema", _schema())
    trees: list[Any] = []

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")
    def job(tree: DictConfig) -> None:
        trees.append(OmegaConf.to_container(tree, resolve=True))

    try:
        job()
    except Exception as error:
        raise ConfigError(_in_one_line(error)) from error
    return trees


def _schema() -> dict[str, Any]:
    """The declared settings with their defaults, for Hydra to compose on; the groups bring their own."""
    empty: dict[str, Any] = {group: {} for group in GROUPS}
    settings = {name: value for name, value in to_dict(RunConfig(**empty)).items() if name not in GROUPS}
    return {**settings, "dataset": {"uneven": UNEVEN[0]}}


def _in_one_line(error: Exception) -> str:
    """What Hydra refused, with the nearest known name."""
    text = " ".join(str(error).split())
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
        return f"unknown setting '{unknown[1]}'; {nearest(unknown[1], _known_settings(unknown[1]))}"
    option = re.search(r"Could not find '([^'/]+)/([^']+)'", text)
    if option:
        choices = sorted(path.stem for path in _choices(option[1]))
        return f"{option[1]}={option[2]} is not one of {', '.join(choices)}; --help says what they are"
    return f"{text}; see --help"


def _known_settings(name: str) -> list[str]:
    from omegaconf import OmegaConf

    group = name.partition(".")[0]
    trees = [cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(path))) for path in _choices(group)]
    keys = [f"{group}.{key}" for tree in trees for key in tree]
    return [*flatten(_schema()), *keys, *(folder.name for folder in CONFIGS.iterdir() if folder.is_dir())]


def _choices(group: str) -> list[Path]:
    return [path for folder in [CONFIGS, *_own_folders(sys.argv)] for path in (folder / group).glob("*.yaml")]


def _own_folders(words: list[str]) -> list[Path]:
    """The folder after --config-dir, where there is one."""
    for index, word in enumerate(words):
        if word.startswith("--config-dir="):
            return [Path(word.partition("=")[2])]
        if word in ("--config-dir", "-cd") and index + 1 < len(words):
            return [Path(words[index + 1])]
    return []


def _say_failure(error: BaseException, rank: int) -> None:
    """A defect: its traceback. On ranks that only lost the others, one line, after those had time to speak."""
    if "Horovod has been shut down" in str(error) or "HorovodInternalError" in type(error).__name__:
        console.say_error("stopped because another rank did; its message stands above", max(rank, 1))
        return
    traceback.print_exc()
    summary = str(error).strip().partition("\n")[0]
    place = f"rank {rank} on {socket.gethostname()}"
    sys.stderr.write(f"hvtrain: {place} failed: {type(error).__name__}: {summary}; its traceback stands above\n")


if __name__ == "__main__":
    main()
