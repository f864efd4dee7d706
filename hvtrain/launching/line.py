"""The command line that starts a job over ssh: Horovod's launcher on Gloo or MPI, or MPI's own. Pure."""

from __future__ import annotations

import os
import sys

from hvtrain.launching.job import Job
from hvtrain.launching.reach import Paths, mpi_options
from hvtrain.launching.ssh import Ssh


def start_line(
    job: Job,
    ssh: Ssh,
    paths: Paths | None = None,
    interfaces: str | None = None,
    mpirun: bool = False,
    discovery_script: str | None = None,
) -> list[str]:
    """The words that start the job's ranks from this host.

    Args:
        paths: the way between the hosts, for mpirun; horovodrun finds it by itself.
        interfaces: the user's choice instead, names joined by commas.
        mpirun: MPI's own launcher instead of Horovod's.
        discovery_script: prints the hosts that there are, for an elastic job.
    """
    first, *rest = job.command
    command = [sys.executable if first == "python" else first, *rest]
    if mpirun:
        return [*_mpirun(job, ssh, paths, interfaces), *command]
    line = [sys.executable, "-m", "hvtrain.horovodrun", f"--{job.controller}", "-np", str(job.num_ranks)]
    if job.min_ranks:
        line += ["--min-np", str(job.min_ranks)]
    if job.max_ranks:
        line += ["--max-np", str(job.max_ranks)]
    if discovery_script:
        line += ["--host-discovery-script", discovery_script]
    else:
        line += ["-H", hosts_word(job)]
    line += ["--ssh-port", str(ssh.port)] if ssh.port else []
    line += ["--ssh-identity-file", ssh.identity_file] if ssh.identity_file else []
    line += ["--network-interfaces", interfaces] if interfaces else []
    return [*line, *command]


def hosts_word(job: Job) -> str:
    """The hosts as -H takes them."""
    return ",".join(f"{host.name}:{host.slots}" for host in job.hosts)


def _mpirun(job: Job, ssh: Ssh, paths: Paths | None, interfaces: str | None) -> list[str]:
    line = [f"{sys.prefix}/bin/mpirun", "-np", str(job.num_ranks), "-H", hosts_word(job), "--tag-output"]
    # As Horovod starts it: its background thread must not share one core with the rank's others.
    line += ["--bind-to", "none", "--map-by", "slot", "-mca", "pml", "ob1", "-mca", "btl", "^openib"]
    line += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    if interfaces:
        line += ["--prefix", sys.prefix]
        line += ["-mca", "btl_tcp_if_include", interfaces, "-mca", "oob_tcp_if_include", interfaces]
        line += ["-x", f"NCCL_SOCKET_IFNAME={interfaces}"]
    elif paths:
        line += mpi_options(paths, ssh)
    # Each host is reached from this one; above 64 Open MPI would go from host to host, for which none has a key.
    line += ["-mca", "plm_rsh_no_tree_spawn", "1", "-mca", "plm_rsh_num_concurrent", str(len(job.hosts))]
    for name in sorted(job.environment):
        line += ["-x", name]
    return line
