"""Restricts a run folder to one run at a time: rank 0 holds a lock, which is released when its process ends."""

import errno
import fcntl
import logging
import os
import socket
import time
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from hvtrain.errors import BusyError

log = logging.getLogger(__name__)

LOCK_FILE = ".lock"
CLAIM_FILE = ".lock-claimed"
# Rank 0 of a run that has just ended may still be exiting.
SECONDS_TO_WAIT = 15.0
# Errors of file systems without locks, where a file that only one process can create replaces the
# lock.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
# Index of starttime among the fields after the name in /proc/PID/stat (proc_pid_stat(5)).
_STARTTIME = 19


class RunLock(AbstractContextManager["RunLock"]):
    """A lock on a run folder (chief only).

    It uses flock, which works on NFS too and is released even by `kill -9`. On file systems without locks,
    CLAIM_FILE replaces it, and remains after `kill -9`.
    """

    _file: IO[str] | None = None
    _claim: Path | None = None

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self, folder: Path, wait_seconds: float = SECONDS_TO_WAIT) -> None:
        """Takes the lock, waiting for another run to end. Does nothing if this object already holds it.

        Raises BusyError if another run holds it, OSError if the folder cannot be written.
        """
        if self._file:
            return
        # O_NOFOLLOW, so that no link leads out of the run folder.
        descriptor = os.open(
            folder / LOCK_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644
        )
        file = os.fdopen(descriptor, "r+", encoding="utf-8")
        deadline = time.monotonic() + wait_seconds
        claim = folder / CLAIM_FILE
        # Tried at least once, however short wait_seconds is.
        while not self._lock(file, claim):
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read(200).strip() or "another process"
                file.close()
                advice = "wait until it ends,"
                if claim.exists():
                    advice += f" remove {claim} if that run is gone,"
                raise BusyError(
                    f"run.dir={folder} is in use by another run ({holder}); {advice} or choose another run.dir"
                )
            time.sleep(0.2)
        file.truncate(0)
        file.write(
            f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}\n"
        )
        file.flush()
        with suppress(OSError):
            # Hosts recognize by this line that they share a disk (training/find_checkpoint.py).
            os.fsync(descriptor)
        self._file = file

    def release(self) -> None:
        if self._claim:
            for path in self._claim.parent.glob(f"{CLAIM_FILE}*"):
                path.unlink(missing_ok=True)
        if self._file:
            self._file.close()
        self._file = self._claim = None

    def _lock(self, file: IO[str], claim: Path) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            if not _create_claim(claim):
                return False
            log.warning(
                f"{claim.parent} is on a disk without locks; {claim} keeps other runs out, and remains after kill -9"
            )
            self._claim = claim
        return True


def is_held(folder: Path) -> bool:
    """Returns True while a run uses the folder. Locks LOCK_FILE for a moment, but does not create it."""
    try:
        # Non-blocking, in case a pipe has this name.
        with os.fdopen(os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_NONBLOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return (folder / CLAIM_FILE).exists()
    return False


def start_of(process: int) -> str | None:
    """Returns when a process of this host started, in clock ticks since the host booted; None if it has ended."""
    # psutil's times follow the host's clock, and older versions keep the boot time of an earlier
    # call, so that the start would seem to change when the clock is set.
    with suppress(OSError):
        stat = Path(f"/proc/{process}/stat").read_text("utf-8", "replace")
        # The process's name, in parentheses, may contain blanks and parentheses.
        return stat.rpartition(")")[2].split()[_STARTTIME]
    return None


def _create_claim(claim: Path) -> bool:
    """Creates the claim file, which names this process and its host. Returns False if another process holds it.

    If that process ran on this host and has ended, its claim is replaced.
    """
    try:
        with claim.open("x", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {socket.gethostname()} {start_of(os.getpid())}")
        return True
    except FileExistsError:
        with suppress(OSError, ValueError):
            process, host, started = claim.read_text("utf-8")[:300].split()
            # A later process may have the same ID, especially in a restarted container.
            if host == socket.gethostname() and start_of(int(process)) != started:
                # Only one process gets past this line. Otherwise another process that has
                # read the same claim would remove the new claim.
                claim.with_name(f"{claim.name}-{process}-{started}").touch(exist_ok=False)
                claim.unlink()
                return _create_claim(claim)
        return False
