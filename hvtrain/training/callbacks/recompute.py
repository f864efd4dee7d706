"""guard.recompute_every: all ranks recompute one rank's gradient, to find faulty devices.

Equal weights on all ranks prove nothing about the gradients behind them: if a defective device sends
a wrong gradient, all ranks apply it. In large fleets such devices are not rare, and most fail
silently (Dixit et al. 2021, arXiv:2102.11245).
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvtrain.errors import ConfigError, LostRankError
from hvtrain.models.parts import sharded_tables
from hvtrain.strategies.loop import replaced
from hvtrain.training.callbacks.repeated_step import step_without_update
from hvtrain.training.callbacks.run_context import RunCallback, RunContext

log = logging.getLogger(__name__)

# Number of initial checks, whose differences show how much rounding alone changes gradients.
NUM_CALIBRATIONS = 3
# Tolerance of the initial checks.
FIRST_TOLERANCE = 1e-2
# Ratio of later tolerances to the largest difference in the initial checks.
MARGIN = 10.0
# Minimum tolerance, unless train.deterministic makes equal steps give equal bits.
MIN_TOLERANCE = 1e-5


class Verdict(NamedTuple):
    """The result of a check.

    Attributes:
        ranks: Those whose gradient differs from that of most ranks; with two ranks, both if their digests differ.
        variable: The index of the variable whose gradient differs most.
        difference: How much that gradient differs, relative to its norm.
    """

    ranks: list[int]
    variable: int
    difference: float


class Recompute(RunCallback):
    """Makes all ranks recompute one rank's gradient of the next step after every N steps (every rank).

    The ranks take turns. All ranks receive the rank's batch and non-trainable variables, such as dropout
    seeds and moving statistics; their trainable weights are equal anyway. So each check compares the forward
    and backward passes of all ranks, and what the rank sent with what it should have sent.

    Raises:
        ConfigError: A step depends on more than weights, batch and seeds.
        LostRankError: A rank's gradient differs from that of most ranks; with two ranks, from the other's.
    """

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        run = self.run
        model = context.model
        train = run.config.train
        obstacle = ""
        if not run.strategy.is_plain or run.strategy.sync_every > 1:
            obstacle = f"strategy={run.strategy.name}, whose steps other ranks cannot repeat"
        elif train.jit_compile:
            obstacle = "train.jit_compile=true"
        elif train.sync_batch_norm:
            obstacle = "train.sync_batch_norm=true"
        elif sharded_tables(model) or any(
            hasattr(loss, "joint_batch") for loss in keras.tree.flatten(run.task.loss)
        ):
            obstacle = "a model or task whose step sends messages to other ranks"
        if obstacle:
            raise ConfigError(
                f"guard.recompute_every={run.config.guard.recompute_every} cannot be combined with {obstacle}; "
                "leave one of the two out"
            )

        self._every = run.config.guard.recompute_every
        self._train_step = model.train_step
        self._names = [variable.path for variable in model.trainable_variables]
        with tf.device("/CPU:0"):
            # If set before a call of the graph, the first step of the
            # call keeps its batch and digest.
            self._is_due = tf.Variable(False, trainable=False)
        self._differences: list[float] = []
        # Replaced before the graph is traced, since Keras calls train_step only then.
        model.train_step = self._recorded_step
        self._digest = tf.function(self._gradient_digest, reduce_retracing=True)

    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        # A denominator is set once the step is traced. It is a mean over the ranks, which differs if
        # all ranks compute on the same batch.
        losses = keras.tree.flatten(self.model.loss)
        if any(getattr(loss, "denominator", None) is not None for loss in losses):
            raise ConfigError(
                f"guard.recompute_every={self._every} cannot be combined with a loss whose divisor depends on the "
                "batches of all ranks (through a mask, an ignored label or weights); leave guard.recompute_every out"
            )
        self._before: list[tuple[Any, tf.Tensor]] = []
        if self.position.is_multiple_of(self._every):
            self._step = self.step + 1
            self._before = self._values()
            self._is_due.assign(True)

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        if self._before:
            self._check()
            self._before = []  # Frees as much memory as the weights take.

    def on_train_end(self, logs: Any) -> None:
        if self._differences:
            count = len(self._differences)
            log.info(
                f"recomputed {count:,} gradient{'s' * (count != 1)} on all ranks, with relative "
                f"differences up to {max(self._differences):.1g}"
            )

    def _values(self) -> list[tuple[Any, tf.Tensor]]:
        """Returns all variables on which a step's gradient depends, with copies of their values."""
        variables = [*self.model.variables, *self.model.metrics_variables]
        if hasattr(self.model.optimizer, "dynamic_scale"):
            variables.append(self.model.optimizer.dynamic_scale)
        return [(variable, tf.identity(variable.value)) for variable in variables]

    def _recorded_step(self, data):
        """Runs the model's step; if a check is due, keeps the batch and a digest of the gradient."""
        self._structure = data
        optimizer = self.model.optimizer
        apply = optimizer.apply

        def recording_apply(gradients, variables=None):
            gradients = list(gradients)

            def record():
                return tf.numpy_function(
                    self._keep, [digest_of(gradients), *tf.nest.flatten(data)], tf.bool
                )

            is_due = tf.cond(self._is_due, record, lambda: tf.constant(False))
            with tf.control_dependencies([self._is_due.assign(is_due)]):
                return apply(gradients, variables)

        with replaced(optimizer, "apply", recording_apply):
            return self._train_step(data)

    def _keep(self, digest: np.ndarray, *batch: np.ndarray) -> bool:
        """Keeps the batch and its gradient's digest. Returns False, the new value of _is_due."""
        # Copies, because TensorFlow reuses the memory.
        self._sent = np.array(digest)
        self._batch = [np.array(part) for part in batch]
        return False

    def _gradient_digest(self, data: Any) -> tf.Tensor:
        with replaced(self.model, "train_step", self._train_step):
            _, pairs = step_without_update(self.model, data)
        return digest_of([gradient for gradient, _ in pairs])

    def _check(self) -> None:
        rank = self._step // self._every % self.run.topology.size
        variables = self.model.non_trainable_variables
        sent = None
        if rank == self.run.topology.rank:
            copies = {id(variable): value for variable, value in self._before}
            sent = self._sent, self._batch, [copies[id(variable)].numpy() for variable in variables]
        original, batch, values = self.comm.broadcast(sent, rank)

        current = self._values()
        for variable, value in [*self._before, *zip(variables, values)]:
            variable.assign(value)
        data = tf.nest.pack_sequence_as(self._structure, [tf.constant(part) for part in batch])
        digests = self.comm.gather(self._digest(data).numpy())
        for variable, value in current:
            variable.assign(value)

        # From earlier checks only, since this one may have found a fault.
        tolerance = self._tolerance()
        verdict = judge(rank, original, digests, tolerance)
        self._differences.append(verdict.difference)
        if not verdict.ranks:
            return
        devices = " or ".join(
            f"rank {culprit} ({self.strategy.devices[culprit]})" for culprit in verdict.ranks
        )
        error = LostRankError(
            f"{devices} computes wrong gradients: when all ranks recomputed rank {rank}'s gradient of step "
            f"{self._step:,}, the results for {self._names[verdict.variable]} differed by {verdict.difference:.1g} "
            f"of the norm (tolerance {tolerance:.1g}); remove that host, and resume from an earlier checkpoint"
        )
        error.culprit = verdict.ranks[0]
        raise error

    def _tolerance(self) -> float:
        """Returns the largest relative difference that is not a fault."""
        if len(self._differences) < NUM_CALIBRATIONS:
            return FIRST_TOLERANCE
        rounding = max(self._differences[:NUM_CALIBRATIONS])
        if self.run.config.train.deterministic:
            return MARGIN * rounding
        return max(MARGIN * rounding, MIN_TOLERANCE)


def digest_of(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns float64 [variables, 3]: for each gradient its norm, a weighted sum, and a checksum.

    The weights of the sum have both signs, so the sum also reveals errors that leave the norm unchanged.
    The checksum depends on every bit: gradients with equal checksums count as equal. All gradients that are not
    finite have the same digest.
    """
    rows = []
    for gradient in gradients:
        if gradient is None:  # The loss does not depend on that variable.
            rows.append([tf.zeros([], tf.float64)] * 3)
            continue
        dense = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        values = tf.cast(tf.reshape(dense, [-1]), tf.float32)
        # All gradients that overflow count as equal: a loss scale skips the step, and their values are arbitrary.
        values = tf.where(tf.reduce_all(tf.math.is_finite(values)), values, float("nan"))
        indices = tf.range(tf.size(values))
        wave = tf.cos(tf.cast(indices, tf.float32))
        bits = tf.cast(tf.bitcast(values, tf.int32), tf.int64) * tf.cast(2 * indices + 1, tf.int64)
        # Below 2**52, so that float64 holds it exactly.
        checksum = tf.reduce_sum(bits) % 2**52
        rows.append(
            [
                tf.cast(part, tf.float64)
                for part in (tf.norm(values), tf.reduce_sum(values * wave), checksum)
            ]
        )
    return tf.convert_to_tensor(rows)


def judge(
    rank: int, original: np.ndarray, digests: Sequence[np.ndarray], tolerance: float
) -> Verdict:
    """Returns the ranks whose gradient differs from that of most ranks, and the largest difference.

    Args:
        rank: The rank whose gradient was recomputed.
        original: The digest of the gradient that this rank sent, [variables, 3].
        digests: The digest of the recomputed gradient on each rank, by rank.
        tolerance: The largest relative difference that is not a fault.
    """
    # Most digests are equal; with a thousand ranks, comparing all pairs would take too long.
    distinct = list({digest.tobytes(): digest for digest in digests}.values())
    num_close = [
        sum(_distance(digest, other)[1] <= tolerance for other in digests) for digest in distinct
    ]
    reference = distinct[np.argmax(num_close)]
    distances = [_distance(digest, reference) for digest in digests]
    # The gradient that the rank sent counts as its own too, since the fault may have been transient.
    distances[rank] = max(distances[rank], _distance(original, reference), key=lambda pair: pair[1])
    variable, difference = max(distances, key=lambda pair: pair[1])

    ranks = [index for index, (_, distance) in enumerate(distances) if distance > tolerance]
    if len(digests) == 2 and _distance(digests[0], digests[1])[1] > tolerance:
        ranks = [0, 1]
    return Verdict(ranks, variable, difference)


def _distance(digest: np.ndarray, reference: np.ndarray) -> tuple[int, float]:
    """Returns the index of the variable that differs most, and its relative difference (see digest_of).

    The difference is 0 for equal checksums, and inf for NaN.
    """
    differences = np.max(np.abs(digest[:, :2] - reference[:, :2]), axis=1) / np.maximum(
        reference[:, 0], 1e-30
    )
    differences[digest[:, 2] == reference[:, 2]] = 0.0
    differences = np.nan_to_num(differences, nan=np.inf)
    variable = int(np.argmax(differences))
    return variable, float(differences[variable])
