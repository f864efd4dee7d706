"""Checks that weights are equal on all ranks.

The ranks compare fingerprints, so a check costs one pass over the weights and one tiny message.
"""

import socket
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvtrain.errors import RankError
from hvtrain.keras.collectives import assign_mean
from hvtrain.keras.gradients import variable_id
from hvtrain.keras.hooks import hook_of
from hvtrain.keras.optimizers import slot_prefix
from hvtrain.keras.same_gradients import end_broadcast_watches

MAX_NAMED_RANKS = 4


class WeightCheck:
    """Compares a built model's weights and optimizer state over the ranks (every rank).

    Weights that no gradient trains, such as the moving statistics of BatchNormalization, follow each
    rank's own batches and so differ between ranks. They are compared only on request, after
    `average_untrained` has made them equal. Local variables and their slots are not compared.

    Args:
        model: a built model.
        enabled: if False, nothing is compared; average_untrained still works.
        waiting: returns the context in which this rank waits for the others.
    """

    def __init__(
        self,
        model: keras.Model,
        enabled: bool = True,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        trained = [*model.trainable_variables]
        if model.optimizer:
            trained += model.optimizer.variables
        trained_ids = {id(variable) for variable in trained}
        untrained = [variable for variable in model.weights if id(variable) not in trained_ids]
        # Each rank has its own part of a sharded variable.
        trained, untrained = (
            [variable for variable in variables if not hasattr(variable, "rank_part")]
            for variables in (trained, untrained)
        )
        # Each rank accumulates its own gradients; only their mean over the ranks is applied.
        accumulators = [v for v in trained if v.name.endswith("gradient_accumulator")]
        excluded_ids = _unshared_ids(model) | {id(variable) for variable in accumulators}
        self._trained = [variable for variable in trained if id(variable) not in excluded_ids]
        # After steps that overflowed, a checkpoint may be due while gradients are still accumulated.
        # Only one rank's accumulators are stored, so they are averaged first, which does not change
        # the step.
        self._untrained = untrained + accumulators
        self._fingerprint = tf.function(_fingerprints)
        self.enabled = enabled
        self.waiting = waiting
        self.num_checks = 0

    def __call__(self, when: str, everything: bool = False) -> None:
        """Compares the weights of all ranks.

        Args:
            when: a phrase for the error message, such as "at batch 500".
            everything: also compare the weights that no gradient trains.

        Raises:
            RankError: on all ranks, if the weights differ.
        """
        if self._is_alone or not self.enabled:
            return
        self.num_checks += 1
        variables = list(self._trained)
        if everything:
            variables += self._untrained
        with self.waiting():
            different = self._find_differences(variables)
            if different:
                raise RankError(_describe(variables, different, when))
        end_broadcast_watches()

    def average_untrained(self) -> None:
        """Sets weights that no gradient trains, and accumulated gradients, to their mean over the ranks (every rank).

        The mean of equal values is exactly that value, on any number of ranks.
        """
        if self._is_alone or not self._untrained:
            return
        with self.waiting():
            different = [
                self._untrained[position] for position in self._find_differences(self._untrained)
            ]
            # Integers, such as counters, have no mean; each rank keeps its own.
            floating = [
                variable for variable in different if keras.backend.is_float_dtype(variable.dtype)
            ]
            # One at a time, since accumulated gradients are as large as the weights.
            for variable in floating:
                assign_mean(variable)

    @property
    def _is_alone(self) -> bool:
        return not hvd.is_initialized() or hvd.size() == 1

    def _find_differences(self, variables: list[Any]) -> dict[int, np.ndarray]:
        """Returns all ranks' fingerprints [ranks, 8] of the variables that differ, by position."""
        by_variable, combined = self._fingerprint([variable.value for variable in variables])
        with tf.device("/CPU:0"):
            # One reduction gives the largest fingerprint and, negated, the smallest.
            # If these two are equal, all are.
            largest = hvd.allreduce(
                tf.stack([combined, -combined]), op=hvd.Max, name="hvtrain.fingerprint"
            )
            if np.array_equal(largest[0], -largest[1]):
                return {}
            # Only now do the ranks send the fingerprints of all variables.
            by_rank = hvd.allgather(by_variable[None], name="hvtrain.fingerprints").numpy()
        differs = (by_rank != by_rank[:1]).any(axis=(0, 2))
        return {int(position): by_rank[:, position] for position in np.flatnonzero(differs)}


def _unshared_ids(model: keras.Model) -> set[int]:
    """Returns the ids of variables that may differ between ranks: rank_variables, local variables and their slots."""
    unshared = list(getattr(model.optimizer, "rank_variables", {}).values())
    hook = hook_of(model.optimizer)
    if hook:
        local_ids = hook.reducer.local_ids
        local = [
            variable for variable in model.trainable_variables if variable_id(variable) in local_ids
        ]
        prefixes = tuple(f"{slot_prefix(variable)}_" for variable in local)
        slots = [slot for slot in model.optimizer.variables if slot.name.startswith(prefixes)]
        unshared += [*local, *slots]
    return {id(variable) for variable in unshared}


def _describe(variables: list[Any], different: dict[int, np.ndarray], when: str) -> str:
    """Returns the error message for weights that differ (every rank).

    It names the ranks that differ from the most common value, the first variable that differs, and by how much.
    """
    position, fingerprints = next(iter(different.items()))
    # The most common value is assumed to be right.
    votes = [row.tobytes() for row in fingerprints]
    majority, _ = Counter(votes).most_common(1)[0]
    reference = votes.index(majority)

    # Only the first variable that differs is sent, not the whole model.
    gap, scale = _distance(variables[position], reference)
    gathered = hvd.allgather_object((gap, socket.gethostname()), name="hvtrain.gaps")
    gaps, hosts = zip(*gathered)

    wrong = [rank for rank, vote in enumerate(votes) if vote != majority]
    largest = max(gaps[rank] for rank in wrong)
    ranks = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in wrong[:MAX_NAMED_RANKS])
    if len(wrong) > MAX_NAMED_RANKS:
        ranks += f" and {len(wrong) - MAX_NAMED_RANKS} more"
    others = ""
    if len(different) > 1:
        others = f"; {len(different)} variables differ"
    return (
        f"weights differ {when}: {ranks} against rank {reference} on {hosts[reference]}; first in "
        f"{variables[position].path} by up to {largest:.3g} (values up to {scale:.3g}){others}; "
        "look for code that changes weights on one rank only, and resume from a checkpoint that predates "
        "the difference"
    )


def _distance(variable: Any, reference: int) -> tuple[float, float]:
    """Returns this rank's largest difference from the reference rank's values (every rank).

    Also returns the largest absolute value on the reference rank.
    """
    own = np.asarray(variable.numpy(), np.float64)
    expected = hvd.broadcast(tf.constant(own), reference, name="hvtrain.reference").numpy()
    with np.errstate(invalid="ignore"):  # The difference of two infinities is NaN.
        gap = np.max(np.abs(own - expected), initial=0.0)
    return float(gap), float(np.max(np.abs(expected), initial=0.0))


def fingerprint(tensors: list[Any]) -> bytes:
    """Returns an 8-byte fingerprint of the contents of all these tensors or arrays together."""
    return _fingerprints([tf.convert_to_tensor(tensor) for tensor in tensors])[1].numpy().tobytes()


def _fingerprints(tensors: list[Any]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns a fingerprint of each tensor, uint8 [n, 8], and one of all tensors together, an int64 scalar.

    Fingerprints are FarmHash64 of the bytes (tf.fingerprint).
    """
    # TensorFlow computes fingerprints on the CPU only (fingerprint_op.cc).
    with tf.device("/CPU:0"):
        rows = [tf.fingerprint(tf.reshape(tensor, [1, -1])) for tensor in tensors]
        by_tensor = tf.concat(rows, axis=0)
        combined = tf.bitcast(tf.fingerprint(tf.reshape(by_tensor, [1, -1]))[0], tf.int64)
    return by_tensor, combined
