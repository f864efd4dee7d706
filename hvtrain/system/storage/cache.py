"""A bounded cache of objects on this host, shared by the host's ranks and runs. Each entry is complete or absent.

An entry is a folder, named after a hash of the address and its objects' names, sizes and modification times. It
appears by a rename and never changes, so a run reads one state of the data, whatever happens in the store. When a new
entry needs space, entries that no process uses are removed, least recently used first.
"""

import fcntl
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import IO

from hvtrain.errors import ConfigError, DataError
from hvtrain.system.files import is_remote, remove, writing
from hvtrain.system.storage.ranges import SUM_BYTES, RemoteFile
from hvtrain.system.storage.remote import Object, Remote, locate
from hvtrain.system.text import duration, human_bytes

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "HVTRAIN_CACHE"
SIZE_VARIABLE = "HVTRAIN_CACHE_GIB"
DEFAULT_GIB = "50"
# Name of the object that lists the files of a run's last complete state in the store.
RUN_MANIFEST = "hvtrain-run.json"
MAX_CONCURRENT_DOWNLOADS = 16
SECONDS_BETWEEN_LINES = 15.0
UNFINISHED = ".part"
# The file in an entry with the checksums of all parts. One file for all objects, since creating a
# file takes a host as much time as a request.
SUMS = ".sums"

_PATTERN = re.compile(r"/(?=[^/]*[*?\[])")
# Lock files of the entries that this process uses, held until it ends.
_locks: dict[Path, IO[str]] = {}
# Objects that are read in parts, by the paths of their placeholder files.
_remote_files: dict[str, RemoteFile] = {}


@lru_cache(maxsize=256)
def local_copy(address: str, remote_suffixes: tuple[str, ...] = ()) -> Path:
    """Returns a local file or folder with the content of an address; for a pattern, the same pattern inside the copy.

    The first process on a host that asks for it downloads it, and the others wait. A process that asks again
    gets the same copy, until `forget_copies`.

    Args:
        remote_suffixes: Suffixes of names, in lower case. Objects with such names stay in the store: their
            local files have the same size but no content, and `remote_file` gives access to parts, which are
            kept if all objects fit.

    Raises:
        ConfigError: No store is known for the address, or the address contains a password.
        DataError: There are no objects, or they cannot be read, do not fit in the cache, or changed meanwhile.
    """
    if address.startswith("file://"):
        return Path(address.removeprefix("file://"))
    # The pattern begins with the first part of the address that has a wildcard.
    root, *pattern = _PATTERN.split(address, maxsplit=1)
    remote = locate(root)
    objects = _matching_objects(remote, *pattern)
    if not objects:
        raise DataError(f"{address} does not exist; check the bucket and the path")

    remote_objects = [
        item for item in objects if (item.name or remote.name).lower().endswith(remote_suffixes)
    ]
    copied_objects = sorted(set(objects) - set(remote_objects))
    num_bytes = sum(item.num_bytes for item in objects)
    # Parts are kept only if the whole objects would fit, since every part may be read in the end.
    keeps_parts = num_bytes <= limit_bytes()
    if not keeps_parts:
        num_bytes = sum(item.num_bytes for item in copied_objects)
    if num_bytes > limit_bytes():
        raise DataError(
            f"{address} has {human_bytes(num_bytes)}, and the cache in {cache_folder()} may hold "
            f"{human_bytes(limit_bytes())}; set {SIZE_VARIABLE}, or write shards for dataset=webdataset, which is read "
            "in parts"
        )

    def fill(folder):
        folder.with_name(SUMS).touch()
        for parent in {(folder / item.name).parent for item in remote_objects}:
            parent.mkdir(parents=True, exist_ok=True)
        for item in remote_objects:
            with (folder / item.name).open("wb") as file:
                file.truncate(item.num_bytes)
        if copied_objects:
            download(remote, copied_objects, folder)
            # If objects were replaced during the download, the copy may mix two states.
            if not set(objects) <= set(remote.objects()):
                raise DataError(
                    f"{address} changed while it was read; start again once it no longer changes"
                )

    folder = _entry(remote, objects, f"{remote_suffixes} {keeps_parts}", num_bytes, fill)
    first_sum = 0
    for item in remote_objects:
        path = folder / item.name
        kept = path if keeps_parts else None
        sums = folder.with_name(SUMS)
        _remote_files[str(path)] = RemoteFile(remote.child(item.name), item, kept, sums, first_sum)
        # A part's checksum is at the part's own offset, so an object's checksums span as many bytes as the object.
        first_sum += item.num_bytes + -item.num_bytes % SUM_BYTES
    return Path(folder, *pattern)


def _matching_objects(remote: Remote, pattern: str = "**") -> list[Object]:
    """Lists the complete objects at an address whose names match a pattern. Raises DataError."""
    # "**/" also matches no folder at all.
    variants = {pattern, pattern.replace("**/", "")}

    def matches(name: str) -> bool:
        return any(
            fnmatchcase(name, variant)
            # If both have the same number of slashes, no "*" has matched a slash.
            and ("**" in variant or variant.count("/") == name.count("/"))
            for variant in variants
        )

    return [item for item in complete_objects(remote) if matches(item.name)]


def remote_file(path: str | Path) -> RemoteFile | None:
    """Returns the object behind a placeholder that local_copy made; None for any other path."""
    return _remote_files.get(str(path))


def path_of(text: str | Path) -> Path:
    """Returns a local path: the local copy of an address, or the path itself."""
    return local_copy(str(text)) if is_remote(text) else Path(text)


def complete_objects(remote: Remote) -> list[Object]:
    """Lists the objects at an address; of a run, only those of its last complete state. Raises DataError."""
    objects = remote.objects()
    if RUN_MANIFEST not in [item.name for item in objects]:
        return objects
    # Small files may be newer than the manifest, but each is complete;
    # files of a checkpoint never change.
    names = remote.child(RUN_MANIFEST).read_json().get("files", {})
    return [item for item in objects if item.name in names]


def forget_copies() -> None:
    """Makes this process look up the content of each address again."""
    local_copy.cache_clear()


def user_cache() -> Path | None:
    """Returns hvtrain's folder in the user's cache; None without a home directory, as in some containers."""
    with suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hvtrain"
    return None


def cache_folder() -> Path:
    """Returns the folder of the cache: HVTRAIN_CACHE, or one in the user's cache. Raises ConfigError without either."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        return Path(folder).absolute()
    caches = user_cache()
    if caches is None:
        raise ConfigError(
            f"this user has no home directory for the cache; set {FOLDER_VARIABLE} to a folder"
        )
    return caches / "objects"


def limit_bytes() -> float:
    """Returns the cache's maximum size in bytes. Raises ConfigError if HVTRAIN_CACHE_GIB is not a number above 0."""
    text = os.environ.get(SIZE_VARIABLE) or DEFAULT_GIB
    gib = 0.0
    with suppress(ValueError):
        gib = float(text)
    if not gib > 0:
        raise ConfigError(
            f"{SIZE_VARIABLE}={text} is not a number above 0; give the size of the cache in GiB"
        )
    return gib * 2**30


def _entry(
    remote: Remote,
    objects: Sequence[Object],
    variant: str,
    num_bytes: int,
    fill: Callable[[Path], None],
) -> Path:
    """Returns the path of the objects in their cache entry, and keeps a shared lock on the entry.

    If the entry does not exist, this process fills it, or waits until another one has done so.

    Args:
        variant: Distinguishes entries of the same objects.
        num_bytes: The space that the entry needs.
        fill: Writes the objects to a path.

    Raises:
        ConfigError: The cache folder cannot be used.
        DataError: There is no room, or `fill` fails.
    """
    facts = [
        variant,
        remote.address,
        *(f"{item.name} {item.num_bytes} {item.changed_ns}" for item in objects),
    ]
    key = hashlib.sha256("\0".join(facts).encode(errors="surrogateescape")).hexdigest()[:20]
    folder = cache_folder() / key
    path = folder / remote.name
    if folder in _locks:
        return path
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_suffix(".lock").open("a+")
        while True:
            # All processes that use the entry share this lock, which keeps
            # others from removing the entry.
            fcntl.flock(lock, fcntl.LOCK_SH)
            if folder.is_dir():
                break
            log.info(
                "storage        %s: %s, %s, to %s",
                remote.address,
                f"{len(objects):,} object{'s' * (len(objects) != 1)}",
                human_bytes(num_bytes),
                folder,
            )
            # Released first, since NFS cannot upgrade a lock that others share.
            fcntl.flock(lock, fcntl.LOCK_UN)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.is_dir():
                continue
            with (cache_folder() / ".making-room").open("a") as guard:
                fcntl.flock(guard, fcntl.LOCK_EX)
                _make_room(Path(lock.name), num_bytes)
                lock.truncate(0)
                lock.write(str(num_bytes))
                lock.flush()
            temporary = folder.with_suffix(UNFINISHED)
            with writing(folder, temporary, num_bytes, DataError, f"the copy of {remote.address}"):
                temporary.mkdir()
                fill(temporary / remote.name)
                temporary.rename(folder)
        os.utime(lock.fileno())  # The time of last use, by which _make_room sorts the entries.
    except OSError as error:
        raise ConfigError(
            f"the cache {cache_folder()} cannot be used ({error.strerror}); set {FOLDER_VARIABLE} to a folder of this "
            "user on this host"
        ) from error
    _locks[folder] = lock
    return path


def _make_room(own_lock: Path, num_bytes: int) -> None:
    """Removes unused entries, least recently used first, until the new one fits. Raises DataError."""
    if not num_bytes:
        return
    others = [path for path in cache_folder().glob("*.lock") if path != own_lock]
    sizes = {
        path: int(path.read_text() or 0)
        for path in sorted(others, key=lambda path: path.stat().st_mtime)
    }
    for path in sizes:
        if sum(sizes.values()) + num_bytes <= limit_bytes():
            return
        # Another user's entry, or one in use, stays.
        with suppress(BlockingIOError, PermissionError), path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for suffix in ("", UNFINISHED):
                remove(path.with_suffix(suffix))
            lock.truncate(0)
            sizes[path] = 0
    used_bytes = sum(sizes.values())
    if used_bytes + num_bytes > limit_bytes():
        raise DataError(
            f"{human_bytes(num_bytes)} do not fit in the cache {cache_folder()}: {human_bytes(used_bytes)} of "
            f"{human_bytes(limit_bytes())} are in use; wait until other runs end, or set {SIZE_VARIABLE}"
        )


def download(remote: Remote, objects: Sequence[Object], folder: Path) -> None:
    """Downloads the objects into the folder, several at a time, and logs the progress. Raises DataError."""

    def fetch(item):
        target = folder / item.name
        target.parent.mkdir(parents=True, exist_ok=True)
        remote.child(item.name).download(target, item.num_bytes)

    began = last_line = time.monotonic()
    num_bytes = 0
    pool = ThreadPoolExecutor(MAX_CONCURRENT_DOWNLOADS)
    try:
        for item, _ in zip(objects, pool.map(fetch, objects)):
            num_bytes += item.num_bytes
            if time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                log.info("storage        %s downloaded so far", human_bytes(num_bytes))
    finally:
        # After a failure, the downloads that have not begun are pointless.
        pool.shutdown(cancel_futures=True)
    log.info(
        "storage        %s downloaded in %s", remote.address, duration(time.monotonic() - began)
    )
