"""Data sets that Keras caches or downloads, one rank of a host at a time.

Keras writes a download in place, without a temporary name, so another rank could read half a file.
A file lock beside the cache makes ranks take turns: those of one host, and of several hosts if
their shared home supports locks.
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
FALLBACK = Path("/tmp/.keras")  # Keras's own choice if the home folder cannot be written.


@dataclass(frozen=True)
class KerasFiles:
    """The files of one of keras.datasets."""

    name: str
    """The module's name in keras.datasets."""
    cached: tuple[str, ...]
    """The files that it keeps in the cache."""
    host: str
    """The host that it downloads from."""
    advice: str
    """Another way to get the data, for error messages."""

    def fetch(self) -> str:
        """Makes sure that the files are in the cache, and returns a description of the place.

        Raises:
            DataError: within seconds if the files are missing and their host does not answer.
        """
        folder = cache_folder()
        with _turn(folder):
            present = all((folder / name).exists() for name in self.cached)
        if not present:
            # Outside the lock, so that the ranks of an offline host find out together, not one
            # after the other.
            if not answers(self.host):
                raise DataError(f"{self.name}: not on this machine, and {self.host} does not answer; {self.advice}")
            self.load()

        return f"Keras's cache ({folder})"

    def load(self) -> dict:
        """Returns whole arrays by split. Keras downloads them if need be, and checks its hashes."""
        folder = cache_folder()
        with _turn(folder):
            # Keras sets none, so a download that stalls would never end.
            timeout = socket.getdefaulttimeout()
            socket.setdefaulttimeout(PROBE_SECONDS)
            try:
                train, test = getattr(keras.datasets, self.name).load_data()
            except Exception as error:  # Downloads, archives, pickles and NumPy raise their own.
                paths = ", ".join(str(folder / name) for name in self.cached)
                raise DataError(
                    f"{self.name}: Keras could not read or fetch it ({error}); remove {paths} "
                    f"and try again, or {self.advice}"
                ) from error
            finally:
                socket.setdefaulttimeout(timeout)

        return {"train": train, "test": test}


def cache_folder() -> Path:
    """Returns the folder where keras.utils.get_file keeps data sets.

    That is in KERAS_HOME or ~/.keras, or in /tmp if they are read-only.

    Raises:
        DataError: if another user made the folder in /tmp.
    """
    home = user_path(os.environ.get("KERAS_HOME") or "~/.keras")
    if not os.access(home, os.W_OK):
        home = FALLBACK
        # Anybody can make that folder first, with links in it that lead to files of this user.
        if os.path.lexists(home) and (home.is_symlink() or home.stat().st_uid != os.geteuid()):
            raise DataError(f"{home} is not a folder of this user; set KERAS_HOME to one that is and can be written")

    return home / "datasets"


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Holds the lock of the cache folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # O_NOFOLLOW: in a folder that others may write, the name may be a link to a file of this user.
    lock = os.open(folder / ".hvtrain.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    # The lock goes with the open file, so that it is free again if this process dies.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def answers(host: str) -> bool:
    """Returns True if https://host answers within PROBE_SECONDS, directly or through a proxy."""
    answered = threading.Event()

    def probe() -> None:
        request = urllib.request.Request(f"https://{host}/", method="HEAD")
        with suppress(OSError):
            with suppress(urllib.request.HTTPError):  # An error status is an answer, too.
                urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
            answered.set()

    # In a thread of its own, because no timeout ends a name look-up that hangs.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS + 1)
    return answered.is_set()
