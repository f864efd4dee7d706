"""Anything that Keras can train."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from hvtrain.data.source import Source
from hvtrain.errors import ConfigError
from hvtrain.tasks.task import NUM_CHECKED, Losses, Metrics, Task


class Custom(Task):
    """Losses and metrics of one's own, for any targets and any outputs.

    Args:
        loss: one, or a mapping of them by the name of the output; None: the model has losses of its own (add_loss, or a
            train_step of its own).
        metrics: by name, or by output and name.
        loss_weights: of each output's loss, by its name; default: 1.
        best: default: the loss.
    """

    output_is_free = True
    output = "as the model's builder says"

    def __init__(
        self,
        loss: Losses = None,
        metrics: Metrics | None = None,
        best: str | None = None,
        loss_weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(loss, metrics or {}, best)
        if loss_weights is not None and (not isinstance(loss, Mapping) or set(loss_weights) - set(loss)):
            names = ", ".join(loss) if isinstance(loss, Mapping) else "no outputs by name"
            raise ConfigError(
                f"task.loss_weights names {', '.join(loss_weights)} and task.loss has {names}; give each output a loss"
            )
        self.loss_weights = dict(loss_weights) if loss_weights is not None else None

    def output_shape(self, source: Source) -> None:
        return None

    def check_targets(self, source: Source) -> None:
        pass

    def examples(self, number: int, source: Source) -> tuple[Any, Any]:
        raise NotImplementedError("the outputs are known once the model is built; see check_outputs")

    def prepare(self, source: Source) -> None:
        self.complete(source)

    def check_outputs(self, outputs: Any, name: str, source: Source) -> None:
        by_output = {key for key, metric in self.metrics.items() if isinstance(metric, Mapping)}
        by_output |= set(self.loss) if isinstance(self.loss, Mapping) else set()
        known = set(outputs) if isinstance(outputs, Mapping) else set()
        if by_output - known:
            raise ConfigError(
                f"the task has a loss or metrics for the outputs {', '.join(sorted(by_output))}, and {name} gives "
                f"{', '.join(sorted(known)) or 'no outputs by name'}; let it return a dict of outputs by these names"
            )
        if self.metrics:
            targets = keras.tree.map_structure(lambda one: _drawn(one.shape, one.dtype.name), source.element_spec[1])
            self.check_metrics(targets, keras.tree.map_structure(lambda one: _drawn(one.shape[1:], one.dtype), outputs))


def _drawn(shape: Any, kind: str) -> np.ndarray:
    """Random numbers for examples of that shape and type, with 4 where a side is open."""
    rng, sides = np.random.default_rng(0), [NUM_CHECKED, *(side or 4 for side in shape)]
    if kind.startswith(("int", "uint", "bool")):
        return rng.integers(2, size=sides).astype(kind)
    return rng.random(sides).astype(np.float32)
