"""Identifies a data set by a manifest that is small enough for a checkpoint, and compares manifests.

A manifest is a mapping with these keys, each only if the data set has a value for it:

- "name", "image_shape", "num_classes"
- "elements": types and shapes of an example, if it is not an image with a class
- "tokenizer": SHA-256 of the tokenizer, for text
- "splits": {"train": {"examples", "digest", "num_files", "files"}, ...}

Files are identified by names and sizes, arrays by their contents. Imports no TensorFlow.
"""

import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvtrain.data.description import listed
from hvtrain.errors import DataError, UserError
from hvtrain.system.files import is_remote
from hvtrain.system.storage.cache import local_copy, path_of

log = logging.getLogger(__name__)

# For more files than this, a checkpoint keeps only a digest, not the list.
MAX_FILES = 1000
# The sizes of at most this many files, evenly spaced, are looked up, since a network file system
# may be slow.
MAX_SIZES = 10_000
# About this many bytes of an array are hashed, in evenly spaced rows.
MAX_BYTES = 2**28


def user_path(text: str | Path) -> Path:
    """Returns a path with ~ expanded; for an address such as s3://BUCKET/FOLDER, the path of its local copy.

    ~ stays if the user has no home directory, as in a container whose user is not in /etc/passwd.
    """
    # Not Path.expanduser(), which raises an error for a user without a home directory.
    return Path(os.path.expanduser(path_of(text)))  # noqa: PTH111


def data_path(text: str, remote_suffixes: tuple[str, ...] = ()) -> Path:
    """Returns the local path of dataset.dir, downloading it if it is an address in object storage.

    Args:
        text: A path or an address.
        remote_suffixes: Suffixes of files that stay in object storage, to be read in parts; see local_copy().

    Raises:
        DataError: This host has no such folder.
    """
    path = local_copy(text, remote_suffixes) if is_remote(text) else user_path(text)
    if not path.exists():
        raise DataError(
            f"dataset.dir={text} does not exist on {socket.gethostname()}; give a folder that this host has"
        )
    return path


def check_names(paths: Iterable[str | Path]) -> None:
    """Raises DataError for a name that is not UTF-8, which TensorFlow cannot open and JSON cannot hold."""
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            # Shown as bytes: the message itself has to be UTF-8.
            raise DataError(
                f"{os.fsencode(path)!r} is a file whose name is not UTF-8; rename it"
            ) from None


def describe_files(folder: Path, paths: Sequence[str]) -> dict[str, Any]:
    """Returns the part of a manifest about files: their number, a digest, and the sizes of up to MAX_FILES by name.

    Names are relative to the folder. A size is in bytes, or None if it was not read, or could not be.
    """
    check_names(paths)
    # Some libraries list absolute paths without "..". Links stay, unlike with resolve().
    folder = Path(os.path.abspath(folder))  # noqa: PTH100
    step = -(-len(paths) // MAX_SIZES) or 1
    measured = set(paths[::step])

    sizes = {}
    # Sorted, so that the order in which the file system lists files does not matter.
    for path in sorted(paths):
        # Names are relative, so that a copy in another folder counts as the same data set.
        file = Path(os.path.abspath(path))  # noqa: PTH100
        name = file.relative_to(folder).as_posix() if folder in file.parents else file.name
        sizes[name] = _file_bytes(path) if path in measured else None

    digest = hashlib.sha256()
    for name, size in sizes.items():
        digest.update(f"{name}\0{size}\n".encode())

    description = {"num_files": len(sizes), "digest": digest.hexdigest()}
    if len(sizes) <= MAX_FILES:
        description["files"] = sizes
    return description


def with_files(
    manifest: dict[str, Any], folder: Path, paths_of: Callable[[str], Sequence[str]]
) -> dict[str, Any]:
    """Adds describe_files() of each split's paths_of(split) to the manifest, in place, and returns it."""
    for split, part in manifest["splits"].items():
        part.update(describe_files(folder, paths_of(split)))
    return manifest


def digest_arrays(arrays: Iterable[Any]) -> str:
    """Returns the SHA-256 of the types, shapes and contents of arrays, such as those of an example.

    They may also be numbers or text. Of large arrays, only evenly spaced rows count.
    """
    digest = hashlib.sha256()
    for array in map(np.atleast_1d, arrays):
        digest.update(f"{array.dtype} {array.shape}".encode())
        # The first row is always hashed.
        step = -(-array.nbytes // MAX_BYTES) or 1
        rows = array[::step]
        # The memory of an array of Python objects holds only their addresses.
        digest.update(repr(rows.tolist()).encode() if rows.dtype.hasobject else rows.tobytes())
    return digest.hexdigest()


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a whole manifest."""
    # Sorted keys, so that equal manifests have equal digests.
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Describes how a data set differs from an older one, given their manifests.

    >>> old = {"name": "digits", "splits": {"train": {"examples": 1400}}}
    >>> differences(old, {"name": "digits", "splits": {"train": {"examples": 1500}}})
    ['train holds 1,500 examples, was 1,400']
    """
    changes = [
        f"{name} is {new.get(name, 'missing')}, was {old.get(name, 'missing')}"
        for name in ("name", "image_shape", "num_classes", "elements", "tokenizer")
        if new.get(name) != old.get(name)
    ]
    # The old manifest may come from a damaged checkpoint, and lack
    # any key; the new one is complete.
    old_splits = old.get("splits", {})
    new_splits = new["splits"]
    for split in old_splits | new_splits:
        changes += _split_differences(split, old_splits.get(split, {}), new_splits.get(split, {}))
    return changes


def _split_differences(split: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    changes = []
    for key, verb in (("examples", "holds"), ("num_files", "has")):
        before = old.get(key, 0)
        now = new.get(key, 0)
        if before != now:
            changes.append(f"{split} {verb} {now:,} {key.removeprefix('num_')}, was {before:,}")

    # Only manifests of few files list them.
    old_files = old.get("files")
    new_files = new.get("files")
    if old_files and new_files:
        for name in sorted(old_files | new_files):
            if name not in new_files:
                changes.append(f"{split}: {name} is gone")
            elif name not in old_files:
                changes.append(f"{split}: {name} is new")
            elif old_files[name] != new_files[name]:
                changes.append(
                    f"{split}: {name} has {new_files[name]} bytes, was {old_files[name]}"
                )

    # If changes were found above, the digest adds nothing to them.
    if not changes and old.get("digest") != new.get("digest"):
        subject = (
            "names or sizes of its files differ" if "num_files" in new else "its content differs"
        )
        changes.append(f"{split}: {subject}")
    if not changes and old.get("labels", "") != new.get("labels", ""):
        changes.append(f"{split}: the classes of its files differ")
    return changes


def _file_bytes(path: str) -> int | None:
    try:
        return Path(path).stat().st_size
    except OSError:
        # The file has been deleted since it was listed. Reading it will fail with a message.
        return None


def check_unchanged(
    checkpoint: str,
    saved: Mapping[str, Any] | None,
    current: Mapping[str, Any],
    refuse: bool,
    alternative: str = "",
) -> None:
    """Compares the data set with the one that a checkpoint was trained on.

    Args:
        checkpoint: Name of the checkpoint, for the message.
        saved: The manifest in the checkpoint; None if it holds none.
        current: The manifest of the data set.
        refuse: If False, warn instead of raising.
        alternative: Advice that follows "restore that data set" in the message.

    Raises:
        DataError: The manifests differ.
    """
    changes = differences(saved, current) if saved else []
    if changes:
        refuse_or_warn(
            f"the data set is not the one that checkpoint {checkpoint} was trained on: "
            f"{listed(changes, separator='; ')}",
            f"restore that data set{alternative}",
            refuse,
        )


def refuse_or_warn(
    problem: str, advice: str, refuse: bool, error_type: type[UserError] = DataError
) -> None:
    """Raises an error of this type or, without `refuse` (guard.data=false), only logs a warning."""
    if refuse:
        raise error_type(f"{problem}; {advice}, or continue anyway with guard.data=false")
    log.warning("%s; continuing because of guard.data=false", problem)
