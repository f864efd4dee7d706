"""The hosts of a launch, and calls on all of them."""

import json
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hvtrain.launch import on_host
from hvtrain.launch.on_host import Answer
from hvtrain.launch.ssh import LOADER, SSH_FAILED, Ssh, answer, request
from hvtrain.system import host_facts, interfaces

URI_FILE = "uri"  # mpirun writes its address there, which begins with the number of its job.
SECONDS_FOR_A_HOST = 20.0
_FILE = "hosts.json"
ON_HOST = (host_facts, interfaces, on_host)


@dataclass(frozen=True)
class Reached:
    """Whoever starts the ranks knows it, and whoever supervises them needs it; those may be two processes.

    places: each rank's host, by the name that -H gives it. remote: all hosts but this one, with their
    on_host.oom_kills() before the start.
    """

    places: tuple[str, ...] = ()
    remote: Mapping[str, int | None] = field(default_factory=dict)
    ssh: Ssh = field(default_factory=Ssh)

    def write(self, folder: Path) -> None:
        """Into the launch's folder, for read()."""
        (folder / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    def clear(self, mark: str, job: int | None = None) -> dict[str, Answer | None]:
        """Calls on_host.clear on all hosts. The answers of the others; None if ssh did not get there."""
        on_host.clear(mark, job)
        with ThreadPoolExecutor(32) as pool:
            return dict(zip(self.remote, pool.map(lambda host: self.call(host, "clear", mark, job), self.remote)))

    def call(self, host: str, function: str, mark: str, *arguments: int | None) -> Answer | None:
        """Calls a function of on_host on another host. None if ssh did not get there."""
        text = request(ON_HOST, function, mark, *arguments)
        try:
            done = self.ssh.run(host, [sys.executable, "-c", LOADER], text, SECONDS_FOR_A_HOST)
        except subprocess.TimeoutExpired:
            return None
        found: Answer | None = answer(done.stdout)
        return found or (None if done.returncode == SSH_FAILED else Answer(count=0, oom_kills=None))


def job(folder: Path) -> int | None:
    """The number of mpirun's own job, if mpirun runs."""
    try:
        return int((folder / URI_FILE).read_text(encoding="utf-8").partition(".")[0])
    except (OSError, ValueError):
        return None


def read(folder: Path) -> Reached:
    """Reads what the other process wrote; nothing if it did not get that far."""
    try:
        tree = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except OSError:
        return Reached()
    return Reached(tuple(tree["places"]), tree["remote"], Ssh(**tree["ssh"]))
