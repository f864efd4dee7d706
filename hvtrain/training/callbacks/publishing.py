"""Publishes what a run measures, for monitoring and to its trackers.

Metrics publishes current values in Prometheus's text format, at a port and in a file. Tracking sends
a run's records to its trackers, which must neither stop the run nor miss an epoch of it.
"""

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf
from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from hvtrain.checkpoint.writer import Writer
from hvtrain.config.instantiate import build
from hvtrain.errors import ConfigError, Stopped, StorageError, in_one_line
from hvtrain.keras.devices import uuid_in_use
from hvtrain.keras.optimizer import gradient_norm, sent_bytes
from hvtrain.system.files import write_json
from hvtrain.system.resources import busy_percent, resident_bytes
from hvtrain.system.run_files import TRACKERS_FILE, EpochRecord, read_starts, read_tracked
from hvtrain.system.secrets import without_passwords
from hvtrain.training.callbacks.run_context import PARTS, Logs, RunCallback, RunContext
from hvtrain.training.trackers import TrackedRun, Tracker, plain_name

log = logging.getLogger(__name__)

SECONDS_BETWEEN_FILES = 5.0

Family = GaugeMetricFamily | CounterMetricFamily


class Metrics(RunCallback):
    """Serves and writes the metrics inside a `with` block (chief only, but every rank enters the block).

    A step only notes its time and its logs. The metrics are computed for each request, in the thread
    that answers it, and whenever the file is written.
    """

    def __init__(self, context: RunContext, writer: Writer) -> None:
        super().__init__(context)
        self._config = self.run.config.metrics
        self._optimizer = context.model.optimizer
        self._writer = writer
        self._logs: Logs = {}
        self._last_step_at = time.time()
        self._last_file_at = 0.0
        self._num_restarts = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._server: Any = None

    @property
    def is_on(self) -> bool:
        """True if a port or a file is set."""
        return self._config.port is not None or bool(self._config.file)

    def __enter__(self) -> "Metrics":
        if self.is_on:
            self.comm.on_chief(self._open)
        return self

    def __exit__(self, *_: object) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()

    def _open(self) -> None:
        """Opens the file and the port. Raises ConfigError if one of them cannot be used."""
        config = self._config
        setting = f"metrics.file={config.file}"
        try:
            self._write_file()
            setting = f"metrics.port={config.port} at metrics.address={config.address}"
            if config.port is not None:
                self._server, _ = start_http_server(config.port, config.address, self._registry)
                log.info("metrics at http://%s:%d/metrics", *self._server.server_address[:2])
        except (OSError, OverflowError) as error:
            problem = getattr(error, "strerror", None) or error
            raise ConfigError(f"{setting} cannot be used: {problem}; choose another") from error

    def on_train_begin(self, logs: Any) -> None:
        self._num_restarts = len(read_starts(self.run.folder)) - 1

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._logs = logs
        self._last_step_at = time.time()
        if self._last_step_at - self._last_file_at >= SECONDS_BETWEEN_FILES:
            self._update_file()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._logs = logs
        self._update_file()

    def _update_file(self) -> None:
        try:
            self._write_file()
        except OSError as error:
            log.warning("metrics.file=%s is not written: %s", self._config.file, error.strerror)

    def _write_file(self) -> None:
        self._last_file_at = time.time()
        if self._config.file:
            write_to_textfile(self._config.file, self._registry)

    def collect(self) -> list[Family]:
        """Returns all metrics; called by prometheus_client, in any thread."""
        logs = dict(self._logs)
        speed = logs.pop("examples/s", 0.0)
        phases = self.strategy.marks.times()._asdict()
        del phases["steps"]
        goodput = self.report.goodput.summary(time.time())
        parts = {name: goodput[name] for name in (*PARTS, "other")}
        # The newest epoch is the last entry.
        rank_seconds = next(reversed(self.report.rank_seconds.values()), [])
        memory = {"process": resident_bytes()}
        if tf.config.list_logical_devices("GPU"):
            memory["gpu"] = tf.config.experimental.get_memory_info("GPU:0")["current"]

        norm = gradient_norm(self._optimizer)
        flops = self.report.flops(speed)
        busy = busy_percent(uuid_in_use())
        families: list[tuple[Any, ...]] = [
            ("step", "Optimizer steps done.", self.step),
            ("planned_steps", "Optimizer steps of the whole run.", self.plan.run_steps),
            ("epoch", "The current epoch, from 1.", self.position.epoch + 1),
            ("last_step_timestamp_seconds", "When the last step ended.", self._last_step_at),
            ("examples_per_second", "Speed of all ranks together in this epoch.", speed),
            ("metric", "Loss and metrics of this epoch so far.", logs, "name"),
            (
                "rank_step_seconds",
                "Seconds of each rank's own work in a step of the last epoch.",
                {str(rank): seconds for rank, seconds in enumerate(rank_seconds)},
                "rank",
            ),
            ("gradient_norm", "Norm of the last step's mean gradient.", norm),
            (
                "model_flops",
                "Floating-point operations of the model per second.",
                flops.get("flops_per_second"),
            ),
            ("peak_share", "The model's share of the devices' peak.", flops.get("share_of_peak")),
            (
                "gpu_busy_ratio",
                "Share of the time during which rank 0's GPU computes.",
                busy and busy / 100,
            ),
            (
                "phase_seconds",
                "Seconds of rank 0's steps, by phase.",
                phases,
                "phase",
                CounterMetricFamily,
            ),
            (
                "sent_bytes_per_step",
                "Bytes that a rank sends in a step, on average.",
                sent_bytes(self._optimizer) / (self.plan.accumulate * self.strategy.sync_every),
            ),
            ("memory_bytes", "Memory that rank 0 uses.", memory, "kind"),
            ("checkpoint_step", "Step of this start's newest checkpoint.", self._writer.whole_step),
            (
                "checkpoint_timestamp_seconds",
                "When that checkpoint was complete; before the first one, when this start began.",
                self._writer.whole_at,
            ),
            ("goodput_seconds", "Wall time of the run, by purpose.", parts, "part"),
            ("restarts", "Starts of the run after the first.", self._num_restarts),
        ]
        return [self._family(*family) for family in families]

    def _family(
        self,
        name: str,
        text: str,
        values: Any,
        label: str = "",
        family_type: type[Family] = GaugeMetricFamily,
    ) -> Family:
        """Makes a metric from a number or, with `label`, from numbers by label value; each has the label `run` too."""
        names = ["run", label] if label else ["run"]
        family = family_type(f"hvtrain_{name}", text, labels=names)
        for key, value in (values if label else {"": values}).items():
            number = math.nan if value is None else float(value)
            family.add_metric([self.run.folder.name, key][: len(names)], number)
        return family


class Tracking(RunCallback):
    """Starts, feeds and ends the run's trackers (chief only, but every rank constructs it).

    As a context manager it also ends the tracked runs of a run that fails or stops. A tracker gets every
    epoch that it does not have yet, even if it was added when the run was resumed, or had failed before
    that. A tracker that fails is dropped with a warning.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._trackers: dict[str, Tracker] = {}
        self._is_open = False
        if self.run.config.tracker:
            self.comm.on_chief(self._build)

    def _build(self) -> None:
        for name in self.run.config.tracker:
            tracker = build(self.run.config, f"tracker.{name}", Tracker)
            tracker.check(name)
            self._trackers[name] = tracker

    def on_train_begin(self, logs: Any = None) -> None:
        run = self.run
        # From here on there may be tracked runs that must not stay open.
        self._is_open = True
        self._tracked = read_tracked(run.folder)

        facts = TrackedRun(run.folder.name, run.folder, run.config.record, run.meta["changes"])

        def start(name, tracker):
            previous = self._tracked.get(name, {"id": None, "step": 0})
            tracked_id = tracker.start(facts, previous["id"])
            # A new tracked run has no epochs yet, and gets all of them.
            continues = tracked_id == previous["id"] and self.position.start_step > 0
            # Epochs after the start are trained again, perhaps with other settings.
            step = min(previous["step"], self.position.start_step) if continues else 0
            self._tracked[name] = {"id": tracked_id, "step": step}

        self._call_trackers(start)
        self._send()

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self._send()

    def finish(
        self,
        state: str,
        values: dict[str, float] | None = None,
        files: list[Path] | None = None,
    ) -> None:
        """Ends the tracked runs, if they are open.

        Args:
            state: "finished", "stopped" or "failed".
            values: Last numbers to log, by name.
            files: Files to keep with the tracked runs.
        """
        if not self._is_open:
            return

        def end(name, tracker):
            if values:
                tracker.scalars(self.step, {plain_name(key): values[key] for key in values})
            tracker.finish(state, files or [])

        self._call_trackers(end)
        self._is_open = False

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        # Without an exception a run is still open here if it will be
        # resumed, as after train.max_time.
        is_stopped = error_type is None or issubclass(error_type, Stopped)
        self.finish("stopped" if is_stopped else "failed")

    def _send(self) -> None:
        """Sends each tracker the epochs that it lacks, and records the last step of each in the run folder."""

        def send(name, tracker):
            tracked = self._tracked[name]
            for record in self.report.records:
                if record.step > tracked["step"]:
                    rank_seconds = self.report.rank_seconds.get(record.epoch, [])
                    tracker.scalars(record.step, scalars(record, rank_seconds))
                    tracked["step"] = record.step

        self._call_trackers(send)
        if not self._trackers:
            return
        try:
            write_json(self.run.folder / TRACKERS_FILE, self._tracked)
        except StorageError as error:
            self._trackers.clear()
            log.warning("%s; the run continues without its trackers", error)

    def _call_trackers(self, action: Callable[[str, Tracker], None]) -> None:
        """Calls action(name, tracker) for each tracker, and drops those that fail."""
        for name, tracker in list(self._trackers.items()):
            try:
                action(name, tracker)
            # Trackers are other people's code, and may raise anything.
            except Exception as error:
                del self._trackers[name]
                reason = without_passwords(in_one_line(error))
                log.warning("tracker.%s failed: %s; the run continues without it", name, reason)


def scalars(record: EpochRecord, rank_seconds: list[float]) -> dict[str, float]:
    """Returns an epoch's numbers by name, including each rank's seconds of own work in a step.

    >>> scalars(EpochRecord(1, 12, 0.1, 2.0, 50.0, {"loss": 0.5}), [0.01, 0.02])
    {'loss': 0.5, 'epoch': 1, 'learning_rate': 0.1, 'examples_per_second': 50.0, 'step_seconds/rank_0': 0.01, \
'step_seconds/rank_1': 0.02}
    """
    return {
        **{plain_name(name): value for name, value in record.metrics.items()},
        "epoch": record.epoch,
        "learning_rate": record.learning_rate,
        "examples_per_second": record.examples_per_second,
        **{f"step_seconds/rank_{rank}": seconds for rank, seconds in enumerate(rank_seconds)},
    }
