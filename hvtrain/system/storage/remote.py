"""Reads and writes objects at addresses: s3://, gs://, abfs:// and hdfs:// with pyarrow.fs, others with fsspec.

Endpoints and credentials come from the stores' own environment variables and files, never from an address.
pyarrow.fs is imported where it is used, since its threads do not survive a fork.
"""

import errno
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from hvtrain.errors import ConfigError, DataError, StorageError, UserError
from hvtrain.system.secrets import WITH_PASSWORD, without_passwords

log = logging.getLogger(__name__)

T = TypeVar("T")

# Pauses after failed attempts; they grow, so that an overloaded store can recover.
SECONDS_BEFORE_RETRIES = (0.5, 1.0, 2.0, 4.0, 8.0)
PIECE_BYTES = 4 << 20
# Concurrent requests of one process for parts of objects; many, since
# each mostly waits for the store.
READ_AT_ONCE = 48
# Time limit for the retries of Google's own client, before each of the pauses above.
GOOGLE_RETRY_SECONDS = 5

# Errors that no retry can fix, by the names that stores give them.
_MISSING = re.compile(r"NO_SUCH_(BUCKET|KEY)|RESOURCE_NOT_FOUND|\b404\b|Container.?NotFound")
_DENIED = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|SIGNATURE|EXPIRED|SKEWED|CREDENTIALS|UNRECOGNIZED_CLIENT"
    r"|HTTP status(?: code:)? 40[013]|OAuth2 access token|Unauthenticated"
    r"|PermissionDenied|AuthenticationFailed|AuthorizationFailure",
    re.IGNORECASE,
)
_AWS = re.compile(r"AWS Error (\w+)(?: \(HTTP status (\d+)\))? during (\w+)")
_GOOGLE = re.compile(
    r"google::cloud::Status\((\w+): (?:[^:]*with a last message of )?(.+?)(?:\. | error_info|$)"
)
_AZURE = re.compile(r"Azure Error: \[(\w*)\] (.+?)(?:\. |$)")
# Errors of this host's disk rather than of the store.
_LOCAL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Object(NamedTuple):
    """An object at or below an address: its relative name ("" for the address itself), size and modification time."""

    name: str
    num_bytes: int
    changed_ns: int


@dataclass(frozen=True)
class Remote:
    """An object, or a folder of objects, in a store.

    Attributes:
        address: the address, without a slash at the end.
        filesystem: the pyarrow filesystem of the store.
        path: the path in that filesystem.
    """

    address: str
    filesystem: Any
    path: str

    @property
    def name(self) -> str:
        """The last part of the address."""
        return PurePosixPath(self.path).name

    def read_json(self) -> dict[str, Any]:
        """Returns the content of a small object that holds a JSON object. Raises DataError."""

        def read():
            with self.filesystem.open_input_stream(self.path) as source:
                return source.read()

        text = self.attempt(read)
        with suppress(ValueError):
            content = json.loads(text)
            if isinstance(content, dict):
                return content
        raise DataError(f"{self.address} is damaged; remove it, or choose another address")

    def child(self, name: str) -> "Remote":
        """Returns an object in this folder; for the name "", the object itself."""
        if not name:
            return self
        return Remote(f"{self.address}/{name}", self.filesystem, f"{self.path}/{name}")

    def objects(self) -> list[Object]:
        """Lists the objects at and below this address, sorted by name; empty if there are none. Raises DataError."""
        from pyarrow import fs

        def list_infos():
            info = self.filesystem.get_file_info(self.path)
            if info.type is fs.FileType.File:
                return [info]
            if info.type is fs.FileType.NotFound:
                # Nothing is at this address, or its bucket does not exist.
                return []
            return self.filesystem.get_file_info(fs.FileSelector(self.path, recursive=True))

        objects = [
            Object(info.path[len(self.path) + 1 :], info.size, info.mtime_ns or 0)
            for info in self.attempt(list_infos)
            if info.type is fs.FileType.File
        ]
        for name, _, _ in objects:
            # The name "" is the address itself.
            if name and not {"..", ""}.isdisjoint(name.split("/")):
                raise DataError(
                    f"{self.address} has an object {name!r}, which is not a path inside a folder; remove it"
                )
        return sorted(objects)

    def download(self, target: Path, num_bytes: int) -> None:
        """Downloads the object to a file. Raises DataError, or OSError if this host's disk fails."""

        def copy():
            with self.filesystem.open_input_stream(self.path) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, PIECE_BYTES)
                if file.tell() != num_bytes:
                    raise OSError("only a part of the object arrived")

        self.attempt(copy)

    def upload(self, source: Path) -> None:
        """Uploads a file as this object. Raises StorageError."""

        def copy():
            with source.open("rb") as file:
                target = self.filesystem.open_output_stream(self.path)
                try:
                    shutil.copyfileobj(file, target, PIECE_BYTES)
                except BaseException:
                    # Only closing ends an upload. It publishes what was sent so
                    # far, so the object is deleted.
                    with suppress(Exception):
                        target.close()
                    with suppress(Exception):
                        self.filesystem.delete_file(self.path)
                    raise
                target.close()

        self.attempt(copy, StorageError)

    def delete(self) -> None:
        """Deletes the object, unless it is gone. Raises StorageError."""

        def delete():
            # An attempt whose answer was lost may have deleted it.
            with suppress(FileNotFoundError):
                self.filesystem.delete_file(self.path)

        self.attempt(delete, StorageError)

    def attempt(self, action: Callable[[], T], error_type: type[UserError] = DataError) -> T:
        """Returns the action's result, retrying after transient failures.

        Raises:
            error_type: The last attempt failed, or no retry can help.
            OSError: This host's disk is full or read-only.
        """
        pauses = iter(SECONDS_BEFORE_RETRIES)
        while True:
            try:
                return action()
            except OSError as error:
                if error.errno in _LOCAL_DISK_ERRORS:
                    raise
                problem = _final_problem(error)
                if problem:
                    raise error_type(f"{self.address} {problem}") from None
                pause = next(pauses, None)
                if pause is None:
                    raise error_type(
                        f"{self.address} failed in {len(SECONDS_BEFORE_RETRIES) + 1} attempts "
                        f"({_reason(error)}); check the network and the store"
                    ) from None
                log.debug("%s: %s; retrying in about %s s", self.address, _reason(error), pause)
                # Jitter separates the retries of ranks that failed together. It comes
                # from SystemRandom, since the run seeds `random`.
                time.sleep(pause * random.SystemRandom().uniform(0.5, 1.5))


def locate(address: str) -> Remote:
    """Returns the object or folder at an address, without reading anything yet. Raises ConfigError."""
    if WITH_PASSWORD.search(address):
        raise ConfigError(
            f"{without_passwords(address)} has a password in it, which records would keep; leave it out, and use the "
            "store's own variables or files, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    scheme, _, rest = address.partition("://")
    authority, _, path = rest.partition("/")
    filesystem, root = _filesystem(scheme.lower(), authority)
    # The path is not parsed as a URI: unlike a URI, an object name may contain blanks, for example.
    full = f"{root.rstrip('/')}/{path}".rstrip("/")
    return Remote(address.rstrip("/"), filesystem, full)


@lru_cache(maxsize=32)
def _filesystem(scheme: str, authority: str) -> tuple[Any, str]:
    """Returns a store's pyarrow filesystem, and the path of the store's root in it. Raises ConfigError."""
    import pyarrow as pa
    from pyarrow import fs

    # An S3 client opens as many connections as pyarrow has I/O threads.
    pa.set_io_thread_count(max(pa.io_thread_count(), READ_AT_ONCE))
    root = f"{scheme}://{authority}"
    if scheme == "file":
        return fs.LocalFileSystem(), ""
    if scheme in ("abfs", "abfss"):
        return _azure(authority)
    try:
        with suppress(ValueError):
            opened = fs.FileSystem.from_uri(_google_uri(authority) if scheme == "gs" else root)
            # pyarrow also reports that the root does not exist if HDFS does not answer.
            if scheme == "hdfs" and opened[0].get_file_info("/").type is fs.FileType.NotFound:
                raise OSError("it does not answer")
            return opened
        return fs.FileSystem.from_uri(f"fsspec+{root}")
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{root}: no store is known for {scheme}://; use s3://, gs://, abfs:// or hdfs://, or install fsspec and "
            f"its package for this scheme ({_reason(error)})"
        ) from None
    except OSError as error:
        advice = "check the address"
        if scheme == "hdfs":
            advice += ", and that JAVA_HOME, HADOOP_HOME and CLASSPATH are set"
        raise ConfigError(f"{root} cannot be opened ({_reason(error)}); {advice}") from None


def _google_uri(bucket: str) -> str:
    """Returns the URI by which pyarrow opens a bucket of Google Cloud Storage."""
    # Google's client would itself retry for 15 minutes, even on a host that has no credentials.
    uri = f"gs://{bucket}?retry_limit_seconds={GOOGLE_RETRY_SECONDS}"
    # The variable of Google's own libraries; pyarrow does not read it.
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if not emulator:
        return uri
    scheme, _, host = emulator.rpartition("://")
    return f"{uri.replace('//', '//anonymous@')}&endpoint_override={host}&scheme={scheme or 'http'}"


def _azure(authority: str) -> tuple[Any, str]:
    """Opens a container of Azure Blob Storage with the variables of Azure's own tools, which pyarrow does not read.

    Raises:
        ConfigError: The account or its credentials are not known.
    """
    from pyarrow import fs

    container, _, host = authority.partition("@")
    account = host.partition(".")[0] or os.environ.get("AZURE_STORAGE_ACCOUNT")
    if not account:
        raise ConfigError(
            f"abfs://{authority} names no account; use abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH, or set "
            "AZURE_STORAGE_ACCOUNT"
        )
    key = os.environ.get("AZURE_STORAGE_KEY")
    token = os.environ.get("AZURE_STORAGE_SAS_TOKEN")
    options: dict[str, Any] = {"account_name": account, "account_key": key, "sas_token": token}
    endpoint = os.environ.get("AZURE_STORAGE_SERVICE_ENDPOINT")
    if endpoint:
        scheme, _, authority = endpoint.rstrip("/").partition("://")
        for service in ("blob", "dfs"):
            options[f"{service}_storage_scheme"] = scheme
            options[f"{service}_storage_authority"] = authority
    if not (key or token):
        _check_azure_login(options, container)
    return fs.AzureFileSystem(**options), container


def _check_azure_login(options: dict[str, Any], container: str) -> None:
    """Checks in another process that Azure's default credentials work, since pyarrow 26 aborts if there are none."""
    code = (
        "import json, sys; from pyarrow import fs; options, container = json.load(sys.stdin); "
        "fs.AzureFileSystem(**options).get_file_info(container)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([options, container]),
        text=True,
        capture_output=True,
    )
    if completed.returncode < 0:
        raise ConfigError(
            f"abfs://{container}@{options['account_name']} cannot be accessed, since this host has no Azure "
            "credentials; set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or log in with az login"
        )


def _final_problem(error: Exception) -> str:
    """Returns the problem, with advice, if no retry can help; otherwise ""."""
    # Object names, which are quoted, do not count: an object
    # signatures/404.jpg says nothing about the error.
    text = re.sub(r"'[^']*'", "", str(error))
    if isinstance(error, FileNotFoundError) or _MISSING.search(text):
        return "does not exist; check the bucket and the path"
    if isinstance(error, PermissionError) or _DENIED.search(text):
        return (
            f"cannot be accessed ({_reason(error)}); check this host's credentials and clock, and the account's "
            "permissions"
        )
    return ""


def _reason(error: Exception) -> str:
    """Returns the error in brief, without the keys and addresses of requests.

    >>> _reason(OSError("When reading 'a' in 'b': AWS Error SLOW_DOWN (HTTP status 503) during GetObject operation: ?"))
    'SLOW_DOWN (HTTP status 503) during GetObject'
    """
    text = " ".join(str(error).split())
    match = _AWS.search(text)
    if match:
        name, status, operation = match.groups()
        details = f" (HTTP status {status})" if status else ""
        return f"{name}{details} during {operation}"
    match = _GOOGLE.search(text) or _AZURE.search(text)
    if match:
        return ": ".join(filter(None, match.groups()))
    return without_passwords(text[:200])
