"""The folder of a run: made or opened again, locked, swept, and described for whoever finds it later."""

import shutil
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hvtrain.checkpoint import store, writer
from hvtrain.config.schema import RunConfig, default_run_dir, to_dict
from hvtrain.core.records import HISTORY_FILE, RESULT_FILE, TEMPORARY, read_file, refuse_link, write_atomic
from hvtrain.errors import ConfigError
from hvtrain.system.run_lock import CLAIM_FILE, LOCK_FILE, RunLock
from hvtrain.version import VERSION

CONFIG_FILE, README_FILE = "config.yaml", "README.md"
REPLACED = (CONFIG_FILE, README_FILE, RESULT_FILE, HISTORY_FILE, "model.keras", "model.json", "best.keras")
"""Files that people may have under the same names."""
CONFIG_HEADER = """\
# All settings of this run. The same run once more, in a new folder, with any of them changed:
#   python -m hvtrain --config-dir THIS_FOLDER SETTING=VALUE ...
defaults:
  - _self_
  - override hydra/job_logging: none
  - override hydra/hydra_logging: none
hydra:
  run:
    dir: .
  output_subdir: null
"""
README = """\
A training run of hvtrain {version}. result.json has its figures, history.csv those of each epoch.
`keras.models.load_model("model.keras")` loads the trained model, and best.keras that of the best checkpoint.
To resume it, run the same command with run.dir={folder}; to repeat it, see config.yaml.
"""


def open_run_folder(config: RunConfig, lock: RunLock, begun: Path | None = None, parent: str = "runs") -> Path:
    """Creates or reopens the run folder, locks it, and removes leftovers of killed runs (chief only).

    begun is the folder in which an earlier attempt of this run began; parent is where folders are made if run.dir is
    not set. Raises ConfigError if the folder cannot be written or another run uses it.
    """
    folder = begun or (Path(config.run.dir).absolute() if config.run.dir else make_default_folder(config, parent))
    checkpoints = folder / "checkpoints"
    refuse_files_of_others(folder)
    advice = "make it a folder, or set run.dir to the folder that it leads to"
    refuse_link(checkpoints, ConfigError, advice)
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        lock.take(folder)
        for place in (folder, checkpoints):
            writer.sweep(place)
            probe = place / f"{TEMPORARY}probe"
            probe.touch()
            probe.unlink()
    except OSError as error:
        raise _cannot_be_written(folder, error) from error
    if config.resume == "never" and not begun and store.list_checkpoints(checkpoints):
        raise ConfigError(
            f"run.dir={folder} holds checkpoints of an earlier run; use resume=auto or choose another run.dir"
        )
    write_atomic(folder / CONFIG_FILE, CONFIG_HEADER + OmegaConf.to_yaml(OmegaConf.create(reusable(config))))
    write_atomic(folder / README_FILE, README.format(version=VERSION, folder=folder))
    return folder


def make_default_folder(config: RunConfig, parent: str) -> Path:
    """A new folder of the default name; of runs that begin in the same second each gets one of its own.

    Raises ConfigError if it cannot be made.
    """
    folder = name = Path(default_run_dir(config, parent)).absolute()
    number = 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = name.with_name(f"{name.name}-{number}")
        except OSError as error:
            raise _cannot_be_written(folder, error) from error


def _cannot_be_written(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"run.dir={folder} cannot be written: {error.strerror}; choose another run.dir")


def refuse_files_of_others(folder: Path) -> None:
    """Raises ConfigError for a folder of something else, of which a run would replace files."""
    others = [name for name in REPLACED if (folder / name).exists()]
    if not others:
        return
    first_line = CONFIG_HEADER.splitlines()[0]
    try:
        is_a_runs = read_file(folder / CONFIG_FILE).startswith(first_line)
    except (OSError, UnicodeDecodeError):
        is_a_runs = False
    if not is_a_runs and not store.list_checkpoints(folder / "checkpoints"):
        raise ConfigError(
            f"run.dir={folder} is not the folder of a run, which would replace its {others[0]}; choose another run.dir"
        )


def remove_if_empty(folder: Path) -> None:
    """Removes the folder of a run that failed before there was anything but logs to keep (chief only)."""
    ours = {CONFIG_FILE, README_FILE, LOCK_FILE, CLAIM_FILE}
    if not any(path.is_file() and path.name not in ours and path.parent.name != "logs" for path in folder.rglob("*")):
        shutil.rmtree(folder, ignore_errors=True)


def reusable(config: RunConfig) -> dict[str, Any]:
    """The settings for another run: without the folder, and without secrets."""
    tree = to_dict(config)
    tree["run"]["dir"] = tree["notify"] = None
    return tree
