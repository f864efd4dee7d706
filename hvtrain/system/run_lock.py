"""Keeps a run folder to one run at a time: rank 0 holds a lock, which ends with its process."""

import errno
import fcntl
import os
import socket
import time
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from hvtrain.errors import BusyError

LOCK_FILE = ".lock"
# Rank 0 of a run that has just ended may still be exiting.
SECONDS_TO_WAIT = 15.0
# Errors of file systems without locks; the run continues without one.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class RunLock(AbstractContextManager["RunLock"]):
    """A lock on a run folder (by flock, so `kill -9` leaves none behind; NFS has it too). Chief only."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self, folder: Path, wait_seconds: float = SECONDS_TO_WAIT) -> None:
        """Takes the lock unless it is already held here; waits for another run to end.

        Raises BusyError if another run holds it, OSError if the folder cannot be written.
        """
        if self._file:
            return
        # No link is followed out of the run folder.
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        file = os.fdopen(descriptor, "r+", encoding="utf-8")
        deadline = time.monotonic() + wait_seconds
        while not _lock(file):
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read(200).strip() or "another process"
                file.close()
                raise BusyError(
                    f"run.dir={folder} is in use by another run ({holder}); wait for its end, or choose another run.dir"
                )
            time.sleep(0.2)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
        file.flush()
        with suppress(OSError):
            os.fsync(descriptor)  # Hosts recognize by it that they share a disk (restore/newest.py).
        self._file = file

    def release(self) -> None:
        if self._file:
            self._file.close()
            self._file = None


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
