"""A rank's part of the joint batches of a plan that was made for another number of ranks.

The streams of those ranks are joined and cut, so each example comes as they would have read it, order and
augmentation included, and sources need no change. Two ranks that need parts of one stream both read and decode it.
"""

from collections.abc import Callable

import tensorflow as tf

from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology
from hvtrain.data.pipeline.streams import FOREVER, finish, parallel_map


def regrouped(
    stream_of: Callable[[int], tf.data.Dataset], plan: StepPlan, topology: Topology, start_step: int
) -> tf.data.Dataset:
    """The batches of one rank. stream_of(share) gives those of a share, from start_step of the plan on."""
    shares = plan.shares_of(topology.rank)
    steps = tf.data.Dataset.range(start_step % plan.steps_per_epoch, FOREVER)

    def part_of(step: tf.Tensor, batches: tuple[tuple[tf.Tensor, tf.Tensor], ...]) -> tuple[tf.Tensor, ...]:
        # If all steps are alike, plain numbers keep the batch's static shape.
        at, minimum = (0, min) if plan.is_full else (step % plan.steps_per_epoch, tf.minimum)
        begin, end = plan.parts(at, minimum)[topology.rank]
        first = plan.share_offsets(at, minimum)[shares[0]]
        return tuple(tf.concat(parts, axis=0)[begin - first : end - first] for parts in zip(*batches))

    streams = tuple(stream_of(share) for share in shares)
    return finish(parallel_map(tf.data.Dataset.zip((steps, streams)), part_of), topology)
