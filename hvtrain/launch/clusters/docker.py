"""Settings and checks of `docker run` on hosts with GPUs, and of a trial with Compose on one machine. Pure.

conf/cluster/docker-run.sh.j2 is one script for every host: given that host's name, it starts there either the ranks or
an sshd that waits for them. conf/cluster/compose.yaml.j2 needs one machine, no GPU and no key: its two containers make
a key pair themselves.
"""

from dataclasses import dataclass
from typing import Any

from hvtrain.config.validate import setting
from hvtrain.errors import ConfigError
from hvtrain.launch.clusters import check_texts
from hvtrain.launch.job import Job, hosts_word, rank_places


@dataclass
class Settings:
    """Containers of the images that our Dockerfile makes."""

    image: str = setting("hvtrain", "the image on the hosts")
    cpu_image: str = setting("hvtrain:cpu", "the image of the trial in compose.yaml")
    gpus: bool = setting(True, "give each container all GPUs of its host")
    keys: str | None = setting(
        None, "folder on each host with id_ed25519 and authorized_keys; needed for several hosts"
    )
    data: str | None = setting(None, "folder on each host with the data, mounted at /data")
    runs: str | None = setting(None, "folder on the first host for results, writable by user 10001; null: lost with it")
    ssh_port: int = setting(2222, "port of the workers' sshd, free on each host", low=1024)


def values(job: Job, settings: Settings) -> dict[str, Any]:
    """What the templates need. Raises ConfigError for what cannot start."""
    if len(job.hosts) > 1 and not settings.keys:
        advice = "give the folder that holds them on each: cluster.keys=/path/to/keys"
        raise ConfigError(f"several hosts need ssh keys; {advice}")
    if job.hosts:
        rank_places(job)  # raises if the hosts have too few slots
    folder = "a folder for Docker; give an absolute path without a colon"
    check_texts(settings, ("keys", "data", "runs"), r"/[^:\n]*", folder)
    return {"hosts": hosts_word(job.hosts)}
