"""Data sets that Keras caches or downloads, one rank of a host at a time.

Keras writes a download in place, without a temporary name, so another rank could read half a file. A file lock
beside the cache makes ranks take turns: those of one host, and of several hosts if their shared home supports locks.
"""

import fcntl
import os
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import keras

from hvtrain.data.manifest import user_path
from hvtrain.errors import DataError

PROBE_SECONDS = 5
FALLBACK = Path("/tmp/.keras")  # Keras's own.


def cache_folder() -> Path:
    """The folder where keras.utils.get_file keeps data sets: KERAS_HOME or ~/.keras, or /tmp if that is read-only.

    Raises DataError if another user made the one in /tmp.
    """
    home = user_path(os.environ.get("KERAS_HOME") or "~/.keras")
    if not os.access(home, os.W_OK):
        home = FALLBACK
        # Anybody can make that folder first, with links in it that lead to files of this user.
        if os.path.lexists(home) and (home.is_symlink() or home.stat().st_uid != os.geteuid()):
            raise DataError(f"{home} is not a folder of this user; set KERAS_HOME to one that is and can be written")
    return home / "datasets"


@dataclass(frozen=True)
class KerasFiles:
    """One of keras.datasets: its name, the files it keeps in the cache, the host it downloads from."""

    name: str
    cached: tuple[str, ...]
    host: str
    advice: str
    """How else to get the data, for error messages."""

    def fetch(self) -> str:
        """Makes sure that the files are in the cache and says where. Raises DataError within seconds if offline."""
        folder = cache_folder()
        with _turn(folder):
            present = all((folder / name).exists() for name in self.cached)
        if not present:
            # Outside the lock, so that the ranks of an offline host find out together, not one after the other.
            if not answers(self.host):
                raise DataError(f"{self.name}: not on this machine, and {self.host} does not answer; {self.advice}")
            self.load()
        return f"Keras's cache ({folder})"

    def load(self) -> dict:
        """Whole arrays of both parts, read (and downloaded if need be) by Keras, which checks its hashes."""
        folder = cache_folder()
        with _turn(folder):
            timeout = socket.getdefaulttimeout()
            socket.setdefaulttimeout(PROBE_SECONDS)
            try:
                train, test = getattr(keras.datasets, self.name).load_data()
            except Exception as error:
                fix = f"remove {', '.join(str(folder / name) for name in self.cached)} and try again, or {self.advice}"
                raise DataError(f"{self.name}: Keras could not read or fetch it ({error}); {fix}") from error
            finally:
                socket.setdefaulttimeout(timeout)
        return {"train": train, "test": test}


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / ".hvtrain.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def answers(host: str) -> bool:
    """True if https://host answers in PROBE_SECONDS, directly or through a proxy.

    The probe has its own thread, because no timeout ends a hanging name look-up.
    """
    outcome: list[bool] = []

    def probe() -> None:
        request = urllib.request.Request(f"https://{host}/", method="HEAD")
        with suppress(OSError):
            with suppress(urllib.request.HTTPError):  # An error is an answer, too.
                urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
            outcome.append(True)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS + 1)
    return bool(outcome)
