"""Manifests: the identity of a data set, small enough for a checkpoint, and the differences of two, in words.

A manifest is {"name", "image_shape", "num_classes", "splits": {"train": {"examples", "digest", "files"}, ...}}, or has
"elements", the types and shapes of an example, in place of the image's shape and the number of classes; a text has
"tokenizer", the SHA-256 of its model.
It identifies files by names and sizes, arrays by their contents. No TensorFlow.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hvtrain.errors import DataError, UserError

log = logging.getLogger(__name__)

MAX_FILES = 1000
"""Above this number of files a checkpoint keeps a digest instead of the list."""
MAX_SIZES = 10_000
"""Sizes that are read, of evenly spaced files, since a network file system may be slow."""
MAX_BYTES = 2**28
"""Bytes of an array that are hashed, in evenly spaced rows."""


def user_path(text: str | Path) -> Path:
    """The path with ~ as the user's home. It stays where there is none, as for a container's user without a name."""
    path = Path(text)
    with suppress(RuntimeError):
        path = path.expanduser()
    return path


def check_names(paths: Iterable[str | Path]) -> None:
    """Raises DataError for a name that is not UTF-8, which TensorFlow cannot open, nor a record hold."""
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise DataError(f"{os.fsencode(path)!r} is a file whose name is not UTF-8; rename it") from None


def of_files(folder: Path, paths: Sequence[str]) -> dict[str, Any]:
    """The part of a manifest about files: names within the folder, and sizes in bytes."""
    check_names(paths)
    step = -(-len(paths) // MAX_SIZES) or 1
    sized = set(paths[::step])
    files = {_name(path, folder): _size(path) if path in sized else None for path in sorted(paths)}
    digest = hashlib.sha256()
    for name, size in files.items():
        digest.update(f"{name}\0{size}\n".encode())
    found = {"num_files": len(files), "digest": digest.hexdigest()}
    return {**found, "files": files} if len(files) <= MAX_FILES else found


def of_arrays(arrays: Sequence[np.ndarray]) -> str:
    """A digest of the contents."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        step = -(-array.nbytes // MAX_BYTES) or 1
        digest.update(np.ascontiguousarray(array[::step]).data)
    return digest.hexdigest()


def digest_of(manifest: Mapping[str, Any]) -> str:
    """One number for a whole manifest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """How the new data set differs from the old one, in words; an empty list if it does not."""
    found = [
        f"{name} is {new.get(name)}, was {old.get(name)}"
        for name in ("name", "image_shape", "num_classes", "elements", "tokenizer")
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
        return None  # It went away; reading it will fail with a message.


def check_unchanged(
    name: str, saved: dict[str, Any] | None, now: dict[str, Any], refuse: bool, other_way: str = ""
) -> None:
    """Raises DataError (or warns) if the checkpoint of that name was made on another data set. Old ones hold none.

    other_way: what can be done besides restoring the data set, for the message.
    """
    changed = differences(saved, now) if saved else []
    if changed:
        refuse_or_warn(
            f"the data set is not the one of checkpoint {name}: {shown(changed)}",
            f"restore that data set{other_way}",
            DataError if refuse else None,
        )


def refuse_or_warn(what: str, advice: str, kind: type[UserError] | None) -> None:
    if kind is None:
        log.warning("%s; going on because of guard.data=false", what)
    else:
        raise kind(f"{what}; {advice}, or go on anyway with guard.data=false")


def shown(found: list[str]) -> str:
    return "; ".join(found[:5]) + (f"; and {len(found) - 5:,} more" if len(found) > 5 else "")
