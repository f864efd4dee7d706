"""A lab for tests: scripts/lab under a name of its own, for as long as a `with` lasts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from launching import BIN, ROOT

SCRIPT = ROOT / "scripts" / "lab"
PYTHON = str(BIN / "python")

needs_lab = pytest.mark.skipif(
    os.geteuid() != 0
    or not (shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") and shutil.which("ip")),
    reason="the lab needs root, openssh-server and iproute2",
)


class Lab:
    """Hosts s1 ... sN. Two labs at once do not see each other."""

    count = 0

    def __init__(self, num_hosts: int, *options: str) -> None:
        Lab.count += 1
        self.name = f"test-{os.getpid()}-{Lab.count}"
        self.state = Path(f"/var/lib/hvtrain-lab-{self.name}")
        self.home = self.state / "home"  # What ~ is on each host; self.of(host) is what lies there.
        self._up = ["up", str(num_hosts), *options]

    def __enter__(self) -> Lab:
        try:
            self(*self._up)
        except BaseException:  # A signal kills `up`, and its namespaces stay.
            self("down")
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self("down")

    def of(self, host: str) -> Path:
        """A host's home, as seen from outside."""
        return self.state / host / "home"

    def __call__(
        self, *command: str, check: bool = True, timeout: float = 560, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """scripts/lab WORDS."""
        done = subprocess.run(
            [SCRIPT, *command],
            cwd=cwd,
            env={**os.environ, "HVTRAIN_LAB": self.name},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(
                f"lab {' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done

    def run(
        self, host: str, *command: str, timeout: float = 560, cwd: Path | None = None
    ) -> tuple[int, str]:
        """Exit code and all output of a command that starts in the home there, or in cwd, with what a login has."""
        done = self("exec", host, *command, check=False, timeout=timeout, cwd=cwd or self.home)
        return done.returncode, done.stdout + done.stderr

    def launch(self, *arguments: str) -> tuple[int, str]:
        """python -m hvtrain launch on s1; nothing is exported or activated."""
        return self.run("s1", PYTHON, "-m", "hvtrain", "launch", *arguments)
