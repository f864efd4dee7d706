"""N ranks with a batch each against one process on all of them: the same weights, or the ranks do not train together.

Every rank starts from other weights and has other data, so nothing but broadcast and reduction can make the
results equal; one rank alone, without the reduction, must end elsewhere, or the comparison would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvtrain.keras as hvd

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Case:
    """A small model of some kind, trained with some optimizer.

    kind: "dense", "embedding" (sparse gradients), "unused" (a variable without gradient) or a dtype policy.
    tolerance: largest relative difference in any weight or slot that rounding may make.
    """

    optimizer: Callable[[], keras.optimizers.Optimizer]
    kind: str = "dense"
    tolerance: float = 1e-5
    steps_per_reduction: int = 1


class OwnStep(keras.optimizers.SGD):
    """Normalizes each gradient and steps by itself, without Keras's apply."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        for gradient, variable in zip(grads, trainable_variables):
            variable.assign_sub(self.learning_rate * gradient / (tf.norm(gradient) + 1e-12))
        self.iterations.assign_add(1)


FAMILIES = {
    "sgd": Case(lambda: keras.optimizers.SGD(0.05)),
    "momentum": Case(lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)),
    "rmsprop": Case(lambda: keras.optimizers.RMSprop(0.003)),
    "adam": Case(lambda: keras.optimizers.Adam(0.003)),
    "adamw": Case(lambda: keras.optimizers.AdamW(0.003, weight_decay=0.01)),
    "lamb": Case(lambda: keras.optimizers.Lamb(0.003)),
    "lion": Case(lambda: keras.optimizers.Lion(0.0005)),
}
SPARSE = {"sparse gradients": Case(lambda: keras.optimizers.SGD(0.05, momentum=0.9), "embedding")}
ACCUMULATION = {
    "accumulation": Case(
        lambda: keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=4), steps_per_reduction=4
    )
}
OWN_STEP = {"a step of its own": Case(lambda: OwnStep(0.05))}
# Half precision rounds the activations of a part otherwise than those of the joint batch.
PRECISION = {
    "mixed_bfloat16": Case(lambda: keras.optimizers.SGD(0.05, momentum=0.9), "mixed_bfloat16", 1e-1),
    "mixed_float16": Case(
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)), "mixed_float16", 1e-2
    ),
}


@dataclass(frozen=True)
class Comparison:
    """Relative to the largest value of each array: weights and float slots.

    error: N ranks against one process; error_without_reduction: one rank alone against it; ranks_differ: the ranks
    against each other, at the start (after the broadcast) or at the end.
    """

    error: float
    error_without_reduction: float
    ranks_differ: float
    reductions: int


def compare(
    case: Case, steps: int = 8, batch: int = 16, wrap: Callable[[Any], Any] = hvd.DistributedOptimizer
) -> Comparison:
    """Trains the case on all ranks, on one process, and on one rank alone (every rank; the same result on each).

    wrap makes the distributed optimizer of the case's.
    """
    rank, size = hvd.rank(), hvd.size()
    x, y = _data(case.kind, steps * size * batch)
    order = np.arange(len(x)).reshape(steps, size, batch)
    mine = [(x[i], y[i]) for i in order[:, rank]]
    joint = [(x[i.ravel()], y[i.ravel()]) for i in order]
    before, after, reductions = _train(case, mine, rank, wrap)
    # Rank 0 has the joint batch and the last rank is alone, at the same time; both start from rank 0's weights.
    alone: Arrays | None = None
    together: Arrays | None = None
    if rank == size - 1:
        alone = _train(case, [(x[i], y[i]) for i in order[:, 0]], seed=0)[1]
    if rank == 0:
        together = _train(case, joint, seed=0)[1]
    everyone = hvd.allgather_object((before, after, reductions, together, alone), name="hvtrain.compare")
    first, expected = everyone[0], everyone[0][3]
    return Comparison(
        error=largest_difference(first[1], expected),
        error_without_reduction=largest_difference(everyone[-1][4], expected),
        ranks_differ=max(
            largest_difference(found[at], first[at]) for found in everyone for at in (0, 1) if found is not first
        ),
        reductions=min(found[2] for found in everyone),
    )


def largest_difference(ours: Arrays, theirs: Arrays) -> float:
    """Over all arrays, relative to the largest value of each; infinite where something is not finite."""
    largest = 0.0
    for a, b in zip(ours, theirs, strict=True):
        gap = np.max(np.abs(a - b), initial=0.0) / (np.max(np.abs(b), initial=0.0) + 1e-12)
        largest = max(largest, float(gap) if np.isfinite(gap) else float("inf"))
    return largest


class Unused(keras.layers.Layer):
    """Holds a weight that the loss does not depend on: its gradient is None."""

    def build(self, input_shape: Any) -> None:
        self.weight = self.add_weight(shape=(2,), name="unused")

    def call(self, inputs: Any) -> Any:
        return inputs


def _data(kind: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(7)
    if kind == "embedding":
        return generator.integers(0, 50, (count, 6)), generator.integers(0, 3, count)
    return generator.normal(size=(count, 12)).astype("float32"), generator.integers(0, 3, count)


def _model(kind: str, seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    if kind == "embedding":
        layers = [keras.Input((6,)), keras.layers.Embedding(50, 8, name="e"), keras.layers.Flatten(name="f")]
    else:
        policy = kind if kind.startswith("mixed") else "float32"
        layers = [keras.Input((12,)), keras.layers.Dense(24, activation="tanh", name="d", dtype=policy)]
        layers += [Unused(name="u")] if kind == "unused" else []
    return keras.Sequential([*layers, keras.layers.Dense(3, name="o", dtype="float32")], name="m")


def _train(
    case: Case, batches: list[tuple[np.ndarray, np.ndarray]], seed: int, wrap: Callable[[Any], Any] | None = None
) -> tuple[Arrays, Arrays, int]:
    """Weights before, weights and float slots after one pass over the batches, and the number of reductions."""
    model = _model(case.kind, seed)
    optimizer = case.optimizer()
    if wrap:
        optimizer = wrap(optimizer)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    if wrap:
        hvd.broadcast_model(model)
    before = [weight.copy() for weight in model.get_weights()]
    x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(batches[0][0]))
    model.fit(dataset, epochs=1, verbose=0, shuffle=False)
    floats = [variable for variable in model.optimizer.variables if variable.dtype == "float32"]
    slots = [variable.numpy() for variable in floats if variable.name != "learning_rate"]
    return before, [*model.get_weights(), *slots], hvd.num_reductions(model.optimizer)
