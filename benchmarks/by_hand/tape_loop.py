"""A loop on Horovod's TensorFlow layer, like Horovod's examples: one tf.function with DistributedGradientTape."""

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from benchmarks.by_hand.common import make_setup, pin
from benchmarks.clock import Stopwatch


def main() -> None:
    """Trains, and reports."""
    stopwatch = Stopwatch()
    hvd.init()
    pin(hvd.local_rank(), hvd.local_size())
    setup = make_setup(hvd.rank(), hvd.size())
    model = setup.model()
    optimizer = setup.optimizer()
    loss_of = setup.loss()
    # Before the broadcast, which covers the slots too.
    optimizer.build(model.trainable_variables)
    mean = keras.metrics.Mean()
    accuracy = setup.accuracy()

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = loss_of(labels, logits)

        tape = hvd.DistributedGradientTape(tape)
        # Horovod's tape does not accept Keras variables.
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        mean.update_state(loss)
        accuracy.update_state(labels, logits)

    hvd.broadcast_variables(
        [v.value for v in (*model.variables, *optimizer.variables)], root_rank=0
    )
    for number, (images, labels) in enumerate(setup.batches_from(0).take(setup.plan.num_steps)):
        # Metrics are those of the last epoch, as Keras reports them.
        if number % setup.plan.steps_per_epoch == 0:
            mean.reset_state()
            accuracy.reset_state()
        step(images, labels)
        stopwatch.step_ended()

    stopwatch.report(hvd.rank(), float(mean.result()))


if __name__ == "__main__":
    main()
