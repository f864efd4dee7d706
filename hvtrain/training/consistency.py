"""Checks, before the first step, that the ranks run the same program on different data."""

import hashlib
import logging
import platform
import re
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvtrain.checkpoint.receipts import Facts
from hvtrain.config.schema import RunConfig
from hvtrain.data import kinds
from hvtrain.data.description import listed
from hvtrain.data.manifest import differences, digest_arrays, digest_of, refuse_or_warn
from hvtrain.data.source import Source
from hvtrain.errors import ConfigError, DataError, RankError
from hvtrain.strategies.comm import Comm
from hvtrain.system import host_facts
from hvtrain.system.resources import cores_of_each
from hvtrain.training.run import Run

log = logging.getLogger(__name__)

_PACKAGES = (
    *host_facts.PACKAGES,
    "h5py",
    "pyarrow",
    "safetensors",
    "scikit-learn",
    "sentencepiece",
)

# Settings that cannot change a single bit of the weights. checkpoint.every_* can: before a
# checkpoint, moving statistics are averaged over the ranks.
_IRRELEVANT_TO_BITS = re.compile(
    r"(run|checkpoint(?!\.every_)|guard|watchdog|profile|tracker|metrics)\."
    r"|resume|verbose|tracebacks|notify|train\.(max_time|steps_per_execution)"
)


def check_same_run(comm: Comm, config: RunConfig) -> None:
    """Checks that all ranks run the same program with the same settings (every rank).

    Raises:
        ConfigError: Settings differ. All ranks raise it, and the message names the settings.
        RankError: Code or versions of packages differ. All ranks raise it, and the message names the packages.
    """
    own = {"settings": config.flat, "programs": software(config)}
    # Digests suffice if all agree; without them, each of a thousand
    # ranks would receive ten megabytes.
    if len(set(comm.gather(digest_of(own)))) == 1:
        return
    ranks = comm.gather((own, comm.topology.host))
    first, first_host = ranks[0]
    # Settings first: if they name different packages, different code is only a consequence.
    for kind, error, advice in (
        ("settings", ConfigError, "start all ranks with the same command"),
        ("programs", RankError, "install the same versions and copy the same code to both hosts"),
    ):
        for rank, (other, host) in enumerate(ranks):
            difference = difference_of(first[kind], other[kind])
            if difference:
                raise error(
                    f"rank 0 on {first_host} and rank {rank} on {host} have different {kind}: {difference}; {advice}"
                )


def software(config: RunConfig) -> dict[str, str]:
    """Returns versions of packages, and digests of the code of hvtrain and of packages that the settings name."""
    facts = {"version of python": platform.python_version()}
    for name, version in host_facts.package_versions(_PACKAGES).items():
        facts[f"version of {name}"] = version or "none"
    targets = [value for key, value in config.flat.items() if key.endswith("_target_")]
    for package in dict.fromkeys(["hvtrain", *(target.split(".")[0] for target in targets)]):
        if package == "keras":
            continue  # Its version is among those above.
        files = host_facts.code_files(package)
        digest = hashlib.sha256(repr(files).encode()).hexdigest()[:12]
        facts[f"code of {package}"] = digest if files else "not found"
    return facts


def facts_of(run: Run) -> Facts:
    """Returns the facts on which the bits of a run's weights may depend, for its receipts (chief only)."""
    programs = software(run.config)
    git = host_facts.checkout(Path.cwd()) or {}
    code = {name: value for name, value in programs.items() if name.startswith("code of ")}
    kinds_of_devices = {device.partition(" ")[2] for device in run.strategy.devices}
    data = run.meta["data"]
    splits = {
        f"{key} of {split}": value
        for split, part in data["splits"].items()
        for key, value in part.items()
        if key != "files"  # There may be thousands, and the manifest's digest covers them.
    }
    return {
        "data": {
            **splits,
            "digest of the manifest": digest_of(data)[:16],
            **{name: run.meta[name] for name in ("batch_sizes", "steps_per_epoch", "uneven")},
        },
        "settings": {
            name: value
            for name, value in run.config.flat.items()
            if not _IRRELEVANT_TO_BITS.match(name)
        },
        "code": {
            **code,
            "commit": git.get("commit", "")[:12],
            "changed files": len(git.get("changed", ())),
        },
        "versions": {name: value for name, value in programs.items() if name not in code},
        "hardware": {
            "processor": host_facts.processor(),
            "devices": sorted(kinds_of_devices),
            "cores of a rank": cores_of_each(run.topology.local_size),
        },
        "ranks": {"number of ranks": run.topology.size},
    }


def check_same_data(comm: Comm, source: Source, refuse: bool) -> dict[str, Any]:
    """Checks that all hosts have the same data, and returns the data set's manifest (every rank).

    Raises RankError on all ranks if copies of the data differ; without `refuse`, only logs a warning.
    """
    manifest = comm.all_or_raise(source.manifest)
    # Digests suffice if all agree; a manifest may list thousands of files.
    digests, hosts = zip(*comm.gather((digest_of(manifest), comm.topology.host)))
    if len(set(digests)) > 1:
        manifests = comm.gather(manifest)
        rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        refuse_or_warn(
            f"rank 0 on {hosts[0]} and rank {rank} on {hosts[rank]} read different data: "
            f"{listed(differences(manifests[0], manifests[rank]), separator='; ')}",
            "copy the same files to both hosts",
            refuse,
            RankError,
        )
    return manifest


def check_first_batches(run: Run, start_step: int) -> None:
    """Checks the first batch of each rank (every rank).

    Rank 0 records the kinds of its inputs in the run folder; in a resumed run it compares them with the record.

    Args:
        run: The run.
        start_step: The step of the run at which this start begins.

    Raises:
        DataError: A target is wrong, the inputs differ in kind from the recorded ones, or two ranks have read
            the same batch. All ranks raise it.
    """
    comm = run.strategy.comm
    source = run.source
    batches = comm.all_or_raise(lambda: run.stream_from(start_step))
    first = tf.nest.map_structure(lambda tensor: tensor.numpy(), next(iter(batches)))
    comm.on_chief(lambda: _check_kinds(run, first[0], is_resumed=start_step > 0))
    for rank, fault in enumerate(comm.gather(run.task.fault(first[1], source))):
        if fault:
            example, problem = fault
            raise DataError(
                f"example {example} of rank {rank}'s first batch from {source.name} {problem}; "
                "fix the targets or choose another task"
            )
    may_be_equal = source.same_on_all_ranks or not run.config.guard.batches
    if comm.topology.size == 1 or may_be_equal:
        return

    digest = digest_arrays(tf.nest.flatten(first))
    first_rank: dict[str, int] = {}
    for rank, rank_digest in enumerate(comm.gather(digest)):
        if first_rank.setdefault(rank_digest, rank) != rank:
            raise DataError(
                f"ranks {first_rank[rank_digest]} and {rank} read the same first batch of {source.name}; "
                "each must read its own part, for example by topology.share or dataset.shard(num_shards, shard); "
                "if equal batches are intended, set same_on_all_ranks on the data set"
            )


def _check_kinds(run: Run, inputs: Any, is_resumed: bool) -> None:
    """Records the kinds of a batch's inputs, or compares them with the recorded ones (chief only).

    Raises DataError if they differ; with guard.data=false, only logs a warning.
    """
    source = run.source
    if source.raw_batches:
        finished = source.finish(tf.nest.map_structure(tf.constant, inputs))
        inputs = tf.nest.map_structure(lambda tensor: tensor.numpy(), finished)
    recorded = kinds.read(run.folder) if is_resumed else {}
    if recorded:
        kinds.check(source.name, recorded, kinds.kinds_of(inputs), run.config.guard.data)
    else:
        kinds.keep(run.folder, inputs)


def difference_of(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Describes up to five names whose values differ; empty if all are equal."""
    # By repr, since NaN is not equal to itself.
    names = [name for name in first | other if repr(first.get(name)) != repr(other.get(name))]
    return "; ".join(f"{name} is {first.get(name)} and {other.get(name)}" for name in names[:5])
