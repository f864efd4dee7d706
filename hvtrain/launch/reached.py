"""What a launch knows of its hosts, and what is done on all of them: each rank's, how they are reached."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypedDict

from hvtrain.launch import on_host
from hvtrain.launch.ssh import Ssh

URI_FILE = "uri"  # Where mpirun is told to write its address, which begins with the number of its job.
SECONDS_FOR_A_HOST = 20.0
_FILE = "hosts.json"
_SSH_FAILED = 255


class Answer(TypedDict):
    """Of a host: how many processes were asked or ended, and its on_host.oom_kills() then."""

    count: int
    oom_kills: int | None


@dataclass(frozen=True)
class Reached:
    """Known to who starts the ranks, needed by who watches over them; those may be two processes.

    Args:
        places: each rank's host, by the name that -H gives it.
        remote: hosts but this one, with what on_host.oom_kills() said of them before the start.
    """

    places: tuple[str, ...] = ()
    remote: Mapping[str, int | None] = field(default_factory=dict)
    ssh: Ssh = field(default_factory=Ssh)

    def write(self, folder: Path) -> None:
        """Into the launch's folder, for read()."""
        (folder / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    def clear(self, mark: str, job: int | None = None) -> dict[str, Answer | None]:
        """on_host.clear() on all hosts, this one first; the others' answers, None where ssh did not get there."""
        on_host.clear(mark, job)
        with ThreadPoolExecutor(32) as pool:
            return dict(zip(self.remote, pool.map(lambda host: self.there(host, "clear", mark, job), self.remote)))

    def there(self, host: str, what: str, mark: str, job: int | None = None) -> Answer | None:
        """Does it on another host. None: ssh did not get there."""
        words = [sys.executable, "-", what, mark, *([] if job is None else [str(job)])]
        text = Path(on_host.__file__).read_text(encoding="utf-8")
        try:
            done = self.ssh.run(host, words, text, SECONDS_FOR_A_HOST)
        except subprocess.TimeoutExpired:
            return None
        found = re.search(rf"^{on_host.ANSWER} (.*)$", done.stdout, re.MULTILINE)
        if found:
            answer: Answer = json.loads(found[1])
            return answer
        return None if done.returncode == _SSH_FAILED else Answer(count=0, oom_kills=None)


def job(folder: Path) -> int | None:
    """The number of mpirun's own job, where mpirun runs."""
    try:
        return int((folder / URI_FILE).read_text(encoding="utf-8").partition(".")[0])
    except (OSError, ValueError):
        return None


def read(folder: Path) -> Reached:
    """What the other process wrote; nothing where it did not get that far."""
    try:
        tree = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except OSError:
        return Reached()
    return Reached(tuple(tree["places"]), tree["remote"], Ssh(**tree["ssh"]))
