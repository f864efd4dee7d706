"""Starts one process of a run on this host, for users who start each process by hand (--job-name and --task-index).

All processes meet at rank 0's (rendezvous.py), learn which of them share a host, and set the variables of Horovod's
Gloo. Then each runs the command as its child, passes signals on to it, and ends with its exit code.
"""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hvtrain.errors import ConfigError, RankError
from hvtrain.launch.child import going_with
from hvtrain.launch.first_failure import shell_code
from hvtrain.launch.rendezvous import Rendezvous, claim
from hvtrain.launch.roles import Roles
from hvtrain.launch.ssh import Ssh
from hvtrain.system import interfaces

START_SECONDS = 120.0
# Set for a process that gets its signals alone: no launcher passes them to the others.
BY_HAND = "HVTRAIN_BY_HAND"


@dataclass(frozen=True)
class Own:
    """This process of the run, and where it meets the others.

    coordinator: HOST:PORT of rank 0's process. seconds: how long to wait for the others. interface: for Gloo, instead
    of the one that leads to the coordinator.
    """

    roles: Roles
    job: str
    index: int
    coordinator: str
    seconds: float = START_SECONDS
    interface: str | None = None


def start(own: Own, command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Runs the command as this process of the run, and returns its exit code. Raises UserError.

    variables: further environment variables of the command, which also inherits this process's.
    """
    rank, names = own.roles.rank_of(own.job, own.index), own.roles.names
    coordinator = host, address, port = _parsed(own.coordinator)
    server = _listening(*coordinator, names) if rank == 0 else None
    try:
        towards = _address_towards(host, address)
        limit = f"waiting for all at {own.coordinator}, {own.seconds:g} s at most"
        print(f"hvtrain: {names[rank]} is rank {rank} of {len(names)}; {limit}", file=sys.stderr, flush=True)
        places = claim((address, port), rank, names, (socket.gethostname(), towards), own.seconds)
        interface = own.interface or str(interfaces.interface_of(towards))
        gloo = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_GLOO_IFACE": interface,
            "PYTHONUNBUFFERED": "1",
            BY_HAND: "1",
            **horovod_place(rank, [tuple(place) for place in places]),
        }
        chosen = {
            "NCCL_SOCKET_IFNAME": interface,
            # Horovod's 30 s end the run where one host takes longer to load TensorFlow.
            "HOROVOD_GLOO_TIMEOUT_SECONDS": f"{max(START_SECONDS, own.seconds):.0f}",
        }
        return _run(command, {**chosen, **os.environ, **variables, **gloo})
    finally:
        if server:
            server.close()


def horovod_place(rank: int, places: Sequence[tuple[str, ...]]) -> dict[str, str]:
    """Horovod's variables for a rank; places: host and address of each rank.

    >>> found = horovod_place(2, [("s1", "10.0.0.1"), ("s1", "10.0.0.1"), ("s2", "10.0.0.2")])
    >>> found["HOROVOD_LOCAL_RANK"], found["HOROVOD_LOCAL_SIZE"], found["HOROVOD_CROSS_RANK"]
    ('0', '1', '1')
    """
    on_host: dict[tuple[str, ...], list[int]] = {}
    for number, place in enumerate(places):
        on_host.setdefault(place, []).append(number)
    mine = on_host[places[rank]]
    local_rank = mine.index(rank)
    across = [ranks[local_rank] for ranks in on_host.values() if len(ranks) > local_rank]
    numbers = {
        "RANK": rank,
        "SIZE": len(places),
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": len(mine),
        "CROSS_RANK": across.index(rank),
        "CROSS_SIZE": len(across),
    }
    return {
        "HOROVOD_HOSTNAME": places[rank][-1],  # Two hosts may have one name.
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **{f"HOROVOD_{name}": str(number) for name, number in numbers.items()},
    }


def _parsed(coordinator: str) -> tuple[str, str, int]:
    """Host, address and port. Raises ConfigError."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--coordinator {coordinator} is not HOST:PORT; give rank 0's host and a free port: s1:2222")
    try:
        return host, socket.gethostbyname(host), int(port)
    except OSError:
        raise ConfigError(f"--coordinator {coordinator}: {Ssh().trouble(host, 'Could not resolve')}") from None


def _address_towards(host: str, address: str) -> str:
    """This host's address on the route to that address. Raises RankError if there is no route."""
    try:
        return interfaces.address_towards(address)
    except OSError as error:
        raise RankError(f"host {host} cannot be reached ({error.strerror}); is it up, and on this network?") from error


def _listening(host: str, address: str, port: int, names: Sequence[str]) -> Rendezvous:
    """Rank 0's server. Raises ConfigError."""
    try:
        server = Rendezvous(address, port, names)
    except OSError as error:
        if isinstance(error, PermissionError):
            why = f"only root may use port {port}; choose one above 1023"
        elif error.errno == errno.EADDRNOTAVAIL:
            why = f"{address} is not an address of {socket.gethostname()}; start {names[0]} there, or give its own host"
        else:
            why = f"port {port} is in use; end what uses it, or choose another port, the same for all processes"
        raise ConfigError(f"--coordinator {host}:{port}: {why}") from error
    if address.startswith("127.") and host != "localhost" and not host.startswith("127."):
        note = f"{host} is {address} here, which other hosts cannot reach; if there are any, give all processes a"
        print(f"hvtrain: {note} --coordinator that they can reach", file=sys.stderr)
    server.serve()
    return server


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the command and passes signals on to it; its exit code as a shell has it."""
    first, *rest = command
    line = [sys.executable if first == "python" else first, *rest]
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, *_: object) -> None:
        if not started:
            sys.exit(128 + number)
        with suppress(ProcessLookupError):
            started[0].send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        # Under nohup SIGHUP is ignored, and stays so.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    # A session of its own: in this terminal's process group it would get a Ctrl-C twice.
    going = going_with(os.getpid())
    started.append(subprocess.Popen(line, env=environment, start_new_session=True, preexec_fn=going))
    return shell_code(started[0].wait())
