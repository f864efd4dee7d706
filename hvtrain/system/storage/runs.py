"""Keeps a run in object storage: the run works in a local folder, which is uploaded after each checkpoint.

Objects are uploaded first and their manifest last, so whatever the manifest lists is complete, even if the process is
killed. Stores have no locks that pyarrow can take: the latest start wins, and an earlier one ends at its next upload.

Outputs of commands are also written on this host first, and uploaded once they are complete.
"""

import hashlib
import logging
import re
import secrets
import socket
import tempfile
import weakref
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from hvtrain.errors import ConfigError, DataError, StorageError, TakenOverError
from hvtrain.system.checkpoint_notes import newest_step
from hvtrain.system.files import TEMPORARY, is_own_file, is_remote, remove, write_atomic, write_json
from hvtrain.system.storage.cache import RUN_MANIFEST, cache_folder, complete_objects, download
from hvtrain.system.storage.remote import Object, Remote, locate

log = logging.getLogger(__name__)

# The object that identifies the run, and the start of the run (a process) that may write to it.
OWNER = "hvtrain-owner.json"
# File in the local working folder: the run that its files belong to, and the run's address.
IDENTITY_FILE = ".object-store-run"
# Not uploaded, since they concern this host only: logs, and names that begin with a dot.
_NOT_UPLOADED = re.compile(r"(logs|launch)(/|$)|(.*/)?\.")


class RunStore:
    """The store of a run; this base class is for a run folder on disk, which is not uploaded."""

    folder: Path | None = None
    """The local folder to work in, if run.dir is an address."""
    address = ""
    run = ""
    """The run's ID in the store, once `begin` has claimed it; empty for a folder on disk."""

    def begin(self) -> None:
        """Claims the run, and downloads its newest state if this host lacks it (chief only). Raises UserError."""

    def join(self, run: str) -> None:
        """Drops what this host has of any other run, after the chief's `begin` (one rank of each other host)."""

    def send(self) -> None:
        """Uploads what has changed (chief only). Raises StorageError; TakenOverError if a later start has the run."""


def address_of(folder: Path) -> str:
    """Returns the address of the run whose local working folder this is; empty for any other folder."""
    identity = folder / IDENTITY_FILE
    # A folder that may not be entered counts as any other; opening the run reports it.
    with suppress(OSError):
        if is_own_file(identity):
            return identity.read_text().partition(" ")[2]
    return ""


def open_store(run_dir: str | None) -> RunStore:
    """Returns the store for the setting run.dir. Raises ConfigError if the address cannot be used."""
    # The local working folder of a run in object storage stands for its address.
    run_dir = run_dir and (address_of(Path(run_dir)) or run_dir)
    if run_dir and is_remote(run_dir):
        if run_dir.startswith("file://"):
            raise ConfigError(f"run.dir={run_dir} is a folder of this host; give its path")
        return _ObjectStore(locate(run_dir))
    return RunStore()


class _ObjectStore(RunStore):
    def __init__(self, remote: Remote) -> None:
        key = hashlib.sha256(remote.address.encode()).hexdigest()[:12]
        self.folder: Path = cache_folder() / "runs" / f"{remote.name}-{key}"
        self.address = remote.address
        self._remote = remote
        self._start = secrets.token_hex(8)
        # The run's objects in the store by name, with size and mtime of the
        # uploaded file; None if unknown.
        self._sent: dict[str, tuple[int, int] | None] = {}

    def begin(self) -> None:
        names = [item.name for item in self._remote.objects()]
        owner = self._remote.child(OWNER).read_json() if OWNER in names else {}
        if names and not owner:
            raise ConfigError(
                f"run.dir={self.address} is not a run, and holds {names[0]}; choose another address"
            )
        objects = complete_objects(self._remote) if RUN_MANIFEST in names else []
        # Only these may be deleted by send(): others, such as a run below this address, do not
        # belong to this run.
        own_names = [
            *(item.name for item in objects),
            *(name for name in names if name.startswith("checkpoints/")),
        ]
        # begin() is called again when ranks leave or join, so known states are kept.
        self._sent = {name: self._sent.get(name) for name in own_names}
        self._claim(owner)
        log.info("storage        %s uses the local folder %s", self.address, self.folder)
        self._download_newest(objects)

    def _claim(self, owner: dict[str, Any]) -> None:
        """Makes this start the owner of the run.

        Args:
            owner: The content of OWNER so far; empty for a new run.
        """
        self.run = owner.get("run") or secrets.token_hex(8)
        self._keep_only(self.run)
        # A restart within this process finds its own start.
        if owner and owner.get("start") != self._start:
            log.info(
                "storage        %s was last started on %s at %s; if that start is still running, it stops at its "
                "next checkpoint",
                self.address,
                owner.get("host"),
                owner.get("since"),
            )
        since = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        self._write(
            OWNER,
            {"run": self.run, "start": self._start, "host": socket.gethostname(), "since": since},
        )

    def join(self, run: str) -> None:
        # A host that cannot write here takes part all the same, and keeps no files of the run.
        with suppress(OSError, StorageError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._keep_only(run)

    def _keep_only(self, run: str) -> None:
        """Drops local files of another run, which may have been deleted from the store, and names this one."""
        identity = self.folder / IDENTITY_FILE
        local_run = ""
        if is_own_file(identity):
            local_run = identity.read_text().partition(" ")[0]
        if local_run == run:
            return
        for path in self.folder.iterdir():
            # The chief holds the lock, which is a file or, in its place, a claim.
            if not path.name.startswith(".lock"):
                remove(path)
        write_atomic(identity, f"{run} {self.address}")

    def _download_newest(self, objects: list[Object]) -> None:
        """Downloads the run's objects if this host lacks the newest checkpoint in the store."""
        folder_of = {item.name: Path(item.name).parent.as_posix() for item in objects}
        checkpoints = {
            folder for folder in folder_of.values() if folder.startswith("checkpoints/step-")
        }
        # This host may have newer checkpoints, whose uploads failed.
        newest_here = newest_step(self.folder)
        newest_in_store = max((int(name.rpartition("-")[2]) for name in checkpoints), default=None)
        if newest_in_store is None:
            return
        if newest_here is not None and newest_here >= newest_in_store:
            return
        temporary = self.folder / f"{TEMPORARY}store"
        remove(temporary)
        download(self._remote, objects, temporary)
        # The newest checkpoint is moved last: if it is in place, so is everything else.
        others = [name for name, folder in folder_of.items() if folder not in checkpoints]
        for name in [*others, *sorted(checkpoints)]:
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            remove(target)
            (temporary / name).rename(target)
        remove(temporary)

    def send(self) -> None:
        try:
            owner = self._remote.child(OWNER).read_json()
        except DataError as error:
            # To callers of send(), a store that cannot be read is one that cannot be written.
            raise StorageError(str(error)) from None
        if owner.get("start") != self._start:
            raise TakenOverError(
                f"{self.address} was taken over by a later start on {owner.get('host')} at "
                f"{owner.get('since')}; wait for that one to finish"
            )
        states = {}
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if is_own_file(path) and not _NOT_UPLOADED.match(name):
                stat = path.stat()
                states[name] = stat.st_size, stat.st_mtime_ns
        for name, state in states.items():
            path = self.folder / name
            # A callback, for example, may have removed it meanwhile.
            if self._sent.get(name) != state and path.exists():
                self._remote.child(name).upload(path)
                self._sent[name] = state
        self._write(
            RUN_MANIFEST, {"files": {name: num_bytes for name, (num_bytes, _) in states.items()}}
        )
        for name in self._sent.keys() - states.keys() - {OWNER, RUN_MANIFEST}:
            self._remote.child(name).delete()
            del self._sent[name]

    def _write(self, name: str, content: dict[str, Any]) -> None:
        file = self.folder / f"{TEMPORARY}{name}"
        write_json(file, content)
        self._remote.child(name).upload(file)
        remove(file)
        self._sent[name] = None


class Output:
    """The destination of a command's output: a local path, or an address to which `send` uploads it.

    Args:
        text: A path, or an address.
        replaces: True if objects at the address may be replaced. For a local path the command itself decides.

    Attributes:
        path: The local path to write to; files next to it, such as a description, are uploaded with it.

    Raises:
        ConfigError, DataError: The address cannot be used, or already has objects.
    """

    _parent: Remote | None = None

    def __init__(self, text: str, replaces: bool = False) -> None:
        self.path = Path(text)
        if not is_remote(text):
            return
        remote = locate(text)
        parent_path, _, name = remote.path.rpartition("/")
        if not parent_path:
            raise ConfigError(f"--output {text} names no object; add a name to it")
        # Listed even with `replaces`, so that an unreadable address is
        # refused before the work begins.
        if remote.objects() and not replaces:
            raise ConfigError(f"--output {text} exists already; choose another address")
        self._parent = Remote(remote.address.rpartition("/")[0], remote.filesystem, parent_path)
        folder = Path(tempfile.mkdtemp(prefix="hvtrain-"))
        self._cleanup = weakref.finalize(self, remove, folder)
        self.path = folder / name

    def send(self) -> None:
        """Uploads the output to its address. Raises StorageError, after which the output stays on this host."""
        if self._parent is None:
            return
        folder = self.path.parent
        files = filter(Path.is_file, folder.rglob("*"))
        try:
            # Files next to the output, such as a description, go last: where they
            # exist, the output is complete.
            for file in sorted(files, key=lambda file: file != self.path and file.parent == folder):
                self._parent.child(file.relative_to(folder).as_posix()).upload(file)
        except StorageError as error:
            self._cleanup.detach()
            raise StorageError(f"{error}; the output is complete in {self.path}") from None
