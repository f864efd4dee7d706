"""Checks that weights are equal on all ranks. Fingerprints make it cost one pass and one tiny message."""

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
from hvtrain.keras import unlike_weights
from hvtrain.keras.collectives import sum_arrays


class WeightCheck:
    """Compares a built model's weights and optimizer state over the ranks (every rank).

    Weights that no gradient touches, such as the moving statistics of BatchNormalization, follow each rank's own
    batches and so differ. `average_untrained` gives them one value, and only then are they compared too.

    Fingerprints are FarmHash64 of the bytes (tf.fingerprint). Raises RankError on all ranks if they differ.

    Args:
        model: a built model.
        enabled: False compares nothing; average_untrained works all the same.
        waiting: makes the context in which this rank waits for the others.
    """

    def __init__(
        self, model: keras.Model, enabled: bool = True, waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._trained = [*model.trainable_variables, *(model.optimizer.variables if model.optimizer else ())]
        known = {id(variable) for variable in self._trained}
        self._untrained = [variable for variable in model.weights if id(variable) not in known]
        self._fingerprint = tf.function(_fingerprints, reduce_retracing=False)
        self.enabled = enabled
        self.waiting = waiting
        self.num_checks = 0

    def __call__(self, when: str, everything: bool = False) -> None:
        """Compares; `when` goes into the message. everything: also the weights that no gradient touches."""
        if self._is_alone or not self.enabled:
            return
        self.num_checks += 1
        variables = [*self._trained, *(self._untrained if everything else ())]
        with self.waiting():
            if different := self._different(variables):
                raise RankError(_describe(variables, different, when))
        unlike_weights.made_equal()

    def average_untrained(self) -> None:
        """Sets the weights that no gradient touches to their means over the ranks, where they differ.

        In double precision, so that the mean of equal values is that value, on any number of ranks.
        """
        if self._is_alone or not self._untrained:
            return
        with self.waiting():
            different = [self._untrained[at] for at in self._different(self._untrained)]
            floating = [v for v in different if keras.backend.is_float_dtype(v.dtype)]
            for variable, total in zip(floating, sum_arrays([v.numpy() for v in floating])):
                variable.assign((total / hvd.size()).astype(variable.numpy().dtype))

    @property
    def _is_alone(self) -> bool:
        return not hvd.is_initialized() or hvd.size() == 1

    def _different(self, variables: list[Any]) -> dict[int, np.ndarray]:
        """Positions of the variables that differ between ranks, with all ranks' fingerprints [ranks, 8]."""
        own, whole = self._fingerprint([variable.value for variable in variables])
        with tf.device("/CPU:0"):
            # The maximum of the fingerprints, and of their negations: if both are this rank's, all are equal.
            largest = hvd.allreduce(tf.stack([whole, -whole]), op=hvd.Max, name="hvtrain.fingerprint")
            if np.array_equal(largest[0], -largest[1]):
                return {}
            every = hvd.allgather(own[None], name="hvtrain.fingerprints").numpy()
        differs = (every != every[:1]).any(axis=(0, 2))
        return {int(at): every[:, at] for at in np.flatnonzero(differs)}


def _describe(variables: list[Any], different: dict[int, np.ndarray], when: str) -> str:
    """The error message: which ranks differ from the most common value, where first and by how much (every rank)."""
    at, prints = next(iter(different.items()))
    votes = [row.tobytes() for row in prints]
    usual = Counter(votes).most_common(1)[0][0]
    reference = votes.index(usual)
    value = np.asarray(variables[at].numpy(), np.float64)
    right = hvd.broadcast(tf.constant(value), reference, name="hvtrain.reference").numpy()
    with np.errstate(invalid="ignore"):
        gap = float(np.max(np.abs(value - right), initial=0.0))
    found: list[tuple[float, str]] = hvd.allgather_object((gap, socket.gethostname()), name="hvtrain.gaps")
    others = [rank for rank, vote in enumerate(votes) if vote != usual]
    largest = max(found[rank][0] for rank in others)
    named = ", ".join(f"rank {rank} on {found[rank][1]}" for rank in others[:4])
    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
    rest = f", and {len(different) - 1} more variables" if len(different) > 1 else ""
    scale = np.max(np.abs(right), initial=0.0)
    return (
        f"weights differ {when}: {named}{more} against rank {reference} on {found[reference][1]}; first in "
        f"{variables[at].path} by up to {largest:.3g} (values up to {scale:.3g}){rest}; "
        "training stops, and the last checkpoint is from before; look for what changes weights on one rank alone"
    )


def fingerprint(tensors: list[Any]) -> bytes:
    """One fingerprint, 8 bytes, of all the bytes of some tensors or arrays."""
    return _fingerprints([tf.convert_to_tensor(tensor) for tensor in tensors])[1].numpy().tobytes()


def _fingerprints(tensors: list[Any]) -> tuple[tf.Tensor, tf.Tensor]:
    """A fingerprint of each tensor, uint8 [n, 8], and one of them all, int64."""
    with tf.device("/CPU:0"):
        own = tf.concat([tf.fingerprint(tf.reshape(tensor, [1, -1])) for tensor in tensors], axis=0)
        whole = tf.bitcast(tf.fingerprint(tf.reshape(own, [1, -1]))[0], tf.int64)
    return own, whole
