"""Copies of objects on this host: bounded, shared by its ranks and runs, each complete or absent.

An entry of the cache is a folder that is named by an address and by names, sizes and times of change of its objects. It
appears by a rename and never changes, so a run reads one state of the data, whatever happens in the store. Entries are
removed, the one used longest ago first, when a new one needs their room and no process uses them.
"""

import fcntl
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import IO

from hvtrain.core.files import TEMPORARY, remove, writing
from hvtrain.errors import ConfigError, DataError
from hvtrain.storage.ranges import RangedFile
from hvtrain.storage.remote import Object, Remote, is_remote, locate
from hvtrain.system.text import duration, human_bytes

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "HVTRAIN_CACHE"
SIZE_VARIABLE = "HVTRAIN_CACHE_GIB"
DEFAULT_GIB = 50.0
RUN_MANIFEST = "hvtrain-run.json"
"""The object of a run in a store that lists the files of its last complete state."""
FETCHED_AT_ONCE = 16
SECONDS_BETWEEN_LINES = 15.0

_PATTERN = re.compile(r"/(?=[^/]*[*?\[])")
# Locks of the entries that this process uses, held until it ends.
_used: dict[Path, IO[str]] = {}
# Files of ranged copies, by their paths.
_ranged: dict[str, RangedFile] = {}


@lru_cache(maxsize=256)
def local_copy(address: str) -> Path:
    """Returns a file or folder of this host with the content of an address; for a pattern, the pattern in a copy.

    The first process of a host that asks brings it, and the others wait. A process that asks again
    gets the same copy, until `forget_copies`.

    Raises:
        ConfigError: No store is known for the address, or it has a password in it.
        DataError: There is nothing, it cannot be read, has no room in the cache, or changed meanwhile.
    """
    if address.startswith("file://"):
        return Path(address.removeprefix("file://"))
    # The pattern begins with the first part of the address that has one.
    head, *tail = _PATTERN.split(address, maxsplit=1)
    remote = locate(head)
    objects = [item for item in complete_objects(remote) if not tail or fnmatchcase(item.name, tail[0])]
    if not objects:
        raise DataError(f"{address} is not there; check the bucket and the path")
    num_bytes = sum(item.num_bytes for item in objects)
    entry = _Entry(remote, objects, "whole", num_bytes)
    if num_bytes > limit_bytes():
        raise DataError(
            f"{address} has {human_bytes(num_bytes)}, and the cache in {cache_folder()} may have "
            f"{human_bytes(limit_bytes())}; set {SIZE_VARIABLE}, or write shards for dataset=webdataset, which is read "
            "in parts"
        )

    def fetch(folder: Path) -> None:
        download(remote, objects, folder)
        # What was replaced meanwhile may be of two states.
        if not {*objects} <= {*remote.objects()}:
            raise DataError(f"{address} changed while it was read; start again when nothing writes there")

    return Path(entry.open(fetch), *tail)


def path_of(text: str | Path) -> Path:
    """Returns a path of this host: the local copy of an address, or the path itself."""
    return local_copy(str(text)) if is_remote(text) else Path(text)


def complete_objects(remote: Remote) -> list[Object]:
    """Lists the objects at an address; of a run those of its last complete state. Raises DataError."""
    objects = remote.objects()
    if RUN_MANIFEST not in [item.name for item in objects]:
        return objects
    # Small files may be newer than the list, each whole; those of a checkpoint stay as they are.
    names = remote.child(RUN_MANIFEST).read_json().get("files", {})
    return [item for item in objects if item.name in names]


@lru_cache(maxsize=256)
def ranged_copy(address: str) -> Path:
    """Returns a folder with the names and sizes of the objects of an address, for `ranged_file` to read them in parts.

    Parts that were read are kept there if all of them have room in the cache.

    Raises:
        ConfigError, DataError: as local_copy does.
    """
    if address.startswith("file://"):
        return local_copy(address)
    remote = locate(address)
    objects = remote.objects()
    if not objects:
        raise DataError(f"{address} is not there; check the bucket and the path")
    num_bytes = sum(item.num_bytes for item in objects)
    is_kept = num_bytes <= limit_bytes()
    entry = _Entry(remote, objects, f"ranged {is_kept}", num_bytes if is_kept else 0)

    def make_holes(folder: Path) -> None:
        for item in objects:
            path = folder / item.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.truncate(path, item.num_bytes)

    folder = entry.open(make_holes)
    for item in objects:
        path = folder / item.name
        _ranged[str(path)] = RangedFile(remote.child(item.name), item, path if is_kept else None)
    return folder


def ranged_file(path: str | Path) -> RangedFile | None:
    """Returns the object behind a file of `ranged_copy`; None for any other file."""
    return _ranged.get(str(path))


def forget_copies() -> None:
    """Lets this process look again for what an address holds."""
    local_copy.cache_clear()
    ranged_copy.cache_clear()


def cache_folder() -> Path:
    """The cache of this host: HVTRAIN_CACHE, or a folder in the user's cache."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        return Path(folder).absolute()
    home = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")  # noqa: PTH111
    # A user of a container may have no home.
    if home.startswith("~"):
        raise ConfigError(f"this user has no home for a cache; set {FOLDER_VARIABLE} to a folder")
    return Path(home) / "hvtrain" / "objects"


def limit_bytes() -> float:
    """The most bytes of the cache. Raises ConfigError if HVTRAIN_CACHE_GIB is no number above 0."""
    text = os.environ.get(SIZE_VARIABLE) or str(DEFAULT_GIB)
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not gib > 0:
        raise ConfigError(f"{SIZE_VARIABLE}={text} is not a number above 0; give the size of the cache in GiB")
    return gib * 2**30


class _Entry:
    """An entry of the cache.

    Args:
        remote: where the objects are.
        objects: what it holds.
        kind: tells entries of the same objects apart.
        num_bytes: the room that it needs.
    """

    def __init__(self, remote: Remote, objects: Sequence[Object], kind: str, num_bytes: int) -> None:
        facts = [kind, remote.address, *(f"{item.name} {item.num_bytes} {item.changed_ns}" for item in objects)]
        key = hashlib.sha256("\0".join(facts).encode(errors="surrogateescape")).hexdigest()[:20]
        self._remote = remote
        self._num_bytes = num_bytes
        self._num_objects = len(objects)
        self._folder = cache_folder() / key

    def open(self, fill: Callable[[Path], None]) -> Path:
        """Returns the path of the objects in the entry, which `fill` makes if it is not there."""
        path = self._folder / self._remote.name
        if self._folder in _used:
            return path
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            lock = _lock_of(self._folder).open("a+")
        except OSError as error:
            raise ConfigError(
                f"the cache {cache_folder()} cannot be written ({error.strerror}); set {FOLDER_VARIABLE} to a folder "
                "of this host"
            ) from error
        while True:
            # Shared by all who use it, so that nobody removes it.
            fcntl.flock(lock, fcntl.LOCK_SH)
            if self._folder.is_dir():
                break
            log.info(
                "storage        %s: %s objects, %s, to %s",
                self._remote.address,
                f"{self._num_objects:,}",
                human_bytes(self._num_bytes),
                self._folder,
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._folder.is_dir():
                self._make(lock, fill)
        os.utime(lock.fileno())
        _used[self._folder] = lock
        return path

    def _make(self, lock: IO[str], fill: Callable[[Path], None]) -> None:
        with (cache_folder() / ".making-room").open("a") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            _make_room(self._folder, self._num_bytes)
            lock.truncate(0)
            lock.write(str(self._num_bytes))
            lock.flush()
        temporary = _temporary_of(self._folder)
        with writing(self._folder, temporary, self._num_bytes, DataError, f"the copy of {self._remote.address}"):
            temporary.mkdir()
            fill(temporary / self._remote.name)
            temporary.rename(self._folder)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _temporary_of(folder: Path) -> Path:
    return folder.with_name(f"{TEMPORARY}{folder.name}")


def _make_room(folder: Path, num_bytes: int) -> None:
    """Removes entries, the one used longest ago first, until the new one has room. Raises DataError."""
    if not num_bytes:
        return
    others = [lock for lock in cache_folder().glob("*.lock") if lock != _lock_of(folder)]
    sizes = {lock: int(lock.read_text() or 0) for lock in sorted(others, key=lambda lock: lock.stat().st_mtime)}
    for lock_path in sizes:
        if sum(sizes.values()) + num_bytes <= limit_bytes():
            return
        with lock_path.open("r+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            entry = lock_path.with_suffix("")
            for path in (entry, _temporary_of(entry)):
                remove(path)
            lock.truncate(0)
            sizes[lock_path] = 0
    used_bytes = sum(sizes.values())
    if used_bytes + num_bytes > limit_bytes():
        raise DataError(
            f"{human_bytes(num_bytes)} have no room in the cache {cache_folder()}: others are using "
            f"{human_bytes(used_bytes)} of {human_bytes(limit_bytes())}; wait for their end, or set {SIZE_VARIABLE}"
        )


def download(remote: Remote, objects: Sequence[Object], folder: Path) -> None:
    """Brings the objects, several at a time, and says now and then how much has come."""
    for parent in {(folder / item.name).parent for item in objects}:
        parent.mkdir(parents=True, exist_ok=True)

    def bring(item: Object) -> int:
        remote.child(item.name).download(folder / item.name, item.num_bytes)
        return item.num_bytes

    began = last_line = time.monotonic()
    num_bytes = 0
    pool = ThreadPoolExecutor(FETCHED_AT_ONCE)
    try:
        for size in pool.map(bring, objects):
            num_bytes += size
            if time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                log.info("storage        %s so far", human_bytes(num_bytes))
    finally:
        # After a failure the others are of no use.
        pool.shutdown(cancel_futures=True)
    log.info("storage        %s is here after %s", remote.address, duration(time.monotonic() - began))
