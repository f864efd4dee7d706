"""guard.layers=true: names the layer in which a value is the first that is not finite."""

import logging
import math
from typing import Any

import tensorflow as tf

from hvtrain.errors import ConfigError, TrainingError, in_one_line
from hvtrain.training.callbacks.guard import ADVICE, named
from hvtrain.training.callbacks.position import RunCallback
from hvtrain.training.repeated_step import Place, first_not_finite

log = logging.getLogger(__name__)


class LayerSearch(RunCallback):
    """Keeps the model as it is before each step, to repeat the step if it fails, and checks the loss (every rank).

    Steps must be calls of their own, see call_steps.
    """

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        if not self.run.strategy.is_plain:
            raise ConfigError(
                "guard.layers=true repeats steps as each rank does them by itself, and this strategy has other steps; "
                "choose strategy=horovod, elastic or single"
            )
        self._before: list[tuple[Any, tf.Tensor]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Seeds of dropout and moving statistics are among them.
        self._before = [(variable, tf.identity(variable.value)) for variable in self.model.variables]

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        if hasattr(self.model.optimizer, "dynamic_scale"):
            return  # It skips steps that overflow; their loss is not an error.
        fine = self.comm.gather(math.isfinite(float(logs.get("loss", 0.0))))
        if ranks := [rank for rank, is_finite in enumerate(fine) if not is_finite]:
            step = self.position.step
            where = self.where(step)
            raise TrainingError(f"the loss of step {step:,} is not finite on {named(ranks)}{where}; {ADVICE}")

    def where(self, step: int) -> str:
        """Repeats the run's step of this number, the last one that was begun; says where it fails (every rank)."""
        for variable, value in self._before:
            variable.assign(value)
        places = self.comm.gather(self._repeat(step - 1))
        found = [place for place in places if place]
        if not found:
            return "; when it is repeated layer by layer, all values are finite"
        first = min(found)
        ranks = [rank for rank, place in enumerate(places) if place and place[:2] == first[:2]]
        return f"; it began with {first.words}, on {named(ranks)}"

    def _repeat(self, steps_before: int) -> Place | None:
        batch = next(iter(self.run.batches_from(steps_before)))
        try:
            return first_not_finite(self.model, batch, has_batch_weight=not self.position.plan.is_even)
        except Exception as error:  # The other ranks wait for this one's answer, and the run fails anyway.
            log.warning("the step cannot be repeated layer by layer: %s", in_one_line(error))
            return None
