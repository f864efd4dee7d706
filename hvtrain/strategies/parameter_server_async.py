"""TensorFlow's parameter servers, asynchronous: each batch goes to a free worker, and no worker waits for another."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import hvtrain.keras as hvd
from hvtrain.core.step_plan import StepPlan
from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError, UserError
from hvtrain.step.step_timing import StepMarks
from hvtrain.strategies.base import Strategy, build_metrics
from hvtrain.strategies.loop import CallSteps, train
from hvtrain.strategies.ps_cluster import WORKER, Cluster, error_of, join_cluster, serve
from hvtrain.strategies.worker_step import ServerState, Workers, compute, packed, reader
from hvtrain.watchdog.progress import EXCHANGE

# Errors of TensorFlow when a process of the cluster is gone.
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)


class ParameterServerStrategy(Strategy):
    """Rank 0, the coordinator, executes the run; the next num_ps ranks hold the variables; others compute gradients.

    The plan is that of one rank: a step is one batch, on whichever worker is free.

    Args:
        num_ps: parameter servers.
        share_gpus: let several workers of a host use one GPU (for experiments).
    """

    name = "parameter_server"
    cluster: Cluster
    steps_by_worker: list[int]

    def __init__(self, num_ps: int = 1, share_gpus: bool = False) -> None:
        super().__init__()
        if type(num_ps) is not int or num_ps < 1:
            raise ConfigError(f"strategy.num_ps={num_ps} is not a whole number of 1 or more")
        self.num_ps, self.share_gpus = num_ps, share_gpus
        self._check_finite = False
        self.steps_by_worker = []

    @property
    def differences(self) -> list[str]:  # type: ignore[override]
        return [
            "a step is one batch of train.batch_size on one worker, so the learning rate is not scaled",
            "gradients can be stale: computed before the steps of other workers",
        ]

    @property
    def num_computing(self) -> int:
        return self.cluster.num_workers

    def start(self) -> Topology:
        """Joins the cluster. Only the coordinator returns; the other processes serve until it ends."""
        self.cluster = join_cluster(self.num_ps, self.name, self.share_gpus, self.check_workers)
        if self.cluster.rank:
            serve(self.cluster)
        self.devices = self.cluster.devices
        self.marks = StepMarks()
        self.marks.host_only = True
        return self.topology

    def check_workers(self, number: int) -> None:
        """Raises ConfigError if the settings do not fit this number of workers (every process)."""

    def hosts(self) -> list[str]:
        return self.cluster.hosts

    def start_watchdog(self, abort_seconds: float) -> None:
        self.comm.watchdog = self.cluster.watch(abort_seconds, self.marks)

    def distribute(
        self, optimizer: keras.optimizers.Optimizer, check_finite: bool = False, divide_losses: bool = False
    ) -> keras.optimizers.Optimizer:
        self._check_finite = check_finite
        return optimizer

    def prepare(self, model: keras.Model) -> None:
        from hvtrain.keras.sync_batch_norm import SyncBatchNormalization

        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        refused = {
            "train.accumulate": optimizer.gradient_accumulation_steps,
            "train.precision=mixed_float16": optimizer is not model.optimizer,
            "train.jit_compile": model.jit_compile,
            "train.sync_batch_norm": any(isinstance(one, SyncBatchNormalization) for one in model._flatten_layers()),
            f"the optimizer {type(optimizer).__name__}, which combines several,": hasattr(optimizer, "optimizers"),
        }
        for setting, is_set in refused.items():
            if is_set:
                raise ConfigError(f"strategy={self.name} and {setting} exclude each other; leave one of them out")

    def fit(
        self,
        model: keras.Model,
        batches_from: Callable[[int], tf.data.Dataset],
        plan: StepPlan,
        start_step: int,
        callbacks: list[keras.callbacks.Callback],
        call_steps: CallSteps,
    ) -> None:
        number = self.num_replicas
        if not plan.is_full or plan.global_batch % number or len(set(plan.batch_sizes)) > 1:
            raise ConfigError(
                f"strategy={self.name} needs batches of one size in all steps; choose data.uneven=trim and one number "
                "as train.batch_size"
            )
        build_metrics(model, batches_from(start_step).element_spec)
        self.steps_by_worker = [0] * self.cluster.num_workers
        assert self.cluster.replicas
        state = ServerState(model, self.cluster.replicas)
        ranks = [rank for rank, role in enumerate(self.cluster.roles) if role.job == WORKER]
        steps = self.steps_of(model, state, Workers(self.cluster.num_workers, ranks), start_step)
        steps.is_due = lambda step: (
            step == plan.num_steps or plan.position(step)[1] == 0 or call_steps.is_boundary(step)
        )
        before_others = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: steps.settle())
        train(model, batches_from, plan, start_step, [before_others, *callbacks], call_steps, self.marks, make=steps)

    def steps_of(self, model: keras.Model, state: ServerState, workers: Workers, step: int) -> "Steps":
        """Returns the object that does the steps of the run, from `step` on."""
        return Steps(self, model, state, workers, step, self._check_finite)

    def cause_of(self, error: BaseException) -> UserError | None:
        verdict = self.watchdog.cause() if isinstance(error, _LOST) else None
        return error_of(verdict, self.watchdog) if verdict else None

    def expect_restart(self) -> None:
        raise ConfigError(
            f"comm.tune=true tunes Horovod's reductions, which strategy={self.name} does not use; leave it out"
        )

    def stop(self) -> None:
        self.watchdog.stop()
        hvd.shutdown()  # In case of a failure before the processes have left Horovod.

    def description(self) -> str:
        workers = self.cluster.num_workers
        return (
            f"coordinator of {self.num_ps} ps and {workers} worker{'s' * (workers > 1)}, {self.words()}; "
            f"started by Horovod on {self.cluster.launcher}"
        )

    def words(self) -> str:
        return "asynchronous"


class Steps:
    """Does steps on the workers. A call with the iterator of batches returns the function that loop.train needs.

    After a step for which `is_due` is true, no worker is busy and the coordinator's model is that of the servers.
    After other steps, workers go on while callbacks act, and the coordinator's weights stay as they were.
    """

    is_due: Callable[[int], bool]

    def __init__(
        self,
        strategy: "ParameterServerStrategy",
        model: keras.Model,
        state: ServerState,
        workers: Workers,
        step: int,
        check_finite: bool,
    ) -> None:
        self.strategy, self.model, self.state, self.workers = strategy, model, state, workers
        self.step = step
        self.check_finite = check_finite
        self._is_settled = True
        self._names: list[str] = []
        self._latest: Any = None
        self._ended = tf.function(lambda: strategy.marks.ended([]), autograph=False)

    def __call__(self, batches: Any) -> Callable[[int], dict[str, Any]]:
        read, spec = reader(batches, self.strategy.marks, self.strategy.num_replicas)
        self.trace(spec)

        def several(number: int) -> dict[str, Any]:
            if self._is_settled:
                self.state.push()
                self._is_settled = False
            for _ in range(number):
                self.one(read())
                self.step += 1
            if self.is_due(self.step):
                self.settle()
            else:
                self.state.pull(everything=False)
            return self.logs()

        return several

    def trace(self, spec: Any) -> None:
        """Traces the function that a worker runs on a batch of this spec."""
        number = tf.TensorSpec([], tf.int64)
        self._function = tf.function(self.on_worker, autograph=False).get_concrete_function(spec, number)

    @tf.autograph.experimental.do_not_convert
    def on_worker(self, batch: Any, number: tf.Tensor) -> tf.Tensor:
        """Computes gradients and applies them to the servers' variables. The servers add to sums and counters."""
        with self.state.traced():
            found = compute(self.model, batch, number, self.check_finite)
            self.model.optimizer.apply(found.gradients, found.variables)
            for variable, count in found.counts:
                variable.value.assign_add(count)
            for variable, value in found.statistics:
                variable.assign(value)
        self._names = sorted(found.result)
        return packed(found.result)

    def one(self, parts: list[Any]) -> None:
        """Gives the batch, which has only one part, to a worker once one is free."""
        if not self.workers.free:
            self.take(self.workers.finished())
        self.workers.call(self.workers.free[0], self.step, self._function, parts[0], tf.constant(self.step, tf.int64))

    def take(self, ended: list[tuple[int, int, Any]]) -> None:
        for worker, _, self._latest in ended:
            self.strategy.steps_by_worker[worker] += 1

    def settle(self) -> None:
        """Waits for all workers and copies the servers' state to the model, unless the model is up to date."""
        if self._is_settled:
            return
        with self.strategy.watchdog.phase(EXCHANGE):
            self.take(self.workers.join())
            self._ended()
            self.state.pull(everything=True)
        self._is_settled = True

    def logs(self) -> dict[str, Any]:
        """The metrics so far, and what else the last step returned."""
        metrics = self.model.get_metrics_result()
        own = {} if self._latest is None else dict(zip(self._names, self._latest))
        return {name: metrics.get(name, own.get(name, 0.0)) for name in self._names}
