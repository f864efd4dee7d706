"""The task for any targets and outputs, for which the user chooses losses and metrics."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.tasks.examples import draw
from hvtrain.tasks.task import Task


class Custom(Task):
    """Losses and metrics of the user's choice, for any targets and any outputs.

    Args:
        loss: One loss, or a mapping from output names to losses. None if the model has its own losses,
            from add_loss() or a custom train_step().
        metrics: Metrics by name, or by output name and then by name. Default: none.
        best: The metric that chooses the best checkpoint. Default: the loss.
        loss_weights: Factors of the losses, by output name. Default: 1.

    Raises:
        ConfigError: loss_weights names an output without a loss.

    Example, in YAML:

        loss:
          price: {_target_: keras.losses.MeanSquaredError}
          style: {_target_: keras.losses.SparseCategoricalCrossentropy, from_logits: true}
        loss_weights: {style: 0.5}
        metrics:
          price:
            error: {_target_: keras.metrics.MeanAbsoluteError}
        best: price_error
    """

    name = "custom"
    target = "anything"
    output_is_free = True
    output = "defined by the model's builder"

    def __init__(
        self, *args: Any, loss_weights: Mapping[str, float] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if not loss_weights:
            return

        # Weights need losses by output name: the weight of a single loss
        # would only scale the learning rate.
        outputs = list(self.loss) if isinstance(self.loss, Mapping) else []
        if not outputs or set(loss_weights) - set(outputs):
            raise ConfigError(
                f"task.loss_weights names {', '.join(loss_weights)} and task.loss has "
                f"{', '.join(outputs) or 'no named outputs'}; give each output a loss"
            )
        # Keras needs a weight for each output.
        self.loss_weights = {output: loss_weights.get(output, 1.0) for output in outputs}

    def output_shape(self, source: Source) -> None:
        return None

    def takes(self, target: Any) -> bool:
        return True

    def prepare(self, source: Source) -> None:
        # Targets may be anything, and metrics can be checked only in check_outputs().
        self.complete(source)

    def check_outputs(self, outputs: Any, name: str, source: Source) -> None:
        # If metrics are nested, the outer keys are names of outputs.
        needed = {key for key, metric in self.metrics.items() if isinstance(metric, Mapping)}
        if isinstance(self.loss, Mapping):
            needed |= set(self.loss)
        # A single output, or a list of outputs, has no names.
        names = sorted(outputs) if isinstance(outputs, Mapping) else []
        self.has_one_output = len(names) == 1

        if not needed <= set(names):
            raise ConfigError(
                f"the task has a loss or metrics for the outputs {', '.join(sorted(needed))}, and "
                f"{name} gives {', '.join(names) or 'no named outputs'}; let the model return a "
                "dict of outputs with these names"
            )
        if self.metrics:
            specs = keras.tree.map_structure(
                lambda output: tf.TensorSpec(output.shape[1:], output.dtype), outputs
            )
            self.check_parts(*draw(source.element_spec[1], specs))
