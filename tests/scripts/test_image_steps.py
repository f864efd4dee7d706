"""The cpu image's steps, replayed from the Dockerfile in a clean Debian, and what a container of it does.

Needs root, debootstrap and the network; some ten minutes on 2 cores, for Horovod is compiled.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay import Image, Replay, debian_mirror

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.release, pytest.mark.timeout(1500)]


def why_not() -> str | None:
    """What is missing for a replay; None: nothing."""
    if os.geteuid() != 0:
        return "only root can make a root folder"
    missing = [
        name
        for name in ("debootstrap", "unshare", "chroot", "apt-get", "git")
        if not shutil.which(name)
    ]
    if missing:
        return f"{', '.join(missing)} not installed"
    if subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False
    ).returncode:
        return "namespaces are not allowed here"
    mirror = debian_mirror()
    if mirror is None:
        return "apt has no bookworm mirror"
    try:
        urllib.request.urlopen(f"{mirror}/dists/bookworm/Release", timeout=20).close()
    except OSError as error:
        return f"the Debian mirror is out of reach: {error}"
    return None


class Replayed:
    """The image that the replay made, and `docker run` of it."""

    def __init__(self, replay: Replay, image: Image) -> None:
        self.replay, self.image, self.root = replay, image, image.root

    def run(self, *arguments: str) -> tuple[int, str]:
        return self.replay.container(self.image, *arguments)

    def files(self, *folders: str) -> Iterator[Path]:
        """Files and folders of the image, links not followed."""
        for folder in folders:
            for path, folders_here, files in os.walk(self.root / folder):
                yield from (Path(path) / name for name in (*folders_here, *files))

    def megabytes(self, path: str = ".") -> int:
        return int(
            subprocess.run(
                ["du", "-sxm", self.root / path], capture_output=True, check=True
            ).stdout.split()[0]
        )


@pytest.fixture(scope="module")
def cpu() -> Iterator[Replayed]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    # Gigabytes, so not among the folders that pytest keeps.
    with tempfile.TemporaryDirectory(prefix="hvtrain-image-") as folder:
        replay = Replay(ROOT, Path(folder))
        yield Replayed(replay, replay.build("cpu"))
        left = [line for line in Path("/proc/mounts").read_text().splitlines() if folder in line]
        assert left == [], "every step's mounts end with it"


def test_nothing_is_left_of_the_building(cpu):
    for folder in ("tmp", "var/lib/apt/lists", "var/cache/apt/archives/partial", "root/.cache"):
        assert not list(cpu.files(folder)), folder
    assert not (cpu.root / "home" / "hvtrain" / ".cache").exists()
    sent = {path.name for path in (cpu.root / "opt" / "hvtrain").iterdir()}
    assert {"conf", "hvtrain", "scripts", ".venv"} <= sent
    assert not sent & {"tests", "docs", ".git", "Dockerfile"}
    size, environment = cpu.megabytes(), cpu.megabytes("opt/hvtrain/.venv")
    print(f"image {size} MB, of it the environment {environment} MB")
    assert size < 2100, "1.8 GB when it was last measured; du tells what grew"


def test_no_compiler_and_no_tool_of_developers(cpu):
    for name in "cc c++ gcc g++ cpp ld as make strip cmake uv ruff mypy pytest hadolint shellcheck pre-commit".split():  # noqa: SIM905
        assert cpu.run("bash", "-c", f"type -P {name}")[0] != 0, name
    names = {path.name for path in cpu.files("usr/bin", "usr/lib", "usr/libexec")}
    assert not [
        name for name in names if re.fullmatch(r"cc1(plus)?|.*-g(cc|\+\+)(-\d+)?|collect2", name)
    ]


def test_no_key_is_in_the_image(cpu):
    """A package's own test data is no key of ours, and pem files of authorities are public."""
    ours = [
        path
        for path in cpu.files("etc", "home", "root", "var", "opt")
        if "site-packages" not in path.parts
    ]
    assert not [
        path
        for path in ours
        if re.match(r"ssh_host_|id_(rsa|ed25519|ecdsa)|authorized_keys", path.name)
    ]
    plain = [
        path
        for path in ours
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 100_000
    ]
    assert len(plain) > 300
    assert not [
        path for path in plain if re.search(rb"-----BEGIN [A-Z ]*PRIVATE KEY", path.read_bytes())
    ]


def test_the_user_owns_its_home_and_nothing_else(cpu):
    for path in cpu.files("opt", "home", "usr", "etc"):
        result = path.lstat()
        owner = 10001 if path.is_relative_to(cpu.root / "home" / "hvtrain") else 0
        assert result.st_uid == owner, path
        if not stat.S_ISLNK(result.st_mode):
            assert not result.st_mode & stat.S_IWOTH, f"{path} is writable by all"
    assert cpu.run("bash", "-c", "touch /opt/hvtrain/hvtrain/new")[0] != 0


def test_commands_are_those_of_the_environment(cpu):
    code, output = cpu.run("bash", "-c", "command -v python horovodrun mpirun pip")
    assert code == 0
    assert output.split() == [
        f"/opt/hvtrain/.venv/bin/{name}" for name in ("python", "horovodrun", "mpirun", "pip")
    ]
    code, output = cpu.run("/opt/hvtrain/scripts/run", "python", "-c", "print('ready')")
    assert (code, output) == (0, "ready\n"), "scripts/run takes the environment as it is"


def test_two_ranks_train_as_an_ordinary_user(cpu):
    assert cpu.run("id", "-u") == (0, "10001\n")
    code, output = cpu.run("horovodrun", "-np", "2", "python", "-m", "hvtrain", "train.epochs=2")
    assert code == 0, output
    assert "weights equal on 2/2 ranks" in output
    assert re.search(r"results in /home/hvtrain/runs/", output)


def test_two_ranks_pass_the_checks(cpu):
    code, output = cpu.run("horovodrun", "--gloo", "-np", "2", "python", "-m", "hvtrain", "verify")
    assert code == 0, output
    assert re.search(r"all \d+ checks passed on 2 rank", output)


def test_short_words_and_help(cpu):
    code, output = cpu.run("verify", "--help")
    assert code == 0 and output.startswith("python -m hvtrain verify "), output
    code, output = cpu.run()
    assert code == 0 and output.startswith("The image takes, after its name:\n")
    code, output = cpu.run("train.epochs=2")
    assert code == 127 and output.count("\n") == 1


WORKER = """
set -e
mkdir -m 700 ~/.ssh
ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519
cp ~/.ssh/id_ed25519.pub ~/.ssh/authorized_keys
/opt/hvtrain/scripts/docker-entrypoint worker 2299 &
for _ in {1..50}; do ssh -p 2299 localhost true 2>/dev/null && break; sleep 0.2; done
echo "reached: $(ssh -p 2299 localhost 'whoami; command -v horovodrun' | xargs)"
rm -r ~/.ssh
"""


def test_a_worker_lets_the_first_host_in(cpu):
    code, output = cpu.run("bash", "-c", WORKER)
    assert code == 0, output
    assert "waiting on port 2299 for horovodrun --ssh-port 2299" in output
    assert "reached: hvtrain /opt/hvtrain/.venv/bin/horovodrun\n" in output
