"""A host's shared memory, open files, disk and GPUs. Part of the probe: standard library."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

NVIDIA_SMI_SECONDS = 15


def shared_memory() -> dict[str, int] | None:
    """Bytes of /dev/shm, free and in all; None if there is none."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return {"free": usage.free, "total": usage.total}


def open_files() -> dict[str, int]:
    """How many files a process may open, and how far it may raise that itself; -1: no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"soft": soft, "hard": hard}


def disk(folder: Path) -> dict[str, Any]:
    """Free bytes where the folder is or would be made, and whether this user may write there."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    writable = there.is_dir() and os.access(there, os.W_OK)
    return {"folder": str(folder), "free": shutil.disk_usage(there).free, "writable": writable}


def gpus() -> dict[str, Any]:
    """Names of the GPUs and the driver according to nvidia-smi, or its error; no names if there is no nvidia-smi."""
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
