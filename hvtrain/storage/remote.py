"""Objects at addresses: s3://, gs://, abfs:// and hdfs:// by pyarrow.fs, other schemes by fsspec.

Endpoints and credentials are those of the stores' own variables and files; an address never has any.
pyarrow.fs is imported where it is used, since its threads do not survive a fork.
"""

import errno
import json
import logging
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from hvtrain.errors import ConfigError, DataError, UserError
from hvtrain.system.secrets import WITH_PASSWORD, without_passwords

log = logging.getLogger(__name__)

T = TypeVar("T")

SECONDS_BEFORE_RETRIES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses after failures, which grow so that a store that is overloaded recovers."""
PIECE_BYTES = 4 << 20

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
# What no retry changes, by the names that stores give it.
_MISSING = re.compile(r"NO_SUCH_(BUCKET|KEY)|RESOURCE_NOT_FOUND|HTTP status 404|\b404\b|Container.?NotFound")
_DENIED = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|SIGNATURE|EXPIRED|SKEWED|CREDENTIALS|UNRECOGNIZED_CLIENT"
    r"|HTTP status 40[013]|Unauthenticated|PermissionDenied|AuthenticationFailed|AuthorizationFailure",
    re.IGNORECASE,
)
_AWS = re.compile(r"AWS Error (\w+)(?: \(HTTP status (\d+)\))? during (\w+)")
# Of errors in the files' own disk, which the store has no part in.
_OWN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def is_remote(text: object) -> bool:
    """True for an address.

    >>> is_remote("s3://bucket/leaves"), is_remote("/data/leaves"), is_remote("file:///data/leaves")
    (True, False, True)
    """
    return bool(_ADDRESS.match(str(text)))


def local_folder(text: str, setting: str) -> Path:
    """Returns the absolute path of a folder. Raises ConfigError for an address."""
    if is_remote(text):
        raise ConfigError(f"{setting}={text} is an address, and a folder of this host is needed here; give its path")
    return Path(text).absolute()


@dataclass(frozen=True)
class Object:
    """An object below an address: its name there ("" for the address itself), size and time of change."""

    name: str
    num_bytes: int
    changed_ns: int


@dataclass(frozen=True)
class Remote:
    """An object, or a folder of objects, in a store.

    Attributes:
        address: as the user gives it.
        filesystem: of pyarrow.
        path: in the filesystem.
    """

    address: str
    filesystem: Any
    path: str

    @property
    def name(self) -> str:
        """The last part of the address."""
        return PurePosixPath(self.path).name

    def read_json(self) -> dict[str, Any]:
        """Returns the content of a small object. Raises DataError."""

        def read() -> bytes:
            with self.filesystem.open_input_stream(self.path) as source:
                data: bytes = source.read()
                return data

        with suppress(ValueError):
            content = json.loads(self.attempt(read))
            if isinstance(content, dict):
                return content
        raise DataError(f"{self.address} is damaged; remove it, or choose another address")

    def child(self, name: str) -> "Remote":
        """An object of this folder; the object itself for the name ""."""
        if not name:
            return self
        return Remote(f"{self.address}/{name}", self.filesystem, f"{self.path}/{name}")

    def objects(self) -> list[Object]:
        """Lists the objects at and below this address, sorted by name; none if there is nothing."""
        from pyarrow import fs

        def listed() -> list[Any]:
            info = self.filesystem.get_file_info(self.path)
            if info.type is fs.FileType.File:
                return [info]
            if info.type is fs.FileType.NotFound:
                # The root of a bucket that does not exist, too.
                return []
            return self.filesystem.get_file_info(fs.FileSelector(self.path, recursive=True))

        infos = self.attempt(listed)
        names = {info.path[len(self.path) + 1 :]: info for info in infos if info.type is fs.FileType.File}
        for name in names:
            if {"..", ""} & {*name.split("/")} and name:
                raise DataError(f"{self.address} has an object {name!r}, which is no path in a folder; remove it")
        return [Object(name, info.size, info.mtime_ns or 0) for name, info in sorted(names.items())]

    def download(self, target: Path, num_bytes: int) -> None:
        """Writes the object to a file. Raises DataError, or OSError for the disk's own errors."""

        def copy() -> None:
            size = 0
            with self.filesystem.open_input_stream(self.path) as source, target.open("wb") as file:
                while True:
                    piece = source.read(PIECE_BYTES)
                    if not piece:
                        break
                    size += file.write(piece)
            if size != num_bytes:
                raise OSError(errno.EIO, f"{size:,} of {num_bytes:,} bytes came")

        self.attempt(copy)

    def attempt(self, action: Callable[[], T], kind: type[UserError] = DataError, verb: str = "read") -> T:
        """Calls the action, again after failures that may pass; raises an error of that kind in the end."""
        for pause in (*SECONDS_BEFORE_RETRIES, None):
            try:
                return action()
            except OSError as error:
                if getattr(error, "errno", None) in _OWN_DISK:
                    raise
                problem = _final_problem(error)
                if problem:
                    raise kind(f"{self.address} {problem}") from None
                if pause is None:
                    raise kind(
                        f"{self.address} was not {verb} in {len(SECONDS_BEFORE_RETRIES) + 1} attempts "
                        f"({_reason(error)}); check the network and the store"
                    ) from None
                log.debug("%s: %s; tried again in %s s", self.address, _reason(error), pause)
                # Ranks that failed together come back apart. Not Python's own generator, which the run has seeded.
                time.sleep(pause * random.SystemRandom().uniform(0.5, 1.5))
        raise AssertionError("unreachable")


def locate(address: str) -> Remote:
    """Opens the store of an address; nothing is read yet. Raises ConfigError."""
    match = _ADDRESS.fullmatch(address)
    assert match, address
    if WITH_PASSWORD.search(address):
        raise ConfigError(
            f"{without_passwords(address)} has a password in it, which records would keep; leave it out, and set the "
            "variables or files of the store, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    scheme, rest = match.groups()
    authority, _, path = rest.partition("/")
    filesystem, root = _filesystem(scheme.lower(), authority)
    # Not parsed as a part of the address: names of objects may hold what addresses may not, such as blanks.
    full = f"{root.rstrip('/')}/{path}".rstrip("/")
    return Remote(address.rstrip("/"), filesystem, full)


@lru_cache(maxsize=32)
def _filesystem(scheme: str, authority: str) -> tuple[Any, str]:
    """Returns the filesystem of a store, and the path of the store's root in it."""
    from pyarrow import fs

    root = f"{scheme}://{authority}"
    try:
        if scheme == "file":
            return fs.LocalFileSystem(), ""
        try:
            return fs.FileSystem.from_uri(root)
        except ValueError:
            import fsspec

            if scheme not in fsspec.available_protocols():
                raise ImportError(f"fsspec does not know {scheme}") from None
            other, path = fsspec.core.url_to_fs(root)
            return fs.PyFileSystem(fs.FSSpecHandler(other)), path
    except ImportError as error:
        raise ConfigError(
            f"{root}: no store is known for {scheme}://; use s3://, gs://, abfs:// or hdfs://, or install fsspec and "
            f"its package for this scheme ({error})"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{root} cannot be opened ({_reason(error)}); check the address") from None


def _final_problem(error: Exception) -> str:
    """Returns the problem and the advice if no retry helps, else ""."""
    text = str(error)
    if isinstance(error, FileNotFoundError) or _MISSING.search(text):
        return "is not there; check the bucket and the path"
    if isinstance(error, PermissionError) or _DENIED.search(text):
        return (
            f"cannot be accessed ({_reason(error)}); check the credentials of this host, its clock, and the rights of "
            "that account"
        )
    return ""


def _reason(error: Exception) -> str:
    """Returns the error in short, without keys and addresses of requests.

    >>> _reason(OSError("When reading 'a' in 'b': AWS Error SLOW_DOWN (HTTP status 503) during GetObject operation: ?"))
    'SLOW_DOWN (HTTP status 503) during GetObject'
    """
    text = " ".join(str(error).split())
    match = _AWS.search(text)
    if match:
        name, status, operation = match.groups()
        details = f" (HTTP status {status})" if status else ""
        return f"{name}{details} during {operation}"
    return without_passwords(text[:200])
