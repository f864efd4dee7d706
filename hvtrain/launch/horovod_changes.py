"""Patches to Horovod's own launcher at run time: shells, environment variables, and ports.

- mpirun replaces its shell, so that signals reach it, while the launcher stays alive to clean up
  after it. The shell on another host waits for the rank, so that the rank's exit code is returned
  even if a signal killed it.
- Environment variables are sent to other hosts by the same allow-list as with hvtrain launch, along
  with HVTRAIN_NOTIFY and those named in HVTRAIN_ENV=NAME,NAME. With Gloo they go through ssh's stdin;
  Horovod puts them on its command line, which every user can read. Local ranks inherit all variables.
- The rendezvous server is ours (rendezvous.py). It listens only on the interface of the launch;
  Horovod's listens on all. Horovod's unpickles whatever anyone sends (CVE-2024-10190); ours accepts
  only plain values, nothing that names code, and does not hand out the workers' keys. Horovod's also
  sometimes keeps the addresses of ranks that have met, and then ranks cannot restart (comm.tune).
"""

import argparse
import base64
import io
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from horovod.runner import gloo_run, mpi_run
from horovod.runner.common.util import env as horovod_env
from horovod.runner.common.util import safe_shell_exec
from horovod.runner.elastic import discovery, rendezvous
from horovod.runner.util import remote

from hvtrain.launch.child import handle_signals
from hvtrain.launch.environment import EXTRA_NAMES, NOTIFY, is_sendable
from hvtrain.launch.job import HOST_NAME
from hvtrain.launch.rendezvous import Store
from hvtrain.system.text import duration

_EXPORTS = "HVTRAIN_EXPORTS"  # Set in the launcher only, for ranks on other hosts.

# Requests per second that the launcher's rendezvous can be relied on to answer: a third of the
# 24,000 to 27,000 measured on one core, 2026-11-26.
GLOO_REQUESTS_PER_SECOND = 8000
SECONDS_WITH_HOROVODS_LIMIT = 15  # Half of Horovod's limit of 30 s.
MIN_ANNOUNCED_SECONDS = 60

_find_hosts = discovery.HostDiscoveryScript.find_available_hosts_and_slots
_ignored_hosts: set[str] = set()


def apply() -> None:
    """Applies all patches that do not depend on the hosts."""
    mpi_run.os = types.SimpleNamespace(environ=os.environ, execve=_run_mpirun)
    extra_names = [NOTIFY, *os.environ.get(EXTRA_NAMES, "").split(",")]
    is_exportable = horovod_env.is_exportable
    horovod_env.is_exportable = lambda name: (
        is_exportable(name) and (name in extra_names or is_sendable(name, os.environ))
    )
    # The command that replaces ssh on Kubernetes takes no input.
    if not horovod_env.is_kubeflow_mpi():
        gloo_run._slot_info_to_command_fn = _command_without_variables
        gloo_run.get_remote_command = _command_by_ssh

    gloo_run.RendezvousServer = Server
    gloo_run.create_rendezvous_handler = lambda driver: driver
    launch_gloo = gloo_run.launch_gloo

    def launch(*arguments):
        Server.address = arguments[-1]
        launch_gloo(*arguments)

    gloo_run.launch_gloo = launch
    discovery.HostDiscoveryScript.find_available_hosts_and_slots = _find_plain_hosts


def apply_in_every_process() -> None:
    """Applies the patch that is also needed in processes between the launcher and the local ranks."""
    end = safe_shell_exec.terminate_executor_shell_and_children

    def end_quietly(process):
        # The shell may have ended in the meantime.
        with suppress(safe_shell_exec.psutil.NoSuchProcess):
            end(process)

    safe_shell_exec.terminate_executor_shell_and_children = end_quietly


def give_gloo_time(args: argparse.Namespace) -> None:
    """Gives many ranks more time to meet over Gloo, unless the user has set a limit.

    Each rank asks this launcher for the addresses of all others. At GLOO_REQUESTS_PER_SECOND, Horovod's 30 s
    are enough for some 490 ranks. The limit has a margin of two. A line on stderr announces a long wait.
    """
    seconds = args.num_proc * (args.num_proc - 1) / GLOO_REQUESTS_PER_SECOND
    has_limit = (
        args.gloo_timeout_seconds is not None or "HOROVOD_GLOO_TIMEOUT_SECONDS" in os.environ
    )
    if seconds > SECONDS_WITH_HOROVODS_LIMIT and not has_limit:
        args.gloo_timeout_seconds = round(2 * seconds)
    if seconds > MIN_ANNOUNCED_SECONDS:
        sys.stderr.write(
            f"horovodrun: {args.num_proc:,} ranks may take {duration(seconds)} to meet over Gloo, "
            "but only seconds over MPI (--mpi)\n"
        )


def _find_plain_hosts(script) -> dict[str, int]:
    """Returns the slots of each host that a script prints, leaving out names that a shell or ssh would misread."""
    slots = _find_hosts(script)
    for name in list(slots):
        if not re.fullmatch(HOST_NAME, name):
            del slots[name]
            # Horovod runs the script every second, and one line is enough.
            if name not in _ignored_hosts:
                _ignored_hosts.add(name)
                sys.stderr.write(
                    f"hvtrain: ignored {name!r}, printed by the host discovery script: it is not a valid host name\n"
                )
    return slots


def _command_without_variables(
    run_command: str, environment: Mapping[str, str]
) -> Callable[[Any], str]:
    """Returns a function from a slot to its rank's command.

    Local ranks inherit the variables; other ranks read them from ssh's stdin.
    """
    # Horovod would replace the interface that the user chose for NCCL with that of the launch.
    nccl_interface = os.environ.get("NCCL_SOCKET_IFNAME")
    os.environ.update({**environment, "PYTHONUNBUFFERED": "1"})
    if nccl_interface is not None:
        os.environ["NCCL_SOCKET_IFNAME"] = nccl_interface

    os.environ[_EXPORTS] = "".join(
        f"export {name}={shlex.quote(value)}\n"
        for name, value in os.environ.items()
        if horovod_env.is_exportable(name)
    )

    def command(slot):
        variables = " ".join(
            f"{name}={value}" for name, value in gloo_run.create_slot_env_vars(slot).items()
        )
        return f"env -u {_EXPORTS} {variables} {run_command}"

    return command


def _command_by_ssh(local_command: str, *arguments, **options) -> str:
    """Returns the command of a rank on another host, which reads its variables from ssh's stdin."""
    # Horovod has already quoted the command. It begins with Horovod's own cd to this folder, which
    # is replaced here, since it leaves the folder's name unquoted and hides errors. Keep `exit $?`:
    # without it many shells exec the rank, and ssh reports a rank killed by a signal as 255, like a
    # dropped connection.
    folder = str(Path.cwd())
    command = shlex.split(local_command)[0].removeprefix(f"cd {folder} > /dev/null 2>&1 ; ")
    script = f'eval "$(cat)"; cd {shlex.quote(folder)} || exit; {command}; exit $?'
    remote_command = shlex.quote(shlex.join(["exec", "sh", "-c", script]))
    return (
        f'printf %s "${_EXPORTS}" | '
        f"{remote.get_remote_command(remote_command, *arguments, **options)}"
    )


def _run_mpirun(path: str, arguments: list[str], environment: Mapping[str, str]) -> None:
    """Runs mpirun as a child, since the launcher has to clean up after it; Horovod would exec it."""
    supervisor = os.getppid()
    child = subprocess.Popen([path, *arguments[1:-1], f"exec {arguments[-1]}"], env=environment)

    def pass_on(*_):
        # The supervisor ends the ranks itself. If it was killed, nothing else ends mpirun.
        if os.getppid() != supervisor:
            child.terminate()

    handle_signals(pass_on)
    code = child.wait()
    if code < 0:
        # Die by the same signal as mpirun, so that the parent sees the cause.
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


class Server(Store):
    """Our store with the interface of Horovod's RendezvousServer.

    In an elastic job, the driver computes the values of some names when they are requested.
    """

    address = ""  # Where all servers listen; "": on all interfaces.
    _driver: Any = None

    def __init__(self, verbose: int = 0) -> None:
        super().__init__(self.address, 0)

    def start(self, driver: Any = None) -> int:
        self._driver = driver
        # The driver answers only once all ranks are ready, so each request needs a thread.
        self.get_waits = driver is not None
        self.serve()
        return self.server_port

    def init(self, host_alloc_plan: Any) -> None:
        self.clear()

    stop = Store.close

    def get(self, scope: str, rank: str) -> bytes | None:
        if self._driver is None or scope != rendezvous.GET_RANK_AND_SIZE:
            return super().get(scope, rank)
        host, local_rank = rank.split(":")
        self._driver.record_ready(host, int(local_rank))
        slot = self._driver.get_slot_info(host, int(local_rank))
        return slot.to_response_string().encode("ascii")

    def put(self, scope: str, rank: str, value: bytes) -> None:
        if scope != rendezvous.PUT_WORKER_ADDRESSES:
            super().put(scope, rank, value)
            return
        # The secret key is not stored: whoever has it can make the worker unpickle
        # anything. A job that is not elastic but calls hvd.elastic.run has no driver, and
        # nobody needs its workers' keys.
        if self._driver is None:
            return
        host, local_rank = rank.split(":")
        addresses, secret_key = _PlainUnpickler(io.BytesIO(base64.b64decode(value))).load()
        self._driver.register_worker_server(host, int(local_rank), addresses, secret_key)


class _PlainUnpickler(pickle.Unpickler):
    """Loads only numbers, strings and collections of them.

    Raises UnpicklingError if the pickle names code.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")
