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
from hvtrain.core.records import refuse_link
from hvtrain.errors import ConfigError
from hvtrain.launch import by_hand, environment, reach, restart
from hvtrain.launch.clusters.choice import Cluster, choose
from hvtrain.launch.job import Host, Job, parse_hostfile, parse_hosts, rank_places
from hvtrain.launch.line import Way, start_line
from hvtrain.launch.options import check, parser
from hvtrain.launch.roles import Roles, roles_of
from hvtrain.launch.ssh import Ssh
from hvtrain.system import addresses


def main() -> int:
    """Makes the job of the command line, then starts it, or writes and submits its files."""
    line = sys.argv[1:]
    end = line.index("--") if "--" in line else len(line)
    words = line[end + 1 :]
    options = parser().parse_intermixed_args(line[:end])
    if end == len(line):
        raise ConfigError("the settings of the run are missing; write them after --, for example: -- model=cnn")
    cluster = choose(options.settings, own_folders(words))
    if not (run := _run(words, options, cluster)):
        return 0
    hosts = parse_hostfile(Path(options.hostfile)) if options.hostfile else ()
    hosts = parse_hosts(options.hosts) if options.hosts else hosts
    number = (sum(host.slots for host in hosts) or 1) if options.np is None else options.np
    roles = roles_of(run.strategy, number)
    check(options, cluster, roles)
    if cluster.kind != "ssh":
        # Slurm's file starts this launcher again, which then adds what the strategy needs.
        return _by_files(options, cluster, _job(options, cluster, run.command, hosts, Roles(number)))
    if roles.num_replicas and (hosts or options.np):
        hosts = _one_host(hosts, number)
        run = replace(run, command=(*run.command, f"strategy.num_replicas={number}"))
    if options.job_name:
        own = by_hand.Own(roles, options.job_name, options.task_index, options.coordinator)
        own = replace(own, seconds=options.start_timeout or own.seconds, interface=options.network_interfaces)
        return by_hand.start(own, run.command, environment.asked_for(os.environ, options.env))
    return _by_ssh(options, _job(options, cluster, run.command, hosts, roles), run.folder)


@dataclass(frozen=True)
class _Run:
    """The command of each rank, its run folder if it is known here, and the settings of its strategy."""

    command: tuple[str, ...]
    folder: str | None
    strategy: Mapping[str, Any]


def _run(words: list[str], options: argparse.Namespace, cluster: Cluster) -> _Run | None:
    """The run of the words after --; None when they only asked to see it composed."""
    if words and Path(words[0]).name.startswith("python"):
        if options.num_ps and cluster.kind != "ssh":
            raise ConfigError(f"cluster={cluster.kind} takes --num-ps with settings of a run only; leave it out")
        return _Run(tuple(words), None, {"num_ps": options.num_ps} if options.num_ps else {})
    if words and "=" not in words[0] and not words[0].startswith("-"):
        raise ConfigError(f"{words[0]!r} is not a run setting; a command of your own begins with python")
    if not (trees := compose(words)):
        return None
    config = from_dict(trees[0])
    words = _without_addresses(words, cluster)
    run_dir = config.run.dir
    # A restart must find the folder again. On Slurm it is named by the job's number, which a requeue keeps; processes
    # that are started by hand take rank 0's.
    if not run_dir and cluster.kind != "slurm" and not options.job_name:
        run_dir = default_run_dir(config)
        words = [*words, f"run.dir={run_dir}"]
    if options.num_ps:
        if "num_ps" not in config.strategy:
            target = config.strategy["_target_"]
            fix = "choose strategy=parameter_server, or leave it out"
            raise ConfigError(f"--num-ps {options.num_ps}: {target} has no parameter servers; {fix}")
        config.strategy["num_ps"] = options.num_ps
        words = [*words, f"strategy.num_ps={options.num_ps}"]
    return _Run(("python", "-m", "hvtrain", *words), run_dir, config.strategy)


def _without_addresses(words: list[str], cluster: Cluster) -> list[str]:
    """The words without notify=..., whose addresses ranks get as a variable: on no command line, and in no file."""
    others, given = addresses.take(words)
    if given is None:
        return words
    if not addresses.split(given):
        return [*others, f"notify={given}"]
    if cluster.kind != "ssh":
        why = f"cluster={cluster.kind} came with notify=, whose addresses would stand in its files"
        raise ConfigError(f"{why}; set {addresses.VARIABLE} where the job runs instead")
    if given != "null":
        os.environ[addresses.VARIABLE] = given
    return others


def _one_host(hosts: tuple[Host, ...], number: int) -> tuple[Host, ...]:
    """The host of the one process that trains all replicas. Raises ConfigError if they need more than one."""
    if hosts and hosts[0].slots < number:
        found = f"-np {number} needs as many slots on one host and {hosts[0].name} has {hosts[0].slots}"
        fix = "lower -np, or choose a strategy for several hosts"
        raise ConfigError(f"this strategy trains all its replicas in one process: {found}; {fix}")
    return hosts[:1]


def _job(
    options: argparse.Namespace, cluster: Cluster, command: tuple[str, ...], hosts: tuple[Host, ...], roles: Roles
) -> Job:
    num_ranks = roles.num_workers
    if cluster.kind == "ssh" and not hosts and not options.host_discovery_script:
        hosts = parse_hosts(f"localhost:{num_ranks}")
    elastic = (options.min_np and not options.max_restarts) or options.max_np or options.host_discovery_script
    if elastic and options.how in ("mpi", "mpirun"):
        raise ConfigError(f"an elastic job needs Gloo, and --{options.how} was given; leave it out")
    # A cluster's file runs elsewhere, in an environment of its own: it gets only the variables of --env.
    variables = environment.for_ranks if cluster.kind == "ssh" else environment.asked_for
    return Job(
        command=command,
        num_ranks=num_ranks,
        hosts=hosts,
        controller="gloo" if elastic or options.how == "gloo" else "mpi",
        environment=variables(os.environ, options.env),
        min_ranks=(options.min_np or num_ranks) if elastic else None,
        max_ranks=options.max_np,
        num_ps=roles.num_ps,
    )


def _by_ssh(options: argparse.Namespace, job: Job, run_dir: str | None) -> int:
    if not options.host_discovery_script:
        rank_places(job)
    ssh = Ssh(options.port, options.identity_file)
    is_mpirun, script = options.how == "mpirun", options.host_discovery_script
    way = Way(ssh, is_mpirun, options.network_interfaces, script, options.start_timeout)
    if options.dry_run:
        paths = reach.check([host.name for host in job.hosts], ssh) if way.mpirun else None
        line, path = start_line(job, way, paths), Path(options.output or "launch/ssh") / "launch.sh"
        _write_script(path, job, line)
        print(f"would run: {shlex.join(line)}\nwritten to {path}")
        return 0
    default = Path(run_dir) / "launch" if run_dir else Path("launch") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    if not options.logs:
        refuse_link(default, ConfigError, "give a place with --logs")
    return restart.run(job, way, Path(options.logs or default), run_dir, options.max_restarts, options.min_np)


def _by_files(options: argparse.Namespace, cluster: Cluster, job: Job) -> int:
    folder = Path(options.output or f"launch/{cluster.kind}")
    paths = cluster.write(job, folder)
    for path in paths if options.dry_run else []:
        print(f"# ---- {path}\n{path.read_text(encoding='utf-8')}")
    print(f"{'would run' if options.dry_run else 'running'}: {shlex.join(cluster.command(folder))}", flush=True)
    return 0 if options.dry_run else cluster.submit(folder)


def _write_script(path: Path, job: Job, line: list[str]) -> None:
    """Writes the command with the environment that it would have here; readable by its owner only, for its values."""
    names = ("HOME", "USER", "TERM", "SSH_AUTH_SOCK", addresses.VARIABLE)
    own = " ".join(f'{name}="${{{name}-}}"' for name in names)
    values = shlex.join(f"{name}={value}" for name, value in job.environment.items() if name not in names)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        # Nobody else can read it at any moment.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "w", encoding="utf-8") as file:
            file.write(f"#!/usr/bin/env bash\nexec env -i {own} {values} \\\n  {shlex.join(line)}\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another place with --output") from error
