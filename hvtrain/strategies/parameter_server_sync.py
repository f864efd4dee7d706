"""TensorFlow's parameter servers, synchronous: a step averages the workers' gradients, and drops late ones."""

from typing import Any

import keras
import tensorflow as tf

from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError
from hvtrain.step.joint_loss import joint_loss
from hvtrain.strategies.parameter_server_async import ParameterServerStrategy, Steps
from hvtrain.strategies.worker_step import ServerState, Workers, compute, packed
from hvtrain.watchdog.progress import EXCHANGE


class SyncParameterServerStrategy(ParameterServerStrategy):
    """Each worker takes the batches of one rank of the plan; the servers step on the mean of their gradients.

    Args:
        replicas_to_aggregate: gradients that a step waits for; None: those of all workers. With fewer, the others are
            backups: a gradient that arrives after its step is dropped.
        servers: the arguments of ParameterServerStrategy.
    """

    name = "parameter_server_sync"

    def __init__(self, replicas_to_aggregate: int | None = None, **servers: Any) -> None:
        super().__init__(**servers)
        self._wanted = replicas_to_aggregate
        self.num_dropped = 0
        self._has_embedding = False

    @property
    def differences(self) -> list[str]:  # type: ignore[override]
        found = ["moving statistics are averaged over the workers after each step"]
        if self._has_embedding:
            found.append("gradients of an embedding's row are summed before Adam or a clipped norm squares them")
        if self.num_needed < self.num_replicas:
            found.append(
                f"a step takes the first {self.num_needed} of {self.num_replicas} gradients, and drops late ones"
            )
        if self.num_dropped:
            found.append(f"dropped {self.num_dropped:,} stale gradients")
        return found

    def prepare(self, model: keras.Model) -> None:
        super().prepare(model)
        self._has_embedding = any(isinstance(layer, keras.layers.Embedding) for layer in model._flatten_layers())

    @property
    def num_needed(self) -> int:
        """Gradients that a step waits for."""
        return self._wanted or self.num_replicas

    def check_workers(self, number: int) -> None:
        wanted = self._wanted
        if wanted is not None and (type(wanted) is not int or not 1 <= wanted <= number):
            raise ConfigError(
                f"strategy.replicas_to_aggregate={wanted} is not a whole number from 1 to the {number} "
                f"worker{'s' * (number > 1)} of this run, nor null"
            )
        self.num_replicas = number

    def distribute_loss(self, loss: keras.losses.Loss) -> keras.losses.Loss:
        return joint_loss(loss, self._refuse_denominator, lambda: self.num_replicas)

    def _refuse_denominator(self, number: tf.Tensor) -> tf.Tensor:
        if self.num_replicas == 1:
            return number
        raise ConfigError(
            f"strategy={self.name} averages the workers' gradients, and this loss divides by what a batch holds (a "
            "mask, ignored labels, or weights), which would make the mean wrong; choose strategy=horovod"
        )

    def fit(self, model: keras.Model, batches_from: Any, plan: StepPlan, *more: Any) -> None:
        self.num_dropped = 0
        super().fit(model, batches_from, plan, *more)

    def steps_of(self, model: keras.Model, state: ServerState, workers: Workers, step: int) -> "SyncSteps":
        return SyncSteps(self, model, state, workers, step, self._check_finite)

    def start(self) -> Topology:
        topology = super().start()
        self.num_dropped = 0
        return topology

    def words(self) -> str:
        return f"synchronous ({self.num_needed} of {self.num_replicas} gradients a step)"


class SyncSteps(Steps):
    """Each worker writes its results into its own row beside each variable, and the step reads these rows.

    So a step uses the same workers for all variables, adds in the order of the workers, and has no late gradient in it.
    """

    strategy: SyncParameterServerStrategy

    def trace(self, spec: Any) -> None:
        self._places: dict[int, tf.Variable] = {}
        self._parts: list[Any] = []
        scalar = tf.TensorSpec([], tf.int64)
        function = tf.function(self.on_worker_number, autograph=False)
        self._function = function.get_concrete_function(spec, scalar, scalar)
        taken = tf.TensorSpec([self.workers.number], tf.bool)
        self._apply = tf.function(self.on_servers, autograph=False).get_concrete_function(taken)

    @tf.autograph.experimental.do_not_convert
    def on_worker_number(self, batch: Any, number: tf.Tensor, worker: tf.Tensor) -> tf.Tensor:
        """Computes on the worker's part of the joint batch, and writes the results into the worker's rows."""
        with self.state.traced():
            found = compute(self.model, batch, number, self.check_finite)
            gradients = [(one, value) for one, value in zip(found.variables, found.gradients) if value is not None]
            self._parts = [[one for one, _ in group] for group in (gradients, found.counts, found.statistics)]
            for variable, value in (*gradients, *found.counts, *found.statistics):
                row = tf.cast(tf.convert_to_tensor(value), variable.dtype)[None]
                place = self._place(variable)
                with tf.device(place.device):
                    place.scatter_update(tf.IndexedSlices(row, worker[None]))
        self._names = sorted(found.result)
        return packed(found.result)

    def _place(self, variable: keras.Variable) -> tf.Variable:
        """A row for each worker, on the server that holds the variable. Gradients of embeddings become dense there."""
        if id(variable) not in self._places:
            with tf.init_scope(), tf.device(variable.value.device):
                blank = tf.zeros([self.workers.number, *variable.shape], variable.dtype)
                self._places[id(variable)] = tf.Variable(blank, trainable=False, name="gradients")
        return self._places[id(variable)]

    @tf.autograph.experimental.do_not_convert
    def on_servers(self, taken: tf.Tensor) -> None:
        """Does one step with the results of some workers. taken: which ones, bool [workers]."""
        with self.state.traced():
            trained, counted, averaged = self._parts
            gradients = [self._sum(variable, taken, is_mean=True) for variable in trained]
            self.model.optimizer.apply(gradients, trained)
            for variable in counted:
                variable.value.assign_add(self._sum(variable, taken, is_mean=False))
            for variable in averaged:
                variable.assign(self._sum(variable, taken, is_mean=True))

    def _sum(self, variable: keras.Variable, taken: tf.Tensor, is_mean: bool) -> tf.Tensor:
        place = self._place(variable)
        with tf.device(place.device):
            rows = place.read_value()
            # A late worker may be writing its row, which must not count.
            mask = tf.reshape(taken, [-1, *[1] * (rows.shape.rank - 1)])
            total = tf.reduce_sum(tf.where(mask, rows, tf.zeros([], rows.dtype)), axis=0)
            if not is_mean:
                return total
            number = tf.reduce_sum(tf.cast(taken, tf.float64))
            return (
                tf.cast(tf.cast(total, tf.float64) / number, total.dtype)
                if total.dtype.is_integer
                else (total / tf.cast(number, total.dtype))
            )

    def one(self, parts: list[Any]) -> None:
        """Does one step: every free worker begins its part, and a late one as soon as it is free."""
        step = self.step
        arrived: set[int] = set()
        for worker in self.workers.free:
            self._begin(worker, parts)
        with self.strategy.watchdog.phase(EXCHANGE):
            while len(arrived) < self.strategy.num_needed:
                for worker, of, result in self.workers.finished():
                    self._latest = result
                    if of == step:
                        arrived.add(worker)
                        self.strategy.steps_by_worker[worker] += 1
                    else:
                        self.strategy.num_dropped += 1
                        self._begin(worker, parts)
            taken = tf.constant([worker in arrived for worker in range(self.workers.number)])
            with tf.device("/job:ps/replica:0/task:0"):
                self._apply(taken)

    def _begin(self, worker: int, parts: list[Any]) -> None:
        number = self.step * self.workers.number + worker
        which = (tf.constant(number, tf.int64), tf.constant(worker, tf.int64))
        self.workers.call(worker, self.step, self._function, parts[worker], *which)

    def settle(self) -> None:
        """Copies the servers' state to the model. Late workers go on: they change only their own places."""
        if self._is_settled:
            return
        self._ended()
        self.state.pull(everything=True)
        self._is_settled = True
