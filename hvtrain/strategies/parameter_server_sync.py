"""TensorFlow's parameter servers, synchronous: a step averages the workers' gradients.

With backup workers, a step waits for the first gradients only, and drops late ones (Chen et al.
2016, "Revisiting Distributed Synchronous SGD", arXiv:1604.00981).
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvtrain.errors import ConfigError
from hvtrain.step.joint_loss import joint_loss
from hvtrain.strategies.parameter_server_async import ParameterServerStrategy
from hvtrain.strategies.worker_step import Computed
from hvtrain.watchdog.progress import EXCHANGE


class SyncParameterServerStrategy(ParameterServerStrategy):
    """Each worker takes the batches of one rank of the plan; a step takes their mean gradient.

    Each worker writes its results into a row of its own beside each variable. So a step uses the
    same workers for all variables, adds in the order of the workers, and has no late gradient in
    it.

    Args:
        replicas_to_aggregate: gradients that a step waits for; None: those of all workers. With
            fewer, the others are backups: a gradient that arrives after its step is dropped.
        servers: the arguments of ParameterServerStrategy.
    """

    name = "parameter_server_sync"
    # Gradients that came after their step.
    num_dropped = 0

    def __init__(self, replicas_to_aggregate: int | None = None, **servers: Any) -> None:
        super().__init__(**servers)
        self._replicas_to_aggregate = replicas_to_aggregate
        self._has_embedding = False

    @property
    def differences(self) -> list[str]:  # type: ignore[override]
        differences = ["moving statistics are averaged over the workers after each step"]
        if self._has_embedding:
            differences.append("gradients of an embedding's row are summed before Adam or a clipped norm squares them")
        if self.num_needed < self.num_replicas:
            differences.append(
                f"a step takes the first {self.num_needed} of {self.num_replicas} gradients, and drops late ones"
            )
        if self.num_dropped:
            differences.append(f"dropped {self.num_dropped:,} stale gradients")
        return differences

    @property
    def num_needed(self) -> int:
        """Gradients that a step waits for."""
        return self._replicas_to_aggregate or self.num_replicas

    @property
    def mode(self) -> str:  # type: ignore[override]
        return f"synchronous ({self.num_needed} of {self.num_replicas} gradients a step)"

    def check_workers(self, number: int) -> None:
        needed = self._replicas_to_aggregate
        if needed is not None and (type(needed) is not int or not 1 <= needed <= number):
            raise ConfigError(
                f"strategy.replicas_to_aggregate={needed} is not a whole number from 1 to the "
                f"{number} worker{'s' * (number > 1)} of this run, nor null"
            )
        self.num_replicas = number

    def prepare(self, model: keras.Model) -> None:
        super().prepare(model)
        self._has_embedding = any(isinstance(layer, keras.layers.Embedding) for layer in model._flatten_layers())

    def make_steps(self, *arguments: Any) -> Callable[[int], dict[str, Any]]:
        self.num_dropped = 0
        self._rows: dict[int, tf.Variable] = {}
        do_steps = super().make_steps(*arguments)
        arrived = tf.TensorSpec([self.num_replicas], tf.bool)
        self._apply = tf.function(self.on_servers, autograph=False).get_concrete_function(arrived)
        return do_steps

    def store(self, computed: Computed, worker: tf.Tensor) -> None:
        """Writes the results into the worker's rows."""
        self._computed = computed
        for variable, value in (*computed.gradients, *computed.counts, *computed.statistics):
            row = tf.cast(tf.convert_to_tensor(value), variable.dtype)[None]
            rows = self._rows_of(variable)
            with tf.device(rows.device):
                rows.scatter_update(tf.IndexedSlices(row, worker[None]))

    def _rows_of(self, variable: keras.Variable) -> tf.Variable:
        """Returns rows for the workers, on the server that holds the variable."""
        # Dense, also for the gradients of embeddings.
        if id(variable) not in self._rows:
            with tf.init_scope(), tf.device(variable.value.device):
                blank = tf.zeros([self.num_replicas, *variable.shape], variable.dtype)
                self._rows[id(variable)] = tf.Variable(blank, trainable=False, name="gradients")
        return self._rows[id(variable)]

    @tf.autograph.experimental.do_not_convert
    def on_servers(self, arrived: tf.Tensor) -> None:
        """Does one step with the results of the workers that arrived, bool [workers]."""
        with self.state.traced():
            trained = [variable for variable, _ in self._computed.gradients]
            self.model.optimizer.apply([self._mean(variable, arrived) for variable in trained], trained)
            for variable, _ in self._computed.counts:
                variable.value.assign_add(self._sum(variable, arrived))
            for variable, _ in self._computed.statistics:
                variable.assign(self._mean(variable, arrived))

    def _sum(self, variable: keras.Variable, arrived: tf.Tensor) -> tf.Tensor:
        rows = self._rows_of(variable)
        with tf.device(rows.device):
            values = rows.read_value()
            # A late worker may be writing its row, which must not count.
            mask = tf.reshape(arrived, [-1, *[1] * (values.shape.rank - 1)])
            return tf.reduce_sum(tf.where(mask, values, tf.zeros([], values.dtype)), axis=0)

    def _mean(self, variable: keras.Variable, arrived: tf.Tensor) -> tf.Tensor:
        total = self._sum(variable, arrived)
        with tf.device(self._rows_of(variable).device):
            number = tf.reduce_sum(tf.cast(arrived, tf.float64))
            # In float64, which holds each integer of 32 bits.
            if total.dtype.is_integer:
                return tf.cast(tf.cast(total, tf.float64) / number, total.dtype)
            return total / tf.cast(number, total.dtype)

    def do_step(self, parts: list[Any]) -> None:
        """Does one step. Every free worker begins its part, a late one once it is free."""
        arrived: set[int] = set()

        def begin(worker: int) -> None:
            # The number differs between steps and between workers, so that each draws its own
            # dropout.
            self.begin(worker, parts[worker], self.step * self.num_replicas + worker)

        for worker in self.workers.free:
            begin(worker)

        with self.watchdog.phase(EXCHANGE):
            while len(arrived) < self.num_needed:
                for worker, step, result in self.workers.finished():
                    self._latest = result
                    if step == self.step:
                        arrived.add(worker)
                        self.steps_by_worker[worker] += 1
                    else:
                        # A backup worker: its row belongs to an earlier step.
                        self.num_dropped += 1
                        begin(worker)
            mask = tf.constant([worker in arrived for worker in range(self.num_replicas)])
            # Called on a server: operations without a device of their own run there, not here.
            with tf.device("/job:ps/replica:0/task:0"):
                self._apply(mask)

    def wait(self) -> None:
        """Returns at once: late workers go on, and change only their own rows."""

    def distribute_loss(self, loss: keras.losses.Loss) -> keras.losses.Loss:
        return joint_loss(loss, self._refuse_denominator, lambda: self.num_replicas)

    def _refuse_denominator(self, number: tf.Tensor) -> tf.Tensor:
        """Stands in for the denominator's mean over the workers, which have no collective."""
        if self.num_replicas == 1:
            return number
        raise ConfigError(
            f"strategy={self.name} averages the workers' gradients, and this loss divides by what "
            "a batch holds (a mask, ignored labels, or weights), which would make the mean wrong; "
            "choose strategy=horovod"
        )
