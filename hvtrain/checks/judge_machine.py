"""Judges whether each host is fit for its ranks: clock, memory, files, disk, GPUs. Pure."""

import sys
from collections.abc import Mapping

from hvtrain.checks.table import (
    Cluster,
    Facts,
    Problem,
    Row,
    copy_to,
    differences,
    fail,
    judge,
    passed,
    skip,
)
from hvtrain.system.text import human_bytes

CLOCK_SECONDS = 1.0
# For each slot: MPI and NCCL pass data between ranks of one host there.
SHARED_MEMORY_BYTES = 64 << 20
DISK_BYTES = 1 << 30

# By how many seconds a clock is ahead of another one, and the error of that.
Clock = tuple[float, float]


def judge_machines(cluster: Cluster, slots: Mapping[str, int]) -> list[Row]:
    """Judges memory, open files, disk and GPUs. slots: of all hosts, also of those that did not answer."""
    return [row for check in (_shared_memory, _open_files, _disk, _gpus) for row in check(cluster, slots)]


def judge_clocks(clocks: Mapping[str, Clock], first: str) -> list[Row]:
    """Fails where a clock is off by more than the limit, whatever the error of the measurement.

    Args:
        clocks: Of the hosts that the first one reached, against its own.
        first: Name of that host.
    """
    if not clocks:
        return [skip("clock", f"{first} has reached no port of another host")]

    def problem(host: str, clock: Clock) -> Problem:
        ahead, error = clock
        if abs(ahead) - error <= CLOCK_SECONDS:
            return None
        direction = "ahead of" if ahead > 0 else "behind"
        finding = f"its clock is {abs(ahead):.1f} s {direction} that of {first}"
        return finding, f"on {host}: timedatectl set-ntp true, or start chrony"

    most, error = max((abs(ahead), error) for ahead, error in clocks.values())
    return judge("clock", clocks, problem, f"{most:.2f} s apart at most (within {error:.2f} s)")


def _shared_memory(cluster: Cluster, slots: Mapping[str, int]) -> list[Row]:
    rooms = {host: facts["shared_memory"] or {"free": 0, "total": 0} for host, facts in cluster.items()}

    def problem(host: str, room: Mapping[str, int]) -> Problem:
        needed = slots[host] * SHARED_MEMORY_BYTES
        if room["free"] >= needed:
            return None

        finding = (
            f"/dev/shm has {human_bytes(room['free'])} free of {human_bytes(room['total'])}; "
            f"{slots[host]} slots need {human_bytes(needed)}"
        )
        # The new size holds what is used now and what is needed, in whole MiB.
        size = -(-(needed + room["total"] - room["free"]) // 2**20)
        fix = f"on {host}: mount -o remount,size={size}m /dev/shm (a container: --shm-size={size}m or --ipc=host)"
        return finding, fix

    least = min(room["free"] for room in rooms.values())
    return judge("shared memory", rooms, problem, f"at least {human_bytes(least)} free in /dev/shm")


def files_needed(num_ranks: int) -> int:
    """Files that a rank may have open: 256 of its own, and connections and pipes for each other rank."""
    return max(1024, 256 + 8 * num_ranks)


def _open_files(cluster: Cluster, slots: Mapping[str, int]) -> list[Row]:
    # Each rank is connected to all others, whatever its host.
    num_ranks = sum(slots.values())
    needed = files_needed(num_ranks)
    soft_limits = {host: facts["open_files"]["soft"] for host, facts in cluster.items()}
    limits = {host: limit for host, limit in soft_limits.items() if limit > -1}  # -1: no limit

    def problem(host: str, limit: int) -> Problem:
        if limit >= needed:
            return None
        fix = (
            f"on {host}: echo '* - nofile 65536' >> /etc/security/limits.conf, "
            "then log in again (or ulimit -n 65536 before sshd starts)"
        )
        return f"a process may open {limit}; {num_ranks} ranks need {needed}", fix

    return judge("open files", limits, problem, f"at least {min(limits.values())}" if limits else "no limit")


def _disk(cluster: Cluster, slots: Mapping[str, int]) -> list[Row]:
    """Judges the run folder on the first host alone: only rank 0 writes to it."""
    host = next(iter(slots))
    if host not in cluster:
        return [skip("run folder", "the host of rank 0 does not answer", host)]

    disk = cluster[host]["disk"]
    free = f"{human_bytes(disk['free'])} free for {disk['folder']}"
    if not disk["writable"]:
        finding = f"{disk['folder']} cannot be written"
        return [fail("run folder", host, finding, "run.dir=PATH names another folder")]
    if disk["free"] < DISK_BYTES:
        finding = f"{free}; checkpoints need {human_bytes(DISK_BYTES)} at least"
        return [fail("run folder", host, finding, "free some there, or run.dir=PATH on another disk")]
    return [passed("run folder", f"{free} on {host}")]


def _gpus(cluster: Cluster, slots: Mapping[str, int]) -> list[Row]:
    if not any(facts["gpus"]["error"] or facts["gpus"]["names"] for facts in cluster.values()):
        return [passed("gpus", "no GPU on any host")]

    first = next(iter(cluster))
    here = cluster[first]["gpus"]
    software = _gpu_software(cluster[first])

    def problem(host: str, facts: Facts) -> Problem:
        gpus = facts["gpus"]
        count = len(gpus["names"])
        if gpus["error"]:
            fix = f"on {host}: install the driver again, or load it: modprobe nvidia"
            return f"nvidia-smi fails: {gpus['error']}", fix
        if count < slots[host]:
            fix = f"-H {host}:{count}" if count else f"leave {host} out of -H, or install its driver"
            return f"{count} GPUs for {slots[host]} slots", fix
        # Without a driver on the first host, its own row says so.
        different = differences(_gpu_software(facts), first, software) if here["driver"] else ""
        if different.startswith("driver "):
            return different, f"install one driver version on {first} and {host}"
        return (different, copy_to(sys.prefix, first, host)) if different else None

    versions = ", ".join(f"{name} {version}" for name, version in software.items())
    return judge("gpus", cluster, problem, f"{', '.join(sorted(set(here['names'])))}; {versions}")


def _gpu_software(facts: Facts) -> dict[str, str]:
    return {"driver": facts["gpus"]["driver"], **facts["cuda"]}
