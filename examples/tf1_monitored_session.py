"""A TensorFlow 1 loop on today's TensorFlow: a graph, MonitoredTrainingSession, hooks, and low-level Horovod.

    horovodrun -np 2 python examples/tf1_monitored_session.py

For old code that should stay as it is. Takes about 10 s on 2 cores and reaches an accuracy of 0.95 on scikit-learn's
digits. Run again, the same command resumes from the checkpoint folder; --steps sets the last step.

What has to change in an old script is marked with "was:". In short:

- tf.X of TensorFlow 1 is tf.compat.v1.X. tf.contrib, tf.estimator and tf.layers are gone: create variables with
  get_variable, and use matmul and similar operations.
- Everything is under `with tf.Graph().as_default()`; outside of it TensorFlow 2 runs operations eagerly.
- hvd.BroadcastGlobalVariablesHook is missing, because it was built on tf.estimator; the class below replaces it.
- hvd.DistributedOptimizer of horovod.tensorflow still wraps the optimizers of tf.compat.v1.train, and only those:
  Keras's need hvtrain.keras.
"""

import argparse

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

v1 = tf.compat.v1


class BroadcastGlobalVariablesHook(v1.train.SessionRunHook):
    """Gives all ranks the root's variables after it has created or restored them. was: hvd's own."""

    def __init__(self, root_rank: int) -> None:
        self.root_rank = root_rank

    def begin(self) -> None:
        # Operations can be added only before the session makes the graph final.
        self.broadcast = hvd.broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: v1.Session, coord: tf.train.Coordinator) -> None:
        session.run(self.broadcast)


class EvaluationHook(v1.train.SessionRunHook):
    """Keeps this rank's final weights and its number of correct answers, for the checks below."""

    def __init__(self, variables: list[tf.Variable], correct: tf.Tensor, feed: dict) -> None:
        self.fetches, self.feed = (variables, correct), feed

    def end(self, session: v1.Session) -> None:
        self.weights, self.correct = session.run(self.fetches, self.feed)


def dense(x: tf.Tensor, units: int, name: str) -> tf.Tensor:
    """was: tf.layers.dense, which was removed with Keras 3."""
    with v1.variable_scope(name):
        kernel = v1.get_variable(
            "kernel", [int(x.shape[-1]), units], initializer=v1.glorot_uniform_initializer()
        )
        return tf.matmul(x, kernel) + v1.get_variable(
            "bias", [units], initializer=v1.zeros_initializer()
        )


def batches(x: np.ndarray, y: np.ndarray, size: int):
    """This rank's endless stream of batches."""
    rng = np.random.default_rng(hvd.rank())
    while True:
        rows = rng.choice(len(x), size, replace=False)
        yield x[rows], y[rows]


def train(options: argparse.Namespace) -> tuple[list[np.ndarray], float]:
    """This rank's final weights, and its test accuracy (all ranks have the same weights and test data)."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype("float32"), labels.astype("int64")
    is_test = np.arange(len(images)) % 5 == 0
    # Each rank its own shard.
    x, y = (array[~is_test][hvd.rank() :: hvd.size()] for array in (images, labels))
    with tf.Graph().as_default():  # was: nothing
        # Ranks start with different weights; the broadcast makes them equal.
        v1.set_random_seed(hvd.rank())
        image = v1.placeholder(tf.float32, [None, 64])
        label = v1.placeholder(tf.int64, [None])
        logits = dense(tf.nn.relu(dense(image, 64, "hidden")), 10, "out")
        loss = v1.losses.sparse_softmax_cross_entropy(label, logits)
        correct = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(logits, axis=1), label), tf.float32))
        step = v1.train.get_or_create_global_step()
        optimizer = hvd.DistributedOptimizer(v1.train.AdamOptimizer(0.001 * hvd.size()))
        training = optimizer.minimize(loss, global_step=step)

        evaluation = EvaluationHook(
            v1.trainable_variables(), correct, {image: images[is_test], label: labels[is_test]}
        )
        hooks = [
            BroadcastGlobalVariablesHook(0),
            # More ranks take fewer steps, each on a larger batch.
            v1.train.StopAtStepHook(last_step=options.steps // hvd.size()),
            evaluation,
        ]
        config = v1.ConfigProto()
        config.gpu_options.allow_growth = True
        config.gpu_options.visible_device_list = str(hvd.local_rank())
        # Only rank 0 has a checkpoint folder. The hook broadcasts what it restores.
        folder = options.folder if hvd.rank() == 0 else None
        feed = batches(x, y, 32)
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=folder, hooks=hooks, config=config
        ) as session:
            while not session.should_stop():
                images_now, labels_now = next(feed)
                session.run(training, {image: images_now, label: labels_now})
    return evaluation.weights, float(evaluation.correct) / int(is_test.sum())


def main() -> tuple[list[np.ndarray], float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=800, help="of all ranks together")
    parser.add_argument(
        "--folder", default="tf1-monitored-session", help="where rank 0 keeps checkpoints"
    )
    hvd.init()
    weights, accuracy = train(parser.parse_args())
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.4f}", flush=True)
    return weights, accuracy


if __name__ == "__main__":
    weights, accuracy = main()
