"""Runs Horovod's own launcher, with changes that make it faster and safer.

`hvtrain launch` and `horovodrun` start it as their child.

It takes the same command line and starts the same ranks. The differences:
- Horovod imports TensorFlow in child processes to find out what it was built with, which takes 10
  seconds and prints a page of notes; here the library file is searched instead.
- Before anything starts, every host is checked over ssh: that it is reachable and has this
  environment, and which interface leads to it. An error is reported in one line. The check replaces
  Horovod's own search for an interface, which opens ports that unpickle whatever they receive. Open
  MPI is told the network and its own location.
- An elastic job reports that it is waiting for its hosts, and needs only one of them to choose the
  network. Horovod's launcher waits silently, and needs a second host to search for a network.
- The patches listed in horovod_changes.py.
- A failed rank is reported by one line and that rank's exit code, not by a traceback of the launcher.
"""

import argparse
import os
import shlex
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from horovod.runner import launch
from horovod.runner.common.util import env as horovod_env
from horovod.runner.driver import driver_service
from horovod.runner.elastic import discovery, driver
from horovod.runner.util import network as horovod_network
from horovod.runner.util import remote

from hvtrain.errors import ConfigError, UserError, message_of
from hvtrain.launch import horovod_changes as changes
from hvtrain.launch import on_host, remote_hosts
from hvtrain.launch.environment import own_environment
from hvtrain.launch.first_failure import failed_rank, shell_code
from hvtrain.launch.job import (
    Job,
    hosts_option,
    mpi_options,
    option_names,
    parse_hostfile,
    parse_hosts,
    place_ranks,
    start_options,
    used_hosts,
)
from hvtrain.launch.remote_hosts import URI_FILE, HostCalls, Ssh
from hvtrain.system import host_facts
from hvtrain.system.console import Verdict

ELASTIC_TIMEOUT_SECONDS = 600  # Horovod's default for --elastic-timeout.
# How long ranks wait for one that joins. Horovod's 30 s would end the job if a host takes longer to
# load TensorFlow.
GLOO_TIMEOUT_SECONDS = 120

_parse_args = launch.parse_args


def main() -> None:
    """Runs horovodrun with this process's arguments.

    Exits with the code of the first rank that failed.
    """
    built_with = host_facts.horovod_facts()["built_with"]
    launch.mpi_built = lambda verbose=False: "MPI" in built_with
    launch.gloo_built = lambda verbose=False: "Gloo" in built_with
    # run_commandline calls parse_args first, so everything is prepared
    # before Horovod starts anything.
    launch.parse_args = _prepare
    changes.apply()
    os.environ.update(own_environment(os.environ.get("PATH", "")))
    supervisor = os.getppid()
    try:
        launch.run_commandline()
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as error:
        sys.stderr.write(f"horovodrun: {message_of(error)}\n")
        sys.exit(2)
    except Exception as error:
        message = " ".join(str(error).split())
        # Horovod raises a RuntimeError for a failed rank, but also for other reasons.
        failed = failed_rank(message)
        if failed is None or not isinstance(error, RuntimeError):
            sys.exit(f"horovodrun: {message}")
        rank, code = failed
        sys.stderr.write(Verdict(rank or "?", code=code).line())
        sys.exit(shell_code(code))
    finally:
        if os.getppid() != supervisor:
            # The supervisor was killed, so nothing else will end the ranks on other hosts.
            folder = _folder()
            HostCalls.read(folder).clean_up(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _prepare() -> argparse.Namespace:
    """Parses the arguments like Horovod's parse_args, then checks the hosts."""
    argparse.ArgumentParser.error = _refuse  # type: ignore[assignment, method-assign]
    args = _parse_args()
    # Nothing here uses Horovod's cache of checks, and it needs a home folder that can be written.
    args.disable_cache = True
    if not args.command:
        raise ConfigError("the command of the ranks is missing; write it last: python -m hvtrain")
    option_names(sys.argv[: -len(args.command)])  # Raises ConfigError for a repeated option.
    if args.num_proc is not None and args.num_proc < 1:
        raise ConfigError(
            f"-np {args.num_proc} is not a whole number of at least 1; give the number of ranks"
        )
    if args.hostfile and not args.hosts:
        args.hosts = hosts_option(parse_hostfile(Path(args.hostfile)))

    is_elastic = launch._is_elastic(args)
    if is_elastic:
        prepare_elastic(args)
    uses_gloo = launch.is_gloo_used(args.use_gloo, args.use_mpi, args.use_jsrun)
    if uses_gloo and args.num_proc:
        changes.give_gloo_time(args)

    # Not checked: hosts of an elastic job, which come and go, and those that
    # Kubernetes reaches without ssh.
    if args.num_proc and not is_elastic and not horovod_env.is_kubeflow_mpi():
        calls = HostCalls((socket.gethostname(),) * args.num_proc)
        if args.hosts:
            calls = _check_hosts(args, uses_gloo)
        calls.write(_folder())
    if not uses_gloo:
        args.mpi_args = (
            f"--report-uri {shlex.quote(str(_folder() / URI_FILE))} {args.mpi_args or ''}"
        )
    return args


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Raises ConfigError in place of argparse's usage message."""
    raise ConfigError(f"{message}; see horovodrun --help")


def _folder() -> Path:
    """Returns the launch's folder, which the supervisor made."""
    return Path(os.environ[on_host.MARK])


def _check_hosts(args: argparse.Namespace, uses_gloo: bool) -> HostCalls:
    """Checks the hosts, writes how to reach them into Horovod's arguments, and returns HostCalls. Raises UserError."""
    rank_hosts = place_ranks(Job((), args.num_proc, parse_hosts(args.hosts)))
    # Horovod needs a number of slots for each host.
    args.hosts = hosts_option(used_hosts(rank_hosts))

    ssh = Ssh(args.ssh_port, args.ssh_identity_file)
    network = remote_hosts.check(rank_hosts, ssh)
    if network is None:
        return HostCalls(rank_hosts)

    # Ranks on other hosts start with the same ssh options as every other command there.
    remote.SSH_COMMAND_PREFIX = shlex.join(["ssh", *ssh.options])
    # That command includes these two now, and Horovod would add them again.
    args.ssh_port = None
    args.ssh_identity_file = None
    # The hosts were checked above, with a one-line reason for a failure.
    launch._check_all_hosts_ssh_successful = lambda *args, **kwargs: True

    # For the ranks' traffic, Horovod gives Open MPI the interfaces of --network-interfaces itself.
    if args.nics:
        options = start_options(",".join(args.nics), ssh)
    else:
        options = mpi_options(network.subnet, network.interfaces, ssh)
        interfaces = [network.interface] if uses_gloo else []
        driver_service.get_common_interfaces = lambda *args: interfaces
    if not uses_gloo:
        args.mpi_args = f"{shlex.join(options)} {args.mpi_args or ''}"
    return HostCalls(rank_hosts, network.oom_kills, ssh)


def prepare_elastic(args: argparse.Namespace) -> None:
    """Sets the network interface and Gloo's time limit for an elastic job, once there are enough hosts.

    Raises ConfigError if the hosts do not appear in time, or the discovery script fails.
    """
    args.gloo_timeout_seconds = args.gloo_timeout_seconds or int(
        os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", GLOO_TIMEOUT_SECONDS)
    )
    hosts = ["localhost"]  # Horovod's default.
    if args.hosts:
        hosts = [host.name for host in parse_hosts(args.hosts)]
    elif args.host_discovery_script:
        hosts = _wait_for_hosts(args)
    if not args.nics:
        # One other host is enough to choose the network; more may come later.
        args.nics = {remote_hosts.common_interface([min(hosts, key=remote_hosts.is_local)])}
    # The server listens before Horovod knows the job's hosts and how to reach them.
    changes.Server.address = horovod_network.get_driver_ip(args.nics)

    # Ranks that are already running wait for the new ones, and Horovod prints nothing about it.
    start = driver.ElasticDriver._start_worker_processes

    def start_and_report(job, slots):
        if slots and len(slots) < job.world_size():
            names = ", ".join(f"rank {slot.rank} on {slot.hostname}" for slot in slots)
            sys.stderr.write(
                f"hvtrain: starting {names}; the others wait up to {args.gloo_timeout_seconds} s "
                "(--gloo-timeout-seconds)\n"
            )
        start(job, slots)

    driver.ElasticDriver._start_worker_processes = start_and_report


def _wait_for_hosts(args: argparse.Namespace) -> list[str]:
    """Waits until the hosts that the discovery script lists have enough slots, and returns their names.

    Raises ConfigError if they do not appear in time, or the script fails.
    """
    # Parsed by Horovod itself: a host listed without a number has --slots slots.
    script = discovery.HostDiscoveryScript(args.host_discovery_script, args.slots or 1)
    limit = args.elastic_timeout or int(
        os.environ.get("HOROVOD_ELASTIC_TIMEOUT", ELASTIC_TIMEOUT_SECONDS)
    )
    began = time.monotonic()
    has_reported = False
    while True:
        try:
            hosts = script.find_available_hosts_and_slots()
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"--host-discovery-script {args.host_discovery_script} failed: {error}; "
                "it must print a line HOST:SLOTS for each host, and exit with 0"
            ) from error
        if sum(hosts.values()) >= args.num_proc:
            return list(hosts)

        waited = time.monotonic() - began
        listed = " ".join(f"{name}:{slots}" for name, slots in sorted(hosts.items())) or "no host"
        shortage = f"{args.num_proc} slots (-np), and {args.host_discovery_script} lists {listed}"
        if waited >= limit:
            raise ConfigError(
                f"waited {limit} s (--elastic-timeout) for {shortage}; make hosts available, or lower -np"
            )
        if not has_reported:
            has_reported = True
            sys.stderr.write(
                f"hvtrain: waiting for {shortage}; giving up after {limit} s (--elastic-timeout)\n"
            )
        time.sleep(1)


changes.apply_in_every_process()
if __name__ == "__main__":
    main()
