"""Checks before the first step: the ranks run the same program, on different data."""

import hashlib
import logging
import platform
from typing import Any

import tensorflow as tf

from hvtrain.config.schema import RunConfig, to_dict
from hvtrain.config.validate import flatten
from hvtrain.data.manifest import differences, digest_of, refuse_or_warn, summarize
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError, DataError, RankError
from hvtrain.strategies.base import Comm
from hvtrain.system import host_facts
from hvtrain.tasks import Task

log = logging.getLogger(__name__)

_PACKAGES = (*host_facts.PACKAGES, "h5py", "pyarrow", "safetensors", "scikit-learn", "sentencepiece")


def check_same_run(comm: Comm, config: RunConfig) -> None:
    """Raises on all ranks if settings (ConfigError), packages or code (RankError) differ, and names the difference."""
    ranks = comm.gather((flatten(to_dict(config)), software(config), comm.topology.host))
    settings, programs, host = ranks[0]
    for rank, (others, _, _) in enumerate(ranks):
        if different := _differences(settings, others):
            raise ConfigError(
                f"ranks 0 and {rank} were started with different settings: {different}; "
                "start all ranks with the same command"
            )
    for rank, (_, others, other_host) in enumerate(ranks):
        if different := _differences(programs, others):
            raise RankError(
                f"rank 0 on {host} and rank {rank} on {other_host} run different programs: {different}; "
                "install the same versions and copy the same code to both hosts"
            )


def software(config: RunConfig) -> dict[str, str]:
    """Versions of packages, and checksums of the code of hvtrain and of the packages that the settings name."""
    versions = {"python": platform.python_version(), **host_facts.package_versions(_PACKAGES)}
    targets = [value for key, value in flatten(to_dict(config)).items() if key.endswith("_target_")]
    packages = dict.fromkeys(["hvtrain", *(target.split(".")[0] for target in targets)])
    files = {package: host_facts.code_files(package) for package in packages if package != "keras"}
    sums = {name: hashlib.sha256(repr(found).encode()).hexdigest()[:12] for name, found in files.items() if found}
    return {
        **{f"version of {name}": version or "none" for name, version in versions.items()},
        **{f"code of {name}": sums.get(name, "not found") for name in files},
    }


def check_same_data(comm: Comm, source: Source, refuse: bool) -> dict[str, Any]:
    """The data set's manifest. Raises RankError on all ranks if hosts have different copies, or warns."""
    manifest = comm.all_or_raise(source.manifest)
    digests, hosts = zip(*comm.gather((digest_of(manifest), comm.topology.host)))
    if len(set(digests)) > 1:
        manifests = comm.gather(manifest)
        rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        refuse_or_warn(
            f"rank 0 on {hosts[0]} and rank {rank} on {hosts[rank]} read different data: "
            f"{summarize(differences(manifests[0], manifests[rank]))}",
            "copy the same files to both hosts",
            RankError if refuse else None,
        )
    return manifest


def check_first_batches(comm: Comm, source: Source, task: Task, batches: tf.data.Dataset) -> None:
    """Raises DataError on all ranks if a target of a first batch is wrong, or two ranks read the same first batch."""
    first = tf.nest.map_structure(lambda tensor: tensor.numpy(), next(iter(batches)))
    faults = comm.gather(task.fault(first[1], source))
    for rank, fault in enumerate(faults):
        if fault:
            where = f"example {fault[0]} of the first batch of rank {rank} from {source.name}"
            raise DataError(f"{where}: {fault[1]}; fix the targets or choose another task")
    if comm.topology.size == 1 or source.same_on_all_ranks:
        return
    digest = hashlib.sha256()
    for array in tf.nest.flatten(first):
        digest.update(array.tobytes())
    first_rank: dict[bytes, int] = {}
    for rank, other in enumerate(comm.gather(digest.digest())):
        if first_rank.setdefault(other, rank) != rank:
            raise DataError(
                f"ranks {first_rank[other]} and {rank} read the same first batch of {source.name}; "
                f"{source.equal_batches_advice}"
            )


def _differences(first: dict[str, Any], other: dict[str, Any]) -> str:
    names = [
        name for name in {**first, **other} if repr(first.get(name)) != repr(other.get(name))
    ]  # NaN is not equal to itself.
    return "; ".join(f"{name} is {first.get(name)} and {other.get(name)}" for name in names[:5])
