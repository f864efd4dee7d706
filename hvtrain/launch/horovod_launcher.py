"""Horovod's own launcher, faster and safer; hvtrain launch and `horovodrun` start it as their child.

Same command line, same launch. What differs:
- Horovod imports TensorFlow in child processes to find out what it was built with, which takes 10 seconds and prints a
  page of notes; here the library's file is searched instead.
- Before anything starts, every host is checked over ssh: that it is reachable and has this environment, and which
  interface leads to it. An error is one line. This replaces Horovod's own search for an interface, which opens ports
  that unpickle what they receive; Open MPI is given the network and its own location.
- The changes listed in changes.py.
- A failed rank is reported by one line and that rank's exit code, not by a traceback of the launcher.
"""

import argparse
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import horovod
from horovod.runner import launch
from horovod.runner.common.util import env as horovod_env
from horovod.runner.driver import driver_service
from horovod.runner.util import remote

from hvtrain.errors import UserError
from hvtrain.launch import elastic_start, on_host, reach
from hvtrain.launch import horovod_changes as changes
from hvtrain.launch.environment import of_this_environment
from hvtrain.launch.first_failure import failed_rank, shell_code
from hvtrain.launch.job import Job, hosts_word, parse_hostfile, parse_hosts, rank_places, used_hosts
from hvtrain.launch.reach import URI_FILE, Reached
from hvtrain.launch.ssh import Ssh
from hvtrain.system.verdict import Verdict


def main() -> None:
    """Runs horovodrun with this process's arguments; exits with the code of the first rank that failed."""
    library = b"".join(path.read_bytes() for path in (Path(horovod.__file__).parent / "tensorflow").glob("mpi_lib*.so"))
    launch.mpi_built = lambda verbose=False: b"MPI_Allreduce" in library
    launch.gloo_built = lambda verbose=False: b"GlooContext" in library
    launch.parse_args = _prepared(launch.parse_args)
    changes.make()
    os.environ.update(of_this_environment(os.environ.get("PATH", "")))
    parent = os.getppid()
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
        sys.stderr.write(Verdict(failed[0] or "?", code=failed[1]).line())
        sys.exit(shell_code(failed[1]))
    except Exception as error:
        sys.exit(f"horovodrun: {' '.join(str(error).split())}")
    finally:
        if os.getppid() != parent and on_host.MARK in os.environ:
            # The supervisor was killed, so nothing else will end the ranks of other hosts.
            folder = Path(os.environ[on_host.MARK])
            Reached.read(folder).clear(str(folder), reach.mpirun_job(folder))
            shutil.rmtree(folder, ignore_errors=True)


def _prepared(parse: Callable[[], argparse.Namespace]) -> Callable[[], argparse.Namespace]:
    """Horovod's parse_args, followed by the check of the hosts."""

    def parse_args() -> argparse.Namespace:
        args = parse()
        if args.hostfile and not args.hosts:
            args.hosts = hosts_word(parse_hostfile(Path(args.hostfile)))
        folder = Path(os.environ[on_host.MARK]) if on_host.MARK in os.environ else None
        if launch._is_elastic(args):
            elastic_start.prepare(args)
        by_gloo = launch.is_gloo_used(args.use_gloo, args.use_mpi, args.use_jsrun)
        if by_gloo and args.num_proc:
            changes.give_gloo_time(args)
        # In an elastic job hosts come and go, and Kubernetes may use a command of its own instead of ssh.
        if args.num_proc and not launch._is_elastic(args) and not horovod_env.is_kubeflow_mpi():
            known = _check_hosts(args, by_gloo) if args.hosts else Reached((socket.gethostname(),) * args.num_proc)
            if folder:
                known.write(folder)
        if folder and not by_gloo:
            args.mpi_args = f"--report-uri {shlex.quote(str(folder / URI_FILE))} {args.mpi_args or ''}"
        return args

    return parse_args


def _check_hosts(args: argparse.Namespace, by_gloo: bool) -> Reached:
    job = Job((), args.num_proc, parse_hosts(args.hosts))
    places = rank_places(job)
    hosts = used_hosts(places)
    args.hosts = hosts_word(hosts)  # Horovod needs the number of slots of each host.
    ssh = Ssh(args.ssh_port, args.ssh_identity_file)
    if (paths := reach.check([host.name for host in hosts], ssh)) is None:
        return Reached(places)
    # Ranks on other hosts start with the same options as every other command there.
    remote.SSH_COMMAND_PREFIX = shlex.join(["ssh", *ssh.options])
    args.ssh_port = args.ssh_identity_file = None  # ssh.options has them now.
    launch._check_all_hosts_ssh_successful = lambda *args, **kwargs: True
    if args.nics:
        words = ["--prefix", sys.prefix, "-mca", "oob_tcp_if_include", ",".join(args.nics)]
        words += ["-mca", "plm_rsh_args", " ".join(ssh.options), *reach.MPI_NOTICES_CUTS]
    else:
        words = reach.mpi_options(paths.network, ",".join(paths.interfaces), ssh)
        driver_service.get_common_interfaces = lambda *args: [paths.interface] if by_gloo else []
    if not by_gloo:
        args.mpi_args = f"{shlex.join(words)} {args.mpi_args or ''}"
    return Reached(places, paths.oom_kills, ssh)


changes.make_in_every_process()
if __name__ == "__main__":
    main()
