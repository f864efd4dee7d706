"""Joins the processes of a run with parameter servers into a TensorFlow cluster, and ends them.

Horovod's launchers start the processes, so each has a rank, which determines its role. The processes
exchange addresses through Horovod, start the watchdog, and leave Horovod. From then on they communicate
through TensorFlow's servers, and the watchdog ends them.
"""

import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

import hvtrain.keras as hvd
from hvtrain.core.topology import CHIEF, SERVER, WORKER, Roles
from hvtrain.errors import ConfigError, RankError
from hvtrain.keras.devices import View, choose_gpus, exchange, gpu_uuids, visible_names
from hvtrain.step.step_timing import StepMarks
from hvtrain.strategies.base import error_of
from hvtrain.strategies.mirrored import cluster_addresses, refuse_own_cluster
from hvtrain.strategies.replica_step import initializing_devices
from hvtrain.system import console
from hvtrain.system.resources import physical_gpus
from hvtrain.watchdog import Watchdog, processes
from hvtrain.watchdog import start as start_watchdog
from hvtrain.watchdog.progress import EXCHANGE

# With a single thread, a call that waits for an answer would block all others.
MIN_INTER_OP_THREADS = 2
INTER_OP_VARIABLE = "TF_NUM_INTEROP_THREADS"
# Used for watchdog.abort_seconds=0: a lack of progress does not end the run, but a lost process does.
NO_LIMIT_SECONDS = 1e9


@dataclass
class Cluster:
    """The cluster as one of its processes sees it."""

    rank: int
    roles: Roles
    # Host and device of each process, by rank.
    hosts: list[str]
    devices: list[str]
    # Horovod's controller: "MPI" or "Gloo".
    launcher: str
    # TensorFlow's strategy, only on the coordinator.
    replicas: tf.distribute.ParameterServerStrategy | None = None
    watchdog: Watchdog | None = None

    def watch(self, abort_seconds: float, marks: StepMarks | None) -> Watchdog:
        """Returns the watchdog over all processes (every process).

        The first call starts it and leaves Horovod. Raises RankError if the watchdog does not start.
        """
        if self.watchdog:
            return self.watchdog

        names = self.roles.names
        self.watchdog = start_watchdog(
            self.rank,
            len(names),
            f"{self.hosts[self.rank]} ({names[self.rank]})",
            abort_seconds or NO_LIMIT_SECONDS,
            exchange,
            marks or (lambda: (0, 0, 0, 0)),
            calls_launcher=hvd.local_rank() == 0,
        )
        hvd.shutdown()
        if type(self.watchdog) is Watchdog:
            raise RankError(
                "the watchdog did not start (see the warning above), and nothing else would end the parameter servers "
                "and workers; check the network between the hosts"
            )
        return self.watchdog


# The one cluster that this process has joined.
_cluster: Cluster | None = None
# TensorFlow stops a server that nothing refers to.
_servers: list[tf.distribute.Server] = []


def roles_of(size: int, num_ps: int, strategy: str) -> Roles:
    """Returns the roles of `size` processes. Raises ConfigError if there are too few processes.

    >>> roles_of(4, 1, "parameter_server").names
    ('coordinator 0', 'ps 0', 'worker 0', 'worker 1')
    """
    if size < num_ps + 2:
        raise ConfigError(
            f"strategy={strategy} needs {num_ps + 2} processes or more (a coordinator, {num_ps} ps "
            f"and a worker), but the launcher started {size}; start the run with horovodrun -np "
            f"{num_ps + 3} for two workers, or python -m hvtrain launch -np 2 --num-ps {num_ps}"
        )
    return Roles(num_workers=size - num_ps - 1, num_ps=num_ps)


def worker_ranks(roles: Roles) -> list[int]:
    """Returns the ranks of the workers, which come after the coordinator and the servers."""
    return list(range(roles.num_ps + 1, len(roles.names)))


def join_cluster(
    num_ps: int, strategy: str, share_gpus: bool, check_workers: Callable[[int], None]
) -> Cluster:
    """Joins all processes into one cluster (every process).

    When it returns, TensorFlow's servers are running. Call it before TensorFlow initializes a device; a
    later call returns the same cluster.

    Args:
        num_ps: number of parameter servers.
        strategy: name of the strategy, for messages.
        share_gpus: let several workers of a host use one GPU.
        check_workers: called with the number of workers; raises ConfigError if the settings do not fit that number.

    Raises:
        ConfigError: too few processes, or TF_CONFIG is set.
        RankError: the processes cannot reach each other, or TensorFlow has initialized its devices.
    """
    global _cluster
    if _cluster is None:
        refuse_own_cluster(strategy)
        hvd.init()
        roles = roles_of(hvd.size(), num_ps, strategy)
        check_workers(roles.num_workers)
        _cluster = _join(roles, strategy, share_gpus)
    else:
        check_workers(_cluster.roles.num_workers)
    return _cluster


def _join(roles: Roles, strategy: str, share_gpus: bool) -> Cluster:
    """Starts this process's server or, on the coordinator, connects to all servers (every process)."""
    rank = hvd.rank()
    _ensure_inter_op_threads()
    hosts, gpus = choose_devices(roles, share_gpus)
    devices = []
    for host, gpu, name in zip(hosts, gpus, roles.names):
        device = "CPU" if gpu is None else f"GPU {gpu}"
        devices.append(f"{host} {device} ({name})")

    addresses = cluster_addresses(rank, strategy)
    first_worker = roles.num_ps + 1
    spec = tf.train.ClusterSpec(
        {CHIEF: addresses[:1], SERVER: addresses[1:first_worker], WORKER: addresses[first_worker:]}
    )
    cluster = Cluster(rank, roles, hosts, devices, "MPI" if hvd.mpi_enabled() else "Gloo")
    if rank:
        _start_server(spec, roles.names[rank], gpus[rank], hosts.count(hosts[rank]))
    exchange("up")  # The coordinator connects once all servers listen.
    if rank == 0:
        cluster.replicas = _connect(spec, strategy)
    return cluster


def choose_devices(roles: Roles, share_gpus: bool) -> tuple[list[str], list[int | None]]:
    """Returns the host and the GPU of each rank (every process).

    The coordinator and parameter servers get no GPU. Workers are counted by host: the first worker on a
    host gets the host's first GPU, whatever the worker's rank.
    """
    num_visible = len(physical_gpus())
    names = visible_names(os.environ.get("CUDA_VISIBLE_DEVICES"), num_visible)
    by_rank = exchange((socket.gethostname(), names, gpu_uuids(num_visible)), "hvtrain.places")
    hosts = [host for host, _, _ in by_rank]

    first_worker = roles.num_ps + 1
    views = []
    for rank in worker_ranks(roles):
        host, names, ids = by_rank[rank]
        workers_before = hosts[first_worker:rank].count(host)
        views.append(View(host, workers_before, names, ids))
    return hosts, [None] * first_worker + choose_gpus(views, share_gpus)


def serve(cluster: Cluster) -> None:
    """Serves until the coordinator ends, then ends this process (parameter servers and workers).

    Exits with 0 if the coordinator succeeded, and with its exit code if it failed. If another process
    failed or was lost, raises the error that all processes report.
    """
    watchdog = cluster.watch(0.0, None)

    def note(signum, *_):
        console.note_signal()
        if console.BY_HAND in os.environ:
            watchdog.signal_rank_0(signum)

    # Signals do not end this process: the coordinator saves and stops, and this process ends after it.
    console.take_signals(note)
    console.take_signals(note, signal.SIGINT)
    watchdog.progress.end_step(0)
    with watchdog.phase(EXCHANGE):
        # A process in this phase never counts as the one that others wait for, and this process
        # only serves.
        reason = watchdog.wait()

    if reason is None:
        # Python would take seconds to shut down, and this process has nothing left to do.
        processes.exit_now(0)
    elif reason.rank == 0 and reason.is_failure:
        # The coordinator reports its failure. Wait, so that the launcher sees it end first.
        console.signal_arrived.wait(console.SECONDS_FOR_ANOTHER_RANK)
        processes.exit_now(reason.code or 1)
    else:
        raise error_of(reason, watchdog)


def _ensure_inter_op_threads() -> None:
    """Raises the number of inter-op threads if it is 1: TensorFlow's servers would deadlock."""
    if os.environ.get(INTER_OP_VARIABLE, "").strip() != "1":
        return
    os.environ[INTER_OP_VARIABLE] = str(MIN_INTER_OP_THREADS)
    if hvd.rank() == 0:
        print(
            f"hvtrain: {INTER_OP_VARIABLE}=1 would make parameter servers hang; "
            f"{MIN_INTER_OP_THREADS} threads are used instead",
            flush=True,
        )


def _start_server(spec: tf.train.ClusterSpec, name: str, gpu: int | None, local_size: int) -> None:
    """Starts this process's server.

    Args:
        spec: addresses of all processes.
        name: name of this process, such as "ps 0" or "worker 1".
        gpu: index of this process's GPU on the host; None: no GPU.
        local_size: number of processes on this host.
    """
    num_cores = os.cpu_count() or 1
    # The servers on a host share its cores; by TensorFlow's default each would use all of them.
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=max(MIN_INTER_OP_THREADS, num_cores),
        intra_op_parallelism_threads=max(1, num_cores // max(1, local_size - 1)),
    )
    if gpu is None:
        config.device_count["GPU"] = 0
    else:
        config.gpu_options.visible_device_list = str(gpu)
        config.gpu_options.allow_growth = True

    job, index = name.split()
    try:
        _servers.append(tf.distribute.Server(spec, job, int(index), config=config))
    except tf.errors.OpError as error:
        raise RankError(
            f"{name} cannot serve at {spec.task_address(job, int(index))}, which another process may be using: "
            f"{str(error).splitlines()[0]}; start the run again"
        ) from error


def _connect(spec: tf.train.ClusterSpec, strategy: str) -> tf.distribute.ParameterServerStrategy:
    """Connects the coordinator to the servers, which must listen already."""
    with initializing_devices(strategy):
        tf.config.set_visible_devices([], "GPU")
        num_threads = max(MIN_INTER_OP_THREADS, os.cpu_count() or 1)
        tf.config.threading.set_inter_op_parallelism_threads(num_threads)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            spec, task_type=CHIEF, task_id=0, rpc_layer="grpc"
        )
        return tf.distribute.ParameterServerStrategy(resolver)
