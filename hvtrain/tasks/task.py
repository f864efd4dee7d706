"""The contract of a task."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from hvtrain.config.instantiate import declared
from hvtrain.core.figures import Figure
from hvtrain.core.topology import Topology
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError, DataError, in_one_line
from hvtrain.step.joint_loss import ExactLoss
from hvtrain.tasks.reviewed import Reviewed

Losses: TypeAlias = keras.losses.Loss | Mapping[str, keras.losses.Loss] | None
Metrics: TypeAlias = Mapping[str, Any]


class Task(ABC):
    """The loss and the metrics of a model, what its outputs have to be, and what its targets are.

    Raises ConfigError for what is no loss or metric.

    Args:
        loss: its mean over the batch is differentiated.
        metrics: by the names that logs and records give them. A functools.partial, `_partial_: true` in YAML, gets the
            facts of the data set that it declares as arguments, such as num_classes.
        best: the metric by which the best checkpoint is chosen; None: that of the class.
    """

    output: str
    """What the numbers are that the model gives, for model.json."""
    head: ClassVar[str] = "keras.layers.Dense({0})"
    """The layer that a model for this task ends with, for its number of outputs."""
    best: str = "loss"
    loss_weights: Mapping[str, float] | None = None
    """Of losses by output."""
    output_is_free: ClassVar[bool] = False
    """True if the model may give whatever it likes, and may have losses of its own."""
    has_classes: ClassVar[bool] = False
    """True if targets are indices of classes, which may have weights."""
    num_reviewed: ClassVar[int] = 0
    """The most examples that `review` takes; 0: the task has no figures."""
    targets_are_masks: ClassVar[bool] = False
    """True if targets have a class for each pixel, which moves with its image."""

    def __init__(self, loss: Losses, metrics: Metrics, best: str | None = None) -> None:
        self.loss = None if loss is None and self.output_is_free else _check("task.loss", loss, keras.losses.Loss)
        self.metrics = dict(metrics)
        for name, metric in self.metrics.items():
            _check(f"task.metrics.{name}", metric, (keras.metrics.Metric, partial))
        self.best = best or self.best

    @abstractmethod
    def output_shape(self, source: Source) -> tuple[Any, ...] | None:
        """The shape of the model's output for one example of the source; None if any will do."""

    @abstractmethod
    def check_targets(self, source: Source) -> None:
        """Raises ConfigError if targets of the source's element_spec are not those of this task."""

    @abstractmethod
    def examples(self, number: int, source: Source) -> tuple[Any, Any]:
        """So many targets and outputs as they might be, to try metrics with."""

    def fault(self, targets: Any, source: Source) -> tuple[int, str] | None:
        """The first example of a batch whose target is wrong, and why; None if there is none."""
        for target in tf.nest.flatten(targets):
            if np.issubdtype(target.dtype, np.floating) and not (finite := np.isfinite(target)).all():
                row = int(np.argmin(finite.reshape(len(target), -1).all(axis=1)))
                return row, "holds NaN or an infinite value"
        return None

    def decode(self, outputs: np.ndarray) -> np.ndarray:
        """Predictions in the terms of the targets from a batch of the model's outputs."""
        return outputs

    def columns(self, outputs: Any, source: Source) -> dict[str, np.ndarray]:
        """A batch of outputs as columns of predictions, by name: numbers or rows of numbers for each example."""
        if isinstance(outputs, Mapping):
            return dict(outputs)
        if isinstance(outputs, list | tuple):
            return {f"prediction.{index}": output for index, output in enumerate(outputs)}
        return {"prediction": outputs}

    def softener(self, source: Source) -> Callable[[Any], tf.Tensor] | None:
        """Turns targets into floats, which layers such as MixUp may mix; None if they cannot be."""
        return None

    def harden(self, targets: Any) -> Any:
        """Targets that were mixed as metrics take them."""
        return targets

    def soft_loss(self) -> Losses:
        """The loss, which takes mixed targets too."""
        return self.loss

    def unit(self, source: Source) -> tuple[str, int] | None:
        """What an example consists of, and how many, if speeds are usually given in that: ("tokens", 128)."""
        return None

    def sample(self, model: keras.Model, source: Source, topology: Topology) -> str | None:
        """Something that the trained model makes of data of this rank's, in a line; None, the default, for nothing."""
        return None

    def review(self, reviewed: Reviewed, model: keras.Model, source: Source) -> list[Figure]:
        """Figures for the report, from the trained model's outputs for some examples."""
        return []

    def results(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics by name, with those that follow from others."""
        return dict(metrics)

    def facts(self, source: Source) -> dict[str, Any]:
        """What a model's builder may ask for beside the facts of the source."""
        shape = self.output_shape(source)
        return {"num_outputs": shape[-1], "output_shape": shape} if shape else {}

    @property
    def metric_names(self) -> list[str]:
        """Of the logs, without prefixes."""
        names = ["loss"]
        if isinstance(self.loss, Mapping) and len(self.loss) > 1:
            names += [f"{output}_loss" for output in self.loss]
        for name, metric in self.metrics.items():
            names += [f"{name}_{inner}" for inner in metric] if isinstance(metric, Mapping) else [name]
        return list(self.results(dict.fromkeys(names, 0.0)))

    def sign(self, name: str) -> int:
        """1 if more of the metric of that name is better, otherwise -1."""
        name, flat = name.removeprefix("val_"), {}
        for key, metric in self.metrics.items():
            flat.update({f"{key}_{k}": m for k, m in metric.items()} if isinstance(metric, Mapping) else {key: metric})
        direction = getattr(flat.get(name), "_direction", None)  # Keras's own answer, where it has one.
        if direction is not None:
            return 1 if direction == "up" else -1
        return -1 if any(word in name for word in ("loss", "error", "perplexity")) else 1

    def prepare(self, source: Source) -> None:
        """Completes metrics with facts of the source. Raises ConfigError for targets or metrics that do not fit."""
        self.check_targets(source)
        self.output_shape(source)  # It may need a fact that the source lacks.
        for split, targets in source.whole_targets().items():
            if fault := self.fault(targets, source):
                raise DataError(f"{source.name}, {split}: example {fault[0]} {fault[1]}; fix the targets")
        self.complete(source)
        self.check_metrics(*self.examples(NUM_CHECKED, source))

    def complete(self, source: Source) -> None:
        """Builds the metrics that are given as partials, with facts of the source."""
        for name, metric in self.metrics.items():
            if isinstance(metric, partial):
                place = f"task.metrics.{name}"
                facts = declared(metric.func, metric.keywords, source.facts(), place, source.name)
                self.metrics[name] = _check(place, metric(**facts), keras.metrics.Metric)

    def compile(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        jit_compile: bool = False,
        weighted: bool = False,
        distribute_loss: Callable[[keras.losses.Loss], keras.losses.Loss] | None = None,
        soft_targets: bool = False,
    ) -> None:
        """Compiles a model with its own loss and metrics.

        Args:
            weighted: for batches that carry weights, with which the metrics then count.
            distribute_loss: of the strategy, for a model that trains.
            soft_targets: training may mix targets.
        """
        is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if model.dtype_policy.name == "mixed_float16" and not is_scaled:
            # Keras would add it by itself, but not save that it did, and a file would not load under another policy.
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
        loss: Any = self.soft_loss() if soft_targets else self.loss
        if distribute_loss and loss is not None:
            loss = keras.tree.map_structure(distribute_loss, loss)
        metrics = {"weighted_metrics" if weighted else "metrics": _fresh_all(self.metrics) or None}
        # Never "auto", which is on if there is a GPU: the user decides about XLA.
        weights = None if self.loss_weights is None else {name: self.loss_weights.get(name, 1.0) for name in loss}
        model.compile(optimizer=optimizer, loss=loss, loss_weights=weights, jit_compile=jit_compile, **metrics)
        if distribute_loss and isinstance(loss, keras.losses.Loss):
            object.__setattr__(model, "_loss_tracker", ExactLoss(loss))  # As Keras does: it is no part of the model.

    def check_outputs(self, outputs: Any, name: str, source: Source) -> None:
        """Raises ConfigError if symbolic outputs of the model of that name are not what the task needs."""
        needed = self.output_shape(source)
        shapes = [tuple(output.shape) for output in keras.tree.flatten(outputs)]
        if needed is not None and shapes != [(None, *needed)]:
            raise ConfigError(
                f"{name} has {len(shapes)} output(s) of shape {', '.join(map(str, shapes))} and needs one of "
                f"{(None, *needed)}, {self.output.partition(';')[0]} for {source.name}; "
                f"end it with {self.head.format(needed[-1])}"
            )

    def check_metrics(self, targets: Any, outputs: Any) -> None:
        """Raises ConfigError for a metric whose state after all examples is not the sum of those after parts of them.

        Only sums over the ranks' states are the state of one process on all examples.
        """
        for name, metric in self.metrics.items():
            if not isinstance(metric, Mapping):
                check_adds_up(metric, name, targets, outputs, type(self).__name__)
                continue
            for inner, one in metric.items():
                check_adds_up(one, f"{name}.{inner}", targets[name], outputs[name], type(self).__name__)


def refuse_targets(task: str, needed: str, source: Source) -> ConfigError:
    """The error about a source whose targets are not those of the task."""
    given = ", ".join(f"{one.dtype.name} {tuple(one.shape)}" for one in tf.nest.flatten(source.element_spec[1]))
    return ConfigError(
        f"task={task} needs as the target of an example {needed}, and {source.name} gives {given}; choose another task "
        "or data set"
    )


def _check(place: str, given: Any, kinds: Any) -> Any:
    """What was given, if it is of that kind, or a mapping of these by output; otherwise raises ConfigError."""
    if isinstance(given, Mapping) and given:
        for name, one in given.items():
            _check(f"{place}.{name}", one, kinds)
    elif not isinstance(given, kinds):
        kind = kinds[0] if isinstance(kinds, tuple) else kinds
        came = f"a {type(given).__name__}" if given is not None else "null"
        raise ConfigError(f"{place} is {came}; it must be a {kind.__module__.split('.')[0]} {kind.__name__}")
    return given


def _fresh_all(metrics: Metrics) -> Any:
    """The metrics without state, as model.compile takes them."""
    if any(isinstance(metric, Mapping) for metric in metrics.values()):
        return {output: _fresh_all(inner) for output, inner in metrics.items()}
    return [fresh(metric, name) for name, metric in metrics.items()]


NUM_CHECKED = 32


def check_adds_up(metric: keras.metrics.Metric, name: str, targets: Any, outputs: Any, task: str) -> None:
    """Raises ConfigError for a metric that cannot take these examples, or cannot be exact over ranks."""
    quarter = NUM_CHECKED // 4
    parts = slice(0), slice(quarter), slice(quarter, None), slice(None)
    try:
        found = [_state(fresh(metric, "checked"), targets[part], outputs[part]) for part in parts]
    except (ValueError, TypeError, tf.errors.OpError) as error:
        raise ConfigError(
            f"task.metrics.{name} cannot take targets of shape {targets.shape} and outputs of {outputs.shape}, "
            f"as {task} has them: {in_one_line(error)}"
        ) from error
    if not all(np.allclose(first + rest - begin, whole, rtol=1e-4) for begin, first, rest, whole in zip(*found)):
        raise ConfigError(
            f"task.metrics.{name} cannot be exact over ranks: the state of {type(metric).__name__} is no sum "
            "over examples; choose a metric that counts or averages, or compute it from the saved model"
        )


def fresh(metric: keras.metrics.Metric, name: str) -> keras.metrics.Metric:
    """The metric without state, under that name."""
    return type(metric).from_config({**metric.get_config(), "name": name})


def _state(metric: keras.metrics.Metric, targets: np.ndarray, outputs: np.ndarray) -> list[np.ndarray]:
    """The metric's variables after these examples."""
    if len(targets):
        metric.update_state(targets, outputs)
    elif not metric.variables:
        metric.build(targets.shape, outputs.shape)
    return [np.asarray(variable.numpy(), np.float64) for variable in metric.variables]
