"""The metrics of a finished run, exact over the ranks: sums over all examples, never a mean of means."""

from typing import Any

import keras

from hvtrain.errors import ConfigError
from hvtrain.finished.finished_run import FinishedRun
from hvtrain.finished.pace import Pace
from hvtrain.training.run import evaluation_batches


def metrics_of(run: FinishedRun, split: str) -> dict[str, Any]:
    """The metrics, with checkpoint, data set and split, and what could not be read (every rank).

    Raises ConfigError if the split is empty.
    """
    topology, source, size = run.strategy.topology, run.source, run.config.train.evaluation_batch_size
    data = run.strategy.comm.all_or_raise(lambda: evaluation_batches(source, split, topology, size))
    total = source.num_examples(split)
    if data is None:
        known = [f"{name} ({number:,})" for name in source.SPLITS if (number := source.num_examples(name))]
        raise ConfigError(f"split={split} of {source.name} has no examples; it has {', '.join(known)}")
    pace = Pace("evaluated", total, topology.is_chief)
    # Shards differ by few examples, so this rank's progress stands for that of all.
    tell = keras.callbacks.LambdaCallback(
        on_test_batch_end=lambda batch, logs: pace.reach(min(total, (batch + 1) * size * topology.size))
    )
    source.unreadable()  # What was left out as the examples were counted is not in their number.
    try:
        found = run.strategy.evaluate(run.model, data, [tell])
    except Exception as error:
        raise run.explain(error) from error
    skipped = run.left_out()
    return {
        "checkpoint": run.checkpoint,
        "dataset": source.name,
        "split": split,
        "examples": total - sum(item.num_examples or 0 for item in skipped),
        "skipped": [f"{item.place}: {item.why}" for item in skipped],
        "metrics": run.task.results(found),
    }
