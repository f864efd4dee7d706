"""tracker=tensorboard: event files in the run folder, for `tensorboard --logdir runs`."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf
import yaml

from hvtrain.training.trackers import TrackedRun, Tracker


class TensorBoard(Tracker):
    """Logs scalars by step, and the settings as text.

    Files are not copied: they are already in the run folder, beside the events.
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
