"""tracker=wandb: a run of Weights & Biases, by default kept offline until `wandb sync` sends it."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from hvtrain.config.validate import check_choice
from hvtrain.training.trackers import TrackedRun, Tracker

Mode = Literal["offline", "online"]


class WeightsAndBiases(Tracker):
    """Logs numbers by step, settings as the run's config, and files.

    Offline, a resumed run gets another folder, with the same ID.
    """

    needs = ("wandb",)

    def __init__(
        self, dir: str, project: str = "hvtrain", entity: str | None = None, mode: Mode = "offline"
    ) -> None:
        check_choice("tracker.wandb.mode", mode, get_args(Mode))
        self.folder = Path(dir).absolute()
        self.project = project
        self.entity = entity
        self.mode = mode

    def start(self, run: TrackedRun, known: str | None) -> str:
        # If the folder did not exist, wandb would use a temporary one.
        self.folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        # wandb's records of the machine include the command line, which may contain secrets.
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=run.name,
            id=known or secrets.token_hex(4),
            dir=str(self.folder),
            mode=self.mode,
            resume="allow",
            reinit="finish_previous",
            config=run.settings,
            allow_val_change=True,
            settings=settings,
        )
        return str(self._run.id)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def finish(self, state: str, files: Sequence[Path]) -> None:
        for path in files:
            link = Path(self._run.dir) / path.name
            link.unlink(missing_ok=True)
            # Linked here, since wandb would make the same link but print a warning.
            link.symlink_to(path)
            self._run.save(str(link), base_path=self._run.dir, policy="now")

        # The run's page then says that the run can be resumed.
        if state == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=int(state != "finished"))
