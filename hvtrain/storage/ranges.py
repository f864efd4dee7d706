"""Objects that are read in parts, each once: a part that was read is kept in a file with holes, which ranks share."""

import errno
import io
import math
import os
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvtrain.errors import StorageError
from hvtrain.storage.remote import Object, Remote

SECONDS_UNCHECKED = 10.0
"""How long an object is taken to be the same, without asking."""
READ_AHEAD_BYTES = 1 << 20
BLOCK_BYTES = 512
"""What the offsets of kept parts are multiples of, as in tar files."""
SUM_BYTES = 4


class RangedFile:
    """An object that is read in parts.

    Args:
        remote: where the object is.
        state: its size and time of change, which must stay.
        kept: a file with holes for the parts that were read; None: they are not kept.
    """

    def __init__(self, remote: Remote, state: Object, kept: Path | None) -> None:
        self._remote = remote
        self._state = state
        self._kept = kept
        self._handle: Any = None
        self._checked = -math.inf

    def part(self, num_bytes: int, offset: int) -> bytes:
        """Returns bytes from an offset, a multiple of BLOCK_BYTES: from this host's disk if they were read before.

        Raises:
            StorageError: The store does not answer, or the object has changed.
        """
        if self._kept is None:
            return self.pread(num_bytes, offset)
        # A checksum, since a power cut may keep either file without the other.
        sums = self._kept.with_name(f".{self._kept.name}.sums")
        slot = offset // BLOCK_BYTES * SUM_BYTES
        with suppress(OSError), self._kept.open("rb") as file, sums.open("rb") as sums_file:
            data = os.pread(file.fileno(), num_bytes, offset)
            expected = os.pread(sums_file.fileno(), SUM_BYTES, slot)
            if zlib.crc32(data).to_bytes(SUM_BYTES, "big") == expected:
                return data
        data = self.pread(num_bytes, offset)
        with suppress(OSError), self._kept.open("r+b") as file, sums.open("ab"), sums.open("r+b") as sums_file:
            os.pwrite(file.fileno(), data, offset)
            os.pwrite(sums_file.fileno(), zlib.crc32(data).to_bytes(SUM_BYTES, "big"), slot)
        return data

    def pread(self, num_bytes: int, offset: int) -> bytes:
        """Reads bytes of the object. Raises StorageError."""

        def read() -> bytes:
            if time.monotonic() - self._checked > SECONDS_UNCHECKED:
                self._check()
            data: bytes = self._handle.read_at(num_bytes, offset)
            if len(data) < num_bytes:
                # Perhaps another object is there now.
                self._checked = -math.inf
                raise OSError(errno.EIO, f"{len(data):,} of {num_bytes:,} bytes came")
            return data

        return self._remote.attempt(read, StorageError)

    def _check(self) -> None:
        filesystem, path = self._remote.filesystem, self._remote.path
        info = filesystem.get_file_info(path)
        if (info.size, info.mtime_ns or 0) != (self._state.num_bytes, self._state.changed_ns):
            raise StorageError(
                f"{self._remote.address} has changed since this run opened it; start again when nothing writes there"
            )
        self._handle = filesystem.open_input_file(path)
        self._checked = time.monotonic()

    def buffered(self) -> io.BufferedReader:
        """Opens the object as a file that is read ahead."""
        return io.BufferedReader(_Positioned(self, self._state.num_bytes), READ_AHEAD_BYTES)


class _Positioned(io.RawIOBase):
    """A file of so many bytes at a position."""

    def __init__(self, file: RangedFile, num_bytes: int) -> None:
        self._file = file
        self._num_bytes = num_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begins = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}
        self._position = begins[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._num_bytes - self._position))
        if size:
            buffer[:size] = self._file.pread(size, self._position)
        self._position += size
        return size
