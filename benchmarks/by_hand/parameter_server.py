"""ParameterServerStrategy: a coordinator, one parameter server, and workers that step asynchronously.

TF_CONFIG says which of them this process is. The coordinator reports for each worker;
benchmarks.measure ends workers and server.
"""

import keras
import tensorflow as tf

from benchmarks.by_hand.common import make_setup, use_gpu
from benchmarks.clock import Stopwatch


def main() -> None:
    """Serves, or coordinates and reports."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    use_gpu(resolver.task_id if resolver.task_type == "worker" else None)
    if resolver.task_type != "chief":
        server = tf.distribute.Server(
            resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc"
        )
        server.join()
    coordinate(resolver)


def coordinate(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> None:
    """Hands steps to free workers. A joint step is one step for each worker."""
    stopwatch = Stopwatch()
    size = resolver.cluster_spec().num_tasks("worker")
    setup = make_setup(0, size)
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    with strategy.scope():
        model = setup.model()
        optimizer = setup.optimizer()
        loss_of = setup.loss()
        optimizer.build(model.trainable_variables)
        mean = keras.metrics.Mean()

    @tf.function
    def step(iterator: tf.data.Iterator) -> None:
        def on_replica(images: tf.Tensor, labels: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(images, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            mean.update_state(loss)

        strategy.run(on_replica, args=next(iterator))

    @tf.function
    def dataset() -> tf.data.Dataset:
        return strategy.distribute_datasets_from_function(lambda _: setup.batches_from(0))

    batches = iter(coordinator.create_per_worker_dataset(dataset))
    for number in range(setup.plan.num_steps):
        # A free worker takes the next step: workers are not in step with each other.
        for _ in range(size):
            coordinator.schedule(step, args=(batches,))
        if number + 1 in (1, stopwatch.warmup, setup.plan.num_steps):
            coordinator.join()  # The clock needs finished steps, and schedule only queues them.
        stopwatch.step_ended()

    for rank in range(size):
        stopwatch.report(rank, float(mean.result()))


if __name__ == "__main__":
    main()
