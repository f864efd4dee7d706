"""The gradient noise scale: the batch size beyond which more examples per step help little.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv:1812.06162). The
expected squared norm of the gradient of a batch of b examples is |G|^2 + S / b: that of the true
gradient, plus noise. A rank's own gradient and the mean over all ranks have different b, so |G|^2
and S follow from the two norms, and the noise scale is B = S / |G|^2. Each rank knows the norm of
its own gradient, and all ranks know that of the mean.
"""

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvtrain.keras.hooks import hook_of
from hvtrain.keras.reduction import Reducer

# Weight of a measured step relative to the next one. McCandlish et al. smooth S and |G|^2
# separately, since a mean of their ratios would be biased. Both are linear in the squared norms, so
# smoothing the norms is equivalent.
DECAY = 0.95


class NoiseScale:
    """Estimates the gradient noise scale from a DistributedOptimizer's gradients in some steps.

    Create it on every rank before the first step. It sends nothing until `estimate` is called, and
    changes no gradient. A measured step costs one pass over the gradients and one over their means.
    Sparse gradients are left out, since their rows may repeat.

    Args:
        optimizer: the result of DistributedOptimizer.
        every: steps from one measured step to the next.

    Raises:
        ValueError: the ranks do not average whole gradients in each step (a plain optimizer,
            LocalSGD or DiLoCo, Adasum, or a compression that keeps errors).

    Example:
        noise = hvd.NoiseScale(optimizer)
        ...
        print(noise.estimate(batch_size))
    """

    def __init__(self, optimizer: Any, every: int = 16) -> None:
        hook = hook_of(optimizer)
        if (
            not hook
            # Subclasses, for virtual ranks and for tf.distribute, measure nothing.
            or type(hook.reducer) is not Reducer
            or hook.averages_weights
            or hook.reducer.op == hvd.Adasum
            or getattr(hook.reducer.compression, "keeps_errors", False)
        ):
            raise ValueError(
                "the gradient noise scale needs ranks that average whole gradients in each step; use a "
                "DistributedOptimizer with op=Average or Sum, and compression none, fp16 or bf16"
            )
        self.every = every
        self._reducer = hook.reducer
        with tf.init_scope():
            self._norms = tf.Variable([0.0, 0.0], trainable=False, name="gradient_norms")
        hook.reducer.noise = self

    def half_squared_norm(self, tensors: Sequence[tf.Tensor], step: tf.Variable) -> tf.Tensor:
        """Returns half the squared norm of a message's gradients; 0 in steps that are not measured."""

        def half_squares():
            # Squares in half precision would overflow.
            return tf.add_n([tf.nn.l2_loss(tf.cast(tensor, tf.float32)) for tensor in tensors])

        return tf.cond(step % self.every == 0, half_squares, lambda: tf.constant(0.0))

    def update(
        self, norms: Sequence[Sequence[tf.Tensor]], factor: float, step: tf.Variable
    ) -> None:
        """Updates the smoothed squared norms with those of a step's messages, in the graph.

        Args:
            norms: for each message, what half_squared_norm returned for this rank's gradients, and for
                the reduced ones.
            factor: how many times larger than the mean the reduced gradients are.
            step: number of steps before this one.
        """
        own, joint = zip(*norms)
        totals = tf.stack([tf.add_n(own), tf.add_n(joint) / factor**2])
        # A step that overflows is left out.
        is_measured = (step % self.every == 0) & tf.reduce_all(tf.math.is_finite(totals))
        self._norms.assign(tf.where(is_measured, DECAY * self._norms + totals, self._norms))

    def norms(self) -> list[float]:
        """Returns the smoothed squared norms of this rank's gradient and of the mean gradient, up to a factor."""
        return self._norms.numpy().tolist()

    def estimate(self, batch_size: int) -> float | None:
        """Returns the noise scale in examples; None if there is not enough data yet (every rank).

        Only ranks that exchange gradients count. On a rank outside the process set the result is None.

        Args:
            batch_size: examples in a rank's gradient, the same on all ranks.
        """
        if self._reducer.is_alone:
            return None
        process_set = self._reducer.process_set
        norms = hvd.allgather_object(
            self.norms(), name="hvtrain_noise_scale", process_set=process_set
        )
        return noise_scale(norms, [batch_size] * len(norms))


def noise_scale(norms: Sequence[Sequence[float]], batch_sizes: Sequence[int]) -> float | None:
    """Returns the noise scale in examples; None if the norms are too few or too noisy.

    Args:
        norms: for each rank, the squared norms of its gradient and of the mean, in any unit.
        batch_sizes: examples in each rank's gradient. Gradients are weighted by their batch sizes.

    >>> noise_scale([[5.0, 3.0], [5.0, 3.0]], [10, 10])  # S = 2 / (1/10 - 1/20) = 40, |G|^2 = 3 - 40 / 20 = 1
    40.0
    >>> noise_scale([[5.0, 2.0], [5.0, 2.0]], [10, 10]) is None  # no gradient beyond the noise
    True
    """
    num_ranks = len(norms)
    joint_batch = sum(batch_sizes)
    own = sum(rank_own for rank_own, _ in norms) / num_ranks
    joint = norms[0][1]
    # (Number of ranks)^2 x the mean over the ranks of (share of the joint batch)^2: 1 for equal
    # batches.
    spread = num_ranks * sum(size**2 for size in batch_sizes) / joint_batch**2
    if num_ranks == spread:
        return None
    noise = (own - spread * joint) * joint_batch / (num_ranks - spread)
    signal = joint - noise / joint_batch
    return noise / signal if noise > 0 and signal > 0 else None
