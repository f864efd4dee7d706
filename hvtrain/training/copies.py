"""A second copy of each checkpoint on another host, made beside the training (checkpoint.copies).

Without a shared disk the checkpoints are on rank 0's host alone. Rank 0 is connected with the receiver, the first rank
on another host. Its writer sends each checkpoint once it is complete, and waits until the receiver has it. There it is
complete or absent too, and as many are kept.
"""

import hmac
import json
import logging
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hvtrain.checkpoint import store, writer
from hvtrain.config.schema import CheckpointConfig
from hvtrain.core.files import TEMPORARY, flush, is_own_file, read_bytes, read_file, write_atomic, writing
from hvtrain.core.run_files import CONFIG_FILE
from hvtrain.data import fitted
from hvtrain.errors import StorageError, UserError
from hvtrain.training.find_checkpoint import RECORDS
from hvtrain.training.run import Run
from hvtrain.watchdog.connections import encode, notice_cuts
from hvtrain.watchdog.starting import agree

log = logging.getLogger(__name__)

SECONDS_TO_CONNECT = 20.0
PIECE_BYTES = 1 << 20
Pieces = Iterator[tuple[str, bytes]]


class Copies(AbstractContextManager["Copies"]):
    """Second copies of a run's checkpoints. This one makes none.

    Args:
        connection: Between rank 0 and the receiver, for as long as the context.
    """

    def __init__(self, connection: socket.socket | None = None) -> None:
        self._connection = connection
        if connection:
            notice_cuts(connection)
            connection.settimeout(None)

    def send(self) -> None:
        """Sends the receiver the checkpoints that it lacks (chief only). An error is only a warning."""

    def __exit__(self, *_: object) -> None:
        if self._connection:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)


def begin_copies(run: Run) -> Copies:
    """Connects rank 0 with a rank on another host, if checkpoint.copies asks for it (every rank)."""
    if not run.config.checkpoint.copies:
        return Copies()
    comm = run.strategy.comm
    rank = comm.topology.rank
    hosts = comm.gather(comm.topology.host)
    # The first rank of each other host that has a disk of its own keeps a note.
    keeps_note = comm.gather(run.state.note_keeper.folder is not None)
    receiver = next((rank for rank, host in enumerate(hosts) if keeps_note[rank] and host != hosts[0]), 0)
    if not receiver:
        if rank == 0:
            reason = f"all hosts share {run.folder}, and a copy would be the same files"
            if len(set(hosts)) == 1:
                reason = f"all ranks are on {hosts[0]}"
            log.warning("checkpoint.copies=1 has no effect: %s", reason)
        return Copies()

    address, listener = agree(rank, comm.gather, comm.broadcast)
    token = comm.broadcast(secrets.token_bytes(32))
    try:
        if listener:
            connection = accept(listener, token)
            log.info("each checkpoint is copied to %s in the background (checkpoint.copies=1)", hosts[receiver])
            return Sender(run.folder, connection, hosts[receiver])
        if address and rank == receiver:
            connection = socket.create_connection(address, SECONDS_TO_CONNECT)
            connection.sendall(token)
            copies = Copies(connection)
            threading.Thread(
                target=receive_all, args=[run.folder, connection, run.config.checkpoint], name="copies", daemon=True
            ).start()
            return copies
    except (OSError, ValueError) as error:
        log.warning("checkpoint.copies=1 has no effect: %s and %s do not connect: %s", hosts[0], hosts[receiver], error)
    return Copies()


def accept(listener: socket.socket, token: bytes) -> socket.socket:
    """Returns the first connection that sends the token, after which nobody else can connect. Raises OSError."""
    with listener:
        listener.settimeout(SECONDS_TO_CONNECT)
        while True:
            connection, _ = listener.accept()
            connection.settimeout(SECONDS_TO_CONNECT)
            with suppress(OSError):
                if hmac.compare_digest(connection.recv(len(token), socket.MSG_WAITALL), token):
                    return connection
            connection.close()


class Sender(Copies):
    """Rank 0's side.

    Args:
        folder: The run folder.
        connection: To the receiver.
        host: The receiver's, for messages.
    """

    def __init__(self, folder: Path, connection: socket.socket, host: str) -> None:
        super().__init__(connection)
        self._folder = folder
        self._socket = connection
        self._host = host
        self._answers = connection.makefile("rb")
        # The checksums of each checkpoint there: equal ones are the same checkpoint.
        self._present: dict[str, str] = json.loads(self._answers.readline())

    def send(self) -> None:
        checkpoints = self._folder / "checkpoints"
        try:
            # The newest first: it is the one that a restart needs.
            for name, sums in reversed(sums_of(checkpoints).items()):
                if self._present.get(name) != sums:
                    self._send_one(checkpoints / name)
                    self._present[name] = sums
        except (OSError, ValueError, UserError) as error:
            log.warning(
                "%s lacks a copy of a checkpoint: %s; training continues, and the next one tries again",
                self._host,
                error,
            )

    def _send_one(self, path: Path) -> None:
        """Sends a checkpoint, and the run's small files as they are now."""
        names = [CONFIG_FILE, *RECORDS, f"checkpoints/{writer.BEST}"]
        small = [*(self._folder / name for name in names), *(self._folder / fitted.FOLDER).glob("[!.]*")]
        # One character for each byte.
        records = {
            str(file.relative_to(self._folder)): read_bytes(file).decode("latin-1")
            for file in small
            if is_own_file(file)
        }
        sizes = {file.name: file.stat().st_size for file in path.iterdir()}
        self._socket.sendall(encode({"name": path.name, "sizes": sizes, "records": records}))
        for name in sizes:
            with (path / name).open("rb") as file:
                self._socket.sendfile(file)
        answer = self._answers.readline() or encode({"problem": "the connection is lost"})
        problem = json.loads(answer)["problem"]
        if problem:
            raise StorageError(problem)


def receive_all(folder: Path, connection: socket.socket, config: CheckpointConfig) -> None:
    """Takes the checkpoints that rank 0 sends, until the connection ends (a thread of the receiver).

    Args:
        folder: The run folder on this host.
        connection: To rank 0.
        config: How many checkpoints are kept.
    """
    checkpoints = folder / "checkpoints"
    writer.sweep(checkpoints)
    with suppress(OSError), connection.makefile("rb") as stream:
        connection.sendall(encode(sums_of(checkpoints)))
        for line in stream:
            message = json.loads(line)
            pieces = _pieces(stream, message["sizes"])
            problem = ""
            try:
                path = _receive(folder, message, pieces)
                step = store.step_of(path)
                writer.prune(checkpoints, config.keep, step, config.keep_every_epochs, config.keep_every_hours)
            except UserError as error:
                problem = str(error)
                # Rank 0 reads no answer before it has sent everything.
                for _ in pieces:
                    pass
            connection.sendall(encode({"problem": problem}))


def _receive(folder: Path, message: dict[str, Any], pieces: Pieces) -> Path:
    """Writes a checkpoint and the run's small files, completely or not at all."""
    name = message["name"]
    sizes = message["sizes"]
    target = folder / "checkpoints" / name
    temporary = target.with_name(f"{TEMPORARY}{name}")
    with writing(target, temporary, sum(sizes.values()), StorageError, f"the copy of {name}"):
        temporary.mkdir(parents=True)
        for file_name, piece in pieces:
            with (temporary / file_name).open("ab") as file:
                file.write(piece)
        for line in read_file(temporary / store.SUMS).splitlines():
            digest, _, file_name = line.partition("  ")
            if store.digest_of(temporary / file_name) != digest:
                raise StorageError(f"the copy of {name} was damaged on its way")
        for file_name in sizes:
            flush(temporary / file_name)
        # The history first: a row too many is left out when the run resumes.
        for record, text in message["records"].items():
            (folder / record).parent.mkdir(exist_ok=True)
            write_atomic(folder / record, text.encode("latin-1"))
        writer.publish(temporary, target)
    return target


def _pieces(stream: BinaryIO, sizes: dict[str, int]) -> Pieces:
    """Yields the files that follow in a stream, as (name, part of its content)."""
    for name, num_left in sizes.items():
        while num_left:
            piece = stream.read(min(num_left, PIECE_BYTES))
            if not piece:
                raise ConnectionError("rank 0 has closed the connection")
            num_left -= len(piece)
            yield name, piece


def sums_of(checkpoints: Path) -> dict[str, str]:
    """Returns the checksums of the checkpoints in a folder, by their names, the oldest first."""
    sums = {}
    for path in store.list_checkpoints(checkpoints):
        with suppress(OSError, ValueError):
            sums[path.name] = read_file(path / store.SUMS)
    return sums
