"""TensorFlow 1 training with a parameter server on today's TensorFlow; each process is started by hand.

    python examples/tf1_parameter_server.py --job-name ps
    python examples/tf1_parameter_server.py --job-name worker --task-index 0
    python examples/tf1_parameter_server.py --job-name worker --task-index 1

Takes about 20 s on 2 cores and reaches an accuracy of 0.95 on scikit-learn's digits. All processes end by themselves.
For several hosts, give every process the same --ps-hosts and --worker-hosts.

Training is synchronous: a step takes the mean gradient of the workers. With --asynchronous for every process, each
worker applies its own gradients and waits for no other one: 0.94 after as many steps.

For old code that should stay as it is; it does not use Horovod. SyncReplicasOptimizer still works, but without the
lines marked "waits:" most runs hang at the start or at the end.
"""

import argparse
import time

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

v1 = tf.compat.v1


class AllReadyHook(v1.train.SessionRunHook):
    """Lets no worker start before all are there. waits: a worker that comes late finds no token."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers

    def begin(self) -> None:
        self.ready = v1.get_variable("ready", [], tf.int32, v1.zeros_initializer(), trainable=False)
        self.add = self.ready.assign_add(1)

    def after_create_session(self, session: v1.Session, coord: tf.train.Coordinator) -> None:
        session.run(self.add)
        while session.run(self.ready) < self.num_workers:
            time.sleep(0.2)


class EndHook(v1.train.SessionRunHook):
    """At the chief's end: prints the accuracy, and lets the other workers finish."""

    def __init__(self, accuracy: tf.Tensor, feed: dict, last: tf.Operation) -> None:
        self.accuracy, self.feed, self.last = accuracy, feed, last

    def end(self, session: v1.Session) -> None:
        session.run(self.last)
        print(f"test accuracy {session.run(self.accuracy, self.feed):.4f}", flush=True)


class WorkerCreator(v1.train.SessionCreator):
    """Waits until the chief has created the variables. waits: MonitoredTrainingSession checks only every 30 s."""

    def __init__(self, master: str, scaffold: v1.train.Scaffold, config: v1.ConfigProto) -> None:
        self.master, self.scaffold, self.config = master, scaffold, config

    def create_session(self) -> v1.Session:
        self.scaffold.finalize()
        ready = {
            "ready_op": self.scaffold.ready_op,
            "ready_for_local_init_op": self.scaffold.ready_for_local_init_op,
        }
        manager = v1.train.SessionManager(self.scaffold.local_init_op, graph=v1.get_default_graph(),
                                          recovery_wait_secs=1, **ready)  # fmt: skip
        # Without a limit: if a worker gave up on a chief that starts late, server and chief would wait for it for ever.
        return manager.wait_for_session(self.master, self.config)


def dense(x: tf.Tensor, units: int, name: str) -> tf.Tensor:
    with v1.variable_scope(name):
        kernel = v1.get_variable(
            "kernel", [int(x.shape[-1]), units], initializer=v1.glorot_uniform_initializer()
        )
        return tf.matmul(x, kernel) + v1.get_variable(
            "bias", [units], initializer=v1.zeros_initializer()
        )


def done_queue(num_workers: int) -> tf.queue.QueueBase:
    """The queue in which workers tell the server that they have ended."""
    with v1.device("/job:ps/task:0"):
        return v1.FIFOQueue(num_workers, tf.int32, shapes=[[]], shared_name="done")


def seen(*devices: str) -> v1.ConfigProto:
    """The config of a session on these devices. waits: a session on all devices starts only while all workers live."""
    return v1.ConfigProto(device_filters=devices)


def serve(server: v1.train.Server, num_workers: int) -> None:
    """Serves until all workers have ended. was: server.join(), which never returns."""
    with tf.Graph().as_default():
        taken = done_queue(num_workers).dequeue()
        with v1.Session(server.target, config=seen("/job:ps")) as session:
            for _ in range(num_workers):
                session.run(taken)
    time.sleep(1.0)  # The last worker still waits for the answer.


def work(
    server: v1.train.Server, cluster: tf.train.ClusterSpec, options: argparse.Namespace
) -> None:
    num_workers, index = cluster.num_tasks("worker"), options.task_index
    config = seen("/job:ps", f"/job:worker/task:{index}")
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype("float32"), labels.astype("int64")
    is_test = np.arange(len(images)) % 5 == 0
    x, y = images[~is_test][index::num_workers], labels[~is_test][index::num_workers]
    with tf.Graph().as_default():
        with v1.device(
            v1.train.replica_device_setter(
                cluster=cluster, worker_device=f"/job:worker/task:{index}"
            )
        ):
            image, label = v1.placeholder(tf.float32, [None, 64]), v1.placeholder(tf.int64, [None])
            logits = dense(tf.nn.relu(dense(image, 64, "hidden")), 10, "out")
            loss = v1.losses.sparse_softmax_cross_entropy(label, logits)
            accuracy = tf.reduce_mean(
                tf.cast(tf.equal(tf.argmax(logits, axis=1), label), tf.float32)
            )
            step = v1.train.get_or_create_global_step()
            optimizer = v1.train.AdamOptimizer(0.002)
            hooks = [v1.train.StopAtStepHook(last_step=options.steps)]
            if options.asynchronous:
                training = optimizer.minimize(loss, global_step=step)
                last = tf.no_op()
            else:
                optimizer = v1.train.SyncReplicasOptimizer(
                    optimizer, replicas_to_aggregate=num_workers, total_num_replicas=num_workers
                )
                training = optimizer.minimize(loss, global_step=step)
                hooks = [
                    AllReadyHook(num_workers),
                    optimizer.make_session_run_hook(index == 0),
                    *hooks,
                ]
                # waits: a worker in its last step waits for a token, which the chief no longer hands out.
                last = optimizer.get_init_tokens_op(num_workers)
            done = done_queue(num_workers).enqueue(index)
            if index == 0:
                hooks.append(
                    EndHook(accuracy, {image: images[is_test], label: labels[is_test]}, last)
                )
        # The ready counter is made in begin(), and lies on the server too.
        with v1.device("/job:ps/task:0"):
            if index == 0:
                session = v1.train.MonitoredTrainingSession(
                    server.target, True, options.folder, hooks=hooks, config=config,
                    # waits: the chief's queue runner does not end by itself. It is given up after these seconds, and
                    # prints a CancelledError, which means nothing.
                    stop_grace_period_secs=3,
                )  # fmt: skip
            else:
                creator = WorkerCreator(server.target, v1.train.Scaffold(), config)
                session = v1.train.MonitoredSession(creator, hooks, stop_grace_period_secs=3)
        rng = np.random.default_rng(index)
        with session:
            while not session.should_stop():
                rows = rng.choice(len(x), 32, replace=False)
                session.run(training, {image: x[rows], label: y[rows]})
        with v1.Session(server.target, config=config) as ending:
            ending.run(done)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job-name", choices=("ps", "worker"), required=True)
    parser.add_argument("--task-index", type=int, default=0)
    parser.add_argument("--ps-hosts", default="localhost:2222")
    parser.add_argument("--worker-hosts", default="localhost:2223,localhost:2224")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--asynchronous",
        action="store_true",
        help="no worker waits for another; --steps counts all",
    )
    parser.add_argument("--folder", help="where the chief, worker 0, keeps checkpoints")
    options = parser.parse_args()
    cluster = tf.train.ClusterSpec(
        {"ps": options.ps_hosts.split(","), "worker": options.worker_hosts.split(",")}
    )
    server = v1.train.Server(cluster, options.job_name, options.task_index)
    if options.job_name == "ps":
        serve(server, cluster.num_tasks("worker"))
    else:
        work(server, cluster, options)


if __name__ == "__main__":
    main()
