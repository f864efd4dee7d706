"""Runs whose folder is in object storage: worked on in a folder of this host, and sent after each checkpoint.

Objects come first and their list last, so what the list names is complete whenever the process is killed. Stores have
no locks that pyarrow can take: the last start wins, and an earlier one ends when it next sends something.
"""

import hashlib
import json
import logging
import secrets
import socket
from datetime import datetime
from pathlib import Path
from typing import Any

from hvtrain.core.files import TEMPORARY, is_own_file, remove, write_atomic
from hvtrain.errors import ConfigError, StorageError
from hvtrain.storage.cache import RUN_MANIFEST, cache_folder, complete_objects, download
from hvtrain.storage.remote import PIECE_BYTES, Object, Remote, is_remote, locate

log = logging.getLogger(__name__)

OWNER = "hvtrain-owner.json"
"""The object that names the run and the start that writes."""
IDENTITY_FILE = ".object-store-run"
# What is of this host.
_LEFT = ("logs", "launch")


class RunStore:
    """The folder of a run that is on a disk, where there is nothing to send."""

    folder: Path | None = None
    """The folder of this host to work in, if run.dir is an address."""
    address = ""

    def begin(self) -> None:
        """Claims the run, and brings its newest state if it is not here (chief only). Raises UserError."""

    def send(self) -> None:
        """Sends what has changed (chief only). Raises StorageError."""


def open_store(run_dir: str | None) -> RunStore:
    """Returns the store of the setting run.dir. Raises ConfigError for an address that cannot be used."""
    # The folder in which such a run is worked on stands for its address.
    identity = Path(run_dir or ".") / IDENTITY_FILE
    if is_own_file(identity):
        run_dir = identity.read_text().partition(" ")[2]
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
        # Objects of the store by name, with size and time of the file that was sent.
        self._sent: dict[str, tuple[int, int] | None] = {}

    def begin(self) -> None:
        # Ranks that leave and join begin it again.
        self._sent = {item.name: self._sent.get(item.name) for item in self._remote.objects()}
        owner = self._remote.child(OWNER).read_json() if OWNER in self._sent else {}
        identity = self.folder / IDENTITY_FILE
        # What is here may be of a run that was deleted there.
        if not owner or not is_own_file(identity) or identity.read_text().split()[0] != owner.get("run"):
            for path in self.folder.iterdir():
                if path.name != ".lock":
                    remove(path)
        run = owner.get("run") or secrets.token_hex(8)
        if owner:
            log.info(
                "storage        %s was begun on %s, %s; if that process still runs, it ends at its next checkpoint",
                self._remote.address,
                owner.get("host"),
                owner.get("since"),
            )
        since = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        self._write(OWNER, {"run": run, "start": self._start, "host": socket.gethostname(), "since": since})
        write_atomic(identity, f"{run} {self.address}")
        log.info("storage        %s is worked on in %s", self._remote.address, self.folder)

        if RUN_MANIFEST in self._sent:
            self._bring(complete_objects(self._remote))

    def _bring(self, objects: list[Object]) -> None:
        """Brings the state of the store if its newest checkpoint is not here."""
        folder_of = {item.name: Path(item.name).parent.as_posix() for item in objects}
        checkpoints = {folder for folder in folder_of.values() if folder.startswith("checkpoints/step-")}
        if not checkpoints or (self.folder / max(checkpoints)).is_dir():
            return
        temporary = self.folder / f"{TEMPORARY}store"
        remove(temporary)
        download(self._remote, objects, temporary)
        # The newest checkpoint last: if it is here, so is the rest.
        others = [name for name, folder in folder_of.items() if folder not in checkpoints]
        for name in [*others, *sorted(checkpoints)]:
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            remove(target)
            (temporary / name).rename(target)
        remove(temporary)

    def send(self) -> None:
        owner = self._remote.child(OWNER).read_json()
        if owner.get("start") != self._start:
            raise StorageError(
                f"{self._remote.address} is written by a later start on {owner.get('host')}, {owner.get('since')}; "
                "wait for its end"
            )
        states = {}
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            is_left = name.startswith(_LEFT) or any(part.startswith(".") for part in name.split("/"))
            if is_own_file(path) and not is_left:
                stat = path.stat()
                states[name] = stat.st_size, stat.st_mtime_ns
        for name, state in states.items():
            if self._sent.get(name) != state:
                self._upload(name, self.folder / name)
                self._sent[name] = state
        self._write(RUN_MANIFEST, {"files": {name: num_bytes for name, (num_bytes, _) in states.items()}})
        for name in self._sent.keys() - states.keys() - {OWNER, RUN_MANIFEST}:
            self._attempt(name, lambda path: self._remote.filesystem.delete_file(path))
            del self._sent[name]

    def _write(self, name: str, content: dict[str, Any]) -> None:
        file = self.folder / f"{TEMPORARY}{name}"
        write_atomic(file, json.dumps(content, indent=1))
        self._upload(name, file)
        remove(file)
        self._sent[name] = None

    def _upload(self, name: str, file: Path) -> None:
        def upload(path: str) -> None:
            with file.open("rb") as source, self._remote.filesystem.open_output_stream(path) as target:
                while True:
                    piece = source.read(PIECE_BYTES)
                    if not piece:
                        break
                    target.write(piece)

        self._attempt(name, upload)

    def _attempt(self, name: str, action: Any) -> None:
        remote = self._remote.child(name)
        remote.attempt(lambda: action(remote.path), StorageError, "written")
