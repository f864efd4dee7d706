"""Horovod's own launcher, quicker and surer: what `horovodrun` is in the environment that scripts/run makes.

Same command line, same launch. What differs:
- Horovod finds out what it was built with by importing TensorFlow in child processes, some 10 seconds and a page
  of notes; the library's file tells it at once.
- Before anything starts, every host is asked by ssh whether it is there, holds this environment, and over which
  interface it is reached. What is wrong is said in one line. Horovod's own search for an interface, which opens
  ports that unpickle what they get, is not needed then; Open MPI is told the network and where it lies.
- Variables that mean something on this host alone (HOME, USER, SSH_AUTH_SOCK) do not travel.
- A failed rank ends in one line and in that rank's exit code, not in a traceback of the launcher. And mpirun's
  banner about the failed rank, which buries what the rank said, is left out.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import horovod
from horovod.runner import launch
from horovod.runner.common.util import env as horovod_env
from horovod.runner.driver import driver_service
from horovod.runner.util import remote

from hvtrain.errors import UserError
from hvtrain.launching import reach
from hvtrain.launching.environment import is_of_this_host, of_this_environment
from hvtrain.launching.exit_code import failed_rank, of_shell
from hvtrain.launching.job import Job, parse_hostfile, parse_hosts, rank_places
from hvtrain.launching.ssh import Ssh


def main() -> None:
    """Runs horovodrun with this process's arguments; exits with the code of the first rank that failed."""
    library = b"".join(path.read_bytes() for path in (Path(horovod.__file__).parent / "tensorflow").glob("mpi_lib*.so"))
    launch.mpi_built = lambda verbose=False: b"MPI_Allreduce" in library
    launch.gloo_built = lambda verbose=False: b"GlooContext" in library
    launch.parse_args = _prepared(launch.parse_args)
    is_exportable = horovod_env.is_exportable
    horovod_env.is_exportable = lambda name: is_exportable(name) and not is_of_this_host(name)
    os.environ.setdefault("OMPI_MCA_orte_execute_quiet", "1")
    os.environ.update(of_this_environment(os.environ.get("PATH", "")))
    try:
        launch.run_commandline()
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as error:
        print(f"horovodrun: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        failed = failed_rank(str(error))
        if failed is None:
            sys.exit(f"horovodrun: {' '.join(str(error).split())}")
        name, code = failed
        print(f"horovodrun: rank {name or '?'} ended with exit code {code}", file=sys.stderr)
        sys.exit(of_shell(code))
    except Exception as error:
        sys.exit(f"horovodrun: {' '.join(str(error).split())}")


def _prepared(parse: Callable[[], argparse.Namespace]) -> Callable[[], argparse.Namespace]:
    """Horovod's parse_args, and then the look at the hosts."""

    def parse_args() -> argparse.Namespace:
        args = parse()
        if args.hostfile and not args.hosts:
            args.hosts = ",".join(f"{host.name}:{host.slots}" for host in parse_hostfile(Path(args.hostfile)))
        # In an elastic job hosts come and go, and Kubernetes may have a command of its own in place of ssh.
        if args.hosts and args.num_proc and not launch._is_elastic(args) and not horovod_env.is_kubeflow_mpi():
            _look_at_hosts(args)
        return args

    return parse_args


def _look_at_hosts(args: argparse.Namespace) -> None:
    hosts = parse_hosts(args.hosts)
    rank_places(Job((), args.num_proc, hosts))
    ssh = Ssh(args.ssh_port, args.ssh_identity_file)
    paths = reach.check([host.name for host in hosts], ssh)
    if paths is None:
        return
    remote.SSH_COMMAND_PREFIX = shlex.join(["ssh", *ssh.options])
    args.ssh_port = args.ssh_identity_file = None  # They are among those options now.
    launch._check_all_hosts_ssh_successful = lambda *args, **kwargs: True
    by_gloo = launch.is_gloo_used(args.use_gloo, args.use_mpi, args.use_jsrun)
    if args.nics:
        words = ["--prefix", sys.prefix, "-mca", "oob_tcp_if_include", ",".join(args.nics)]
        words += ["-mca", "plm_rsh_args", " ".join(ssh.options)]
    else:
        words = reach.mpi_options(paths, ssh)
        driver_service.get_common_interfaces = lambda *args: [paths.interface] if by_gloo else []
    if not by_gloo:
        args.mpi_args = f"{shlex.join(words)} {args.mpi_args or ''}"


if __name__ == "__main__":
    main()
