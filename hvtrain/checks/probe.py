"""Collects one host's facts. ask_hosts sends it to every host, and runs it there even if hvtrain is not installed.

It runs in the environment's Python, or in any python3 where that is missing. So the modules of the probe need nothing
but the standard library of Python 3.9.
"""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import DEVNULL, TimeoutExpired, run
from typing import Any

from hvtrain.checks import probe_network
from hvtrain.system import host_facts, interfaces

DATASET_SECONDS = 12.0
NVIDIA_SMI_SECONDS = 15
END_BYTES = 64 << 10
# At most this many files are read, END_BYTES at both ends; of the others only name and size count.
MAX_FILES_READ = 256
# With more files than this, there is one entry per folder.
MAX_ENTRIES = 5_000


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answers a request of ask_hosts, {"work": "facts" or "ports", ...}.

    began and ended: seconds since the epoch by this host's clock. Raises OSError in "ports" if the port is taken.
    """
    began = time.time()
    facts = _facts(request) if request["work"] == "facts" else probe_network.Exchange(request).run()
    return {**facts, "began": began, "ended": time.time()}


def _facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Collects the facts.

    request: folder, where ranks start, and first in sys.path; python_path, which follows in sys.path; python, the
    interpreter of the ranks; names, of all hosts; run_dir and dataset, relative to folder; dataset may be None.
    """
    sys.path[:] = [request["folder"], *request["python_path"], *(path for path in sys.path if path)]
    folder, dataset = Path(request["folder"]), request["dataset"]
    return {
        "hostname": socket.gethostname(),
        "machine": _machine(),
        "working_folder": str(folder),
        "folder_exists": folder.is_dir() and os.access(folder, os.X_OK),
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "wanted": request["python"],  # Where it is missing, another one answers.
            "is_wanted": sys.executable == request["python"],
        },
        "packages": host_facts.package_versions(),
        "cuda": host_facts.cuda_versions(),
        "code": host_facts.code_facts(),
        "horovod": host_facts.horovod_facts(),
        "addresses": probe_network.addresses(request["names"]),
        "interfaces": interfaces.all_interfaces(),
        "port": probe_network.free_port(),
        "shared_memory": _shared_memory(),
        "open_files": dict(zip(("soft", "hard"), resource.getrlimit(resource.RLIMIT_NOFILE))),  # -1: no limit
        "disk": _disk(folder / request["run_dir"]),
        "gpus": _gpus(),
        "dataset": dataset and fingerprint(folder / dataset, DATASET_SECONDS),
    }


def _machine() -> dict[str, Any]:
    """The operating system in words, the number of cores that this process may use, and bytes of memory."""
    try:
        lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
        name = dict(line.split("=", 1) for line in lines if "=" in line)["PRETTY_NAME"].strip('"')
    except (OSError, KeyError):
        name = platform.system()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"system": f"{name}, Linux {platform.release()}", "cores": len(os.sched_getaffinity(0)), "memory": memory}


def _shared_memory() -> dict[str, int] | None:
    """Free and total bytes of /dev/shm; None if it does not exist."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return {"free": usage.free, "total": usage.total}


def _disk(folder: Path) -> dict[str, Any]:
    """Free bytes where the folder is or would be created, and whether this user may write there."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    writable = there.is_dir() and os.access(there, os.W_OK)
    return {"folder": str(folder), "free": shutil.disk_usage(there).free, "writable": writable}


def _gpus() -> dict[str, Any]:
    """GPU names and driver version from nvidia-smi, or its error; no names and no error without nvidia-smi."""
    found: dict[str, Any] = {"names": [], "driver": None, "error": None}
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/bin:/usr/local/nvidia/bin")
    if program is None:
        return found
    try:
        line = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = run(line, stdin=DEVNULL, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False)
    except (OSError, TimeoutExpired) as error:
        return {**found, "error": " ".join(str(error).split())}
    if done.returncode:
        return {**found, "error": " ".join((done.stdout + done.stderr).split()) or f"exit code {done.returncode}"}
    rows = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line]
    return {**found, "names": [name.strip() for name, _, _ in rows], "driver": rows[0][2].strip() if rows else None}


def fingerprint(path: Path, seconds: float) -> dict[str, Any]:
    """Describes the data set in a folder or file: {"path", "num_files", "num_bytes", "entries", "error", "too_large"}.

    entries: a checksum of each file, or of each folder if there are more than MAX_ENTRIES files. It covers relative
    names, sizes, and the first and last 64 KiB of at most MAX_FILES_READ files, evenly spaced. error: a path that is
    missing or cannot be read, and why. too_large: a message if `seconds` were not enough. Both are None otherwise.
    """
    deadline = time.monotonic() + seconds
    found: dict[str, Any] = {"path": str(path), "num_files": 0, "num_bytes": 0, "entries": {}}
    found.update(error=None, too_large=None)
    try:
        sizes = _sizes(path, deadline)
        names = sorted(sizes)
        ends = {name: _ends(path / name, deadline) for name in names[:: max(1, -(-len(names) // MAX_FILES_READ))]}
    except TimeoutError:
        return {**found, "too_large": f"it cannot be listed in {seconds:.0f} s"}
    except OSError as error:
        return {**found, "error": f"{error.filename or path}: {error.strerror}"}
    texts = {name: f"{name}\0{sizes[name]}\0{ends.get(name, '')}\n" for name in names}
    return {**found, "num_files": len(names), "num_bytes": sum(sizes.values()), "entries": _entries(texts)}


def _sizes(path: Path, deadline: float) -> dict[str, int]:
    """Bytes of each file below a folder, by relative name; of a file itself as "."."""
    if not path.is_dir():
        return {".": path.stat().st_size}

    def fail(error: OSError) -> None:
        raise error

    sizes = {}
    for folder, _, names in os.walk(path, onerror=fail, followlinks=True):
        for name in names:
            _check(deadline)
            file = Path(folder, name)
            sizes[str(file.relative_to(path))] = file.stat().st_size
    return sizes


def _ends(file: Path, deadline: float) -> str:
    _check(deadline)
    with file.open("rb") as opened:
        first = opened.read(END_BYTES)
        opened.seek(max(0, file.stat().st_size - END_BYTES))
        return hashlib.sha256(first + opened.read(END_BYTES)).hexdigest()


def _entries(texts: dict[str, str]) -> dict[str, str]:
    """A short checksum of each file's text, or of each folder's files together."""
    joined: dict[str, str] = {}
    for name, text in texts.items():
        key = name if len(texts) <= MAX_ENTRIES else f"{os.path.dirname(name)}/"  # noqa: PTH120
        joined[key] = joined.get(key, "") + text
    return {key: hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12] for key, text in joined.items()}


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError
