"""The data alone: how fast batches come when no model waits for them."""

import tensorflow as tf

from benchmarks.by_hand.common import make_setup, pinned_job
from benchmarks.clock import Stopwatch


def main() -> None:
    """Reads as many batches as a training would, and reports."""
    stopwatch = Stopwatch()
    job = pinned_job()
    setup = make_setup()

    @tf.function
    def take(images: tf.Tensor, labels: tf.Tensor) -> None:
        tf.debugging.assert_equal(tf.shape(images)[0], tf.shape(labels)[0])

    for images, labels in setup.batches_from(0).take(setup.plan.num_steps):
        take(images, labels)
        stopwatch.step_ended()

    stopwatch.report(job, 0.0)


if __name__ == "__main__":
    main()
