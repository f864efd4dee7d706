"""Keeps a second copy of each checkpoint on another host, in the background (checkpoint.copies).

Without a shared disk only rank 0's host has the checkpoints. The receiver, the first rank on another host with its own
disk, connects to rank 0. Rank 0's writer sends each complete checkpoint, and waits until the receiver has it. The
receiver never keeps an incomplete checkpoint, and prunes old ones by the same settings.
"""

import hmac
import json
import logging
import secrets
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hvtrain.checkpoint import store, writer
from hvtrain.config.schema import CheckpointConfig
from hvtrain.errors import StorageError, UserError
from hvtrain.system.console import in_background
from hvtrain.system.files import (
    TEMPORARY,
    flush,
    is_own_file,
    read_bytes,
    read_file,
    write_atomic,
    writing,
)
from hvtrain.system.run_files import CONFIG_FILE
from hvtrain.training.find_checkpoint import read_records
from hvtrain.training.run import Run
from hvtrain.watchdog.connections import enable_keepalive, encode
from hvtrain.watchdog.starting import agree_on_address

log = logging.getLogger(__name__)

SECONDS_TO_CONNECT = 20.0
PIECE_BYTES = 1 << 20
Pieces = Iterator[tuple[str, bytes]]


class Copies(AbstractContextManager["Copies"]):
    """One rank's side of the second copies of a run's checkpoints. This base class makes none.

    Args:
        connection: The connection between rank 0 and the receiver, which is shut down when the context exits.
    """

    def __init__(self, connection: socket.socket | None = None) -> None:
        self._connection = connection
        if connection:
            enable_keepalive(connection)
            connection.settimeout(None)

    def send(self) -> None:
        """Sends the receiver the checkpoints that it lacks (chief only). An error becomes a warning."""

    def __exit__(self, *_: object) -> None:
        if self._connection:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)


def begin_copies(run: Run) -> Copies:
    """Connects rank 0 to the receiver if checkpoint.copies is set; returns this rank's side (every rank).

    Only logs a warning if there is no other host with a disk of its own, or if the two cannot connect.
    """
    if not run.config.checkpoint.copies:
        return Copies()
    comm = run.strategy.comm
    rank = comm.topology.rank
    hosts = comm.gather(comm.topology.host)
    # The receiver needs a disk of its own. Hosts that have one are known by their first rank, which
    # keeps a note of the newest checkpoint.
    keeps_note = comm.gather(run.state.note_keeper.folder is not None)
    receiver = next(
        (other for other, host in enumerate(hosts) if keeps_note[other] and host != hosts[0]), 0
    )
    if not receiver:
        if rank == 0:
            reason = f"all hosts share {run.folder}, and a copy would be the same files"
            if len(set(hosts)) == 1:
                reason = f"all ranks are on {hosts[0]}"
            log.warning("checkpoint.copies=1 has no effect: %s", reason)
        return Copies()

    address, listener = agree_on_address(rank, comm.gather)
    if not address and rank == 0:
        log.warning(
            "checkpoint.copies=1 has no effect: no address of %s can be reached from all ranks; check the firewalls",
            hosts[0],
        )
    token = comm.broadcast(secrets.token_bytes(32))
    try:
        if listener:
            connection = accept(listener, token)
            log.info(
                "each checkpoint is copied to %s in the background (checkpoint.copies=1)",
                hosts[receiver],
            )
            return Sender(run.folder, connection, hosts[receiver])
        if address and rank == receiver:
            connection = socket.create_connection(address, SECONDS_TO_CONNECT)
            connection.sendall(token)
            copies = Copies(connection)
            in_background(receive_all, run.folder, connection, run.config.checkpoint)
            return copies
    except (OSError, ValueError) as error:
        log.warning(
            "checkpoint.copies=1 has no effect: %s and %s cannot connect: %s; check the firewalls",
            hosts[0],
            hosts[receiver],
            error,
        )
    return Copies()


def accept(listener: socket.socket, token: bytes) -> socket.socket:
    """Returns the first connection that sends the token, and stops listening. Raises OSError if none comes in time."""
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
    """Rank 0's side: sends checkpoints to the receiver.

    Args:
        folder: The run folder.
        connection: The connection to the receiver.
        host: The receiver's host, for messages.
    """

    def __init__(self, folder: Path, connection: socket.socket, host: str) -> None:
        super().__init__(connection)
        self._folder = folder
        self._socket = connection
        self._host = host
        # True once a message was cut short, after which the connection cannot be used any more.
        self._is_lost = False
        self._answers = connection.makefile("rb")
        # The checksums of the receiver's checkpoints, by name. Equal
        # checksums mean the same checkpoint.
        self._present: dict[str, str] = json.loads(self._answers.readline())

    def send(self) -> None:
        if self._is_lost:
            return
        checkpoints = self._folder / "checkpoints"
        try:
            # Newest first, since a restart needs the newest.
            for name, sums in reversed(sums_of(checkpoints).items()):
                if self._present.get(name) != sums:
                    self._send_checkpoint(checkpoints / name)
                    self._present[name] = sums
        except (OSError, ValueError, UserError) as error:
            log.warning(
                "%s lacks a copy of a checkpoint: %s; training continues, %s",
                self._host,
                error,
                "without copies"
                if self._is_lost
                else "and the copy is retried with the next checkpoint",
            )

    def _send_checkpoint(self, path: Path) -> None:
        """Sends a checkpoint with the run's small files. Raises StorageError or OSError if that fails."""
        small_files = read_records(self._folder)
        for name in (CONFIG_FILE, f"checkpoints/{writer.BEST}"):
            if is_own_file(self._folder / name):
                small_files[name] = read_bytes(self._folder / name)
        # As Latin-1, which maps each byte to one character, so that JSON can hold them.
        records = {name: data.decode("latin-1") for name, data in small_files.items()}
        sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
        try:
            self._socket.sendall(encode({"name": path.name, "sizes": sizes, "records": records}))
            for name, size in sizes.items():
                with (path / name).open("rb") as file:
                    if self._socket.sendfile(file) != size:
                        raise OSError(f"{name} has changed")
        except OSError:
            # If the connection stayed open, the receiver would read the next
            # message as the rest of this one.
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._is_lost = True
            raise
        answer = self._answers.readline() or encode({"problem": "the connection is lost"})
        problem = json.loads(answer)["problem"]
        if problem:
            raise StorageError(problem)


def receive_all(folder: Path, connection: socket.socket, config: CheckpointConfig) -> None:
    """Receives checkpoints from rank 0 until the connection ends (in a thread of the receiver).

    Args:
        folder: The run folder on this host.
        connection: The connection to rank 0.
        config: The settings that determine which checkpoints to keep.
    """
    checkpoints = folder / "checkpoints"
    writer.sweep(checkpoints)
    # However this thread ends, it closes the connection: otherwise rank 0
    # would wait for an answer forever.
    with suppress(OSError), connection, connection.makefile("rb") as stream:
        connection.sendall(encode(sums_of(checkpoints)))
        for line in stream:
            message = json.loads(line)
            pieces = _pieces(stream, message["sizes"])
            problem = ""
            try:
                path = _receive(folder, message, pieces)
                writer.prune(checkpoints, config, store.step_of(path))
            except UserError as error:
                problem = str(error)
                # Skip the rest of the message, since rank 0 reads the answer
                # only after it has sent everything.
                for _ in pieces:
                    pass
            connection.sendall(encode({"problem": problem}))


def _receive(folder: Path, message: dict[str, Any], pieces: Pieces) -> Path:
    """Writes the run's small files, and the checkpoint completely or not at all; returns the checkpoint's path."""
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
                raise StorageError(f"the copy of {name} was damaged in transit")
        for file_name in sizes:
            flush(temporary / file_name)
        # Records before the checkpoint: a surplus row is dropped when the run
        # resumes, a missing one is lost.
        for record, text in message["records"].items():
            (folder / record).parent.mkdir(exist_ok=True)
            write_atomic(folder / record, text.encode("latin-1"))
        writer.publish(temporary, target)
    return target


def _pieces(stream: BinaryIO, sizes: dict[str, int]) -> Pieces:
    """Yields (name, piece of content) for the stream's next files. Raises ConnectionError if the stream ends."""
    for name, num_left in sizes.items():
        while num_left:
            piece = stream.read(min(num_left, PIECE_BYTES))
            if not piece:
                raise ConnectionError("rank 0 has closed the connection")
            num_left -= len(piece)
            yield name, piece


def sums_of(checkpoints: Path) -> dict[str, str]:
    """Returns {name: checksums} of the checkpoints in a folder, oldest first."""
    sums = {}
    for path in store.list_checkpoints(checkpoints):
        with suppress(OSError, ValueError):
            sums[path.name] = read_file(path / store.SUMS)
    return sums
