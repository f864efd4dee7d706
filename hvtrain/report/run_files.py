"""A run as its folder describes it: settings, numbers, starts, messages and state. Without TensorFlow."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvtrain.checkpoint.notes import newest_step
from hvtrain.core.rank_seconds import read_rank_seconds
from hvtrain.core.records import RESULT_FILE, REVIEW_FILE, EpochRecord, read_file, read_history
from hvtrain.core.starts import read_starts
from hvtrain.errors import ConfigError
from hvtrain.system.run_lock import is_held

CONFIG_FILE = "config.yaml"
MAX_LOGS, LOG_BYTES, MAX_MESSAGES = 64, 100_000, 30
_MESSAGE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (INFO|WARNING|ERROR|CRITICAL) \S+?: (.*)$")


@dataclass(frozen=True)
class Message:
    """A line of a rank's log."""

    when: str
    level: str
    rank: int
    text: str


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run folder.

    state is "running", "finished", "stopped" (it was asked to save and stop), or "failed" (it ended in any other way).
    """

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any]
    history: list[EpochRecord]
    rank_seconds: dict[int, list[float]]
    starts: list[dict[str, Any]]
    review: list[dict[str, Any]]
    messages: list[Message]
    state: str
    checkpoint_step: int | None

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_resumable(self) -> bool:
        """True if it has not finished, and has a checkpoint on this host to continue from."""
        return self.state in ("stopped", "failed") and self.checkpoint_step is not None

    @property
    def num_ranks(self) -> int | None:
        """How many computed gradients at the same time: replicas and workers count like ranks."""
        found = self.result or (self.starts[-1] if self.starts else {})
        return found.get("num_replicas") or found.get("num_ranks")

    @property
    def examples_per_second(self) -> float | None:
        """Over all ranks: of the result, or of the newest epoch."""
        rates = [row.examples_per_second for row in self.history[-1:]]
        return self.result.get("examples_per_second") or next(iter(rates), None)

    @property
    def began(self) -> str:
        """Date and time of the first start; empty if it is not known."""
        return str(self.starts[0].get("began", "")).replace("T", " ")[:16] if self.starts else ""

    @property
    def progress(self) -> float | None:
        """Fraction of the steps that are done and saved or recorded, 0 to 1."""
        planned = self.starts[-1].get("num_steps") if self.starts else None
        done = max(
            [self.checkpoint_step or 0, self.result.get("num_steps", 0), *(row.step for row in self.history[-1:])]
        )
        return min(done / planned, 1.0) if planned else None

    @property
    def sign(self) -> int:
        """1 if a higher score is better, otherwise -1."""
        return self.starts[-1].get("sign", 1) if self.starts else 1

    @property
    def score(self) -> tuple[str, float] | None:
        """The task's metric and its name: on the test data, or else the best value in validation or training."""
        best = self.result.get("best") or {}
        name = self.starts[-1].get("best") if self.starts else best.get("metric")
        tested = self.result.get("metrics") or {}
        if name is None:
            names = [key for key in tested if key != "test_loss"] or list(tested)
            return (names[0], tested[names[0]]) if names else None
        own = f"test_{name.removeprefix('val_')}"
        if own in tested:
            return own, tested[own]
        for column in (name, name.removeprefix("val_")):
            measured = [row.metrics.get(column, math.nan) for row in self.history]
            if values := [value for value in measured if math.isfinite(value)]:
                return column, self.sign * max(self.sign * value for value in values)
        return None


def is_run_folder(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() and (folder / "checkpoints").is_dir()


def read_run(folder: Path) -> RunFiles:
    """Reads a run folder. Raises ConfigError if it is not one, StorageError if its history is damaged."""
    if not is_run_folder(folder):
        raise ConfigError(
            f"{folder} is not a run folder, which has config.yaml and checkpoints/; give the run.dir of a run "
            "(python -m hvtrain runs lists them)"
        )
    result, messages, steps = _result(folder), _messages(folder), newest_step(folder)
    return RunFiles(
        folder=folder.absolute(),
        config=result.get("config") or _config(folder),
        result=result,
        history=read_history(folder),
        rank_seconds=read_rank_seconds(folder),
        starts=read_starts(folder),
        review=[figure for figure in _json(folder / REVIEW_FILE, list) if isinstance(figure, dict)],
        messages=[one for one in messages if one.level != "INFO"][-MAX_MESSAGES:],
        state=_state(folder, result, steps, messages),
        checkpoint_step=steps,
    )


def _state(folder: Path, result: dict[str, Any], steps: int | None, messages: list[Message]) -> str:
    if is_held(folder):
        return "running"
    if result and (steps is None or result.get("num_steps", 0) >= steps):
        return "finished"
    of_chief = [one for one in messages if one.rank == 0 and one.level != "WARNING"]
    return "stopped" if of_chief and of_chief[-1].text.startswith("stopped by ") else "failed"


def _result(folder: Path) -> dict[str, Any]:
    path = folder / RESULT_FILE
    if path.exists() and not (found := _json(path, dict)):
        raise ConfigError(f"{path} is damaged; move it away, and the same command tests the run again")
    return found if path.exists() else {}


def _json(path: Path, kind: type) -> Any:
    """The content of the file, of that kind; empty if there is none or it is damaged."""
    try:
        found = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return kind()
    return found if isinstance(found, kind) else kind()


def _config(folder: Path) -> dict[str, Any]:
    """The settings of a run without results."""
    import yaml

    try:
        found = yaml.safe_load(read_file(folder / CONFIG_FILE))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {key: value for key, value in found.items() if key not in ("defaults", "hydra")} if found else {}


def _messages(folder: Path) -> list[Message]:
    """Messages of the ranks on this host, by rank and in order; only the ends of long logs."""
    found = []
    for path in sorted((folder / "logs").glob("rank-*.log"))[:MAX_LOGS]:
        rank = path.stem.removeprefix("rank-")
        try:
            if not path.is_file():
                continue
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            continue
        matches = filter(None, map(_MESSAGE.match, lines))
        number = int(rank) if rank.isdigit() else 0
        found += [Message(match[1], match[2], number, match[3][:400]) for match in matches]
    return found
