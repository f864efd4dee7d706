"""The gradient noise scale: the batch beyond which more examples in a step help little.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv:1812.06162). The gradient
of a batch of b examples has the expected squared norm |G|^2 + S / b: that of the true gradient, and
noise. A rank's own gradient and the mean of all have different b, so both parts follow from their
norms, and B = S / |G|^2. A rank knows its own norm, and every rank that of the mean.
"""

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvtrain.keras.hooks import hook_of

# Weight of a measured step relative to the next one. McCandlish et al. smooth S and |G|^2 apart,
# since the mean of their ratios is biased. Both are linear in the norms, so the norms are smoothed.
DECAY = 0.95


class NoiseScale:
    """Measures the norms of a DistributedOptimizer's gradients, in some of its steps.

    Make it on every rank before the first step. It sends nothing until `estimate` is called, and
    changes no gradient. A measured step costs a pass over the gradients and one over their mean;
    sparse gradients, whose rows may repeat, are left out.

    Args:
        optimizer: what DistributedOptimizer returned.
        every: steps from one measured step to the next.

    Raises:
        ValueError: the optimizer does not average whole gradients in each step.

    Example:
        noise = hvd.NoiseScale(optimizer)
        ...
        print(noise.estimate(batch_size))
    """

    def __init__(self, optimizer: Any, every: int = 16) -> None:
        # A loss scale wraps the optimizer that accumulates, which reduces.
        hook = hook_of(getattr(optimizer, "inner_optimizer", optimizer)) or hook_of(optimizer)
        compression = hook.reducer.compression if hook else None
        is_adasum = hook is not None and hook.reducer.op == hvd.Adasum
        if not hook or hook.every > 1 or is_adasum or getattr(compression, "keeps_errors", False):
            raise ValueError(
                "the gradient noise scale needs ranks that average whole gradients in each step; use a "
                "DistributedOptimizer with op=Average or Sum, and compression none, fp16 or bf16"
            )
        self.every = every
        with tf.init_scope():
            self._norms = tf.Variable([0.0, 0.0], trainable=False, name="gradient_norms")
        hook.reducer.noise = self

    def squared_norm(self, tensors: Sequence[tf.Tensor], step: tf.Variable) -> tf.Tensor:
        """Returns half the squared norm of a message's gradients, in the graph; 0 in a step that is not measured."""

        def half_squares() -> tf.Tensor:
            # In half precision squares would overflow.
            return tf.add_n([tf.nn.l2_loss(tf.cast(tensor, tf.float32)) for tensor in tensors])

        return tf.cond(step % self.every == 0, half_squares, lambda: tf.constant(0.0))

    def update(self, own: Sequence[tf.Tensor], joint: Sequence[tf.Tensor], factor: float, step: tf.Variable) -> None:
        """Takes the norms of a step's messages, in the graph.

        Args:
            own: of this rank's gradients, as squared_norm returned them.
            joint: of the reduced ones.
            factor: by which the reduced gradients are larger than the mean.
            step: counts the steps before.
        """
        norms = tf.stack([tf.add_n(own), tf.add_n(joint) / factor**2])
        # A step whose loss scale overflows changes nothing.
        is_measured = tf.logical_and(step % self.every == 0, tf.reduce_all(tf.math.is_finite(norms)))
        self._norms.assign(tf.where(is_measured, DECAY * self._norms + norms, self._norms))

    def norms(self) -> list[float]:
        """Returns this rank's smoothed squared norms, of its own gradient and of the mean, in one unit."""
        return [float(norm) for norm in self._norms.numpy()]

    def estimate(self, batch_size: int) -> float | None:
        """Returns the noise scale in examples (every rank); None if there is too little to tell.

        Args:
            batch_size: examples of a rank's gradient, the same on all ranks.
        """
        norms = hvd.allgather_object(self.norms(), name="hvtrain_noise_scale")
        return noise_scale(norms, [batch_size] * len(norms))


def noise_scale(norms: Sequence[Sequence[float]], batch_sizes: Sequence[int]) -> float | None:
    """Returns the noise scale in examples; None if the norms are too few, or too noisy, to tell.

    Args:
        norms: for each rank, the squared norms of its gradient and of the mean, in any unit.
        batch_sizes: examples of each rank's gradient. The gradient of a larger batch than others is
            larger, in proportion.

    >>> noise_scale([[5.0, 3.0], [5.0, 3.0]], [10, 10])  # S = 2 / (1/10 - 1/20) = 40, |G|^2 = 3 - 40 / 20 = 1
    40.0
    >>> noise_scale([[5.0, 2.0], [5.0, 2.0]], [10, 10]) is None  # no gradient beyond the noise
    True
    """
    num_ranks = len(norms)
    joint_batch = sum(batch_sizes)
    own = sum(rank_own for rank_own, _ in norms) / num_ranks
    joint = norms[0][1]
    # 1 for equal batches: the mean over ranks of their share of the batch, squared, times the ranks' number squared.
    spread = num_ranks * sum(size**2 for size in batch_sizes) / joint_batch**2
    if num_ranks == spread:
        return None
    noise = (own - spread * joint) * joint_batch / (num_ranks - spread)
    signal = joint - noise / joint_batch
    return noise / signal if noise > 0 and signal > 0 else None
