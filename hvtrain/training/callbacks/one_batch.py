"""data.one_batch=true: says whether the model has memorized its only batch."""

import logging
from typing import Any

import tensorflow as tf

from hvtrain.errors import TrainingError
from hvtrain.training.callbacks.position import RunCallback

log = logging.getLogger(__name__)

LEARNED_LOSS = 0.05
"""The part of the first loss to which a model that has learned the batch comes, at most."""
LEARNED_SCORE = 0.99
"""Or a metric of which more is better, such as the accuracy."""


class OneBatch(RunCallback):
    """Evaluates on the global batch before and after the training (every rank).

    Raises TrainingError if the model has not learned it. Dropout has no part in an evaluation, and batch normalization
    takes its moving statistics; so the loss of the last epoch in training counts too. Put it after SameLogs, so that
    all ranks decide alike. A run that resumes is not judged: what it had before its first step is not known.
    """

    training: dict[str, float]
    before: dict[str, float]

    def on_train_begin(self, logs: Any = None) -> None:
        self.training, self.before = {}, self._evaluate()

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        self.training = logs

    def on_train_end(self, logs: Any = None) -> None:
        if not self.position.is_last:
            return  # Stopped by a signal or a limit of time.
        if self.position.start_step:
            log.info("whether one batch was memorized is not judged, since the run resumed; start it in a new run.dir")
            return
        plan, best, after = self.position.plan, self.run.task.best, self._evaluate()
        shown = ", ".join(f"{name} {self.before[name]:.4g} -> {value:.4g}" for name, value in after.items())
        loss = self.training.get("loss")
        in_training = "" if loss is None else f"; in training, with dropout if there is any: {loss:.4g}"
        what = f"one batch of {plan.global_batch} examples"
        if is_learned(self.before, after, self.training, best, self.run.task.sign(best)):
            log.info("%s was memorized: %s%s", what, shown, in_training)
            return
        raise TrainingError(
            f"{what} was not memorized in {self.position.step:,} steps: {shown}{in_training}; look for a fault "
            "in the last layer, the loss, the targets, frozen layers or the learning rate, or give more train.steps"
        )

    def _evaluate(self) -> dict[str, float]:
        run = self.run
        batch = run.stream_from(self.position.plan.shift).take(1)
        if run.source.raw_batches:
            batch = batch.map(lambda inputs, *others: (run.source.finish(inputs), *others))
        batch = batch.apply(tf.data.experimental.assert_cardinality(1))
        return run.task.results(run.strategy.evaluate(self.model, batch))


def is_learned(
    before: dict[str, float], after: dict[str, float], training: dict[str, float], best: str, sign: int
) -> bool:
    """True if a loss has fallen to LEARNED_LOSS of the first one, or the best metric says so.

    >>> is_learned({"loss": 2.3}, {"loss": 0.6, "accuracy": 1.0}, {}, "accuracy", 1)
    True
    >>> is_learned({"loss": 2.3}, {"loss": 0.6, "accuracy": 0.8}, {"loss": 0.5}, "accuracy", 1)
    False
    """
    losses = [logs["loss"] for logs in (after, training) if "loss" in logs]
    return (bool(losses) and min(losses) <= LEARNED_LOSS * before["loss"]) or (
        sign > 0 and after.get(best, 0.0) >= LEARNED_SCORE
    )
