"""Collects one host's facts, and tests connections between hosts.

ask_hosts sends this file and host_facts.py to every host and calls facts() or exchange() there, even
if hvtrain is not installed: in the environment's Python, or in any python3 if that is missing. So
both files need only the standard library of Python 3.9.
"""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, STDOUT, SubprocessError, check_output
from typing import Any

from hvtrain.system import host_facts

DATASET_SECONDS = 12.0
NVIDIA_SMI_SECONDS = 15
LOOKUP_SECONDS = 6.0
CONNECT_SECONDS = 2.0
END_BYTES = 64 << 10
# The ends (END_BYTES each) of at most this many files are read; others count by name and size only.
MAX_FILES_READ = 256
# With more files than this, there is one entry per folder.
MAX_ENTRIES = 5_000


def facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Collects this host's facts.

    request: The result of facts_request. Ranks start in its folder; run_dir and dataset are relative to it.
    """
    # The ranks' path, so that the hvtrain they would import is examined.
    sys.path[:] = [request["folder"], *request["python_path"], *(path for path in sys.path if path)]
    folder = Path(request["folder"])
    dataset = request["dataset"]

    return {
        "hostname": socket.gethostname(),
        "machine": _machine(),
        "working_folder": str(folder),
        "folder_exists": folder.is_dir() and os.access(folder, os.X_OK),
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "wanted": request["python"],  # If it is missing, another Python answers.
            "is_wanted": sys.executable == request["python"],
        },
        "packages": host_facts.package_versions() | host_facts.cuda_versions(),
        "code": host_facts.code_facts(),
        "horovod": host_facts.horovod_facts(),
        "addresses": addresses(request["names"]),
        "interfaces": host_facts.all_interfaces(),
        "port": free_port(),
        "shared_memory": _shared_memory(),
        # -1: no limit.
        "open_files": dict(zip(("soft", "hard"), resource.getrlimit(resource.RLIMIT_NOFILE))),
        "disk": _disk(folder / request["run_dir"]),
        "gpus": _gpus(),
        "dataset": dataset and fingerprint(folder / dataset, DATASET_SECONDS),
    }


def _machine() -> dict[str, Any]:
    """Returns the operating system in words, the cores that this process may use, and bytes of memory."""
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, AttributeError):  # No such file, or Python 3.9.
        name = platform.system()

    return {
        "system": f"{name}, Linux {platform.release()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _shared_memory() -> dict[str, int]:
    """Returns the free and total bytes of /dev/shm; 0 without one, as in some containers."""
    with suppress(OSError):
        usage = shutil.disk_usage("/dev/shm")
        return {"free": usage.free, "total": usage.total}
    return {"free": 0, "total": 0}


def _disk(folder: Path) -> dict[str, Any]:
    """Returns the free bytes where the folder is or would be created, and whether this user may write there."""
    # Path.exists raises an error for a path inside a folder that this user may not enter.
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    return {"folder": str(folder), "free": shutil.disk_usage(existing).free, "writable": writable}


def _gpus() -> dict[str, Any]:
    """Returns GPU names and driver version from nvidia-smi, or its error; all empty without nvidia-smi."""
    gpus: dict[str, Any] = {"names": [], "driver": None, "error": None}
    # ssh starts a shell whose PATH may lack these folders.
    more_folders = "/usr/bin:/usr/local/nvidia/bin"
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=more_folders)
    if program is None:
        return gpus

    try:
        output = check_output(
            [program, "--query-gpu=name,driver_version", "--format=csv,noheader"],
            stdin=DEVNULL,
            stderr=STDOUT,
            text=True,
            timeout=NVIDIA_SMI_SECONDS,
        )
    except (OSError, SubprocessError) as error:
        # nvidia-smi prints what is wrong before it fails.
        return gpus | {"error": " ".join(str(getattr(error, "output", None) or error).split())}

    for row in output.splitlines():
        name, comma, driver = row.rpartition(",")
        if comma:
            gpus["names"].append(name.strip())
            gpus["driver"] = driver.strip()  # All GPUs of a host have the same one.
    return gpus


def fingerprint(path: Path, seconds: float) -> dict[str, Any]:
    """Describes the data set in a folder or file, without reading all of it.

    Returns:
        path, num_files and num_bytes.
        entries: A checksum of each file, or of each folder if there are more than MAX_ENTRIES
            files. It covers relative names, sizes, and the first and last 64 KiB of at most
            MAX_FILES_READ files, evenly spaced.
        error: A path that is missing, is empty or cannot be read, and why; None otherwise.
        too_large: A message if `seconds` were not enough; None otherwise.
    """
    deadline = time.monotonic() + seconds
    description = {
        "path": str(path),
        "num_files": 0,
        "num_bytes": 0,
        "entries": {},
        "error": None,
        "too_large": None,
    }
    try:
        sizes = _sizes(path, deadline)
        names = sorted(sizes)
        step = -(-len(names) // MAX_FILES_READ) or 1
        ends = {name: _ends(path / name, deadline) for name in names[::step]}
    except TimeoutError:
        return description | {"too_large": f"it cannot be listed in {seconds:.0f} s"}
    except OSError as error:
        return description | {"error": f"{error.filename or path}: {error.strerror}"}

    texts = {name: f"{name}\0{sizes[name]}\0{ends.get(name, '')}\n" for name in names}
    return description | {
        "num_files": len(names),
        "num_bytes": sum(sizes.values()),
        "entries": _entries(texts),
        "error": None if names else f"{path} is empty",
    }


def _sizes(path: Path, deadline: float) -> dict[str, int]:
    """Returns the bytes of each file below a folder, by relative name; a single file is named "."."""
    if not path.is_dir():
        return {".": path.stat().st_size}

    def fail(error):
        raise error

    sizes = {}
    # By default os.walk silently skips folders that it cannot read.
    for folder, _, names in os.walk(path, onerror=fail, followlinks=True):
        for name in names:
            _check_time(deadline)
            file = Path(folder, name)
            sizes[str(file.relative_to(path))] = file.stat().st_size
    return sizes


def _ends(file: Path, deadline: float) -> str:
    """Returns a checksum of the first and the last END_BYTES of a file."""
    _check_time(deadline)
    with file.open("rb") as stream:
        first = stream.read(END_BYTES)
        stream.seek(max(0, file.stat().st_size - END_BYTES))
        return hashlib.sha256(first + stream.read(END_BYTES)).hexdigest()


def _entries(texts: dict[str, str]) -> dict[str, str]:
    """Returns a short checksum of each file's text, or of each folder's texts together if there are many."""
    by_key: dict[str, str] = {}
    for name, text in texts.items():
        key = name
        if len(texts) > MAX_ENTRIES:
            key = f"{os.path.dirname(name)}/"  # noqa: PTH120 (a top-level file's folder is empty, not ".")
        by_key[key] = by_key.get(key, "") + text
    return {
        # A file name on Linux may be any bytes; Python holds those that are not UTF-8 as surrogates.
        key: hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]
        for key, text in by_key.items()
    }


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError


def addresses(names: Sequence[str]) -> dict[str, str | None]:
    """Returns the IPv4 address to which this host resolves each name.

    None if that fails, or takes longer than LOOKUP_SECONDS.
    """
    resolved = dict.fromkeys(names)

    def resolve(name):
        with suppress(OSError):
            resolved[name] = socket.gethostbyname(name)

    # In threads, since a lookup has no time limit of its own.
    threads = [_in_background(resolve, name) for name in names]
    deadline = time.monotonic() + LOOKUP_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))

    return resolved


def free_port() -> int:
    """Returns a free port above 1023, chosen by the kernel as the ports of Horovod and MPI are."""
    with socket.socket() as server:
        server.bind(("", 0))
        return server.getsockname()[1]


def exchange(request: Mapping[str, Any]) -> dict[str, Any]:
    """Listens on a port and connects to all other hosts, which do the same at the same time.

    Args:
        request: Has these keys.
            me: This host's name.
            port: The port to listen on.
            token: A secret that these hosts share, without which a caller is ignored.
            others: The [address, port] of each other host, by name.
            seconds: The overall time limit.

    Returns:
        missing: The reason for each host that was not reached.
        clocks: For each host reached, by how many seconds its clock is ahead of this one's, and
            the error: half the round-trip time.

    Raises:
        OSError: The port is taken.
    """
    token = request["token"]
    others = request["others"]
    deadline = time.monotonic() + request["seconds"]
    # Why each host is not reached yet, and the hosts that have reached this one.
    missing = dict.fromkeys(others, "no answer")
    callers: set[str] = set()
    clocks: dict[str, tuple[float, float]] = {}
    server = socket.create_server(("", request["port"]), backlog=len(others) + 8)

    def listen():
        while True:
            caller, _ = server.accept()
            _in_background(answer_call, caller)

    def answer_call(caller):
        with (
            suppress(OSError),
            caller,
            caller.makefile("rw", encoding="utf-8", errors="replace") as stream,
        ):
            caller.settimeout(CONNECT_SECONDS)
            caller_token, _, name = stream.readline(200).strip().partition(" ")
            # Other programs and hosts of another doctor run get no answer.
            if caller_token == token and name in others:
                stream.write(f"{token} {time.time()}\n")
                stream.flush()
                callers.add(name)

    def connect(name):
        while True:
            try:
                with socket.create_connection(others[name], CONNECT_SECONDS) as connection:
                    sent_at = time.time()
                    connection.sendall(f"{token} {request['me']}\n".encode())
                    # Another program may answer with any bytes.
                    line = connection.makefile(encoding="utf-8", errors="replace").readline(200)
                    round_trip = time.time() - sent_at
            except OSError as error:
                missing[name] = error.strerror or str(error)
            else:
                answer_token, _, clock = line.strip().partition(" ")
                if answer_token == token:
                    clocks[name] = (float(clock) - sent_at - round_trip / 2, round_trip / 2)
                    del missing[name]
                    return
                missing[name] = "another program answers there"

            # Hosts start at different moments: a refusal may only mean "not yet".
            time.sleep(0.1)

    _in_background(listen)
    for name in others:
        _in_background(connect, name)
    # Keep listening until all other hosts have connected.
    while (missing or callers < set(others)) and time.monotonic() <= deadline:
        time.sleep(0.02)
    return {"missing": dict(missing), "clocks": dict(clocks)}


def _in_background(work: Callable[..., None], *args: Any) -> threading.Thread:
    """Starts a daemon thread, since `work` may never return, and must not keep the process alive."""
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread
