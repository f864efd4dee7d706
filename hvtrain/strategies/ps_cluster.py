"""Joins the processes of a run with parameter servers into a TensorFlow cluster, and ends them.

Horovod's launchers start the processes, so each has a rank. They exchange addresses through Horovod, start the watchdog
and leave Horovod. From then on they communicate through TensorFlow's servers, and the watchdog ends them.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

import hvtrain.keras as hvd
from hvtrain import watchdog
from hvtrain.errors import ConfigError, FailedRankError, LostRankError, RankError, UserError
from hvtrain.keras.devices import View, _uuids, choose_gpus, visible_names
from hvtrain.keras.devices import exchange
from hvtrain.launch.by_hand import BY_HAND
from hvtrain.step.step_timing import StepMarks
from hvtrain.strategies.multi_worker_mirrored import cluster_addresses, refuse_own_cluster
from hvtrain.system import console
from hvtrain.watchdog import Watchdog, ending
from hvtrain.watchdog.judge import Verdict
from hvtrain.watchdog.progress import EXCHANGE

# With a single thread, a call that waits for an answer would block all others.
MIN_INTER_OP_THREADS = 2
INTER_OP_VARIABLE = "TF_NUM_INTEROP_THREADS"
# For watchdog.abort_seconds=0: no limit for a run without progress, but a lost process still ends it.
NO_LIMIT_SECONDS = 1e9


CHIEF, PS, WORKER = "chief", "ps", "worker"


@dataclass(frozen=True)
class Role:
    """A process's job in the cluster, and its number among those with that job."""

    job: str
    index: int

    def __str__(self) -> str:
        return "coordinator" if self.job == CHIEF else f"{self.job} {self.index}"


def roles_of(size: int, num_ps: int, name: str) -> list[Role]:
    """Roles by rank: the coordinator, then the parameter servers, then the workers. Raises ConfigError.

    >>> [str(role) for role in roles_of(4, 1, "parameter_server")]
    ['coordinator', 'ps 0', 'worker 0', 'worker 1']
    """
    if size < num_ps + 2:
        raise ConfigError(
            f"strategy={name} needs {num_ps + 2} processes or more (a coordinator, {num_ps} ps and a worker), and "
            f"the launcher started {size}; start it with horovodrun -np {num_ps + 3} for two workers, or "
            f"python -m hvtrain launch -np 2 --num-ps {num_ps}"
        )
    servers = [Role(PS, index) for index in range(num_ps)]
    return [Role(CHIEF, 0), *servers, *(Role(WORKER, index) for index in range(size - 1 - num_ps))]


def num_workers(roles: Sequence[Role]) -> int:
    return sum(role.job == WORKER for role in roles)


def choose_places(roles: list[Role], share_gpus: bool) -> tuple[list[str], list[int | None]]:
    """The host and the GPU of each rank; coordinator and parameter servers have no GPU (every process)."""
    visible = len(tf.config.list_physical_devices("GPU"))
    names = visible_names(os.environ.get("CUDA_VISIBLE_DEVICES"), visible)
    seen = exchange((socket.gethostname(), names, _uuids(visible)), "hvtrain.places")
    hosts = [host for host, *_ in seen]
    workers = [rank for rank, role in enumerate(roles) if role.job == WORKER]
    views = [
        View(hosts[rank], sum(hosts[other] == hosts[rank] for other in workers if other < rank), *seen[rank][1:])
        for rank in workers
    ]
    chosen = dict(zip(workers, choose_gpus(views, share_gpus)))
    return hosts, [chosen.get(rank) for rank in range(len(roles))]


@dataclass
class Cluster:
    """The cluster as one of its processes sees it. replicas: TensorFlow's strategy, on the coordinator alone."""

    rank: int
    roles: list[Role]
    hosts: list[str]
    devices: list[str]
    launcher: str
    replicas: tf.distribute.ParameterServerStrategy | None = None
    watchdog: Watchdog | None = None

    @property
    def num_workers(self) -> int:
        return num_workers(self.roles)

    @property
    def role(self) -> Role:
        return self.roles[self.rank]

    def watch(self, abort_seconds: float, marks: StepMarks | None) -> Watchdog:
        """Returns the watchdog over all processes. The first call starts it and leaves Horovod (every process)."""
        if self.watchdog:
            return self.watchdog
        self.watchdog = watchdog.start(
            self.rank,
            len(self.roles),
            f"{self.hosts[self.rank]} ({self.role})",
            abort_seconds or NO_LIMIT_SECONDS,
            exchange,
            lambda value: exchange(value)[0],
            marks or (lambda: (0, 0, 0, 0)),
            calls_launcher=hvd.local_rank() == 0,
        )
        hvd.shutdown()
        if type(self.watchdog) is Watchdog:
            raise RankError("the watchdog did not start, and nothing else would end the parameter servers and workers")
        return self.watchdog


# The one cluster that this process has joined.
_cluster: Cluster | None = None


def join_cluster(num_ps: int, name: str, share_gpus: bool, check_workers: Callable[[int], None]) -> Cluster:
    """Joins all processes into one cluster; TensorFlow's servers run when it returns (every process).

    Call it before TensorFlow has initialized a device; a later call returns the same cluster. check_workers is called
    with the number of workers, and raises ConfigError if it does not fit. Raises ConfigError and RankError.
    """
    global _cluster
    if _cluster is None:
        refuse_own_cluster(name)
        hvd.init()
        roles = roles_of(hvd.size(), num_ps, name)
        check_workers(num_workers(roles))
        _cluster = _join(roles, name, share_gpus)
    else:
        check_workers(_cluster.num_workers)
    return _cluster


def _join(roles: list[Role], name: str, share_gpus: bool) -> Cluster:
    rank = hvd.rank()
    _allow_threads()
    hosts, gpus = choose_places(roles, share_gpus)
    devices = [
        f"{host} {'CPU' if gpu is None else f'GPU {gpu}'} ({role})" for host, gpu, role in zip(hosts, gpus, roles)
    ]
    addresses = cluster_addresses(rank, name)
    jobs = {
        job: [at for at, role in zip(addresses, roles) if role.job == job]
        for job in dict.fromkeys(r.job for r in roles)
    }
    spec = tf.train.ClusterSpec(jobs)
    cluster = Cluster(rank, roles, hosts, devices, "MPI" if hvd.mpi_enabled() else "Gloo")
    if rank:
        _start_server(spec, roles[rank], gpus[rank], hosts.count(hosts[rank]), addresses[rank])
    exchange("up")
    if rank == 0:
        cluster.replicas = _connect(spec, name)
    return cluster


def serve(cluster: Cluster) -> None:
    """Serves until the coordinator ends, and then ends this process: never returns (ps and workers).

    Exits with 0 if the coordinator ended well, else raises what all processes report.
    """
    dog = cluster.watch(0.0, None)
    told = threading.Event()

    def note(number: int, *_: object) -> None:
        console.note_signal()
        told.set()
        if BY_HAND in os.environ:
            dog.signal_rank_0(number)

    # Signals do not end this process: the coordinator saves and stops, and then this ends.
    for numbers in ((), (signal.SIGINT,)):
        console.take_signals(note, *numbers)
    dog.progress.end_step(0)
    with dog.phase(EXCHANGE):  # It only serves, so it never counts as the one that others wait for.
        verdict = dog.wait()
    if verdict is None:
        ending.end(0)  # Python would take seconds to tear down what this process has nothing left to do with.
    elif verdict.rank == 0 and verdict.is_failure:
        told.wait(console.SECONDS_FOR_ANOTHER_RANK)  # The coordinator says why, and the launcher sees it end first.
        ending.end(verdict.code or 1)
    else:
        raise error_of(verdict, dog)


def error_of(verdict: Verdict, dog: Watchdog) -> UserError:
    """The error that a process raises for the failure or loss of another one."""
    cause = (FailedRankError if verdict.is_failure else LostRankError)(f"stopped because {verdict.text}")
    cause.exit_code, cause.culprit, cause.spokesman = verdict.code, verdict.rank, dog.spokesman
    return cause


def _allow_threads() -> None:
    """Raises a number of threads at which TensorFlow's servers would deadlock."""
    if os.environ.get(INTER_OP_VARIABLE, "").strip() == "1":
        os.environ[INTER_OP_VARIABLE] = str(MIN_INTER_OP_THREADS)
        if hvd.rank() == 0:
            print(
                f"hvtrain: {INTER_OP_VARIABLE}=1 would make parameter servers hang; "
                f"{MIN_INTER_OP_THREADS} are used instead",
                flush=True,
            )


def _start_server(spec: tf.train.ClusterSpec, role: Role, gpu: int | None, num_here: int, address: str) -> None:
    threads = max(MIN_INTER_OP_THREADS, os.cpu_count() or 1)
    share = max(1, (os.cpu_count() or 1) // max(1, num_here - 1))
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads, intra_op_parallelism_threads=share)
    config.device_count["GPU"] = 0 if gpu is None else 1
    if gpu is not None:
        config.gpu_options.visible_device_list = str(gpu)
        config.gpu_options.allow_growth = True
    try:
        _servers.append(tf.distribute.Server(spec, role.job, role.index, protocol="grpc", config=config, start=True))
    except tf.errors.OpError as error:
        raise RankError(
            f"{role} cannot serve at {address}, which another process may have taken meanwhile: "
            f"{str(error).partition(chr(10))[0]}; start the run again"
        ) from error


# TensorFlow stops a server that nothing refers to.
_servers: list[tf.distribute.Server] = []


def _connect(spec: tf.train.ClusterSpec, name: str) -> tf.distribute.ParameterServerStrategy:
    try:
        tf.config.set_visible_devices([], "GPU")
        threads = max(MIN_INTER_OP_THREADS, os.cpu_count() or 1)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            spec, task_type=CHIEF, task_id=0, rpc_layer="grpc"
        )
        return tf.distribute.ParameterServerStrategy(resolver)
    except RuntimeError as error:
        raise RankError(
            f"strategy={name} must start before TensorFlow has initialized its devices ({error}); "
            "import no module that creates a tensor or a model"
        ) from error
