"""Creates or reopens a run folder, locks it, cleans it up, and describes the run for later readers.

This module does not need TensorFlow.
"""

import logging
import os
import platform
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from hvtrain.checkpoint import store, writer
from hvtrain.config.schema import RunConfig, default_run_dir
from hvtrain.core import VERSION
from hvtrain.errors import ConfigError, in_one_line
from hvtrain.system import console
from hvtrain.system.files import (
    TEMPORARY,
    new_folder,
    read_file,
    refuse_link,
    write_atomic,
    write_json,
)
from hvtrain.system.host_facts import checkout, processor
from hvtrain.system.run_files import (
    CONFIG_FILE,
    HISTORY_FILE,
    README_FILE,
    RESULT_FILE,
    STARTS_FILE,
    last_step_at,
    note_step,
    read_starts,
)
from hvtrain.system.secrets import without_secrets
from hvtrain.system.storage.cache import FOLDER_VARIABLE

if TYPE_CHECKING:
    from hvtrain.training.run import Run, RunState

log = logging.getLogger(__name__)

# Files that a run replaces. A folder that is not a run folder may hold other files of these names.
REPLACED = (
    CONFIG_FILE,
    README_FILE,
    RESULT_FILE,
    HISTORY_FILE,
    "model.keras",
    "model.json",
    "best.keras",
)
# Number of starts that starts.json keeps, the newest ones.
MAX_STARTS = 100
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
`keras.models.load_model("model.keras")` loads the trained model; best.keras is the model of the best checkpoint.
To resume the run, use the same command with run.dir={folder}; to repeat it, see config.yaml.
"""


def open_run_folder(config: RunConfig, state: "RunState", parent: str = "runs") -> Path:
    """Creates or reopens the run folder, locks it, cleans it up, and returns it (chief only).

    Args:
        config: The run's settings.
        state: The run's state. Its folder, if set, is that of an earlier attempt at this run, and
            is reopened. Its lock is taken here, and its store is claimed if run.dir is an address.
        parent: Where the folder is created if run.dir is not set.

    Raises:
        ConfigError: The folder cannot be written, another run is using it, it holds files that do
            not belong to a run, or it holds checkpoints although resume=never.
    """
    folder = state.folder or state.store.folder
    is_default = not folder and not config.run.dir
    if folder is None:
        folder = Path(config.run.dir or default_run_dir(config, parent)).absolute()
    try:
        state.is_new_folder |= is_default or not folder.exists()
        if is_default:
            # Even runs that begin in the same second get separate folders.
            folder = new_folder(folder)
        checkpoints = folder / "checkpoints"
        refuse_foreign_files(folder)
        refuse_link(
            checkpoints,
            ConfigError,
            "replace it with the folder that it leads to, or choose another run.dir",
        )
        folder.mkdir(parents=True, exist_ok=True)
        # Before the sweep, which would remove what another process is still writing.
        state.lock.take(folder)
        state.store.begin()
        checkpoints.mkdir(exist_ok=True)
        for path in (folder, checkpoints):
            writer.sweep(path)
            # If permissions are missing, the run should fail now, not after the first epoch.
            probe = path / f"{TEMPORARY}probe"
            probe.touch()
            probe.unlink()
    except OSError as error:
        where, advice = f"run.dir={folder}", "choose another run.dir"
        if state.store.address:
            where = f"the local folder {folder} of run.dir={state.store.address}"
            advice = f"set {FOLDER_VARIABLE} to a folder for it"
        raise ConfigError(f"{where} cannot be written: {error.strerror}; {advice}") from error

    if config.resume == "never" and not state.folder and store.list_checkpoints(checkpoints):
        raise ConfigError(
            f"run.dir={folder} holds checkpoints of an earlier run; use resume=auto or choose another run.dir"
        )
    state.settings = CONFIG_HEADER + OmegaConf.to_yaml(OmegaConf.create(reusable_settings(config)))
    # On a resume, config.yaml keeps the settings of the earlier starts until the runner has
    # accepted this one.
    if not (folder / CONFIG_FILE).exists():
        write_atomic(folder / CONFIG_FILE, state.settings)
    write_atomic(
        folder / README_FILE, README.format(version=VERSION, folder=state.store.address or folder)
    )
    return folder


def refuse_foreign_files(folder: Path) -> None:
    """Raises ConfigError if this is not a run folder, but has files that a run would replace."""
    others = [name for name in REPLACED if (folder / name).exists()]
    if not others:
        return
    # The first line distinguishes a run's config.yaml from any other.
    first_line = CONFIG_HEADER.splitlines()[0]
    try:
        is_run_config = read_file(folder / CONFIG_FILE).startswith(first_line)
    except (OSError, UnicodeDecodeError):
        is_run_config = False

    # A run folder whose config.yaml was edited or lost still has its checkpoints.
    if not is_run_config and not store.list_checkpoints(folder / "checkpoints"):
        raise ConfigError(
            f"run.dir={folder} is not a run folder, and a run would replace its {others[0]}; choose another run.dir"
        )


def reusable_settings(config: RunConfig) -> dict[str, Any]:
    """Returns the settings with which another run can start: without run.dir and notify."""
    # Another run needs a folder of its own, and the addresses in notify may contain passwords.
    return {**config.record, "run": {**config.record["run"], "dir": None}, "notify": None}


def note_start(run: "Run", hosts: Sequence[str], described: dict[str, str], step: int) -> None:
    """Adds this start to starts.json, for the report (chief only). Any error becomes a warning.

    Args:
        run: The run that starts.
        hosts: The host of each rank, by rank.
        described: The lines of the summary, by name.
        step: Number of steps that were done before this start.
    """
    try:
        earlier = read_starts(run.folder)
        for start in earlier:
            # The diff of the newest start is enough.
            if start.get("git"):
                start["git"]["diff"] = ""
        working_folder = Path.cwd()
        facts = {
            "began": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": command(sys.argv, hosts),
            "folder": str(working_folder),
            "num_ranks": run.plan.size,
            "num_replicas": run.strategy.num_computing,
            "hosts": Counter(hosts),
            "first_step": step,
            "num_steps": run.plan.run_steps,
            "steps_per_epoch": run.plan.steps_per_epoch,
            "best": run.best,
            "sign": run.task.sign(run.best),
            "described": described,
            "versions": run.meta["versions"],
            "system": {
                "system": platform.platform(),
                "processor": processor(),
                "cores": os.cpu_count(),
            },
            "git": checkout(working_folder),
        }
        starts = [*earlier[1 - MAX_STARTS :], facts]
        last_step_ended = last_step_at(run.folder)
        write_json(run.folder / STARTS_FILE, starts)
        # Writing changed the file's modification time, which tells when the last step ended (see
        # note_step). It is restored, because this start may end before its first step.
        if last_step_ended:
            note_step(run.folder, last_step_ended)
    except Exception as error:
        log.warning("%s is not written: %s", STARTS_FILE, in_one_line(error))


def command(argv: Sequence[str], hosts: Sequence[str]) -> str:
    """Returns the command that starts the same ranks again, without secrets.

    If the ranks were started by hand, it is the command of this process alone.

    Args:
        argv: sys.argv of this process.
        hosts: The host of each rank, by rank.

    >>> argv = ["/x/hvtrain/__main__.py", "model=cnn", "dataset.api_key=hunter2"]
    >>> command(argv, ["s1", "s1", "s2"])
    "horovodrun -np 3 -H s1:2,s2:1 python -m hvtrain model=cnn 'dataset.api_key=***'"
    >>> command(["/home/me/hvtrain/train.py"], ["s1"])
    'python /home/me/hvtrain/train.py'
    """
    by_hand = os.environ.get(console.BY_HAND)
    if by_hand:
        return by_hand
    # Either .../hvtrain/__main__.py or the installed program .../hvtrain.
    script = Path(argv[0])
    is_runner = script.name == "hvtrain" or script.parts[-2:] == ("hvtrain", "__main__.py")
    program = ["python", "-m", "hvtrain"] if is_runner else ["python", argv[0]]

    launcher: list[str] = []
    if len(hosts) > 1:
        launcher = ["horovodrun", "-np", str(len(hosts))]
    # Ranks per host; a Counter keeps the hosts in the order of the ranks.
    ranks_per_host = Counter(hosts)
    if len(ranks_per_host) > 1:
        slots = ",".join(f"{host}:{num_ranks}" for host, num_ranks in ranks_per_host.items())
        launcher += ["-H", slots]
    return shlex.join([*launcher, *program, *without_secrets(argv[1:])])
