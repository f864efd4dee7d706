"""Writes files so that a crash leaves none half written, and reads them without blocking on a pipe."""

import csv
import errno
import io
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from hvtrain.errors import ConfigError, StorageError, UserError

Json = TypeVar("Json", list[Any], dict[str, Any])

# Prefix of files that are incomplete or about to be deleted, used to find
# leftovers of a killed process.
TEMPORARY = ".tmp-"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


@contextmanager
def writing(
    path: Path,
    temporary: Path,
    needed_bytes: int,
    error_type: type[UserError] = StorageError,
    name: str | None = None,
) -> Iterator[None]:
    """Context in which the caller writes `temporary` and renames it to `path`.

    On an OSError, `temporary` is removed, and an error of type `error_type` is raised instead.

    Args:
        path: The file or folder that `temporary` becomes.
        temporary: The temporary path, which is removed first if it exists.
        needed_bytes: The size of the result, for the message.
        error_type: The type of the error that replaces an OSError; its message gives the space needed
            and the space free.
        name: The name of the result in the message; default: the path.
    """
    try:
        remove(temporary)
        yield
    except OSError as error:
        with suppress(OSError):
            remove(temporary)
        message = _failure_message(name or path, path.parent, error, needed_bytes)
        raise error_type(message) from error


def _failure_message(name: str | Path, folder: Path, error: OSError, needed_bytes: int) -> str:
    needed = f"{needed_bytes:,} bytes needed"
    with suppress(OSError):  # A lost mount does not even report its free space.
        while not folder.exists():
            folder = folder.parent
        disk = os.statvfs(folder)
        needed += f", {disk.f_bavail * disk.f_frsize:,} free"
        # Some file systems do not count inodes.
        if disk.f_files and not disk.f_favail:
            needed += ", no free inode"
    advice = "make room there"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "make that folder writable"
    return f"{name} was not written: {error.strerror or error} ({needed} at {folder}); {advice}"


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replaces a file. Readers see either the old content or the new, even after a crash.

    The new file keeps the mode of the old one. Raises StorageError.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    with writing(path, temporary, len(data)):
        with temporary.open("xb") as file:  # Fails if the name exists, even as a link.
            file.write(data)
        if is_own_file(path):
            shutil.copymode(path, temporary)
        flush(temporary)
        temporary.replace(path)


def append_text(path: Path, text: str) -> None:
    """Appends text to an existing file, or raises StorageError and leaves the file as it was."""
    data = text.encode()
    size = 0
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW), "ab") as file:
            size = file.tell()
            file.write(data)
        flush(path)
    except OSError as error:
        if size:
            # Part of a line may have been written, which the next text would continue.
            with suppress(OSError):
                os.truncate(path, size)
        raise StorageError(_failure_message(path, path.parent, error, len(data))) from error


def refuse_link(path: Path, error_type: type[UserError], advice: str) -> None:
    """Raises an error of the given type if `path`, inside a run folder, is a symbolic link."""
    if path.is_symlink():
        raise error_type(f"{path} is a symbolic link, and may lead out of the run folder; {advice}")


def remove(path: Path) -> None:
    """Removes a file, a link (not its target) or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def new_folder(default: Path) -> Path:
    """Creates and returns the folder `default`; if the name is taken, appends -2, -3, and so on. Raises OSError."""
    # Made first: in the loop, a parent that is a dangling link would
    # look like a name that is taken.
    default.parent.mkdir(parents=True, exist_ok=True)
    folder = default
    number = 1
    while True:
        try:
            # If several processes create the folder at the same time, this succeeds for only one.
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1
            folder = default.with_name(f"{default.name}-{number}")


def page_path(text: str | Path) -> Path:
    """Returns the path of the file that --output names.

    Raises ConfigError if no file can be written there.
    """
    path = Path(text)
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            f"--output {path}: there is no folder {path.parent}; make it, or choose another file"
        )
    return path


def is_own_file(path: Path) -> bool:
    """True for a regular file that is not a symbolic link."""
    return path.is_file() and not path.is_symlink()


def read_bytes(path: Path, last_bytes: int | None = None) -> bytes:
    """Reads a regular file, or only its end.

    Raises OSError for anything else, such as a pipe, on which a reader would block forever.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if last_bytes is not None:
            file.seek(max(0, status.st_size - last_bytes))
        return file.read()


def read_file(path: Path) -> str:
    """Reads the text of a regular file, as read_bytes does."""
    return read_bytes(path).decode()


def read_json(path: Path, json_type: type[Json]) -> Json:
    """Reads a JSON list or dict; empty if the file is missing, damaged or of another type."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_file(path))
        if isinstance(content, json_type):
            return content
    return json_type()


def json_text(content: Any, indent: int | None = 1) -> str:
    """Returns content as JSON, with null for numbers that are not finite, since JSON has no NaN or infinity."""
    return json.dumps(_finite(content), indent=indent)


def write_json(path: Path, content: Any, indent: int | None = 1) -> None:
    """Replaces a JSON file with json_text(content), as write_atomic does."""
    write_atomic(path, json_text(content, indent) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def whole_lines(text: str) -> str:
    """Returns the text up to its last line break; its writer may have died while adding a line."""
    return text[: text.rfind("\n") + 1]


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Formats rows as CSV, with a line break after each."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def flush(path: Path) -> None:
    """Flushes a file, or a folder's entries, to disk (fsync), if the file system can do so."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot flush folders: AFS, OrangeFS, and folders shared with a virtual machine.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def is_remote(text: object) -> bool:
    """True for an address with a scheme, as opposed to a path.

    >>> is_remote("s3://bucket/leaves"), is_remote("/data/leaves"), is_remote("file:///data/leaves")
    (True, False, True)
    """
    return bool(_SCHEME.match(str(text)))


def local_folder(text: str, setting: str) -> Path:
    """Returns the absolute path of a folder. Raises ConfigError for an address."""
    if is_remote(text):
        raise ConfigError(
            f"{setting}={text} is an address, but it must be a folder on this host; give its path"
        )
    return Path(text).absolute()
