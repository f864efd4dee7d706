"""Starts one process of a run on this host, for users who start each by hand (--job-name and --task-index).

All processes meet at rank 0 (rendezvous.py), learn which of them share a host, and set Horovod's
Gloo variables. Each then runs the command as a child, passes signals on to it, and exits with its
exit code.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hvtrain.core.topology import Roles
from hvtrain.errors import ConfigError
from hvtrain.launch.child import die_with_parent, handle_signals
from hvtrain.launch.first_failure import shell_code
from hvtrain.launch.job import with_own_python
from hvtrain.launch.remote_hosts import address_towards, common_interface, unknown_host
from hvtrain.launch.rendezvous import Rendezvous, claim
from hvtrain.system import console
from hvtrain.system.secrets import command_line

START_SECONDS = 120.0


def start(
    roles: Roles,
    rank: int,
    coordinator: str,
    command: Sequence[str],
    variables: Mapping[str, str],
    seconds: float,
    interface: str | None = None,
) -> int:
    """Runs the command as one process of the run, and returns its exit code. Raises UserError.

    Args:
        roles: the processes of the run.
        rank: the rank of this process.
        coordinator: HOST:PORT of rank 0, where all processes meet.
        command: the command to run.
        variables: environment variables for the command, in addition to those of this process.
        seconds: how long to wait for the other processes.
        interface: comma-separated network interfaces, all for NCCL and the first for Gloo; None:
            the one that leads to the coordinator.
    """
    # While it waits for the others, there is nothing to save. In a container, whose first process this
    # may be, Linux would ignore a signal without a handler.
    console.take_signals(console.end_before_training)
    names = roles.names
    host, address, port = _parse_address(coordinator)
    # The server comes first: rank 0 also claims its own rank over the network.
    server = _serve(host, address, port, names) if rank == 0 else None
    try:
        own_address = address_towards(host)
        sys.stderr.write(
            f"hvtrain: {names[rank]} is rank {rank} of {len(names)}; waiting up to {seconds:g} s for all "
            f"processes at {coordinator}\n"
        )
        rank_hosts = claim(
            (address, port), rank, names, (socket.gethostname(), own_address), seconds
        )

        interface = interface or common_interface([host])
        # The user's own settings override these.
        defaults = {
            "NCCL_SOCKET_IFNAME": interface,
            # Horovod's default of 30 s would end the run if one host
            # takes longer to load TensorFlow.
            "HOROVOD_GLOO_TIMEOUT_SECONDS": f"{max(START_SECONDS, seconds):.0f}",
        }
        # These override the user's settings, since they describe this launch.
        gloo = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_GLOO_IFACE": interface.partition(",")[0],  # Gloo takes only one.
            "PYTHONUNBUFFERED": "1",
            # For the run's records, since no launcher passes on this command line.
            console.BY_HAND: command_line("launch", sys.argv[1:]),
            **horovod_variables(rank, rank_hosts),
        }
        return _run(command, {**defaults, **os.environ, **variables, **gloo})
    finally:
        if server:
            # Only after the command has ended: ranks that restart
            # (comm.tune) meet through the same store.
            server.close()


def horovod_variables(rank: int, rank_hosts: Sequence[Sequence[str]]) -> dict[str, str]:
    """Returns Horovod's variables for a rank. rank_hosts: name and address of each rank's host.

    Hosts are compared by both, since two hosts may have the same name.

    >>> variables = horovod_variables(2, [("s1", "10.0.0.1"), ("s1", "10.0.0.1"), ("s2", "10.0.0.2")])
    >>> variables["HOROVOD_LOCAL_RANK"], variables["HOROVOD_LOCAL_SIZE"], variables["HOROVOD_CROSS_RANK"]
    ('0', '1', '1')
    """
    host = rank_hosts[rank]
    local_rank = rank_hosts[:rank].count(host)
    # The ranks with the same local rank, one on each host that has enough ranks.
    cross_ranks = [
        other_rank
        for other_rank, other_host in enumerate(rank_hosts)
        if rank_hosts[:other_rank].count(other_host) == local_rank
    ]
    return {
        "HOROVOD_HOSTNAME": host[-1],  # The address, since names may not be unique.
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(len(rank_hosts)),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(rank_hosts.count(host)),
        "HOROVOD_CROSS_RANK": str(cross_ranks.index(rank)),
        "HOROVOD_CROSS_SIZE": str(len(cross_ranks)),
    }


def _parse_address(coordinator: str) -> tuple[str, str, int]:
    """Returns the host of HOST:PORT, its IPv4 address, and the port. Raises ConfigError."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"--coordinator {coordinator} is not HOST:PORT; give rank 0's host and a free port: s1:2222"
        )
    try:
        return host, socket.gethostbyname(host), int(port)
    except (OSError, UnicodeError):
        raise ConfigError(f"--coordinator {coordinator}: {unknown_host(host)}") from None


def _serve(host: str, address: str, port: int, names: Sequence[str]) -> Rendezvous:
    """Starts rank 0's server. Raises ConfigError if it cannot listen on that address."""
    try:
        server = Rendezvous(address, port, names)
    except OSError as error:
        raise ConfigError(
            f"--coordinator {host}:{port}: {socket.gethostname()} cannot listen on port {port} of {address}: "
            f"{error.strerror}; give all processes the host of {names[0]}, and a free port above 1023"
        ) from error

    # Debian's /etc/hosts gives a host's own name the address 127.0.1.1.
    if address.startswith("127.") and host != "localhost" and not host.startswith("127."):
        sys.stderr.write(
            f"hvtrain: {host} is {address} here, which other hosts cannot reach; if there are any, "
            "give all processes a --coordinator that they can reach\n"
        )
    server.serve()
    return server


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the command and passes signals on to it. Returns its exit code, as a shell would report it."""
    child: subprocess.Popen[bytes] | None = None

    def pass_on(signum: int, *_: object) -> None:
        # Before the command has started, there is nothing to save.
        if child is None:
            if signum in (signal.SIGTERM, signal.SIGUSR1):
                console.end_before_training(signum)
            sys.exit(128 + signum)
        with suppress(ProcessLookupError):
            child.send_signal(signum)

    handle_signals(pass_on)
    child = subprocess.Popen(
        with_own_python(command),
        env=environment,
        # In the terminal's process group the child would get Ctrl-C twice.
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )
    return shell_code(child.wait())
