"""Sums a data set up, to compare it between hosts. Part of the probe: standard library."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

END_BYTES = 64 << 10
# The ends of so many files are read; of all others the name and the size count.
MAX_FILES_READ = 256
# With more files than these, entries stand for folders.
MAX_ENTRIES = 5_000


def fingerprint(path: Path, seconds: float) -> dict[str, Any]:
    """The data set at a path, a folder or a file: {"path", "num_files", "num_bytes", "entries", "error", "too_large"}.

    entries: a checksum of each file, or of each folder if there are too many files. It covers relative names, sizes,
    and the first and last 64 KiB of files chosen evenly. error says what is missing or cannot be read, too_large that
    the time was too short.
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
    """Bytes of each file, by its name relative to the path; "." is the path itself."""
    if not path.is_dir():
        return {".": path.stat().st_size}

    def stop(error: OSError) -> None:
        raise error

    sizes = {}
    for folder, _, names in os.walk(path, onerror=stop, followlinks=True):
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
