"""Lines for Docker on hosts with GPUs, and a try-out of two containers on one machine.

Pure. One script is the same on every host: it is told that host's name, and starts there either the ranks or an sshd
that waits for them. The compose file needs one machine, no GPU and no key: the two containers make a key pair
themselves.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from hvtrain.config.validate import setting
from hvtrain.errors import ConfigError
from hvtrain.launch.job import Job, rank_places

SCRIPT = "docker-run.sh"
COMPOSE = "compose.yaml"
HOME = "/home/hvtrain"


@dataclass
class Settings:
    """Containers of the images that our Dockerfile makes."""

    image: str = setting("hvtrain", "the image on the hosts")
    cpu_image: str = setting("hvtrain:cpu", "the image of the try-out in compose.yaml")
    gpus: bool = setting(True, "give each container all GPUs of its host")
    keys: str | None = setting(
        None, "folder on each host with id_ed25519 and authorized_keys; needed for several hosts"
    )
    data: str | None = setting(None, "folder on each host with the data, seen as /data")
    runs: str | None = setting(None, "folder on the first host for results, writable by user 10001; null: lost with it")
    ssh_port: int = setting(2222, "port of the workers' sshd, free on each host", low=1024)


def files(job: Job, settings: Settings) -> dict[str, str]:
    """The script for the hosts, and the compose file. Raises ConfigError for what cannot start."""
    if job.is_elastic:
        raise ConfigError("cluster=docker came with --min-np; its hosts are fixed: leave --min-np out")
    if len(job.hosts) > 1 and not settings.keys:
        raise ConfigError(
            "several hosts need ssh keys; give the folder that holds them on each: cluster.keys=/path/to/keys"
        )
    if job.hosts:
        rank_places(job)  # raises where the hosts have too few slots
    for name in ("keys", "data", "runs"):
        value = getattr(settings, name)
        if value is not None and not re.fullmatch(r"/[^:\n]*", value):
            raise ConfigError(f"cluster.{name}={value} is no folder for Docker; give a path from / on, without a colon")
    return {SCRIPT: _script(job, settings), COMPOSE: _compose(job, settings)}


def commands(job: Job, settings: Settings, folder: str) -> list[list[str]]:
    """The try-out on this machine. The script is started by hand, on each host."""
    return [["docker", "compose", "--file", f"{folder}/{COMPOSE}", "up", "--exit-code-from", "s1"]]


def _horovodrun(job: Job, *where: str) -> list[str]:
    return ["horovodrun", f"--{job.controller}", *where, *job.command]


def _script(job: Job, settings: Settings) -> str:
    """Horovod passes the environment of the first host's container on to all ranks."""
    options = ["--rm", "--init", "--network=host", "--ipc=host", "--ulimit", "memlock=-1"]
    options += ["--gpus", "all"] if settings.gpus else []
    options += ["-v", f"{settings.data}:/data:ro"] if settings.data else []
    first = [word for name, value in job.environment.items() for word in ("-e", f"{name}={value}")]
    first += ["-v", f"{settings.runs}:{HOME}/runs"] if settings.runs else []
    if len(job.hosts) < 2:
        words = _horovodrun(job, "-np", str(job.num_ranks))
        return _header("On the host with the GPUs: bash docker-run.sh") + _run(
            [*options, *first], settings.image, words
        )
    options += ["-v", f"{settings.keys}:{HOME}/.ssh:ro"]
    listed = ",".join(f"{host.name}:{host.slots}" for host in job.hosts)
    where = ("--ssh-port", str(settings.ssh_port), "-np", str(job.num_ranks), "-H", listed)
    chief, others = job.hosts[0].name, [host.name for host in job.hosts[1:]]
    about = f"On {', '.join(others)} first, each with its own name: bash {SCRIPT} {others[0]}"
    starts = _run([*options, *first], settings.image, _horovodrun(job, *where))
    waits = _run(options, settings.image, ["worker", str(settings.ssh_port)])
    lines = [
        _header(f"{about}\n# Then on {chief}: bash {SCRIPT} {chief}") + 'case "${1:-}" in',
        f"{chief})\n{starts};;",
        f"{' | '.join(others)})\n{waits};;",
        f"*)\necho '{SCRIPT}: say which of these hosts this is: {' '.join([chief, *others])}' >&2\nexit 2\n;;",
        "esac\n",
    ]
    return "\n".join(lines)


def _header(about: str) -> str:
    secrets = (
        "Whoever may read this file, or ask Docker about the container, reads the values after -e: no secrets there."
    )
    return f"#!/usr/bin/env bash\n# {about}\n# {secrets}\nset -euo pipefail\n\n"


def _run(options: list[str], image: str, words: list[str]) -> str:
    """One docker run, a line for its options, its image and the words in the container."""
    parts = [["exec", "docker", "run", *options], [image], words]
    return " \\\n  ".join(" ".join(map(shlex.quote, part)) for part in parts) + "\n"


def _compose(job: Job, settings: Settings) -> str:
    """Two containers that share a home, as hosts of a cluster do: the key pair made in it is known to both."""
    port = str(settings.ssh_port)
    key = f"{HOME}/.ssh/id_ed25519"
    make_key = (
        f"mkdir -p -m 700 {HOME}/.ssh && {{ [ -s {key} ] || ssh-keygen -q -t ed25519 -N '' -f {key}; }} && "
        f"cp {key}.pub {HOME}/.ssh/authorized_keys && exec /opt/hvtrain/scripts/docker-entrypoint worker {port}"
    )
    volumes = [f"home:{HOME}", *([f"{_literal(settings.data)}:/data:ro"] if settings.data else [])]
    shared: dict[str, Any] = {"image": settings.cpu_image, "init": True, "shm_size": "1gb", "volumes": volumes}
    healthy = {"test": ["CMD", "bash", "-c", f"</dev/tcp/127.0.0.1/{port}"], "interval": "2s", "retries": 30}
    train = _horovodrun(job, "--ssh-port", port, "-np", "2", "-H", "s1:1,s2:1")
    services = {
        "s2": {**shared, "hostname": "s2", "command": ["bash", "-c", make_key], "healthcheck": healthy},
        "s1": {
            **shared,
            "hostname": "s1",
            "command": [_literal(word) for word in train],
            "environment": {name: _literal(value) for name, value in job.environment.items()},
            "depends_on": {"s2": {"condition": "service_healthy"}},
        },
    }
    comment = (
        "# Two containers on one machine, without a GPU: docker compose -f compose.yaml up --exit-code-from s1\n"
        "# Results and the key pair stay in the volume `home`; docker compose -f compose.yaml down -v removes them.\n"
        "# Whoever may read this file reads the values under environment: no secrets there.\n"
    )
    tree = {"services": services, "volumes": {"home": {}}}
    dumper = type("Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    return comment + yaml.dump(tree, Dumper=dumper, sort_keys=False, width=120, allow_unicode=True)


def _literal(word: str) -> str:
    """The word for Compose, which replaces $NAME and reads $$ as a dollar."""
    return word.replace("$", "$$")
