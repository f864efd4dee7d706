"""Compares what the ranks are about to reduce, before they reduce it for the first time.

Horovod does not compare the tensors of a grouped reduction: sums over unlike shapes read foreign memory, and a
gradient that one rank lacks makes the others wait for ever.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvtrain.errors import RankError

_agreed: set[tuple[str, str]] = set()


def forget_comparisons() -> None:
    """Compares everything anew, because other ranks may have joined (every rank)."""
    _agreed.clear()


@tf.autograph.experimental.do_not_convert  # AutoGraph would go on into pickling, and warn.
def compare_structure(
    reduction: str, settings: str, gradients: Sequence[Any], variables: Sequence[Any], process_set: Any
) -> None:
    """Raises RankError on all ranks where they would not reduce the same gradients in the same way (every rank).

    One exchange of a digest for each structure that a reduction of this name has not had before: while a step is
    traced, or in the first eager step; a step traced again, for a batch of another size, sends nothing. Of names
    only layer and weight are compared, without the numbers that Keras gives (dense_1): numbers depend on what else a
    rank has built, and the model's name on whether the rank loaded it.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            return  # A graph of TensorFlow 1 sends nothing while it is built.
        lines = [settings, *(describe(*pair) for pair in zip_longest(gradients, variables[: len(gradients)]))]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        if (reduction, digest) in _agreed:
            return
        options = {"name": f"{reduction}_compared_before_the_first_step", "process_set": process_set}
        if len(set(hvd.allgather_object(digest, **options))) > 1:
            found = hvd.allgather_object(lines, **options)
            raise RankError(difference(found, getattr(process_set, "ranks", None) or range(len(found))))
        _agreed.add((reduction, digest))


def describe(gradient: Any, variable: Any) -> str:
    """One line: names of layer and weight, and the gradient's type and shape.

    >>> describe(tf.zeros([2, 3]), tf.Variable(tf.zeros([2, 3]), name="model_1/dense_4/kernel"))
    'dense/kernel float32 [2, 3]'
    """
    name = getattr(variable, "path", None) or ("" if isinstance(variable, tf.Tensor) else getattr(variable, "name", ""))
    name = "/".join(re.sub(r"(_\d+|:\d+)(?=/|$)", "", name or "").split("/")[-2:])
    if gradient is None:
        kind = "without a gradient"
    elif isinstance(gradient, tf.IndexedSlices):
        kind = f"{gradient.dtype.name} rows of {_dimensions(gradient.values.shape[1:])}, sparse"
    else:
        kind = f"{gradient.dtype.name} {_dimensions(gradient.shape)}"
    return f"{name} {kind}".strip()


def difference(found: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    """What the first rank that differs from the first one has instead; found: by rank, settings and then gradients.

    >>> difference([["op=Sum", "a float32 [2]"], ["op=Sum", "a float32 [3]"]], [0, 4]).partition(";")[0]
    'cannot reduce the gradients of ranks 0 and 4: gradient 0 is a float32 [2] on rank 0, a float32 [3] on rank 4'
    """
    other, lines = next((rank, lines) for rank, lines in zip(ranks, found) if lines != found[0])
    pairs = enumerate(zip_longest(found[0], lines, fillvalue="missing"))
    at, (first, second) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
    what = f"gradient {at - 1} is" if at else "the reduction is set to"
    return (
        f"cannot reduce the gradients of ranks {ranks[0]} and {other}: {what} {first} on rank {ranks[0]}, "
        f"{second} on rank {other}; build the same model, loss and optimizer on every rank"
    )


def _dimensions(shape: tf.TensorShape) -> str:
    return str(shape.as_list()) if shape.rank is not None else "of any shape"
