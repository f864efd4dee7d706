"""review.json: the trained model's predictions for some test examples, for the report; only the chief computes them."""

import json
import logging
import time
from dataclasses import asdict
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.core.records import REVIEW_FILE, write_atomic
from hvtrain.core.topology import Topology
from hvtrain.errors import in_one_line
from hvtrain.tasks.reviewed import Reviewed
from hvtrain.training.run import Run

log = logging.getLogger(__name__)

MAX_SECONDS = 10.0  # For the predictions. Other ranks wait meanwhile.
MAX_BYTES = 256 << 20  # Of examples and outputs together.


def write_review(run: Run, model: keras.Model) -> None:
    """Writes the task's figures (chief only). An error is only a warning, since the run itself has finished."""
    if not run.config.run.report or not run.task.num_reviewed:
        return
    try:
        reviewed = _try_out(run, model)
        figures = run.task.review(reviewed, model, run.source) if reviewed else []
        write_atomic(run.folder / REVIEW_FILE, json.dumps([asdict(figure) for figure in figures]) + "\n")
    except Exception as error:
        log.warning("the report will show no predictions: %s", in_one_line(error))


def _try_out(run: Run, model: keras.Model) -> Reviewed | None:
    """The model's outputs for the first test examples, or those of validation; None if there are none.

    As many as the task takes, unless time or memory run out.
    """
    source, number = run.source, run.task.num_reviewed
    split = next((split for split in ("test", "validation") if source.num_examples(split)), None)
    if split is None:
        return None
    batches, num_taken, num_bytes, began = [], 0, 0, time.monotonic()
    batch_size = min(run.plan.batch_sizes[0], number)
    for inputs, targets, *_ in source.evaluation(split, Topology(), batch_size).as_numpy_iterator():
        run.strategy.watchdog.progress.beat()
        outputs = keras.tree.map_structure(_as_numpy, model(inputs, training=False))
        batches.append((inputs, targets, outputs))
        leaves = tf.nest.flatten(batches[-1])
        num_taken += len(leaves[0])
        num_bytes += sum(leaf.nbytes for leaf in leaves)
        if num_taken >= number or num_bytes > MAX_BYTES or time.monotonic() - began > MAX_SECONDS:
            break
    if not batches:
        return None
    inputs, targets, outputs = tf.nest.map_structure(lambda *parts: np.concatenate(parts)[:number], *batches)
    return Reviewed(inputs, targets, outputs, min(num_taken, number), split, source.num_examples(split))


def _as_numpy(output: Any) -> np.ndarray:
    array = keras.ops.convert_to_numpy(output)
    return array if array.dtype.kind in "iub" else array.astype(np.float32)
