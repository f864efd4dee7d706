"""The contract of a task."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvtrain.data.source import Source
from hvtrain.errors import ConfigError, in_one_line

NUM_CHECKED = 32


class Task(ABC):
    """The loss and the metrics of a model, and what its outputs have to be.

    Raises ConfigError for a metric that cannot be exact over several ranks.

    Args:
        loss: its mean over the batch is differentiated.
        metrics: by the names that logs and records give them.
    """

    def __init__(self, loss: keras.losses.Loss, metrics: Mapping[str, keras.metrics.Metric]) -> None:
        for name, kind in {"loss": keras.losses.Loss, **dict.fromkeys(metrics, keras.metrics.Metric)}.items():
            given, place = (loss, "task.loss") if name == "loss" else (metrics[name], f"task.metrics.{name}")
            if not isinstance(given, kind):
                came = f"a {type(given).__name__}" if given is not None else "null"
                raise ConfigError(f"{place} is {came}; it must be a {kind.__module__.split('.')[0]} {kind.__name__}")
        self.loss = loss
        self.metrics = dict(metrics)

    output: str
    """What the numbers are that the model gives, for model.json."""

    @abstractmethod
    def output_shape(self, source: Source) -> tuple[int, ...]:
        """The shape of the model's output for one example of the source."""

    @abstractmethod
    def examples(self, number: int, source: Source) -> tuple[np.ndarray, np.ndarray]:
        """So many targets and outputs as they might be, to try metrics with."""

    @property
    def metric_names(self) -> list[str]:
        """Of the logs, without prefixes."""
        return ["loss", *self.metrics]

    def compile(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        jit_compile: bool = False,
        weighted: bool = False,
    ) -> None:
        """Compiles a model with its own loss and metrics; weighted: for batches that carry their rank's weight."""
        is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if model.dtype_policy.name == "mixed_float16" and not is_scaled:
            # Keras would add it by itself, but not save that it did, and a file would not load under another policy.
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
        metrics = [_fresh(metric, name) for name, metric in self.metrics.items()]
        loss = rank_weighted(self.loss) if weighted else self.loss
        # Never "auto", which is on if there is a GPU: the user decides about XLA.
        model.compile(optimizer=optimizer, loss=loss, metrics=metrics, jit_compile=jit_compile)

    def check_metrics(self, source: Source) -> None:
        """Raises ConfigError for a metric whose state after all examples is not the sum of those after parts of them.

        Only sums over the ranks' states are the state of one process on all examples.
        """
        targets, outputs = self.examples(NUM_CHECKED, source)
        quarter = NUM_CHECKED // 4
        parts = slice(0), slice(quarter), slice(quarter, None), slice(None)
        for name, metric in self.metrics.items():
            try:
                found = [_state(_fresh(metric, name), targets[part], outputs[part]) for part in parts]
            except (ValueError, TypeError, tf.errors.OpError) as error:
                raise ConfigError(
                    f"task.metrics.{name} cannot take targets of shape {targets.shape} and outputs of {outputs.shape}, "
                    f"as {type(self).__name__} has them: {in_one_line(error)}"
                ) from error
            if not all(
                np.allclose(first + rest - begin, whole, rtol=1e-4) for begin, first, rest, whole in zip(*found)
            ):
                raise ConfigError(
                    f"task.metrics.{name} cannot be exact over ranks: the state of {type(metric).__name__} is no sum "
                    "over examples; choose a metric that counts or averages, or compute it from the saved model"
                )


def rank_weighted(loss: keras.losses.Loss) -> keras.losses.Loss:
    """The same loss, whose gradient is multiplied by the batch's weight; its value is that without weights."""
    base = type(loss)

    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = base.__call__(self, y_true, y_pred)
        if sample_weight is None:
            return value
        weighted = value * tf.cast(sample_weight[0], value.dtype)
        return weighted + tf.stop_gradient(value - weighted)

    # Keras writes these names into saved models, which then load as the plain loss.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    kind = type(base.__name__, (base,), {**names, "__call__": call})
    weighted: keras.losses.Loss = object.__new__(kind)
    vars(weighted).update(vars(loss))
    return weighted


def _fresh(metric: keras.metrics.Metric, name: str) -> keras.metrics.Metric:
    """The metric without state, under that name."""
    return type(metric).from_config({**metric.get_config(), "name": name})


def _state(metric: keras.metrics.Metric, targets: np.ndarray, outputs: np.ndarray) -> list[np.ndarray]:
    """The metric's variables after these examples."""
    if len(targets):
        metric.update_state(targets, outputs)
    elif not metric.variables:
        metric.build(targets.shape, outputs.shape)
    return [np.asarray(variable.numpy(), np.float64) for variable in metric.variables]
