"""`python -m hvtrain launch`: starts a run on many hosts over ssh, or writes a cluster's job files and submits them.

With --job-name it starts one process of the run here, for users who start each process by hand.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hvtrain.config.choices import config_dirs
from hvtrain.config.compose import composed, override
from hvtrain.config.schema import default_run_dir
from hvtrain.core.topology import Roles, roles_of
from hvtrain.errors import ConfigError
from hvtrain.launch import by_hand, cluster_files, environment, remote_hosts, restart
from hvtrain.launch.cluster_kinds import Slurm
from hvtrain.launch.job import (
    SECONDS_TO_BEGIN,
    ClusterKind,
    Hosts,
    Job,
    launcher_command,
    option_names,
    parse_hostfile,
    parse_hosts,
    place_ranks,
)
from hvtrain.launch.options import check, parser
from hvtrain.system import secrets
from hvtrain.system.files import is_remote, new_folder, refuse_link
from hvtrain.system.run_lock import LOCK_FILE, RunLock


def main() -> int:
    """Builds the job from the command line, then starts it, or writes and submits its files."""
    arguments = sys.argv[1:]
    end = [*arguments, "--"].index("--")
    names = option_names(arguments[:end])
    # Intermixed, because cluster=KIND may come before, between or after the options.
    options = parser().parse_intermixed_args(arguments[:end])
    if end == len(arguments):
        raise ConfigError(
            "the settings of the run are missing; write them after --, for example: -- model=cnn"
        )

    run_arguments = arguments[end + 1 :]
    folders = config_dirs(run_arguments)
    cluster = cluster_files.choose(options.settings, folders)
    run = _run(run_arguments, options, cluster)
    hosts: Hosts = ()
    if options.hosts:
        option, value = options.hosts
        hosts = parse_hosts(value) if option == "-H" else parse_hostfile(Path(value))
    num_training = options.np or sum(host.slots for host in hosts) or options.min_np or 1
    roles = roles_of(run.strategy, num_training)
    check(names, cluster, roles)

    if cluster:
        # The Slurm file runs this launcher again, which then starts one process for all replicas.
        job = _job(options, cluster, run.command, hosts, Roles(num_training, roles.num_ps))
        return _write_files(options, cluster, job, folders)

    if roles.num_replicas and (hosts or options.np):
        # One process trains all replicas, so only the first host is used.
        if hosts and hosts[0].slots < num_training:
            raise ConfigError(
                "this strategy trains all its replicas in one process: "
                f"-np {num_training} needs as many slots on one host and {hosts[0].name} has {hosts[0].slots}; "
                "lower -np, or choose a strategy for several hosts"
            )
        hosts = hosts[:1]
        run = replace(run, command=(*run.command, f"strategy.num_replicas={num_training}"))
    if options.job_name:
        return by_hand.start(
            roles,
            roles.rank_of(options.job_name, options.task_index),
            options.coordinator,
            run.command,
            environment.parse_env_options(os.environ, options.env),
            options.start_timeout or by_hand.START_SECONDS,
            options.network_interfaces,
        )
    return _start_over_ssh(options, _job(options, cluster, run.command, hosts, roles), run)


@dataclass(frozen=True)
class _Run:
    """The command of each rank, the run folder (None if it is not known here), and the strategy's settings.

    is_new: the folder is the default one, chosen for this launch.
    """

    command: tuple[str, ...]
    folder: str | None
    strategy: Mapping[str, Any]
    is_new: bool = False


def _run(arguments: list[str], options: argparse.Namespace, cluster: ClusterKind | None) -> _Run:
    """Returns the run that the arguments after -- describe: settings, or a command of the user's own."""
    first = next(iter(arguments), "")
    if first and "=" not in first and not first.startswith("-"):
        return _own_command(arguments, options, cluster)

    if options.num_ps:
        arguments = [*arguments, f"strategy.num_ps={options.num_ps}"]
    # Composed before any rank starts, so that an error is printed only once.
    config = composed(arguments)
    arguments = _without_addresses(arguments, cluster)

    may_restart = isinstance(cluster, Slurm) or getattr(cluster, "retries", None)
    if cluster and may_restart and config.resume == "never":
        raise ConfigError(
            f"resume=never would refuse the checkpoints from which cluster={cluster.kind} resumes after a restart; "
            "set resume=auto (debug=fast, overfit and profile set it to never) and choose a new run.dir"
        )

    run_dir = config.run.dir
    if options.max_restarts and config.resume == "never":
        if is_remote(run_dir):
            raise ConfigError(
                f"resume=never would refuse the checkpoints in {run_dir} from which --max-restarts resumes; leave one "
                "of them out, and choose a new run.dir"
            )
        arguments = [argument for argument in arguments if argument != "resume=never"]
        # A new folder has no checkpoints to refuse. In any other, restart.py replaces the setting once the
        # launch has checkpoints of its own.
        arguments.append("resume=never" if run_dir else "resume=auto")
    # An environment variable may have another value on another host or in another job.
    has_variable = any("run.dir=" in argument and "${oc.env:" in argument for argument in arguments)
    # A restart must find the folder again, so the launcher names it, except on Slurm, where it is named
    # after the job's number, which a requeue keeps, and by hand, where rank 0 names it.
    is_new = not (run_dir or isinstance(cluster, Slurm) or options.job_name)
    if is_new:
        run_dir = default_run_dir(config)
    # If the name comes from a file or contains the time, each process might arrive at a different
    # one, so the launcher passes on the name that it has composed.
    is_given = has_variable or f"run.dir={run_dir}" in arguments
    if is_new or (run_dir and not (is_given or options.job_name)):
        # Quoted if need be, since run.name may hold any character.
        arguments = [*arguments, override("run.dir", run_dir)]
    return _Run(("python", "-m", "hvtrain", *arguments), run_dir, config.strategy, is_new)


def _own_command(
    arguments: list[str], options: argparse.Namespace, cluster: ClusterKind | None
) -> _Run:
    """Returns the run of a command of the user's own.

    Raises ConfigError if the command does not begin with python.
    """
    if not Path(arguments[0]).name.startswith("python"):
        raise ConfigError(
            f"{arguments[0]!r} is not a run setting; a command of your own begins with python"
        )
    # Only a run has settings through which a cluster's file can pass on the number of servers.
    if options.num_ps and cluster:
        raise ConfigError(
            f"cluster={cluster.kind} takes --num-ps only with settings of a run; leave it out"
        )
    strategy = {"num_ps": options.num_ps} if options.num_ps else {}
    return _Run(tuple(arguments), None, strategy)


def _without_addresses(arguments: list[str], cluster: ClusterKind | None) -> list[str]:
    """Returns the arguments without the addresses of notify=, which ranks get in an environment variable instead.

    Addresses may contain passwords, and every user of a host can read command lines.
    """
    others, value = secrets.take_addresses(arguments)
    if value is None:
        return arguments
    if value == "null" or not secrets.split_addresses(value):
        return [*others, f"notify={value}"]
    if cluster:
        raise ConfigError(
            f"cluster={cluster.kind} cannot be combined with notify=, whose addresses would be written to its files; "
            f"set {secrets.NOTIFY_VARIABLE} where the job runs instead"
        )
    os.environ[secrets.NOTIFY_VARIABLE] = value
    # null, so that the variable takes precedence over the addresses in an experiment's file.
    return [*others, "notify=null"]


def _job(
    options: argparse.Namespace,
    cluster: ClusterKind | None,
    command: tuple[str, ...],
    hosts: Hosts,
    roles: Roles,
) -> Job:
    """Returns the job of the command line. Raises ConfigError for options that exclude each other."""
    num_ranks = roles.num_workers
    if options.min_np and options.min_np > num_ranks:
        raise ConfigError(f"--min-np {options.min_np} is more than -np {num_ranks}; lower it")
    # Horovod would start only that many, whatever -np says.
    if options.max_np and options.max_np < num_ranks:
        raise ConfigError(f"--max-np {options.max_np} is less than -np {num_ranks}; raise it")
    if not cluster and not hosts and not options.host_discovery_script:
        hosts = parse_hosts(f"localhost:{num_ranks}")

    # With --max-restarts, --min-np is the minimum for a restart, and the job
    # itself has a fixed number of ranks.
    is_elastic = (
        (options.min_np and not options.max_restarts)
        or options.max_np
        or options.host_discovery_script
    )
    if is_elastic and options.how in ("mpi", "mpirun"):
        raise ConfigError(f"an elastic job needs Gloo, and --{options.how} was given; leave it out")

    if cluster:
        # Its file runs elsewhere, in an environment of its own, and gets only the variables of --env.
        variables = environment.parse_env_options(os.environ, options.env)
        # Without the names, the file's horovodrun would not send them to other hosts. Slurm's file has --env.
        if variables and not isinstance(cluster, Slurm):
            variables[environment.EXTRA_NAMES] = ",".join(variables)
    else:
        variables = environment.for_ranks(os.environ, options.env)
    return Job(
        command=command,
        num_ranks=num_ranks,
        hosts=hosts,
        controller="gloo" if is_elastic or options.how == "gloo" else "mpi",
        environment=variables,
        min_ranks=(options.min_np or num_ranks) if is_elastic else None,
        max_ranks=options.max_np,
        num_ps=roles.num_ps,
        ssh=remote_hosts.Ssh(options.port, options.identity_file),
        mpirun=options.how == "mpirun",
        interfaces=options.network_interfaces,
        discovery_script=options.host_discovery_script,
        seconds_to_begin=options.start_timeout or SECONDS_TO_BEGIN,
    )


def _start_over_ssh(options: argparse.Namespace, job: Job, run: _Run) -> int:
    """Starts the job or, with --dry-run, prints the command that would start it. Returns the exit code."""
    if not job.discovery_script:
        place_ranks(job)  # Raises ConfigError if the hosts have too few slots.
    if options.dry_run:
        network = None
        if job.mpirun:
            network = remote_hosts.check([host.name for host in job.hosts], job.ssh)
        # Without a launch folder, since nothing supervises the command from outside.
        print(f"would run: {shlex.join(launcher_command(job, network))}")
        return 0

    if run.is_new and run.folder:
        folder = _make_run_folder(run.folder)
        setting = override("run.dir", run.folder)
        renamed = override("run.dir", folder)
        command = (renamed if part == setting else part for part in job.command)
        job = replace(job, command=tuple(command))
        run = replace(run, folder=folder)
    # Logs are written on this host, even if the run is in object storage.
    logs = Path("launch") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    local = None
    if run.folder and not is_remote(run.folder):
        local = Path(run.folder)
        logs = local / "launch"
    try:
        is_new_run = run.is_new or bool(local and not local.exists())
        if local and (local / LOCK_FILE).exists():
            # The ranks would refuse a folder in use too, but the other run's logs would be gone by then.
            with RunLock() as lock:
                lock.take(local)
    except OSError as error:
        raise ConfigError(
            f"run.dir={local} cannot be written: {error.strerror}; choose another run.dir"
        ) from error
    if options.logs:
        logs = Path(options.logs)
    else:
        refuse_link(logs, ConfigError, "choose another folder with --logs")
    try:
        return restart.run(job, logs, local, options.max_restarts, options.min_np, is_new_run)
    finally:
        if run.is_new and local:
            # rmdir removes only empty folders: those of a launch that was refused.
            with suppress(OSError):
                local.rmdir()
                local.parent.rmdir()


def _make_run_folder(run_dir: str) -> str:
    """Creates a run's folder, numbered if a launch in the same second has taken the name, and returns its path."""
    try:
        return str(new_folder(Path(run_dir)))
    except OSError:
        return run_dir  # The run itself will say why the folder cannot be created.


def _write_files(
    options: argparse.Namespace, cluster: ClusterKind, job: Job, folders: list[Path]
) -> int:
    """Writes the cluster's files, and submits them or, with --dry-run, prints them.

    Returns the exit code of the submission, or 0 with --dry-run.
    """
    folder = Path(options.output or f"launch/{cluster.kind}")
    paths = cluster_files.write(cluster, job, folder, folders)
    command = cluster_files.submission(cluster, folder)
    if options.dry_run:
        for path in paths:
            print(f"# ---- {path}\n{path.read_text(encoding='utf-8')}")
        print(f"would run: {shlex.join(command)}")
        return 0

    print(f"running: {shlex.join(command)}", flush=True)
    return cluster_files.submit(cluster, command)
