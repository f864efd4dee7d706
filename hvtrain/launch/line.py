"""The command line that starts a job over ssh, by Horovod's launcher on Gloo or MPI or by MPI's own. Pure."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hvtrain.launch.job import Host, Job, hosts_word, rank_places, used_hosts
from hvtrain.launch.on_host import MARK
from hvtrain.launch.reach import URI_FILE, Paths, mpi_options
from hvtrain.launch.ssh import Ssh


@dataclass(frozen=True)
class Way:
    """How hosts are reached and ranks are started: by Horovod's launcher, or by MPI's own.

    interfaces: names joined by commas, instead of those found. discovery_script: prints an elastic job's hosts.
    """

    ssh: Ssh = field(default_factory=Ssh)
    mpirun: bool = False
    interfaces: str | None = None
    discovery_script: str | None = None
    seconds_to_begin: float | None = None


def start_line(job: Job, way: Way, paths: Paths | None = None, folder: Path | None = None) -> list[str]:
    """The words of the command that starts the job's ranks from this host.

    paths: the way between the hosts, for mpirun; horovodrun finds it itself. folder: the launch's, as Launch takes it;
    None: nobody supervises the line from outside.
    """
    first, *rest = job.command
    command = [sys.executable if first == "python" else first, *rest]
    if way.mpirun:
        watched = ["--report-uri", str(folder / URI_FILE), "-x", MARK] if folder else []
        return [*_mpirun(job, way, paths), *watched, *command]
    # Without a supervisor outside, horovodrun supervises itself.
    line = [sys.executable, "-m", "hvtrain.launch.horovod_launcher"] if folder else [f"{sys.prefix}/bin/horovodrun"]
    options = {
        "-np": job.num_processes,
        "--min-np": job.min_ranks,
        "--max-np": job.max_ranks,
        "--host-discovery-script": way.discovery_script,
        "-H": None if way.discovery_script else hosts_word(_hosts(job)),
        "--ssh-port": way.ssh.port,
        "--ssh-identity-file": way.ssh.identity_file,
        "--network-interfaces": way.interfaces,
    }
    words = [word for name, value in options.items() if value for word in (name, str(value))]
    return [*line, f"--{job.controller}", *words, *command]


def _hosts(job: Job) -> tuple[Host, ...]:
    """The hosts, with a slot for each of their processes; ranks of an elastic job may take any slot."""
    return job.hosts if job.is_elastic else used_hosts(rank_places(job))


def _mpirun(job: Job, way: Way, paths: Paths | None) -> list[str]:
    hosts = _hosts(job)
    line = [f"{sys.prefix}/bin/mpirun", "-np", str(job.num_processes), "-H", hosts_word(hosts), "--tag-output"]
    # As Horovod does: its background thread must not share one core with the rank's others.
    line += ["--bind-to", "none", "--map-by", "slot", "-mca", "pml", "ob1", "-mca", "btl", "^openib"]
    line += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    if way.interfaces:
        line += mpi_options(way.interfaces, way.interfaces, way.ssh)
    elif paths:
        line += mpi_options(paths.network, ",".join(paths.interfaces), way.ssh)
    # Above 64 hosts Open MPI would go from host to host, for which none has a key.
    line += ["-mca", "plm_rsh_no_tree_spawn", "1", "-mca", "plm_rsh_num_concurrent", str(len(hosts))]
    return [*line, *(word for name in sorted(job.environment) for word in ("-x", name))]
