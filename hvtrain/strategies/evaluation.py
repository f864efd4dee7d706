"""Metrics over all ranks: sum of values over sum of counts, never a mean of means.

The state of a Keras metric is sums (total and count of a mean, the counts of an AUC), so the sums over the
ranks are the state that one process would have on all the data, and its result is exact also where shards
differ in size.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.strategies.comm import Comm
from hvtrain.watchdog.progress import VALIDATION


def metrics_over_ranks(model: keras.Model, comm: Comm) -> dict[str, float]:
    """Results of the model's metrics over all ranks (every rank); their own state stays as it is."""
    own = [variable.numpy() for variable in model.metrics_variables]
    for variable, total in zip(model.metrics_variables, comm.sum_arrays(own)):
        variable.assign(total.astype(variable.dtype))
    results = {name: float(value) for name, value in model.get_metrics_result().items()}
    for variable, value in zip(model.metrics_variables, own):
        variable.assign(value)
    return results


def evaluate(model: keras.Model, dataset: tf.data.Dataset, comm: Comm) -> dict[str, float]:
    """Metrics on all ranks' shards together (every rank); shards may differ in size, and some be empty.

    The state of the training metrics of an epoch that has begun is left as it was.
    """
    training = [variable.numpy() for variable in model.metrics_variables]
    if int(dataset.cardinality().numpy()) == 0:
        build_metrics(model, dataset)
    else:
        with comm.watchdog.phase(VALIDATION):
            model.evaluate(dataset, verbose=0, callbacks=[_Heartbeat(comm)])
    results = metrics_over_ranks(model, comm)
    for variable, value in zip(model.metrics_variables, training):
        variable.assign(value)
    return results


def build_metrics(model: keras.Model, dataset: tf.data.Dataset) -> None:
    """Makes the state of the model's metrics, which Keras defers to the first batch; they count nothing yet."""
    images, labels = dataset.element_spec[:2]
    blank = [np.zeros([1, *spec.shape[1:]], spec.dtype.as_numpy_dtype) for spec in (images, labels)]
    model.evaluate(*blank, verbose=0)
    model.reset_metrics()


class _Heartbeat(keras.callbacks.Callback):
    """Tells the watchdog that each batch of an evaluation is progress (every rank)."""

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self.comm = comm

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.comm.watchdog.progress.beat()
