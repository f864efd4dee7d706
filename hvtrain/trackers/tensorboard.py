"""tracker=tensorboard: event files in the run folder, which `tensorboard --logdir runs` shows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
import yaml

from hvtrain.trackers.tracker import TrackedRun, Tracker


class TensorBoard(Tracker):
    """Scalars by step, and the settings as text. Files stay where they are: beside the events, in the run folder."""

    needs = ("tensorboard",)

    def __init__(self, dir: str) -> None:
        self.folder = Path(dir).absolute()
        self._writer: Any = None

    def start(self, run: TrackedRun, known: str | None) -> str:
        self._writer = tf.summary.create_file_writer(str(self.folder))
        if known != str(self.folder):
            text = yaml.safe_dump(run.settings, sort_keys=False)
            with self._writer.as_default():
                tf.summary.text("settings", "".join(f"    {line}\n" for line in text.splitlines()), step=0)
            self._writer.flush()
        return str(self.folder)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        # tf.summary.scalar writes the same, but runs operations for each number, while the other ranks wait.
        summary = Summary(value=[scalar_pb(name, value).value[0] for name, value in values.items()])
        with self._writer.as_default():
            tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step=step)
        self._writer.flush()

    def finish(self, state: str, files: Sequence[Path]) -> None:
        self._writer.close()
