"""Predictions as rows, in the order of the examples, gathered from the ranks batch by batch."""

from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from hvtrain.errors import ConfigError
from hvtrain.finished.finished_run import FinishedRun
from hvtrain.finished.inputs import Batch, Examples
from hvtrain.finished.pace import Pace

Rows = dict[str, np.ndarray]
"""Columns of equal length by name."""


def predictions(run: FinishedRun, examples: Examples) -> Iterator[Rows]:
    """Yields rows in order, the same on every rank (every rank). At most one batch per rank is in memory."""
    comm, batches = run.strategy.comm, examples.batches()
    forward = tf.function(lambda inputs: run.model(inputs, training=False), reduce_retracing=True)
    pace = Pace("predicted", examples.total, run.is_chief)
    number = 0

    def next_rows() -> Rows | None:
        try:
            batch = next(batches, None)
        except Exception as error:
            raise run.explain(error) from error
        return batch and rows_of(run, batch, forward)

    while blocks := [block for block in comm.gather(comm.all_or_raise(next_rows)) if block is not None]:
        rows = joined(blocks, examples.is_interleaved)
        count = len(next(iter(rows.values())))
        yield {"example": np.arange(number, number + count), **rows}
        number += count
        pace.reach(number)


def rows_of(run: FinishedRun, batch: Batch, forward: object) -> Rows:
    """The columns of a batch: those of the input, then those that the task makes of the outputs."""
    inputs, known = batch
    outputs = keras.tree.map_structure(
        lambda output: np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(output, "float32"))),
        forward(inputs),  # type: ignore[operator]
    )
    columns = flat(run.task.columns(outputs, run.source), run.task.targets_are_masks)
    taken = {"example", *known}  # A label or an output may have one of these names.
    return {**known, **{f"prediction.{name}" if name in taken else name: array for name, array in columns.items()}}


def flat(columns: dict[str, np.ndarray], has_masks: bool = False) -> Rows:
    """Splits arrays [examples, n] into n columns. Raises ConfigError for more dimensions.

    >>> list(flat({"class": np.zeros(3), "prediction": np.zeros((3, 2))}))
    ['class', 'prediction.0', 'prediction.1']
    """
    found: Rows = {}
    for name, array in columns.items():
        if array.ndim == 1 or has_masks:
            found[name] = array
        elif array.ndim == 2:
            narrow = array.shape[1] == 1
            found.update({name if narrow else f"{name}.{i}": array[:, i] for i in range(array.shape[1])})
        else:
            raise ConfigError(
                f"the predictions of an example are of shape {list(array.shape[1:])}, which is no row of a table; use "
                "hvtrain.load(run).model, or python -m hvtrain generate for text"
            )
    return found


def joined(blocks: Sequence[Rows], is_interleaved: bool) -> Rows:
    """The blocks of all ranks in the order of the examples.

    >>> joined([{"x": np.array([0, 2, 4])}, {"x": np.array([1, 3])}], is_interleaved=True)["x"].tolist()
    [0, 1, 2, 3, 4]
    """
    rows = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    if not is_interleaved:
        return rows
    lengths = [len(next(iter(block.values()))) for block in blocks]
    ranks = np.repeat(np.arange(len(blocks)), lengths)
    places = np.concatenate([np.arange(length) for length in lengths])
    order = np.lexsort((ranks, places))
    return {name: array[order] for name, array in rows.items()}
