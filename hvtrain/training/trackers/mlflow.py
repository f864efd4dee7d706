"""tracker=mlflow: a run of an MLflow experiment, in an SQLite file or on a server."""

import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvtrain.system.text import flatten
from hvtrain.training.trackers import TrackedRun, Tracker, plain_name

STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
# Without these MLflow sends usage data to its makers, and waits many
# minutes for a server that is gone.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
# MLflow refuses a request with more parameters than this, and values with more characters.
MOST_PARAMS = 100
LONGEST_PARAM = 6000


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
        params = [Param(name, str(value)[:LONGEST_PARAM]) for name, value in values.items()]
        for begin in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + MOST_PARAMS])
