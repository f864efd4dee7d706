"""What a data set is, small enough for a checkpoint; and how two of them differ, in words. No TensorFlow.

A manifest is {"name", "image_shape", "num_classes", "splits": {"train": {"examples", "digest", "files"}, ...}}.
Of files it knows the names and sizes, of arrays the contents.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvtrain.errors import DataError, UserError

log = logging.getLogger(__name__)

MOST_FILES = 1000
"""Of more files a checkpoint keeps no list, only a digest."""
MOST_SIZES = 10_000
"""Of more files only so many, evenly spaced, are asked for their sizes: a network's file system takes its time."""
MOST_BYTES = 2**28
"""Of larger arrays only so much, in evenly spaced rows, is read."""


def of_files(folder: Path, paths: Sequence[str]) -> dict[str, Any]:
    """The part of a manifest about files that were read: names within the folder, and sizes in bytes."""
    step = -(-len(paths) // MOST_SIZES) or 1
    sized = set(paths[::step])
    files = {_name(path, folder): _size(path) if path in sized else None for path in sorted(paths)}
    digest = hashlib.sha256()
    for name, size in files.items():
        digest.update(f"{name}\0{size}\n".encode())
    found = {"num_files": len(files), "digest": digest.hexdigest()}
    return {**found, "files": files} if len(files) <= MOST_FILES else found


def of_arrays(arrays: Sequence[np.ndarray]) -> str:
    """A digest of the contents."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        step = -(-array.nbytes // MOST_BYTES) or 1
        digest.update(np.ascontiguousarray(array[::step]).data)
    return digest.hexdigest()


def digest_of(manifest: Mapping[str, Any]) -> str:
    """One number for a whole manifest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """How the new data set differs from the old, in words; none where it does not.

    >>> old = {"name": "a", "splits": {"train": {"examples": 3, "digest": "x", "files": {"f": 9}}}}
    >>> differences(old, {"name": "a", "splits": {"train": {"examples": 3, "digest": "y", "files": {"f": 8}}}})
    ['train: f has 8 bytes, was 9']
    >>> differences(old, {"name": "b", "splits": {"train": {"examples": 2}}})
    ['name is b, was a', 'train holds 2 examples, was 3']
    """
    found = [
        f"{name} is {new.get(name)}, was {old.get(name)}"
        for name in ("name", "image_shape", "num_classes")
        if new.get(name) != old.get(name)
    ]
    before, after = old.get("splits", {}), new["splits"]
    for split in {**before, **after}:
        found += [f"{split}{what}" for what in _of_split(before.get(split, {}), after.get(split, {}))]
    return found


def _of_split(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    if was.get("examples", 0) != now.get("examples", 0):
        found.append(f" holds {now.get('examples', 0):,} examples, was {was.get('examples', 0):,}")
    if was.get("num_files", 0) != now.get("num_files", 0):
        found.append(f" has {now.get('num_files', 0):,} files, was {was.get('num_files', 0):,}")
    old, new = was.get("files"), now.get("files")
    if old is not None and new is not None:
        for name in sorted({**old, **new}):
            if name not in new:
                found.append(f": {name} is gone")
            elif name not in old:
                found.append(f": {name} is new")
            elif old[name] != new[name]:
                found.append(f": {name} has {new[name]} bytes, was {old[name]}")
    if not found and was.get("digest") != now.get("digest"):
        what = "names or sizes of its files differ" if "num_files" in now else "its content differs"
        found.append(f": {what} (SHA-256 {str(now.get('digest'))[:12]}, was {str(was.get('digest'))[:12]})")
    return found


def _name(path: str, folder: Path) -> str:
    return Path(path).relative_to(folder).as_posix() if folder in Path(path).parents else Path(path).name


def _size(path: str) -> int | None:
    try:
        return Path(path).stat().st_size
    except OSError:
        return None  # It went away; whoever reads it says so.


def check_unchanged(name: str, saved: dict[str, Any] | None, now: dict[str, Any], refuse: bool) -> None:
    """Raises DataError when a checkpoint, by name, was made on another data set (or warns). An old one knows none."""
    changed = differences(saved, now) if saved else []
    if changed:
        refuse_or_warn(
            f"the data set is not the one of checkpoint {name}: {shown(changed)}",
            "bring that one back, or choose another run.dir",
            DataError if refuse else None,
        )


def refuse_or_warn(what: str, advice: str, kind: type[UserError] | None) -> None:
    if kind is None:
        log.warning("%s; guard.data=false: going on all the same", what)
    else:
        raise kind(f"{what}; {advice}, or go on all the same with guard.data=false")


def shown(found: list[str]) -> str:
    return "; ".join(found[:5]) + (f"; and {len(found) - 5:,} more" if len(found) > 5 else "")
