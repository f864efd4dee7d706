"""MultiWorkerMirroredStrategy in a custom loop, since its `fit` fails on Keras 3 (keras#20585)."""

import keras
import tensorflow as tf

from benchmarks.by_hand.common import make_setup, pin
from benchmarks.clock import Stopwatch


def main() -> None:
    """Trains, and reports."""
    stopwatch = Stopwatch()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    rank = resolver.task_id
    size = resolver.cluster_spec().num_tasks("worker")
    pin(rank, size)  # First: the strategy initializes all GPUs that it sees.
    strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    setup = make_setup(rank, size)
    keras.utils.set_random_seed(1)  # Every worker makes the same weights.

    with strategy.scope():
        model = setup.model()
        optimizer = setup.optimizer()
        loss_of = setup.loss()
        optimizer.build(model.trainable_variables)
        mean = keras.metrics.Mean()
        accuracy = setup.accuracy()

    @tf.function
    def step(iterator: tf.data.Iterator) -> None:
        def on_replica(images: tf.Tensor, labels: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                logits = model(images, training=True)
                # Keras divides by the number of replicas here; the optimizer sums.
                share = loss_of(labels, logits)
            gradients = tape.gradient(share, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            mean.update_state(share * size)
            accuracy.update_state(labels, logits)

        strategy.run(on_replica, args=next(iterator))

    batches = iter(strategy.distribute_datasets_from_function(lambda _: setup.batches_from(0)))
    for number in range(setup.plan.num_steps):
        # Metrics are those of the last epoch, as Keras reports them.
        if number % setup.plan.steps_per_epoch == 0:
            mean.reset_state()
            accuracy.reset_state()
        step(batches)
        stopwatch.step_ended()

    stopwatch.report(rank, float(mean.result()))


if __name__ == "__main__":
    main()
