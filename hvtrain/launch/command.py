"""`python -m hvtrain launch`: starts a run on many hosts over ssh, or writes a cluster's files and submits them.

With --job-name it starts one process of the run here, for users who start each process by hand.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hvtrain.config.compose import compose, own_folders
from hvtrain.config.schema import default_run_dir, from_dict
from hvtrain.core.files import refuse_link
from hvtrain.core.topology import Roles, roles_of
from hvtrain.errors import ConfigError
from hvtrain.launch import by_hand, cluster_files, environment, remote_hosts, restart
from hvtrain.launch.cluster_kinds import ClusterKind, Slurm
from hvtrain.launch.job import (
    SECONDS_TO_BEGIN,
    Host,
    Job,
    given,
    launcher_command,
    parse_hostfile,
    parse_hosts,
    place_ranks,
)
from hvtrain.launch.options import check, parser
from hvtrain.launch.remote_hosts import Ssh
from hvtrain.system import secrets


def main() -> int:
    """Makes the job of the command line, then starts it, or writes and submits its files."""
    line = sys.argv[1:]
    end = [*line, "--"].index("--")
    names = given(line[:end])
    # Intermixed, because cluster=KIND may stand before, between and after the options.
    options = parser().parse_intermixed_args(line[:end])
    if end == len(line):
        raise ConfigError("the settings of the run are missing; write them after --, for example: -- model=cnn")

    run_arguments = line[end + 1 :]
    folders = own_folders(run_arguments)
    cluster = cluster_files.choose(options.settings, folders)
    run = _run(run_arguments, options, cluster)
    # The composed run was printed, as --cfg asks.
    if run is None:
        return 0

    hosts = _hosts(options)
    num_training = options.np
    if num_training is None:
        num_training = sum(host.slots for host in hosts) or 1
    roles = roles_of(run.strategy, num_training)
    check(names, cluster, roles)

    if cluster:
        # Slurm's file starts this launcher again, which then starts one process for all replicas.
        job = _job(options, cluster, run.command, hosts, Roles(num_training, roles.num_ps))
        return _by_files(options, cluster, job, folders)

    if roles.num_replicas and (hosts or options.np):
        hosts = _one_host(hosts, num_training)
        run = replace(run, command=(*run.command, f"strategy.num_replicas={num_training}"))
    if options.job_name:
        return by_hand.start(
            roles,
            roles.rank_of(options.job_name, options.task_index),
            options.coordinator,
            run.command,
            environment.asked_for(os.environ, options.env),
            options.start_timeout or by_hand.START_SECONDS,
            options.network_interfaces,
        )
    return _by_ssh(options, _job(options, cluster, run.command, hosts, roles), run)


@dataclass(frozen=True)
class _Run:
    """The command of each rank, its run folder if it is known here, and the settings of its strategy.

    is_new: the folder is the default one of this launch.
    """

    command: tuple[str, ...]
    folder: str | None
    strategy: Mapping[str, Any]
    is_new: bool = False


def _run(arguments: list[str], options: argparse.Namespace, cluster: ClusterKind | None) -> _Run | None:
    """The run of the arguments after --; None if they only ask to see it composed."""
    first = next(iter(arguments), "")
    if Path(first).name.startswith("python"):
        # Only a run has settings in which a cluster's file could pass the number of servers on.
        if options.num_ps and cluster:
            raise ConfigError(f"cluster={cluster.kind} takes --num-ps with settings of a run only; leave it out")
        strategy = {"num_ps": options.num_ps} if options.num_ps else {}
        return _Run(tuple(arguments), None, strategy)
    if first and "=" not in first and not first.startswith("-"):
        raise ConfigError(f"{first!r} is not a run setting; a command of your own begins with python")

    # Before any rank starts, so that an error is printed once and here. Empty after --cfg.
    trees = compose(arguments)
    if not trees:
        return None
    config = from_dict(trees[0])
    arguments = _without_addresses(arguments, cluster)

    run_dir = config.run.dir
    # A restart must find the folder again. On Slurm it is named by the job's number, which a
    # requeue keeps; processes that are started by hand take rank 0's.
    if not run_dir and not isinstance(cluster, Slurm) and not options.job_name:
        run_dir = default_run_dir(config)
        arguments = [*arguments, f"run.dir={run_dir}"]

    if options.num_ps:
        if "num_ps" not in config.strategy:
            raise ConfigError(
                f"--num-ps {options.num_ps}: {config.strategy['_target_']} has no parameter servers; "
                "choose strategy=parameter_server, or leave it out"
            )
        config.strategy["num_ps"] = options.num_ps
        arguments = [*arguments, f"strategy.num_ps={options.num_ps}"]
    return _Run(("python", "-m", "hvtrain", *arguments), run_dir, config.strategy, run_dir != config.run.dir)


def _without_addresses(arguments: list[str], cluster: ClusterKind | None) -> list[str]:
    """Removes notify=..., whose addresses ranks get as a variable: they may hold passwords.

    So they appear neither on a command line, which every user of a host can read, nor in a file.
    """
    others, value = secrets.take_addresses(arguments)
    if value is None:
        return arguments
    if not secrets.split_addresses(value):
        return [*others, f"notify={value}"]
    if cluster:
        raise ConfigError(
            f"cluster={cluster.kind} came with notify=, whose addresses would stand in its files; "
            f"set {secrets.NOTIFY_VARIABLE} where the job runs instead"
        )
    if value != "null":
        os.environ[secrets.NOTIFY_VARIABLE] = value
    return others


def _hosts(options: argparse.Namespace) -> tuple[Host, ...]:
    """The hosts of -H or --hostfile; empty without either."""
    if options.hosts:
        return parse_hosts(options.hosts)
    if options.hostfile:
        return parse_hostfile(Path(options.hostfile))
    return ()


def _one_host(hosts: tuple[Host, ...], num_replicas: int) -> tuple[Host, ...]:
    """The host of the one process that trains all replicas.

    Raises ConfigError if they need more than one.
    """
    if hosts and hosts[0].slots < num_replicas:
        raise ConfigError(
            "this strategy trains all its replicas in one process: "
            f"-np {num_replicas} needs as many slots on one host and {hosts[0].name} has {hosts[0].slots}; "
            "lower -np, or choose a strategy for several hosts"
        )
    return hosts[:1]


def _job(
    options: argparse.Namespace,
    cluster: ClusterKind | None,
    command: tuple[str, ...],
    hosts: tuple[Host, ...],
    roles: Roles,
) -> Job:
    """The job of the command line. Raises ConfigError for options that exclude each other."""
    num_ranks = roles.num_workers
    # Without hosts, this one alone.
    if not cluster and not hosts and not options.host_discovery_script:
        hosts = parse_hosts(f"localhost:{num_ranks}")

    # With --max-restarts, --min-np is the fewest ranks to restart on, and the job itself has a
    # fixed number.
    is_elastic = (options.min_np and not options.max_restarts) or options.max_np or options.host_discovery_script
    if is_elastic and options.how in ("mpi", "mpirun"):
        raise ConfigError(f"an elastic job needs Gloo, and --{options.how} was given; leave it out")

    # A cluster's file runs elsewhere, in an environment of its own: it gets those of --env alone.
    variables = environment.asked_for if cluster else environment.for_ranks
    return Job(
        command=command,
        num_ranks=num_ranks,
        hosts=hosts,
        controller="gloo" if is_elastic or options.how == "gloo" else "mpi",
        environment=variables(os.environ, options.env),
        min_ranks=(options.min_np or num_ranks) if is_elastic else None,
        max_ranks=options.max_np,
        num_ps=roles.num_ps,
        ssh=Ssh(options.port, options.identity_file),
        mpirun=options.how == "mpirun",
        interfaces=options.network_interfaces,
        discovery_script=options.host_discovery_script,
        seconds_to_begin=options.start_timeout or SECONDS_TO_BEGIN,
    )


def _by_ssh(options: argparse.Namespace, job: Job, run: _Run) -> int:
    """Starts the job, or writes the command that would. Returns its exit code."""
    if not job.discovery_script:
        place_ranks(job)  # Raises ConfigError if the hosts have too few slots.
    if options.dry_run:
        network = None
        if job.mpirun:
            network = remote_hosts.check([host.name for host in job.hosts], job.ssh)
        # Without a launch's folder: nobody supervises the script from outside.
        line = launcher_command(job, network)
        path = Path(options.output or "launch/ssh") / "launch.sh"
        _write_script(path, job, line)
        print(f"would run: {shlex.join(line)}\nwritten to {path}")
        return 0

    logs = Path("launch") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    if run.folder:
        logs = Path(run.folder) / "launch"
    if options.logs:
        logs = Path(options.logs)
    else:
        refuse_link(logs, ConfigError, "give a place with --logs")
    return restart.run(job, logs, run.folder, options.max_restarts, options.min_np, run.is_new)


def _by_files(options: argparse.Namespace, cluster: ClusterKind, job: Job, folders: list[Path]) -> int:
    """Writes the cluster's files, and submits or prints them.

    Returns the exit code of the submission.
    """
    folder = Path(options.output or f"launch/{cluster.kind}")
    paths = cluster_files.write(cluster, job, folder, folders)
    submission = shlex.join(cluster_files.submission(cluster, folder))
    if options.dry_run:
        for path in paths:
            print(f"# ---- {path}\n{path.read_text(encoding='utf-8')}")
        print(f"would run: {submission}")
        return 0

    print(f"running: {submission}", flush=True)
    return cluster_files.submit(cluster, folder)


def _write_script(path: Path, job: Job, line: list[str]) -> None:
    """Writes the command with the environment that it would have here; readable by its owner only, for its values."""
    # Taken from the shell that runs the script: they belong to a user, a terminal or an agent, or
    # are secret.
    kept = ("HOME", "USER", "TERM", "SSH_AUTH_SOCK", secrets.NOTIFY_VARIABLE)
    references = " ".join(f'{name}="${{{name}-}}"' for name in kept)
    values = shlex.join(f"{name}={value}" for name, value in job.environment.items() if name not in kept)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        # Nobody else can read it at any moment.
        path.touch(mode=0o700, exist_ok=False)
        path.write_text(f"#!/usr/bin/env bash\nexec env -i {references} {values} \\\n  {shlex.join(line)}\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another place with --output") from error
