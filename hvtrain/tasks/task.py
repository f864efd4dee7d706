"""The base classes of tasks, which hold a model's loss and metrics and interpret its outputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras import Model
from keras.losses import Loss
from keras.metrics import Metric

from hvtrain.config.instantiate import select_facts
from hvtrain.core.figures import Figure
from hvtrain.core.topology import Topology
from hvtrain.data.description import listed
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError, DataError
from hvtrain.step.joint_loss import ExactLoss
from hvtrain.system.run_files import HISTORY_COLUMNS, lower_is_better
from hvtrain.tasks.examples import (
    Columns,
    Fault,
    ReviewedExamples,
    check_additive,
    check_logits,
    check_loss,
    copy_metrics,
    draw,
    draw_classes,
    first_fault,
    logits_metric,
    out_of_range,
)

Losses: TypeAlias = Loss | Mapping[str, Loss] | None
Metrics: TypeAlias = Mapping[str, Any]


class Task(ABC):
    """A model's loss and metrics, the outputs that they need, and the targets that they take.

    Args:
        loss: The loss, whose mean over the batch is minimized. None: the task's default.
        metrics: Metrics by their names in logs and records. A functools.partial, written
            `_partial_: true` in YAML, gets the data set's facts that it declares as arguments, such as
            num_classes. None: the task's defaults; {}: no metrics.
        best: The metric by which the best checkpoint is chosen. None: the task's default.

    Raises:
        ConfigError: A value is not a Keras loss or metric.

    Example of a subclass, for counts, which are never below 0:

        class Counts(Regression):
            def default_loss(self):
                return keras.losses.Poisson()

            def fault(self, targets, source):
                return first_fault(targets < 0, lambda row: f"is {targets[row]}, below 0")
    """

    name: str
    """The name by which a user chooses the task, task=NAME."""
    target: str
    """A description of valid targets, for messages about invalid ones."""
    output: str
    """The meaning of the model's outputs, for model.json and messages."""
    head = "keras.layers.Dense({0})"
    """The layer with which a model for this task ends, for messages; {0} is its number of outputs."""
    best = "loss"
    loss_weights: Mapping[str, float] | None = None
    """Factors of all losses, by output name."""
    has_one_output = False
    """True if the model has a single output with a name."""
    label_smoothing = 0.0
    """Share of each target that training spreads over all classes."""
    output_is_free = False
    """True if the model may have any outputs, and losses of its own."""
    has_classes = False
    """True if targets are indices of classes, which may have weights."""
    num_reviewed = 0
    """The largest number of examples that `review` takes; 0 for a task without figures."""
    gives_logits = False
    """True if the outputs are logits, for which metrics have to be adapted."""
    targets_are_masks = False
    """True if targets have a class for each pixel, and are cropped and flipped with their image."""

    def __init__(
        self, loss: Losses = None, metrics: Metrics | None = None, best: str | None = None
    ) -> None:
        self.loss = self.default_loss() if loss is None else loss
        self.metrics = dict(self.default_metrics() if metrics is None else metrics)
        self.best = best or self.best

        if not (self.loss is None and self.output_is_free):
            _check_type("task.loss", self.loss, Loss)
        for name, metric in self.metrics.items():
            _check_type(f"task.metrics.{name}", metric, Metric, partial)
            if name in HISTORY_COLUMNS:
                raise ConfigError(f"task.metrics.{name} is a column of history.csv; rename it")

    def default_loss(self) -> Losses:
        return None

    def default_metrics(self) -> Metrics:
        return {}

    def output_shape(self, source: Source) -> tuple[Any, ...] | None:
        """Returns the shape of an output for one example, by default the target's; None: any."""
        # For a single number a dense layer outputs a row.
        return tuple(source.element_spec[1].shape) or (1,)

    @abstractmethod
    def takes(self, target: Any) -> bool:
        """True if targets with this tf.TensorSpec, or nested structure of them, fit the task."""

    def check_targets(self, source: Source) -> None:
        """Raises ConfigError if the targets in the source's element_spec do not fit this task."""
        target = source.element_spec[1]
        if not self.takes(target):
            types = ", ".join(
                f"{spec.dtype.name} {tuple(spec.shape) or 'numbers'}"
                for spec in tf.nest.flatten(target)
            )
            advice = "task=regression" if types == "float32 numbers" else "another task"
            names = source.facts().get("class_names")
            if names:  # Classes are given as numbers; their names say more.
                types = f"one of {len(names)} classes ({listed(names)})"
            raise ConfigError(
                f"task={self.name}: the target of each example must be {self.target}, and {source.name} "
                f"gives {types}; choose {advice} or another {source.target_setting}"
            )

    def examples(self, source: Source) -> tuple[Any, ...]:
        """Draws targets and outputs of NUM_CHECKED examples, on which to try metrics."""
        output = tf.TensorSpec(self.output_shape(source) or (), tf.float32)
        return draw(source.element_spec[1], output)

    def fault(self, targets: Any, source: Source) -> Fault:
        """Returns the row and the problem of a batch's first wrong target; None if all are right."""
        # Only floats can be NaN or infinite.
        faults = [
            first_fault(~np.isfinite(target), lambda _: "holds NaN or an infinite value")
            for target in tf.nest.flatten(targets)
            if np.issubdtype(target.dtype, np.floating)
        ]
        return next(filter(None, faults), None)

    def decode(self, outputs: np.ndarray) -> np.ndarray:
        """Turns a batch of the model's outputs into predictions in the form of targets."""
        return outputs

    def columns(self, outputs: Any, source: Source) -> Columns:
        """Returns a batch's predictions as columns by name, with a number or row per example."""
        if isinstance(outputs, Mapping):
            return dict(outputs)
        if isinstance(outputs, list | tuple):
            return {f"prediction.{index}": output for index, output in enumerate(outputs)}
        return {"prediction": outputs}

    def softener(self, source: Source) -> Callable[[Any], tf.Tensor] | None:
        """Returns a function that turns targets into floats that MixUp can mix; None if they cannot be mixed."""
        return None

    def harden(self, targets: Any) -> Any:
        """Turns mixed targets back into targets that metrics accept."""
        return targets

    def soft_loss(self) -> Losses:
        """Returns the loss for training with mixed or smoothed targets."""
        return self.loss

    def unit(self, source: Source) -> tuple[str, int] | None:
        """Returns the unit of speeds besides examples, and its mean number per example: ("tokens", 128); or None."""
        return None

    def sample(self, model: Model, source: Source, topology: Topology) -> str | None:
        """Returns a line that shows what the trained model does with this rank's data, or None."""
        return None

    def review(self, reviewed: ReviewedExamples, model: Model, source: Source) -> list[Figure]:
        """Returns figures for the report, made from the trained model's outputs for some examples."""
        return []

    def results(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics, with those added that are computed from others, such as the perplexity."""
        return dict(metrics)

    def facts(self, source: Source) -> dict[str, Any]:
        """Returns facts that a model's builder may declare as arguments, in addition to the source's."""
        shape = self.output_shape(source)
        if not shape:
            return {}
        return {"num_outputs": shape[-1], "output_shape": shape}

    def _named_metrics(self) -> dict[str, Any]:
        """Returns metrics by their names in the logs, with a prefix for several outputs."""
        named: dict[str, Any] = {}
        for name, metric in self.metrics.items():
            if isinstance(metric, Mapping):
                prefix = "" if self.has_one_output else f"{name}_"
                named.update({prefix + inner: item for inner, item in metric.items()})
            else:
                named[name] = metric
        return named

    @property
    def metric_names(self) -> list[str]:
        """The names of losses and metrics in the logs, without the prefix val_."""
        names = ["loss"]
        # Keras logs no loss per output if there is only one.
        if isinstance(self.loss, Mapping) and len(self.loss) > 1:
            names += [f"{output}_loss" for output in self.loss]
        names += self._named_metrics()
        # results() adds metrics computed from others. Only names matter here, so values are 0.
        return list(self.results(dict.fromkeys(names, 0.0)))

    def sign(self, name: str) -> int:
        """Returns 1 if larger values of the metric `name` are better, otherwise -1."""
        name = name.removeprefix("val_")
        # Keras knows the direction of most of its metrics. For others, the name decides.
        direction = getattr(self._named_metrics().get(name), "_direction", None)
        if direction is None:
            is_cost = any(part in name for part in ("loss", "error", "perplexity"))
            return -1 if is_cost or lower_is_better(name) else 1
        return 1 if direction == "up" else -1

    def prepare(self, source: Source) -> None:
        """Checks the source's targets, and completes and checks the metrics, before a model is built.

        Raises:
            ConfigError: The source's targets or a metric do not fit the task.
            DataError: A target has an invalid value.
        """
        self.check_targets(source)
        self.output_shape(source)  # Raises ConfigError if the source lacks a fact that it needs.
        for split, targets in source.whole_targets().items():
            fault = self.fault(targets, source)
            if fault:
                row, problem = fault
                raise DataError(f"{source.name}, {split}: example {row} {problem}; fix the targets")
        # Partial metrics must be completed before they can be tried.
        self.complete(source)
        self.check_parts(*self.examples(source))

    def complete(self, source: Source) -> None:
        """Builds partial metrics with the source's facts, and adapts all to logits if needed."""

        def build(metric, setting):
            if isinstance(metric, Mapping):
                return {name: build(item, f"{setting}.{name}") for name, item in metric.items()}
            if isinstance(metric, partial):
                options = metric.keywords
                facts = select_facts(metric.func, options, source.facts(), setting, source.name)
                metric = metric(**facts)
                _check_type(setting, metric, Metric)
            return logits_metric(metric, setting) if self.gives_logits else metric

        self.metrics = build(self.metrics, "task.metrics")

    def compile(
        self,
        model: Model,
        optimizer: keras.optimizers.Optimizer,
        jit_compile: bool = False,
        weighted: bool = False,
        distribute_loss: Callable[[Loss], Loss] | None = None,
        soft_targets: bool = False,
    ) -> None:
        """Compiles a model with the task's loss and with copies of its metrics, and builds the optimizer.

        Args:
            model: A built model.
            optimizer: The optimizer.
            jit_compile: True to compile with XLA. Never "auto", which would turn XLA on wherever there is a GPU.
            weighted: True if batches have sample weights, which the metrics must use too.
            distribute_loss: Strategy.distribute_loss, for a model that trains.
            soft_targets: True if training may mix or smooth targets.
        """
        is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if model.dtype_policy.name == "mixed_float16" and not is_scaled:
            # Keras would wrap the optimizer too, but would not save that, and the saved model would
            # not load under another dtype policy.
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")

        loss: Any = self.soft_loss() if soft_targets else self.loss
        if distribute_loss and loss is not None:
            loss = keras.tree.map_structure(distribute_loss, loss)

        # Copies, because metrics have state and a task may compile several models.
        metrics = copy_metrics(self.metrics)
        losses = keras.tree.flatten(loss)
        self.bind(model, losses + keras.tree.flatten(metrics))
        # Keras passes sample weights only to weighted_metrics.
        metrics_argument = "weighted_metrics" if weighted else "metrics"
        model.compile(
            optimizer=optimizer,
            loss=loss,
            loss_weights=self.loss_weights,
            jit_compile=jit_compile,
            **{metrics_argument: metrics or None},
        )
        if distribute_loss and len(losses) == 1 and isinstance(losses[0], Loss):
            # Keras's own tracker weights each batch by its number of examples, which is wrong for
            # losses that divide by something else. object.__setattr__ keeps Keras from tracking the
            # new tracker as part of the model.
            object.__setattr__(model, "_loss_tracker", ExactLoss(losses[0]))
        # Slots must exist before they are restored and broadcast. Builds model.optimizer, because
        # compile() may have wrapped the optimizer for mixed precision.
        model.optimizer.build(model.trainable_variables)

    def bind(self, model: Model, parts: Sequence[Any]) -> None:  # noqa: B027  (most tasks bind nothing)
        """Gives losses and metrics (`parts`, a flat list) what they need from their model."""

    def check_outputs(self, outputs: Any, name: str, source: Source) -> None:
        """Raises ConfigError if the model's symbolic outputs do not fit the task.

        Args:
            outputs: A symbolic tensor, or a nested structure of them.
            name: The model's name, for the message.
            source: The data set.
        """
        needed = self.output_shape(source)
        # Exactly one output is expected, whose first axis is the batch.
        shapes = [tuple(output.shape) for output in keras.tree.flatten(outputs)]
        if needed is not None and shapes != [(None, *needed)]:
            raise ConfigError(
                f"{name} has {len(shapes)} output(s) of shape {', '.join(map(str, shapes))} and "
                f"needs one of {(None, *needed)}, {self.output.partition(';')[0]} for "
                f"{source.name}; end it with {self.head.format(needed[-1])}"
            )
        if self.gives_logits:
            check_logits(outputs, name, f"task={self.name}")

    def check_parts(self, targets: Any, outputs: Any) -> None:
        """Raises ConfigError if a loss or metric cannot take these examples, or a metric's state is not a sum."""
        if not self.output_is_free and isinstance(targets, np.ndarray):
            check_loss(self.loss, targets, outputs, self.gives_logits)
        for name, metric in self.metrics.items():
            if isinstance(metric, Mapping):
                if not all(
                    isinstance(part, Mapping) and name in part for part in (targets, outputs)
                ):
                    raise ConfigError(
                        f"task.metrics.{name} needs targets and an output of this name; rename it or leave it out"
                    )
                for inner, item in metric.items():
                    check_additive(item, f"{name}.{inner}", targets[name], outputs[name])
            else:
                check_additive(metric, name, targets, outputs)


class ClassTask(Task):
    """A task whose targets are class indices or arrays of them; outputs have a logit per class."""

    gives_logits = True
    target_rank = 0
    """The number of axes of a target; 0 for one class per example."""
    num_classes_fact = "num_classes"
    """The name of the data set's fact with the number of classes."""
    ignored_label: int | None = None
    """The label of targets that do not count, if any."""

    def default_metrics(self) -> Metrics:
        return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}

    def output_shape(self, source: Source) -> tuple[Any, ...]:
        num_classes = source.fact(self.num_classes_fact, f"task={self.name}")
        return *source.element_spec[1].shape, num_classes

    def takes(self, target: Any) -> bool:
        return is_integer(target, self.target_rank)

    def fault(self, targets: np.ndarray, source: Source) -> Fault:
        return out_of_range(targets, self.output_shape(source)[-1], self.ignored_label)

    def examples(self, source: Source) -> tuple[np.ndarray, np.ndarray]:
        # Small targets suffice, since metrics treat all positions alike.
        return draw_classes((4,) * self.target_rank, self.output_shape(source)[-1])

    def decode(self, outputs: np.ndarray) -> np.ndarray:
        return outputs.argmax(axis=-1)


def is_integer(spec: Any, rank: int) -> bool:
    """True for the spec of an integer tensor with this number of axes; False for nested specs."""
    return hasattr(spec, "dtype") and spec.dtype.is_integer and spec.shape.rank == rank


def _check_type(setting: str, value: Any, *types: type) -> None:
    """Raises ConfigError if the value, or a value in a mapping by output, has none of the types."""
    if isinstance(value, Mapping) and value:
        for output, item in value.items():
            _check_type(f"{setting}.{output}", item, *types)
    elif not isinstance(value, types):
        description = "null" if value is None else f"of type {type(value).__name__}"
        raise ConfigError(f"{setting} is {description}; it must be a keras {types[0].__name__}")
