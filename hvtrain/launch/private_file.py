"""Objects in files of this user alone: a notebook's function on its way to the ranks, and what it returned there.

Nothing else in hvtrain unpickles. A pickle can run any code, so a file that another user could have written is refused.
"""

import os
import stat
from pathlib import Path
from typing import Any

import cloudpickle  # Horovod needs it, so it is there.

from hvtrain.errors import ConfigError


def write(path: Path, value: Any) -> None:
    """Writes a new file. Raises ConfigError if the value cannot be pickled."""
    try:
        data = cloudpickle.dumps(value)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"it cannot be sent to another process ({why}); send numbers, arrays or paths") from error
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def read(path: Path) -> Any:
    """The object in the file. Raises ConfigError if the file is not this user's own, OSError if it cannot be opened."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ConfigError(f"{path} is not a file that only this user can write; work in a folder of your own")
        return cloudpickle.load(file)
