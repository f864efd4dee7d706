"""Reads a run from its folder: settings, metrics, starts, messages and state. Does not need TensorFlow."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvtrain.errors import ConfigError
from hvtrain.system.checkpoint_notes import newest_step
from hvtrain.system.files import read_bytes, read_file, read_json
from hvtrain.system.run_files import (
    CONFIG_FILE,
    RESULT_FILE,
    REVIEW_FILE,
    STARTS_FILE,
    EpochRecord,
    read_history,
    read_rank_seconds,
    read_starts,
    restore_nan,
)
from hvtrain.system.run_lock import is_held

# Only this many bytes at the end of a log are read.
LOG_BYTES = 100_000
MAX_MESSAGES = 30
MAX_MESSAGE_LENGTH = 400
_LOG_LINE = re.compile(
    r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (INFO|WARNING|ERROR|CRITICAL) \S+?: (.*)$"
)

# An object in a JSON or YAML file.
Record = dict[str, Any]


@dataclass(frozen=True)
class Message:
    """A line from a rank's log; `when` is "YYYY-MM-DD HH:MM:SS", and `level` a logging level, such as "WARNING"."""

    when: str
    level: str
    rank: int
    text: str


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run folder.

    Attributes:
        folder: the run folder, absolute.
        config: the settings, as in config.yaml.
        result: the content of result.json; empty until the run has finished, and after a resume with more steps until
            it has finished again.
        history: a record for each epoch.
        rank_seconds: the seconds of each rank's own work in a step, by epoch.
        starts: the content of starts.json, one entry for each start of the ranks.
        review: figures about the predictions (core/figures.py), as plain values.
        messages: the newest warnings and errors of the ranks on this host.
        state: "running", "finished", "stopped" (it was asked to save and stop) or "failed" (it ended in
            any other way).
        checkpoint_step: the step of the newest checkpoint on this host, if there is one.
    """

    folder: Path
    config: Record
    result: Record
    history: list[EpochRecord]
    rank_seconds: dict[int, list[float]]
    starts: list[Record]
    review: list[Record]
    messages: list[Message]
    state: str
    checkpoint_step: int | None

    @property
    def last_start(self) -> Record:
        """The newest entry of starts.json; empty if there is none."""
        return self.starts[-1] if self.starts else {}

    @property
    def is_resumable(self) -> bool:
        """True if the run ended before it finished, and has a checkpoint on this host from which to continue."""
        return self.state in ("stopped", "failed") and self.checkpoint_step is not None

    @property
    def num_ranks(self) -> int | None:
        """Number of replicas that compute gradients at the same time: ranks, workers, or devices of one process."""
        # Before there is a result, the newest start has the number.
        facts = self.result or self.last_start
        return facts.get("num_replicas") or facts.get("num_ranks")

    @property
    def examples_per_second(self) -> float | None:
        """Speed over all ranks, from the result or else from the newest epoch."""
        rate = self.result.get("examples_per_second")
        if not rate and self.history:
            return self.history[-1].examples_per_second

        return rate

    @property
    def began(self) -> str:
        """Date and time of the first start; empty if it is unknown."""
        if not self.starts:
            return ""
        # To the minute, without the T of ISO 8601.
        return str(self.starts[0].get("began", "")).replace("T", " ")[:16]

    @property
    def seconds(self) -> float | None:
        """Seconds of all starts, without the pauses between them; None before there is a result."""
        goodput = self.result.get("goodput") or {}
        if "all" in goodput:
            return float(goodput["all"] - goodput["restarts"])
        return self.result.get("seconds")

    @property
    def progress(self) -> float | None:
        """Fraction of the steps that are done and saved or recorded, 0 to 1; None if their number is unknown."""
        num_steps = self.last_start.get("num_steps")
        if not num_steps:
            return None
        # A checkpoint may be newer than the last epoch, and a run without checkpoints still records
        # epochs.
        recorded = self.history[-1].step if self.history else 0
        num_done = max(self.checkpoint_step or 0, self.result.get("num_steps", 0), recorded)

        return min(num_done / num_steps, 1.0)

    @property
    def sign(self) -> int:
        """1 if a higher score is better, otherwise -1."""
        return self.last_start.get("sign", 1)

    @property
    def score(self) -> tuple[str, float] | None:
        """The task's metric and its value on the test data, or else its best value in validation or training."""
        tested = self.result.get("metrics") or {}
        best = self.result.get("best") or {}
        # starts.json may be missing or damaged.
        name = self.last_start.get("best") or best.get("metric", "val_loss")
        training_name = name.removeprefix("val_")
        test_name = f"test_{training_name}"
        if test_name in tested:
            return test_name, tested[test_name]

        for column in (name, training_name):
            values = [row.metrics.get(column, math.nan) for row in self.history]
            finite = [value for value in values if math.isfinite(value)]
            if finite:
                return column, self.sign * max(self.sign * value for value in finite)

        return None


def is_run_folder(folder: Path) -> bool:
    # Object storage has no empty folders, such as that of a run without checkpoints.
    has_begun = (folder / "checkpoints").is_dir() or (folder / STARTS_FILE).is_file()
    return has_begun and (folder / CONFIG_FILE).is_file()


def read_run(folder: Path) -> RunFiles:
    """Reads a run folder.

    Raises:
        ConfigError: it is not a run folder, or its result.json is damaged.
        StorageError: its history is damaged.
    """
    if not is_run_folder(folder):
        raise ConfigError(
            f"{folder} is not a run folder, which has config.yaml and checkpoints/; give the run.dir of a run "
            "(python -m hvtrain runs lists them)"
        )

    result = _read_result(folder)
    starts = read_starts(folder)
    messages = _read_messages(folder)
    step = newest_step(folder)
    # After a resume with more steps, result.json is still that of the shorter run, perhaps with
    # other settings.
    last_step = step or 0
    if starts:
        last_step = max(last_step, starts[-1].get("first_step", 0) + 1)
    if last_step > result.get("num_steps", 0):
        result = {}

    return RunFiles(
        folder=folder.absolute(),
        config=result.get("config") or _read_config(folder),
        result=result,
        history=read_history(folder),
        rank_seconds=read_rank_seconds(folder),
        starts=starts,
        # A damaged review is read as empty, so only its part of the page is missing. Without a
        # result, the file describes the weights of an earlier, shorter run.
        review=read_json(folder / REVIEW_FILE, list) if result else [],
        messages=[message for message in messages if message.level != "INFO"][-MAX_MESSAGES:],
        state=_state(folder, result, messages),
        checkpoint_step=step,
    )


def _state(folder: Path, result: Record, messages: list[Message]) -> str:
    # A process's lock ends with it, so a killed run does not count as running.
    if is_held(folder):
        return "running"
    if result:
        return "finished"
    # The chief's last message that is not a warning says why the run ended, if there was time to
    # write it.
    chief_messages = [
        message for message in messages if message.rank == 0 and message.level != "WARNING"
    ]
    if chief_messages and chief_messages[-1].text.startswith("stopped by "):
        return "stopped"

    return "failed"


def _read_result(folder: Path) -> Record:
    path = folder / RESULT_FILE
    if not path.exists():
        return {}
    result = read_json(path, dict)
    if not result:
        raise ConfigError(
            f"{path} is damaged; move it away, and resume the run to test its model again"
        )

    return restore_nan(result)


def _read_config(folder: Path) -> Record:
    """Returns a run's settings from config.yaml; empty if the file cannot be read."""
    import yaml

    try:
        tree = yaml.safe_load(read_file(folder / CONFIG_FILE)) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}

    if not isinstance(tree, dict):
        return {}
    # Hydra's own keys are not settings of the run.
    return {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}


def _read_messages(folder: Path) -> list[Message]:
    """Reads the logs of the ranks on this host, one rank after another; of long logs only the end."""
    messages = []
    for path in sorted((folder / "logs").glob("rank-[0-9]*.log")):
        try:
            rank = int(path.stem.removeprefix("rank-"))
            # The first line may be cut off; it then does not match and is skipped.
            lines = read_bytes(path, LOG_BYTES).decode(errors="replace").splitlines()
        except (OSError, ValueError):  # Not readable, or not a log of ours.
            continue

        for match in filter(None, map(_LOG_LINE.match, lines)):
            when, level, text = match.groups()
            messages.append(Message(when, level, rank, text[:MAX_MESSAGE_LENGTH]))

    return messages
