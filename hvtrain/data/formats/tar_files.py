"""Locates the members of a data set's tar shards, so that one ranged read fetches a member.

A shard's members are found once, by reading its headers, and are listed in .SHARD.index beside it,
or in the user's cache if that folder is read-only. The index also holds the shard's size and
modification time, and is rebuilt if these change. The webdataset library, by contrast, reads shards
from beginning to end, and so does not know how many examples they hold.
"""

import fcntl
import hashlib
import io
import os
import re
import tarfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from hvtrain.errors import DataError, StorageError
from hvtrain.system.files import read_bytes, write_atomic
from hvtrain.system.storage.cache import remote_file, user_cache
from hvtrain.system.storage.ranges import READ_AHEAD_BYTES, ReadAhead

# Members up to this size, such as labels, are kept in the index.
MAX_TEXT_BYTES = 4096
# Members up to this size, of a shard in object storage, are kept while its headers are read: most
# of their bytes lie in blocks that are read anyway, and then need not be requested again.
MAX_KEPT_BYTES = READ_AHEAD_BYTES
BLOCK_BYTES = 512
# Number of bytes to read after the last member. tar pads an archive with zeros to a multiple of its
# record size, which is 10 KiB unless --blocking-factor sets another.
PADDING_BYTES = 2**16

_NUMBERS = re.compile(r"\{(\d+)\.\.(\d+)\}")
_ADDRESS = re.compile(r"(.+?)@(\d+)\+(\d+)/.*", re.DOTALL)
# The first bytes of gzip, bzip2, xz and zstd files.
_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")

# A regular file in a tar file: its name, offset and size, and, if it is small, its bytes as "text".
Member = dict[str, Any]


def expand_numbers(pattern: str) -> list[str]:
    """Expands the ranges of numbers in a pattern, as a shell does.

    >>> expand_numbers("train-{08..10}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar']
    >>> expand_numbers("{02..01}.tar")
    ['02.tar', '01.tar']
    """
    match = _NUMBERS.search(pattern)
    if not match:
        return [pattern]
    first, last = map(int, match.groups())
    # A shell also counts down.
    step = 1 if first <= last else -1
    width = len(match[1])
    numbers = [f"{number:0{width}d}" for number in range(first, last + step, step)]
    return [
        name for number in numbers for name in expand_numbers(pattern.replace(match[0], number, 1))
    ]


def address(shard: Path, member: Member) -> str:
    """Returns the address of a member: a string, used like a path, that member_bytes() reads."""
    return f"{shard}@{member['offset']}+{member['size']}/{member['name']}"


def member_bytes(path: str) -> bytes | None:
    """Reads a member by its address, or a file in object storage; None for any other path.

    Raises:
        DataError: The shard cannot be read, or ends before the member does.
    """
    match = _ADDRESS.fullmatch(path)
    if not match:
        remote = remote_file(path)
        return remote.whole() if remote else None
    shard = match[1]
    offset, size = int(match[2]), int(match[3])
    remote = remote_file(shard)
    if remote:
        return remote.part(size, offset)
    try:
        # The reference keeps the file open during the read. Without it, a file that leaves the
        # cache is closed, and its descriptor number may be reused.
        file = _open_shard(shard)
        # pread() uses no file position, so threads can share the file.
        data = os.pread(file.fileno(), size, offset)
    except OSError as error:
        raise DataError(f"{shard} cannot be read: {error.strerror}") from error
    if len(data) < size:
        raise DataError(
            f"{shard} ends before byte {offset + size:,}: it has changed since it was opened"
        )
    return data


def is_remote_file(path: str) -> bool:
    """True if a file, or the shard of a member, is in object storage."""
    return remote_file(_ADDRESS.sub(r"\1", path)) is not None


# Reads members in object storage ahead of their use.
members_ahead = ReadAhead(member_bytes)


@lru_cache(maxsize=256)
def _open_shard(shard: str) -> IO[bytes]:
    """Opens a shard. The file is closed once it has left this cache and no thread is reading it."""
    return Path(shard).open("rb")


def find_members(shard: Path) -> tuple[list[Member], str | None]:
    """Finds the members of a shard, from its index or, without one, from the shard itself.

    If several processes start together, one reads the shard, and the others wait for its index.

    Returns:
        The members in the shard's order, and the defect that hides the rest, or None.
    """
    # The shard may have been replaced since it was last opened.
    _open_shard.cache_clear()
    members = _read_index(shard)
    if members is not None:
        return members, None
    try:
        with shard.open("rb") as file:
            # Some network file systems cannot lock a file opened for reading.
            # Then each process reads the shard.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            members = _read_index(shard)
            if members is not None:
                return members, None
            members, problem = _scan(shard, file)
    except OSError as error:
        return [], f"cannot be read ({error.strerror})"
    # A damaged shard gets no index, since it will be replaced.
    if not problem:
        _write_index(shard, members)
    return members, problem


def _scan(shard: Path, file: Any) -> tuple[list[Member], str | None]:
    """Finds the members of a shard by reading its headers; returns the same as find_members()."""
    members: list[Member] = []
    file_bytes = shard.stat().st_size
    remote = remote_file(shard)
    if remote:
        file = remote.read_ahead()
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for header in tar:
                offset, size = header.offset_data, header.size
                end = offset + size
                if end > file_bytes:
                    return (
                        members,
                        f"has {file_bytes:,} bytes, and {header.name} ends at {end:,}: it is truncated",
                    )
                # The data of a sparse file are not contiguous.
                if not header.isreg() or header.issparse():
                    continue
                members.append(
                    {
                        "name": header.name.encode(errors="backslashreplace").decode(),
                        "offset": offset,
                        "size": size,
                        "text": _read_at(file, size, offset) if size <= MAX_TEXT_BYTES else None,
                    }
                )
                if remote and remote.kept and size <= MAX_KEPT_BYTES:
                    remote.keep(_read_at(file, size, offset), offset)
            end = tar.offset
    except tarfile.TarError as error:
        if not members and _read_at(file, BLOCK_BYTES, 0).startswith(_PACKED):
            return members, "is compressed, so that no part of it can be read alone: decompress it"
        return members, f"is not a complete tar file ({error}): it is truncated or damaged"

    # tarfile takes a damaged header, or the end of a truncated file, for the end of the archive. A
    # complete archive ends with blocks of zeros.
    rest = _read_at(file, PADDING_BYTES, end)
    if rest[:BLOCK_BYTES] != bytes(BLOCK_BYTES):
        return members, f"has no header at byte {end:,}: it is truncated or damaged"
    if any(rest):
        return members, f"continues after its end at byte {end:,}: `cat` does not join tar files"
    return members, None


def _read_at(file: Any, num_bytes: int, offset: int) -> bytes:
    file.seek(offset)
    return bytes(file.read(num_bytes))


def _index_paths(shard: Path) -> list[Path]:
    """Returns the possible paths of a shard's index: beside the shard, and in the user's cache."""
    paths = [shard.with_name(f".{shard.name}.index")]
    cache = user_cache()
    if cache:
        paths.append(cache / hashlib.sha256(os.fsencode(shard.resolve())).hexdigest())
    return paths


def _state(shard: Path) -> dict[bytes, bytes]:
    """Returns the size and modification time of a shard, as Parquet metadata."""
    stat = shard.stat()
    return {b"shard": f"{stat.st_size} {stat.st_mtime_ns}".encode()}


def _read_index(shard: Path) -> list[Member] | None:
    """Reads the members of a shard from its index; None if it is missing, or does not match the shard."""
    for path in _index_paths(shard):
        # An unreadable index counts as missing.
        with suppress(OSError, ValueError, pa.ArrowException):
            table = pq.read_table(pa.BufferReader(read_bytes(path)))
            if table.schema.metadata == _state(shard):
                return table.to_pylist()
    return None


def _write_index(shard: Path, members: list[Member]) -> None:
    """Writes the index of a shard to the first path that is writable, if any."""
    types = {"name": pa.string(), "offset": pa.int64(), "size": pa.int64(), "text": pa.binary()}
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(members, pa.schema(types, _state(shard))), content)
    for path in _index_paths(shard):
        with suppress(OSError, StorageError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content.getvalue())
            return
