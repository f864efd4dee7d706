"""TensorFlow's parameter servers, asynchronous or synchronous.

A synchronous step uses the mean of the workers' gradients.
"""

from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

import hvtrain.keras as hvd
from hvtrain.config.validate import check_whole
from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology, reduced
from hvtrain.errors import ConfigError
from hvtrain.keras.over_ranks import synchronized_layers
from hvtrain.step.joint_loss import joint_loss, refuse_joint_batch
from hvtrain.step.step_timing import StepMarks
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.loop import CallSteps, Steps, build_metrics
from hvtrain.strategies.mirrored import LOST_PROCESS_ERRORS
from hvtrain.strategies.ps_cluster import join_cluster, serve, worker_ranks
from hvtrain.strategies.worker_step import ServerState, StepResults, Workers, compute, reader
from hvtrain.system.text import counted
from hvtrain.watchdog.progress import EXCHANGE


class ParameterServerStrategy(Strategy):
    """Asynchronous training: servers hold the variables, and workers do not wait for each other.

    Rank 0, the coordinator, executes the run; the next num_ps ranks are servers, and the others are
    workers. The plan is that of a single rank: a step is one batch, on whichever worker is free.

    Args:
        num_ps: number of parameter servers.
        share_gpus: let several workers of a host use one GPU (for experiments).
    """

    name = "parameter_server"
    unit = "workers in a step"
    mode = "asynchronous"
    augments_in_step = False
    takes_varying_shapes = False  # Not tested.
    takes_short_batches = False
    can_restart = False
    differences = (
        "a step is one batch of train.batch_size on one worker, so the learning rate is not scaled",
        "gradients can be stale: computed before the steps of other workers",
    )
    steps_by_worker: list[int]  # Set by make_steps.

    def __init__(self, num_ps: int = 1, share_gpus: bool = False) -> None:
        super().__init__()
        check_whole("strategy.num_ps", num_ps, 1)
        self.num_ps = num_ps
        self.share_gpus = share_gpus

    @property
    def num_computing(self) -> int:
        return self.cluster.roles.num_workers

    def start(self) -> Topology:
        """Joins the cluster. Returns only on the coordinator; the others serve until it ends."""
        self.cluster = join_cluster(self.num_ps, self.name, self.share_gpus, self.check_workers)
        if self.cluster.rank:
            serve(self.cluster)
        self.devices = self.cluster.devices
        self.marks = StepMarks()
        # Set by hand, because TensorFlow lists the workers' GPUs here too, though this process
        # waits for none of them.
        self.marks.host_only = True
        return self.topology

    def check_workers(self, num_workers: int) -> None:
        """Raises ConfigError if the settings do not fit this number of workers (every process)."""

    def hosts(self) -> list[str]:
        return self.cluster.hosts

    def start_watchdog(self, abort_seconds: float) -> None:
        self.comm.watchdog = self.cluster.watch(abort_seconds, self.marks)

    def distribute(self, optimizer: Optimizer, check_finite: bool) -> Optimizer:
        self.check_finite = check_finite  # Workers check their gradients before they send them.
        return optimizer

    def prepare(self, model: keras.Model) -> None:
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        combining = f"the optimizer {type(optimizer).__name__}, which combines several,"
        self.exclude(
            {
                "train.accumulate": optimizer.gradient_accumulation_steps,
                "train.precision=mixed_float16": optimizer is not model.optimizer,
                "train.jit_compile": model.jit_compile,
                "train.sync_batch_norm": synchronized_layers(model),
                combining: hasattr(optimizer, "optimizers"),
            }
        )

    def check_plan(self, plan: StepPlan) -> None:
        super().check_plan(plan)
        # Examples in each part of a step's batch. A synchronous step has a part for each worker.
        self.part_sizes = plan.on(self.num_replicas).batch_sizes

    def make_steps(
        self,
        model: keras.Model,
        batches: tf.data.Dataset,
        start_step: int,
        call_steps: CallSteps,
    ) -> Steps:
        self.steps_by_worker = [0] * self.num_computing
        # The servers hold the state of the metrics too, so it must exist before they copy it.
        build_metrics(model, batches.element_spec)
        self.model = model
        self.state = ServerState(model, self.cluster.replicas)
        self.workers = Workers(worker_ranks(self.cluster.roles))
        self.step = start_step
        self._is_due = call_steps.is_boundary
        self._is_settled = True
        self._read, specs = reader(iter(batches), self.marks, self.part_sizes)
        self._ended = tf.function(lambda: self.marks.ended([]), autograph=False)
        scalar = tf.TensorSpec([], tf.int64)
        function = tf.function(self.on_worker, autograph=False)
        # Parts of one size share a trace.
        self._functions = [function.get_concrete_function(spec, scalar, scalar) for spec in specs]
        # Before the first result, the logs have zeros.
        self._latest: Any = [0.0] * len(self._names)
        return self.do_steps

    def do_steps(self, num_steps: int) -> dict[str, Any]:
        """Takes this many steps, and returns the last one's logs.

        If callbacks may look at the model after the last step, it is first brought up to date with
        the servers, and no worker changes it while they run. Otherwise the workers continue
        meanwhile, and this process's copy of the weights stays as it was.
        """
        if self._is_settled:
            # Callbacks may have changed the model, such as its learning rate.
            self.state.push()
            self._is_settled = False
        for _ in range(num_steps):
            self.do_step(self._read())
            self.step += 1
        if self._is_due(self.step):
            self.settle()
        else:
            self.state.pull(all_variables=False)

        # The metrics so far, and other values from the last result.
        metrics = self.model.get_metrics_result()
        return {name: metrics.get(name, value) for name, value in zip(self._names, self._latest)}

    @tf.autograph.experimental.do_not_convert
    def on_worker(self, batch: Any, seed_offset: tf.Tensor, worker: tf.Tensor) -> tf.Tensor:
        """Computes and stores the results of a batch, on the worker that calls it.

        Returns the values of the logs, sorted by name, as one float32 vector.
        """
        # A part's sum times this ratio, averaged over the parts, is the batch's sum.
        self.batch_over_part = sum(self.part_sizes) / tf.nest.flatten(batch)[0].shape[0]
        with self.state.tracing():
            computed = compute(self.model, batch, seed_offset, self.check_finite)
            self.store(computed, worker)
        self._names = sorted(computed.result)
        # In one tensor, because each value would need its own fetch from the worker.
        means = [tf.reduce_mean(computed.result[name]) for name in self._names]
        return tf.stack([tf.cast(mean, tf.float32) for mean in means] or [0.0])

    def store(self, computed: StepResults, worker: tf.Tensor) -> None:
        """Applies the results to the servers' variables."""
        variables, gradients = zip(*computed.gradients)
        self.model.optimizer.apply(gradients, variables)
        # Added on the server, so that no worker's count is lost between a read and a write.
        for variable, count in computed.counts:
            variable.value.assign_add(count)
        for variable, value in computed.statistics:
            variable.assign(value)

    def begin(self, worker: int, parts: list[Any]) -> None:
        """Gives a free worker its own part of the batch or, if the batch is not split, the only part."""
        index = worker % len(parts)
        # Differs between steps and between parts, so that each draws its own dropout masks.
        seed_offset = tf.constant(self.step * len(parts) + index, tf.int64)
        function = self._functions[index]
        sender = tf.constant(worker, tf.int64)
        self.workers.call(worker, self.step, function, parts[index], seed_offset, sender)

    def do_step(self, parts: list[Any]) -> None:
        """Gives the batch, which has only one part, to a worker as soon as one is free."""
        if not self.workers.free:
            self.record_finished()
        self.begin(self.workers.free[0], parts)

    def record_finished(self) -> None:
        """Waits until a call has finished; counts the finished calls, and keeps the last result for the logs."""
        for worker, _, result in self.workers.finished():
            self._latest = result
            self.steps_by_worker[worker] += 1

    def settle(self) -> None:
        """Waits for all workers and brings the model up to date with the servers."""
        if self._is_settled:
            return
        with self.watchdog.phase(EXCHANGE):
            self.wait()
            # Closes the last step, so that it does not include the time of callbacks.
            self._ended()
            self.state.pull(all_variables=True)
        self._is_settled = True

    def wait(self) -> None:
        """Waits until no worker will change the servers' model."""
        while self.workers.calls:
            self.record_finished()

    def is_lost_rank(self, error: BaseException) -> bool:
        return isinstance(error, LOST_PROCESS_ERRORS)

    def stop(self) -> None:
        self.watchdog.stop()
        hvd.shutdown()  # Needed only if the run failed before the processes left Horovod.

    def description(self) -> str:
        return (
            f"coordinator of {self.num_ps} ps and {counted(self.num_computing, 'worker')}, "
            f"{self.mode}; started by Horovod on {self.cluster.launcher}"
        )


class SyncParameterServerStrategy(ParameterServerStrategy):
    """Synchronous training: a step uses the mean gradient of the workers.

    Each worker takes the batches of one rank of the plan.

    With backup workers, a step waits only for the first gradients, and drops late ones (Chen et al.
    2016, "Revisiting Distributed Synchronous SGD", arXiv:1604.00981). A worker with a larger batch has a
    proportionally larger weight in the mean.

    Next to each variable, on its server, each worker has its own row for its results. So a step uses
    the same workers for all variables, adds their rows in the order of the workers, and includes no
    late gradient.

    Args:
        replicas_to_aggregate: number of gradients that a step waits for; None: one from each worker. With
            fewer, the rest are backups: a gradient that arrives after its step is dropped.
        servers: the arguments of ParameterServerStrategy.
    """

    name = "parameter_server_sync"
    # Number of gradients that came after their step.
    num_dropped = 0

    def __init__(self, replicas_to_aggregate: int | None = None, **servers: Any) -> None:
        super().__init__(**servers)
        self._replicas_to_aggregate = replicas_to_aggregate

    @property
    def differences(self) -> list[str]:  # type: ignore[override]
        differences = [
            "moving statistics are averaged over the workers after each step",
            "gradients of an embedding's row are summed before Adam or a clipped norm squares them",
        ]
        if self.num_needed < self.num_replicas:
            differences.append(
                f"a step takes the first {self.num_needed} of {self.num_replicas} gradients, and drops late ones"
            )
        if self.num_dropped:
            ending = "s" * (self.num_dropped != 1)
            differences.append(f"dropped {self.num_dropped:,} stale gradient{ending}")
        return differences

    def check_workers(self, num_workers: int) -> None:
        needed = self._replicas_to_aggregate
        if needed is not None and (type(needed) is not int or not 1 <= needed <= num_workers):
            raise ConfigError(
                f"strategy.replicas_to_aggregate={needed} does not fit the {counted(num_workers, 'worker')} of this "
                f"run; choose a whole number from 1 to {num_workers}, or null for all"
            )
        self.num_replicas = num_workers
        # Number of gradients that a step waits for.
        self.num_needed = needed or num_workers
        self.mode = f"synchronous ({self.num_needed} of {num_workers} gradients a step)"

    def make_steps(self, *arguments: Any) -> Steps:
        self.num_dropped = 0
        self._rows: dict[int, tf.Variable] = {}
        do_steps = super().make_steps(*arguments)
        arrived = tf.TensorSpec([self.num_replicas], tf.int32)
        self._apply = tf.function(self.on_servers, autograph=False).get_concrete_function(arrived)
        return do_steps

    def store(self, computed: StepResults, worker: tf.Tensor) -> None:
        """Writes the results into the worker's rows."""
        self._computed = computed
        for variable, value in (*computed.gradients, *computed.counts, *computed.statistics):
            row = tf.cast(tf.convert_to_tensor(value), variable.dtype)[None]
            rows = self._rows_of(variable)
            with tf.device(rows.device):
                rows.scatter_update(tf.IndexedSlices(row, worker[None]))

    def _rows_of(self, variable: keras.Variable) -> tf.Variable:
        """Returns the variable's rows [workers, ...], which are on its server."""
        # Rows are dense, even for the gradients of embeddings.
        if id(variable) not in self._rows:
            with tf.init_scope(), tf.device(variable.value.device):
                blank = tf.zeros([self.num_replicas, *variable.shape], variable.dtype)
                self._rows[id(variable)] = tf.Variable(blank, trainable=False, name="gradients")
        return self._rows[id(variable)]

    @tf.autograph.experimental.do_not_convert
    def on_servers(self, arrived: tf.Tensor) -> None:
        """Takes one step with the results of some workers.

        Args:
            arrived: [workers], 1 for each worker whose results count, otherwise 0.
        """
        weights = arrived * tf.constant(reduced(self.part_sizes))
        with self.state.tracing():
            trained = [variable for variable, _ in self._computed.gradients]
            means = [self._mean(variable, weights) for variable in trained]
            self.model.optimizer.apply(means, trained)
            for variable, _ in self._computed.counts:
                variable.value.assign_add(self._sum(variable, arrived))
            for variable, _ in self._computed.statistics:
                variable.assign(self._mean(variable, weights))

    def _sum(self, variable: keras.Variable, weights: tf.Tensor) -> tf.Tensor:
        rows = self._rows_of(variable)
        with tf.device(rows.device):
            values = rows.read_value()
            factors = tf.cast(weights, values.dtype)
            factors = tf.reshape(factors, [-1, *[1] * (values.shape.rank - 1)])
            # A late worker may be writing its row. That row must not count, even if it is not finite
            # (0 x NaN is NaN).
            return tf.reduce_sum(tf.where(factors > 0, values * factors, 0), axis=0)

    def _mean(self, variable: keras.Variable, weights: tf.Tensor) -> tf.Tensor:
        total = self._sum(variable, weights)
        with tf.device(self._rows_of(variable).device):
            total_weight = tf.reduce_sum(tf.cast(weights, tf.float64))
            # In float64, which represents every 32-bit integer exactly.
            if total.dtype.is_integer:
                return tf.cast(tf.cast(total, tf.float64) / total_weight, total.dtype)
            return total / tf.cast(total_weight, total.dtype)

    def do_step(self, parts: list[Any]) -> None:
        """Takes one step. Every free worker begins its part immediately, and a late one as soon as it is free."""
        arrived: set[int] = set()
        for worker in self.workers.free:
            self.begin(worker, parts)

        with self.watchdog.phase(EXCHANGE):
            while len(arrived) < self.num_needed:
                for worker, step, result in self.workers.finished():
                    self._latest = result
                    if step == self.step:
                        arrived.add(worker)
                        self.steps_by_worker[worker] += 1
                    else:
                        # A late worker, whose row belongs to an earlier step.
                        self.num_dropped += 1
                        self.begin(worker, parts)
            mask = tf.constant([int(worker in arrived) for worker in range(self.num_replicas)])
            # Operations without a device of their own then run on a server, not on the coordinator.
            with tf.device("/job:ps/replica:0/task:0"):
                self._apply(mask)

    def wait(self) -> None:
        """Returns immediately: late workers change only their own rows."""

    def distribute_loss(self, loss: keras.losses.Loss) -> keras.losses.Loss:
        refuse_joint_batch(loss, self.name)
        return joint_loss(loss, self._refuse_denominator, lambda: self.batch_over_part)

    def _refuse_denominator(self, denominator: tf.Tensor) -> tf.Tensor:
        """Stands in for the mean of the workers' denominators.

        Workers have no collective, so it raises ConfigError if there are several.
        """
        if self.num_replicas == 1:
            return denominator
        raise ConfigError(
            f"strategy={self.name} averages the workers' gradients, but this loss divides by a number "
            "that depends on the batch (a mask, ignored labels, or weights), which would make the mean "
            "wrong; choose strategy=horovod"
        )
