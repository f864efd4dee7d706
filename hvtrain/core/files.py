"""Files that a crash never leaves half written, and readers that no pipe holds up. Pure."""

import csv
import errno
import io
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from hvtrain.errors import StorageError, UserError

Json = TypeVar("Json", list[Any], dict[str, Any])

# Prefix of files that are incomplete or about to be deleted, by which leftovers of a killed process are found.
TEMPORARY = ".tmp-"


@contextmanager
def writing(
    path: Path,
    temporary: Path,
    needed_bytes: int,
    kind: type[UserError] = StorageError,
    name: str | None = None,
) -> Iterator[None]:
    """Surrounds the writing of `path` under a temporary name. A failure leaves nothing behind.

    Args:
        path: The file or folder that `temporary` becomes.
        needed_bytes: Its size, for the message.
        kind: The error that an OSError becomes, with the space that was needed and the space that is free.
        name: What the message calls it; default: the path.
    """
    try:
        remove(temporary)
        yield
    except OSError as error:
        with suppress(OSError):
            remove(temporary)
        raise kind(_why_not_written(name or str(path), path.parent, error, needed_bytes)) from error


def _why_not_written(name: str, folder: Path, error: OSError, needed_bytes: int) -> str:
    disk = None
    with suppress(OSError):  # A lost mount does not even report its free space.
        while not folder.exists():
            folder = folder.parent
        disk = os.statvfs(folder)

    needed = f"{needed_bytes:,} bytes needed"
    if disk:
        needed += f", {disk.f_bavail * disk.f_frsize:,} free"
        # Some file systems count no inodes at all.
        if disk.f_files and not disk.f_favail:
            needed += ", no free inode"
    return f"{name} was not written: {error.strerror or error} ({needed} at {folder}); make room there"


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replaces a file. Readers see the old content or the new one, even after a crash. Raises StorageError.

    The mode of the old file stays.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    with writing(path, temporary, len(data)):
        with temporary.open("xb") as file:  # Fails for a link, whose target somebody else owns.
            file.write(data)
        if is_own_file(path):
            shutil.copymode(path, temporary)
        flush(temporary)
        temporary.replace(path)


def append_text(path: Path, text: str) -> None:
    """Adds text to the end of a file that exists. Raises StorageError, after which a part of the text may be there."""
    data = text.encode()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        with os.fdopen(handle, "ab") as file:
            file.write(data)
        flush(path)
    except OSError as error:
        raise StorageError(_why_not_written(str(path), path.parent, error, len(data))) from error


def refuse_link(path: Path, kind: type[UserError], advice: str) -> None:
    """Raises an error of that kind if a part of a run folder is a symbolic link."""
    if path.is_symlink():
        raise kind(f"{path} is a symbolic link, and may lead out of the run folder; {advice}")


def remove(path: Path) -> None:
    """Removes a file, a link (not its target) or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_own_file(path: Path) -> bool:
    """True for a regular file that is no link to another one."""
    return path.is_file() and not path.is_symlink()


def read_bytes(path: Path) -> bytes:
    """Reads a regular file. Raises OSError for anything else: a reader would wait for a pipe forever."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def read_file(path: Path) -> str:
    """Reads the text of a regular file, as read_bytes does."""
    return read_bytes(path).decode("utf-8")


def read_json(path: Path, kind: type[Json]) -> Json:
    """Reads a list or a dict; an empty one if the file is missing, damaged or of another type."""
    try:
        content = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return kind()
    return content if isinstance(content, kind) else kind()


def write_json(path: Path, content: Any, indent: int | None = 1) -> None:
    """Replaces a JSON file, as write_atomic does."""
    write_atomic(path, json.dumps(content, indent=indent) + "\n")


def whole_lines(text: str) -> str:
    """Cuts off what follows the last line break: the process may have ended while it added a line."""
    return text[: text.rfind("\n") + 1]


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Formats rows as CSV, with a line break after each."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def flush(path: Path) -> None:
    """Waits until a file, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
