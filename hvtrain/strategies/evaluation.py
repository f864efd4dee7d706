"""Metrics over all ranks: sum of values over sum of counts, never a mean of means.

The state of a Keras metric is sums (total and count of a mean, the counts of an AUC). Their sums over the ranks are
the state of one process on all the data, so the result is exact even if shards differ in size.
"""

import keras
import numpy as np
import tensorflow as tf

from hvtrain.strategies.comm import Comm
from hvtrain.watchdog.progress import VALIDATION


def metrics_over_ranks(model: keras.Model, comm: Comm) -> dict[str, float]:
    """Returns the model's metrics over all ranks, and keeps their own state (every rank)."""
    own = [variable.numpy() for variable in model.metrics_variables]
    for variable, total in zip(model.metrics_variables, comm.sum_arrays(own)):
        variable.assign(total.astype(variable.dtype))
    results = {name: float(value) for name, value in model.get_metrics_result().items()}
    for variable, value in zip(model.metrics_variables, own):
        variable.assign(value)
    return results


def evaluate(model: keras.Model, dataset: tf.data.Dataset, comm: Comm) -> dict[str, float]:
    """Returns metrics over all ranks' shards, which may differ in size or be empty (every rank).

    The training metrics of an unfinished epoch keep their state.
    """
    training = [variable.numpy() for variable in model.metrics_variables]
    if int(dataset.cardinality().numpy()) == 0:
        build_metrics(model, dataset)
    else:
        with comm.watchdog.phase(VALIDATION):
            beat = keras.callbacks.LambdaCallback(on_test_batch_begin=lambda batch, logs: comm.watchdog.progress.beat())
            model.evaluate(dataset, verbose=0, callbacks=[beat])
    results = metrics_over_ranks(model, comm)
    for variable, value in zip(model.metrics_variables, training):
        variable.assign(value)
    return results


def build_metrics(model: keras.Model, dataset: tf.data.Dataset) -> None:
    """Creates the state of the model's metrics, which Keras defers to the first batch, and resets it."""
    images, labels = dataset.element_spec[:2]
    blank = [np.zeros([1, *spec.shape[1:]], spec.dtype.as_numpy_dtype) for spec in (images, labels)]
    model.evaluate(*blank, verbose=0)
    model.reset_metrics()
