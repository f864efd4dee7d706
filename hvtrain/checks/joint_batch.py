"""Checks that N ranks with one batch each train like one process on the joint batch.

Every rank starts with different weights and data, so only broadcast and all-reduce can make the
results equal. One rank alone, without all-reduce, must end with different weights, or the
comparison would prove nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.layers import Dense, Embedding, Flatten
from keras.optimizers import (
    SGD,
    Adam,
    AdamW,
    Lamb,
    Lion,
    LossScaleOptimizer,
    Optimizer,
    RMSprop,
)

import hvtrain.keras as hvd
from hvtrain.checks.table import CheckError

Arrays = list[np.ndarray]
IGNORED = -1  # A label that the loss ignores.
BATCH = 16  # Examples per rank and step.
# The weights change twice even with accumulation over four steps.
STEPS = 8


@dataclass(frozen=True)
class Case:
    """A small model, its loss and its optimizer.

    Attributes:
        optimizer: Makes the optimizer.
        kind: "dense", "embedding" (sparse gradients), a dtype policy, or one of UNEQUAL_KINDS, in
            which ranks have different total loss weights.
        tolerance: Largest relative difference in any weight or slot that rounding may cause.
        steps_per_reduction: Training steps per weight update.
        more_layers: Makes layers to insert before the last one.
        reduction: The reduction of the loss.
    """

    optimizer: Callable[[], Optimizer]
    kind: str = "dense"
    tolerance: float = 1e-5
    steps_per_reduction: int = 1
    more_layers: Callable[[], list[keras.layers.Layer]] = list
    reduction: str = "sum_over_batch_size"


class Trained(NamedTuple):
    """The result of training a case.

    Attributes:
        before: The weights before training.
        after: The weights and float slots after training.
        reductions: The number of reductions, counted in the graph.
    """

    before: Arrays
    after: Arrays
    reductions: int


class OwnStep(SGD):
    """An optimizer whose own apply() normalizes each gradient, and never calls Keras's apply()."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        for gradient, variable in zip(grads, trainable_variables):
            variable.assign_sub(self.learning_rate * gradient / (tf.norm(gradient) + 1e-12))
        self.iterations.assign_add(1)


CASES = {
    "sgd": Case(lambda: SGD(0.05)),
    "momentum": Case(lambda: SGD(0.05, momentum=0.9, nesterov=True)),
    "rmsprop": Case(lambda: RMSprop(0.003)),
    "adam": Case(lambda: Adam(0.003)),
    "adamw": Case(lambda: AdamW(0.003, weight_decay=0.01)),
    "lamb": Case(lambda: Lamb(0.003)),
    "lion": Case(lambda: Lion(0.0005)),
    # Gradients must be reduced even if the optimizer never calls Keras's apply().
    "a step of its own": Case(lambda: OwnStep(0.05)),
    "sparse gradients": Case(lambda: SGD(0.05, momentum=0.9), "embedding"),
    "accumulation": Case(
        lambda: SGD(0.05, momentum=0.9, gradient_accumulation_steps=4), steps_per_reduction=4
    ),
    # Half precision rounds the activations of one rank's batch differently from those of the
    # joint batch.
    "mixed_bfloat16": Case(lambda: SGD(0.05, momentum=0.9), "mixed_bfloat16", 1e-1),
    "mixed_float16": Case(lambda: LossScaleOptimizer(SGD(0.05)), "mixed_float16", 1e-2),
    # From here on, ranks have different total loss weights, so a mean of means is wrong.
    "ignored labels": Case(lambda: SGD(0.05), "ignored"),
    "masked tokens": Case(lambda: SGD(0.5, momentum=0.9), "masked"),
    "weighted mean": Case(lambda: Adam(0.003), "weighted", reduction="mean_with_sample_weight"),
    "two losses": Case(
        lambda: SGD(0.05, gradient_accumulation_steps=2), "two losses", steps_per_reduction=2
    ),
}
# Kinds of cases that are exact only with a DistributedLoss.
UNEQUAL_KINDS = ("ignored", "masked", "weighted", "two losses")


@dataclass(frozen=True)
class Comparison:
    """Largest differences of weights and float slots, relative to the largest value of each array.

    Attributes:
        error: N ranks against one process on the joint batch.
        error_without_reduction: One rank alone against one process on the joint batch.
        error_of_plain_loss: N ranks with the mean of their losses against one process on the joint
            batch; infinite for cases in which that mean is correct.
        rank_difference: The ranks against each other, at the start (after the broadcast) or at the end.
        reductions: Fewest reductions of any rank.
    """

    error: float
    error_without_reduction: float
    error_of_plain_loss: float
    rank_difference: float
    reductions: int


def compare(
    case: Case,
    steps: int = STEPS,
    wrap: Callable[[Any], Any] = hvd.DistributedOptimizer,
) -> Comparison:
    """Trains the case on all ranks, in one process, and on one rank alone.

    Every rank must call this, and gets the same comparison.

    Args:
        case: The model and its optimizer.
        steps: Number of training steps.
        wrap: Makes the case's optimizer distributed.
    """
    rank = hvd.rank()
    size = hvd.size()
    # Every rank generates the data of all ranks, and takes its part.
    data = _data(case.kind, steps, size)
    indices = np.arange(steps * size * BATCH).reshape(steps, size, BATCH)

    def batches(indices_by_step):
        take = partial(np.take, indices=indices_by_step.ravel(), axis=0)
        examples = keras.tree.map_structure(take, data)
        return tf.data.Dataset.from_tensor_slices(examples).batch(indices_by_step[0].size)

    own_batches = batches(indices[:, rank])
    distributed = _train(case, own_batches, rank, wrap, hvd.DistributedLoss)
    # The mean of the ranks' mean losses, as Horovod alone would compute it.
    plain = None
    if case.kind in UNEQUAL_KINDS:
        plain = _train(case, own_batches, rank, wrap).after
    # Rank 0 trains on the joint batch while the last rank trains alone, on rank 0's batches; both
    # start from rank 0's weights.
    joint = None
    single = None
    if rank == 0:
        joint = _train(case, batches(indices), seed=0).after
    if rank == size - 1:
        single = _train(case, batches(indices[:, 0]), seed=0).after

    # The model is small enough to gather its arrays as one object from each rank.
    gathered = hvd.allgather_object((distributed, plain, joint, single), name="hvtrain.compare")
    first, plain, expected, _ = gathered[0]
    *_, without_reduction = gathered[-1]
    trained_by_rank = [trained for trained, *_ in gathered]

    return Comparison(
        error=largest_difference(first.after, expected),
        error_without_reduction=largest_difference(without_reduction, expected),
        error_of_plain_loss=largest_difference(plain, expected) if plain else float("inf"),
        rank_difference=max(
            largest_difference(trained.before + trained.after, first.before + first.after)
            for trained in trained_by_rank
        ),
        reductions=min(trained.reductions for trained in trained_by_rank),
    )


def check_joint_batch(case: Case) -> str:
    """Runs the comparison, and returns its result in a few words (every rank).

    Raises CheckError if the ranks do not train together, or if the comparison proves nothing.
    """
    comparison = compare(case)
    size = hvd.size()
    expected = STEPS // case.steps_per_reduction
    # Counted in the graph: a Python counter would count traces.
    if comparison.reductions != expected:
        raise CheckError(
            f"{comparison.reductions} reductions in the graph for {expected} steps that change weights; "
            "the optimizer that trains is not the distributed one"
        )

    if not comparison.error < case.tolerance:
        raise CheckError(
            f"{size} ranks differ from one process on the joint batch by {comparison.error:.2g} "
            f"(at most {case.tolerance:g}); gradients are not reduced, or are reduced wrongly"
        )

    if comparison.rank_difference:
        raise CheckError(
            f"weights differ between ranks by {comparison.rank_difference:.2g}; look at broadcast and reduction"
        )
    # A check that cannot fail proves nothing: the wrong ways must give clearly different weights.
    wrong_ways = {
        "the mean of the ranks' losses gives": comparison.error_of_plain_loss,
        "one rank without reduction ends with": comparison.error_without_reduction,
    }
    for wrong_way, error in wrong_ways.items():
        if error < 3 * case.tolerance:
            raise CheckError(f"{wrong_way} the same weights, so the comparison proves nothing")

    controls = f"without reduction {comparison.error_without_reduction:.1g}"
    if case.kind in UNEQUAL_KINDS:
        controls = f"with the mean of losses {comparison.error_of_plain_loss:.1g}; {controls}"
    return (
        f"{size} x {BATCH} equal 1 x {BATCH * size} to {comparison.error:.1g}; {controls}; "
        f"{comparison.reductions} reductions"
    )


def largest_difference(actual: Arrays, expected: Arrays) -> float:
    """Returns the largest difference in any array, relative to the expected array's largest value.

    Infinite if a difference is not finite.

    >>> round(largest_difference([np.array([1.0, 2.0])], [np.array([1.0, 4.0])]), 6)
    0.5
    """
    largest = 0.0
    for array, expected_array in zip(actual, expected, strict=True):
        exact = np.asarray(expected_array, np.float64)
        # Relative to the whole array: a value near 0 may differ by a multiple of itself.
        scale = np.max(np.abs(exact), initial=0.0) or 1.0
        gap = np.max(np.abs(array - exact), initial=0.0) / scale
        if not np.isfinite(gap):
            return float("inf")
        largest = max(largest, float(gap))

    return largest


def _data(kind: str, steps: int, size: int) -> tuple[Any, ...]:
    """Returns the inputs, targets and, for "weighted", weights of all examples.

    They are ordered by step, rank and position in the batch.
    """
    generator = np.random.default_rng(7)
    count = steps * size * BATCH
    # The higher the rank, the more of its labels count, or the larger its weights are.
    share = np.tile(np.repeat((np.arange(size) + 1) / (size + 1), BATCH), steps)
    x = generator.normal(size=(count, 12)).astype("float32")
    y = generator.integers(0, 3, count)
    is_counted = generator.random(count) < share
    if kind == "embedding":
        return generator.integers(0, 50, (count, 6)), y
    if kind == "masked":
        tokens = generator.integers(1, 50, (count, 6))
        lengths = np.ceil(6 * share)[:, None]
        return np.where(np.arange(6) < lengths, tokens, 0), generator.integers(0, 3, (count, 6))
    if kind == "weighted":
        return x, y, (share * generator.random(count)).astype("float32")
    if kind == "two losses":
        return x, {"o": np.where(is_counted, y, IGNORED), "p": np.where(is_counted, IGNORED, y)}
    if kind == "ignored":
        return x, np.where(is_counted, y, IGNORED)
    return x, y


def _model(case: Case, seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    # Float32, so that the loss is computed in float32 under half-precision policies too.
    last = Dense(3, name="o", dtype="float32")
    if case.kind in ("embedding", "masked"):
        is_masked = case.kind == "masked"
        layers = [keras.Input((6,)), Embedding(50, 8, mask_zero=is_masked, name="e")]
        if not is_masked:
            layers.append(Flatten(name="f"))
    else:
        policy = case.kind if case.kind.startswith("mixed") else "float32"
        layers = [
            keras.Input((12,)),
            Dense(24, activation="tanh", name="d", dtype=policy),
        ]

    model = keras.Sequential([*layers, *case.more_layers(), last], name="m")
    if case.kind != "two losses":
        return model

    # For each of the two outputs, ranks have different numbers of labels.
    features = model.layers[-2].output
    return keras.Model(model.inputs, {"o": last(features), "p": Dense(3, name="p")(features)})


def _train(
    case: Case,
    batches: tf.data.Dataset,
    seed: int,
    wrap: Callable[[Any], Any] | None = None,
    wrap_loss: Callable[[Any], Any] = lambda loss: loss,
) -> Trained:
    """Trains for one pass over the batches.

    If given, `wrap` makes the optimizer distributed, and `wrap_loss` the loss.
    """
    model = _model(case, seed)
    optimizer = wrap(case.optimizer()) if wrap else case.optimizer()

    def loss():
        options = {"from_logits": True, "reduction": case.reduction, "ignore_class": IGNORED}
        return wrap_loss(keras.losses.SparseCategoricalCrossentropy(**options))

    losses = {"o": loss(), "p": loss()} if case.kind == "two losses" else loss()
    model.compile(optimizer, losses, jit_compile=False)
    # So far, each rank has different weights, from its own seed.
    if wrap:
        hvd.broadcast_model(model)

    before = [weight.copy() for weight in model.get_weights()]
    # Without shuffling, each step trains on one of the given batches, in order.
    model.fit(batches, epochs=1, verbose=0, shuffle=False)
    # Slots only: counters are integers, and the learning rate is a setting.
    floats = [variable for variable in model.optimizer.variables if variable.dtype == "float32"]
    slots = [variable.numpy() for variable in floats if variable.name != "learning_rate"]
    return Trained(before, [*model.get_weights(), *slots], hvd.num_reductions(model.optimizer))
