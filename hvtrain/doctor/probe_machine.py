"""What a host has: shared memory, open files, disk, GPUs. Part of the probe: standard library."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

NVIDIA_SMI_SECONDS = 15


def shared_memory() -> dict[str, int] | None:
    """Bytes of /dev/shm, free and in all; None where there is none."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return {"free": status.f_bavail * status.f_frsize, "total": status.f_blocks * status.f_frsize}


def open_files() -> dict[str, int]:
    """How many files a process may open, and up to where it may raise that itself; -1 is without limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"soft": soft, "hard": hard}


def disk(folder: Path) -> dict[str, Any]:
    """Free bytes where the folder is, or would be made, and whether this user may write there."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    status = os.statvfs(there)
    return {
        "folder": str(folder),
        "free": status.f_bavail * status.f_frsize,
        "writable": there.is_dir() and os.access(there, os.W_OK),
    }


def gpus() -> dict[str, Any]:
    """Names of the GPUs, and the driver, as nvidia-smi says; no names where there is no nvidia-smi.

    error is what it said when it failed.
    """
    found: dict[str, Any] = {"names": [], "driver": None, "error": None}
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/bin:/usr/local/nvidia/bin")
    if program is None:
        return found
    try:
        line = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {**found, "error": " ".join(str(error).split())}
    if done.returncode:
        return {**found, "error": " ".join((done.stdout + done.stderr).split()) or f"exit code {done.returncode}"}
    rows = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line]
    return {**found, "names": [name.strip() for name, _, _ in rows], "driver": rows[0][2].strip() if rows else None}
