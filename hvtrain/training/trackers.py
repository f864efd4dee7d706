"""Trackers, the services that show runs: their interface, and the choices of tracker=NAME.

- tensorboard: event files in the run folder, for `tensorboard --logdir runs`.
- wandb: a run of Weights & Biases, by default kept offline until `wandb sync` sends it.
- mlflow: a run of an MLflow experiment, in an SQLite file or on a server.

training/callbacks/publishing.py drives all trackers of a run.
"""

import json
import logging
import os
import re
import secrets
import textwrap
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import tensorflow as tf
import yaml

from hvtrain.config.validate import check_choice
from hvtrain.errors import ConfigError
from hvtrain.system.text import flatten

INSTALL = "./scripts/run uv pip install --no-deps -r scripts/lock/trackers.txt"


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers see it at its start: settings without secrets, and the changes that resumes made to them."""

    name: str
    folder: Path
    settings: dict[str, Any]
    changes: list[Any]


class Tracker(ABC):
    """Keeps the numbers of a run (chief only).

    If a method raises, the run continues without the tracker.
    """

    # Names of the modules that the tracker imports.
    needs: tuple[str, ...] = ()

    def check(self, name: str) -> None:
        """Raises ConfigError if a package is missing; `name` is the choice in tracker=name."""
        # All missing modules are named, so that one installation is enough. find_spec does not import
        # them, which would take seconds.
        missing = [module for module in self.needs if not find_spec(module)]
        if missing:
            raise ConfigError(
                f"tracker={name} needs modules that are not installed: {', '.join(missing)}; install: {INSTALL}"
            )

    @abstractmethod
    def start(self, run: TrackedRun, known: str | None) -> str:
        """Begins a tracked run, or continues the one with the ID `known` if it still exists; returns its ID."""

    @abstractmethod
    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Adds numbers, by name, at an optimizer step."""

    @abstractmethod
    def finish(self, state: str, files: Sequence[Path]) -> None:
        """Ends the tracked run as "finished", "stopped" (to be resumed) or "failed", with copies of the files."""


def plain_name(name: str) -> str:
    """Returns a metric's name in characters that every tracker accepts.

    >>> plain_name("val_top-3/recall@5")
    'val_top-3/recall_5'
    """
    return re.sub(r"[^\w\-. /]", "_", name)


class TensorBoard(Tracker):
    """Logs scalars by step, and the settings as text.

    Files are not copied, since they are already in the run folder.
    """

    needs = ("tensorboard",)

    def __init__(self, dir: str) -> None:
        self.folder = Path(dir).absolute()

    def start(self, run: TrackedRun, known: str | None) -> str:
        self._writer = tf.summary.create_file_writer(str(self.folder))
        # Relative if possible, so that a run is recognized even after its folder was moved.
        folder = self.folder
        if folder.is_relative_to(run.folder):
            folder = folder.relative_to(run.folder)
        # A resumed run continues in its folder, which has the settings already.
        if known != str(folder):
            # Markdown shows a block that is indented by four spaces verbatim.
            block = textwrap.indent(yaml.safe_dump(run.settings, sort_keys=False), "    ")
            with self._writer.as_default():
                tf.summary.text("settings", block, step=0)
            self._writer.flush()
        return str(folder)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        # tf.summary.scalar would write the same, but it runs several operations for each number,
        # and the other ranks would wait for them.
        summary = b"".join(
            scalar_pb(name, value).SerializeToString() for name, value in values.items()
        )
        with self._writer.as_default():
            tf.summary.experimental.write_raw_pb(summary, step=step)
        self._writer.flush()

    def finish(self, state: str, files: Sequence[Path]) -> None:
        self._writer.close()


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


STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
# Without these MLflow sends usage data to its makers, and waits many
# minutes for a server that is gone.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
# MLflow's limits on the number of parameters in a request, and on the characters of a value.
MAX_PARAMS = 100
MAX_PARAM_LENGTH = 6000


class MLflow(Tracker):
    """Logs metrics by step, settings as parameters, and files as artifacts.

    Args:
        uri: Where MLflow keeps runs; null: MLFLOW_TRACKING_URI, or else sqlite:///mlflow.db in the working folder.
        experiment: The name of the experiment, which is created if it does not exist.
    """

    needs: tuple[str, ...] = ("mlflow",)

    def __init__(self, uri: str | None = None, experiment: str = "hvtrain") -> None:
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        if self.uri.startswith("sqlite:"):
            self.needs = (*self.needs, "sqlalchemy", "alembic", "sqlparse")
        self.experiment = experiment

    def start(self, run: TrackedRun, known: str | None) -> str:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import mlflow

        # For a new SQLite file, both loggers would report every migration of its schema.
        for logger in ("mlflow", "alembic"):
            logging.getLogger(logger).setLevel(logging.WARNING)

        self._client = mlflow.MlflowClient(self.uri)
        if known and self._exists(known):
            self._id = known
            self._client.update_run(known, "RUNNING")
        else:
            experiment = self._experiment_id()
            self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
            self._log_settings(run.settings)
        # As a tag, since MLflow does not let parameters change.
        if run.changes:
            self._client.set_tag(self._id, "changes", json.dumps(run.changes))
        return self._id

    def scalars(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        # In milliseconds; all metrics of a step get the same time.
        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, state: str, files: Sequence[Path]) -> None:
        for path in files:
            self._client.log_artifact(self._id, str(path))
        self._client.set_terminated(self._id, STATES[state])

    def _exists(self, known: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            info = self._client.get_run(known).info
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        # MLflow also returns runs that were deleted, which cannot be continued.
        return info.lifecycle_stage == "active"

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self.experiment)
        if experiment:
            return experiment.experiment_id

        # None: the server decides where to keep artifacts.
        artifacts = None
        if self.uri.startswith("sqlite:"):
            # Absolute, or MLflow would look for them in the working folder
            # of whoever opens the file later.
            artifacts = Path("mlruns").absolute().as_uri()
        return self._client.create_experiment(self.experiment, artifact_location=artifacts)

    def _log_settings(self, settings: dict[str, Any]) -> None:
        from mlflow.entities import Param

        # MLflow refuses all parameters if one name contains, for example, a *.
        values = {plain_name(name): value for name, value in flatten(settings).items()}
        params = [Param(name, str(value)[:MAX_PARAM_LENGTH]) for name, value in values.items()]
        for begin in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + MAX_PARAMS])
