"""Replays a Dockerfile's stages in folders, without an engine: chroot in namespaces of their own. Needs root.

Each RUN line is run verbatim, with the ENV, SHELL, USER and WORKDIR in force. The base image is made by debootstrap.
What this machine needs to reach its mirrors (names, certificates, proxies) is lent while a step runs and stays outside.
"""

from __future__ import annotations

import copy
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile import assignments, is_sent, stages

HOST = "container"
SECONDS_PER_STEP = 1200
# Mounts are made in a namespace that ends with the step, so none is left, whatever happens.
ENTER = """
set -e
root=$1 lent=$2; shift 2
hostname "$HOST"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/dev/shm"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
for name in hosts resolv.conf; do
  [ -e "$root/etc/$name" ] || : >"$root/etc/$name"
  mount --bind "$lent/$name" "$root/etc/$name"
done
mkdir -p "$root/mnt/lent"
mount --bind "$lent" "$root/mnt/lent"
exec chroot "$@"
"""


@dataclass
class Image:
    """A root folder, and what is in force in it."""

    root: Path
    environment: dict[str, str] = field(
        default_factory=lambda: {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        }
    )
    user: str = "root"
    workdir: str = "/"
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def account(self) -> tuple[str, str, str]:
        """User id, group id and home of the user, as the root's own passwd has them."""
        for line in (self.root / "etc" / "passwd").read_text().splitlines():
            name, _, uid, gid, _, home, _ = line.split(":")
            if self.user in (name, uid):
                return uid, gid, home
        raise LookupError(f"no user {self.user} in the image")


class Replay:
    """The stages of `checkout`'s Dockerfile, made below `folder`."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.stages = stages((checkout / "Dockerfile").read_text())
        self.folder = folder
        self.images: dict[str, Image] = {}
        self.lent = _lend(folder / "lent")
        self.context = folder / "context"
        _send(checkout, self.context)

    def build(self, name: str) -> Image:
        """The image of a stage, or of the Debian release that a stage starts from."""
        if name not in self.images:
            self.images[name] = self._stage(name) if name in self.stages else self._debian(name)
        return self.images[name]

    def _stage(self, name: str) -> Image:
        stage = self.stages[name]
        base = self.build(stage.base)
        image = copy.deepcopy(base)
        image.root = self.folder / name
        subprocess.run(["cp", "-a", base.root, image.root], check=True)
        for instruction, rest in stage.instructions:
            print(f"{name}: {instruction} {rest}", flush=True)
            self._instruct(image, instruction, rest)
        return image

    def _instruct(self, image: Image, instruction: str, rest: str) -> None:
        if instruction == "RUN":
            self.step(image, [*image.shell, rest], self.lent_environment()).check_returncode()
        elif instruction == "COPY":
            self._copy(image, shlex.split(rest))
        elif instruction == "ENV":
            image.environment |= assignments(rest, image.environment)
        elif instruction == "WORKDIR":
            image.workdir = rest
            (image.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif instruction == "USER":
            image.user = rest
        else:
            attribute = {"SHELL": "shell", "ENTRYPOINT": "entrypoint", "CMD": "command"}[
                instruction
            ]
            setattr(image, attribute, json.loads(rest))

    def _copy(self, image: Image, arguments: list[str]) -> None:
        origin = self.context
        if arguments[0].startswith("--"):
            option, _, stage = arguments.pop(0).partition("=")
            assert option == "--from", f"COPY {option} is not read here"
            origin = self.build(stage).root
        *sources, target = arguments
        goal = image.root / os.path.normpath(
            f"{image.workdir}/{target}" if target[0] != "/" else target
        ).lstrip("/")
        for source in (origin / source_name.lstrip("/") for source_name in sources):
            (goal if source.is_dir() or target.endswith("/") else goal.parent).mkdir(
                parents=True, exist_ok=True
            )
            what = f"{source}/." if source.is_dir() else str(source)
            subprocess.run(["cp", "-a", "--no-preserve=ownership", what, goal], check=True)

    def step(
        self, image: Image, command: list[str], lent: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs the command in the image as its user. With lent variables it is a build step, whose output is shown."""
        uid, gid, home = image.account()
        variables = {**(lent or {}), "HOME": home, "HOSTNAME": HOST, **image.environment}
        enter = [
            "unshare",
            "--mount",
            "--pid",
            "--uts",
            "--ipc",
            "--fork",
            "--kill-child",
            "--propagation",
            "private",
        ]
        chroot = [f"--userspec={uid}:{gid}", "--groups=", str(image.root)]
        chroot += [
            "/usr/bin/env",
            "-i",
            f"--chdir={image.workdir}",
            *(f"{k}={v}" for k, v in variables.items()),
        ]
        return subprocess.run(
            [
                *enter,
                "bash",
                "-c",
                ENTER,
                "bash",
                str(image.root),
                str(self.lent),
                *chroot,
                *command,
            ],
            env={**os.environ, "HOST": HOST},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if lent is None else None,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_PER_STEP,
            check=False,
        )

    def container(self, image: Image, *arguments: str) -> tuple[int, str]:
        """Exit code and output of `docker run IMAGE WORDS`: through the entry point, with nothing lent but names."""
        done = self.step(image, [*image.entrypoint, *(arguments or image.command)])
        return done.returncode, done.stdout

    def _debian(self, name: str) -> Image:
        assert name.startswith("debian:bookworm"), f"{name} is no Debian that can be made here"
        image = Image(self.folder / "debian")
        mirror = debian_mirror()
        assert mirror, "apt has no bookworm mirror"
        command = ["debootstrap", "--variant=minbase", "bookworm", str(image.root), mirror]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        # As in Debian's own image: neither archives of packages are kept nor what apt computes from its lists.
        (image.root / "etc/apt/apt.conf.d/keep-none").write_text(
            'APT::Keep-Downloaded-Packages "false";\nDir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\n'
        )
        shutil.rmtree(image.root / "var/cache/apt/archives")
        (image.root / "var/cache/apt/archives/partial").mkdir(parents=True)
        shutil.rmtree(image.root / "var/lib/apt/lists")
        return image

    def lent_environment(self) -> dict[str, str]:
        """This machine's way to its mirrors, as variables; the files that they name are lent too."""
        ours = (
            "PIP_INDEX",
            "PIP_EXTRA_INDEX",
            "PIP_TRUSTED",
            "PIP_DEFAULT_TIMEOUT",
            "UV_INDEX",
            "UV_DEFAULT_INDEX",
        )
        kept = {
            k: v
            for k, v in os.environ.items()
            if k.startswith(ours) or k.lower().endswith("_proxy")
        }
        done = subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.stdout.strip():
            kept = {
                "PIP_INDEX_URL": done.stdout.strip(),
                "UV_DEFAULT_INDEX": done.stdout.strip(),
                **kept,
            }
        certificates = dict.fromkeys(
            ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE"), "/mnt/lent/certificates"
        )
        return {
            **kept,
            **certificates,
            "APT_CONFIG": "/mnt/lent/apt.conf",
            "DEBIAN_FRONTEND": "noninteractive",
        }


def _lend(folder: Path) -> Path:
    folder.mkdir()
    shutil.copy("/etc/resolv.conf", folder / "resolv.conf")
    (folder / "hosts").write_text(f"127.0.0.1 localhost {HOST}\n")
    shutil.copy(
        os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt"),
        folder / "certificates",
    )
    settings = subprocess.run(
        ["apt-config", "dump"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    options = ("Acquire::Check", "Acquire::http", "Acquire::Retries")
    (folder / "apt.conf").write_text(
        "".join(f"{line}\n" for line in settings if line.startswith(options))
    )
    return folder


def debian_mirror() -> str | None:
    """Where this machine's apt takes bookworm from; None where it takes something else."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages"],
        capture_output=True, text=True, check=False,
    ).stdout.splitlines()  # fmt: skip
    return next(
        (line.split()[1].rstrip("/") for line in listed if line.startswith("bookworm ")), None
    )


def _send(checkout: Path, context: Path) -> None:
    """What `docker build` would be sent from a clone of the checkout, changes not yet committed included."""
    rules = (checkout / ".dockerignore").read_text().splitlines()
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in listed:
        if name and (checkout / name).is_file() and is_sent(name, rules):
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, context / name)
