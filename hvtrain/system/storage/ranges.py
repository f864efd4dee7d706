"""Reads objects in parts, each part only once: parts are kept in a sparse file, which the host's ranks share."""

import io
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from hvtrain.errors import StorageError
from hvtrain.system.storage.remote import READ_AT_ONCE, Object, Remote

# How long an object is assumed to be unchanged before it is checked again.
SECONDS_UNCHECKED = 10.0
READ_AHEAD_BYTES = 1 << 20
# Size of a checksum, a CRC-32.
SUM_BYTES = 4
# Maximum number of parts read ahead and not yet taken.
MAX_AHEAD = 1024


@dataclass(eq=False)
class RemoteFile:
    """An object that is read in parts.

    Args:
        remote: the object in its store.
        state: the object's size and modification time, which must not change.
        kept: a sparse file for the parts that have been read; None: they are not kept.
        sums: the file with the checksums of all kept parts of the data set.
        first_sum: the position in `sums` of this object's first checksum, in bytes.
    """

    remote: Remote
    state: Object
    kept: Path | None
    sums: Path
    first_sum: int
    _handle: Any = None
    _checked: float = 0.0

    def part(self, num_bytes: int, offset: int) -> bytes:
        """Returns num_bytes at an offset, from this host's disk if the same part was read before.

        Raises:
            StorageError: The store does not answer, or the object has changed.
        """
        if self.kept is None:
            return self.pread(num_bytes, offset)
        # A checksum distinguishes a part from a hole, since the CRC-32 of zeros is not 0, and shows
        # if only one of the two files was saved before a power cut.
        with suppress(OSError):
            data = os.pread(_open_file(self.kept).fileno(), num_bytes, offset)
            stored = os.pread(_open_file(self.sums).fileno(), SUM_BYTES, self._sum_offset(offset))
            if stored == _checksum(data):
                return data
        data = self.pread(num_bytes, offset)
        self.keep(data, offset)
        return data

    def keep(self, data: bytes, offset: int) -> None:
        """Keeps a part on this host's disk, where `part` finds it."""
        if self.kept is None:
            return
        with suppress(OSError):
            os.pwrite(_open_file(self.kept).fileno(), data, offset)
            os.pwrite(_open_file(self.sums).fileno(), _checksum(data), self._sum_offset(offset))

    def _sum_offset(self, offset: int) -> int:
        """Returns the position in `sums` of the checksum of the part at this offset.

        It is the part's own offset in the object, rounded down so that checksums do not overlap.
        """
        return self.first_sum + offset - offset % SUM_BYTES

    def pread(self, num_bytes: int, offset: int) -> bytes:
        """Reads num_bytes at an offset from the store without keeping them. Raises StorageError."""

        def read():
            handle = self._handle
            if handle is None or time.monotonic() - self._checked > SECONDS_UNCHECKED:
                handle = self._open()
            data = handle.read_at(num_bytes, offset)
            if len(data) < num_bytes:
                # The object may have been replaced, so the next attempt opens it again.
                self._handle = None
                raise OSError("only a part of the object arrived")
            return data

        return self.remote.attempt(read, StorageError)

    def _open(self) -> Any:
        """Opens the object, and checks that it has not changed."""
        remote = self.remote
        handle = remote.filesystem.open_input_file(remote.path)
        # S3 reports the modification time with the size; other stores need a second request.
        changed = handle.metadata().get("Last-Modified", b"").decode().replace("Z", "+00:00")
        if changed:
            seconds = datetime.fromisoformat(changed).timestamp()
        else:
            seconds = (remote.filesystem.get_file_info(remote.path).mtime_ns or 0) / 1e9
        # In whole seconds, since some stores list times with more digits
        # than they report for one object.
        if (handle.size(), int(seconds)) != (self.state.num_bytes, self.state.changed_ns // 10**9):
            raise StorageError(
                f"{remote.address} has changed since this run opened it; start again once it no longer changes"
            )
        self._checked = time.monotonic()
        self._handle = handle
        return handle

    def whole(self) -> bytes:
        """Returns the whole object as one part (see `part`)."""
        data = self.part(self.state.num_bytes, 0)
        # The handle is not kept, since there may be millions of objects.
        self._handle = None
        return data

    def open_unbuffered(self) -> io.RawIOBase:
        """Opens the object as an unbuffered file, each read of which is a part."""
        return _RawFile(self.part, self.state.num_bytes)

    def read_ahead(self) -> io.BufferedReader:
        """Opens the object as a buffered file for sequential reading; what it reads is not kept on this host."""
        return io.BufferedReader(_RawFile(self.pread, self.state.num_bytes), READ_AHEAD_BYTES)


# Small, since the usual limit is 1,024 open files per process.
@lru_cache(maxsize=32)
def _open_file(path: Path) -> IO[bytes]:
    """Opens a file for reading and writing in parts.

    It is closed once it has left this function's cache and no thread uses it.
    """
    return path.open("r+b", buffering=0)


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(SUM_BYTES, "big")


class ReadAhead:
    """Prefetches parts, several at a time, since each read waits for the store.

    Args:
        read: a function that reads a part by name.
    """

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read
        # Parts in the order in which they were announced.
        self._parts: dict[str, Future[Any]] = {}
        self._lock = threading.Lock()
        # Starts its threads only when it is first used: threads would not survive a fork.
        self._pool = ThreadPoolExecutor(READ_AT_ONCE)

    def announce(self, names: Iterable[str]) -> None:
        """Starts reading these parts. Beyond MAX_AHEAD, the oldest parts that were not taken are dropped."""
        with self._lock:
            for name in names:
                if name not in self._parts:
                    self._parts[name] = self._pool.submit(self._read, name)
            while len(self._parts) > MAX_AHEAD:
                self._parts.pop(next(iter(self._parts))).cancel()

    def take(self, name: str) -> Any:
        """Returns a part; reads it now if it was not announced. Raises what `read` raises."""
        with self._lock:
            future = self._parts.pop(name, None)
        if future is None:
            return self._read(name)
        try:
            return future.result()
        except BaseException:
            # The reader gives up here, and the process should not wait for
            # parts that nobody will use.
            with self._lock:
                for part in self._parts.values():
                    part.cancel()
                self._parts.clear()
            raise


@dataclass(eq=False)
class _RawFile(io.RawIOBase):
    """A read-only file of `num_bytes` bytes that reads its content by calling part(size, offset)."""

    part: Callable[[int, int], bytes]
    num_bytes: int
    position: int = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.num_bytes}
        self.position = origins[whence] + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    # RawIOBase.read would first read into another buffer, and then copy it.
    def read(self, size: int = -1) -> bytes:
        rest = max(0, self.num_bytes - self.position)
        size = rest if size < 0 else min(size, rest)
        data = self.part(size, self.position) if size else b""
        self.position += size
        return data
