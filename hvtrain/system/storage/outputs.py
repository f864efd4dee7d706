"""Sends the outputs of commands to addresses: written on this host first, uploaded once they are complete."""

import tempfile
import weakref
from pathlib import Path

from hvtrain.errors import ConfigError, StorageError
from hvtrain.system.files import is_remote, remove
from hvtrain.system.storage.remote import Remote, locate


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
