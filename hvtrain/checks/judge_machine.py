"""Judges whether each host is fit for its ranks: clock, memory, files, disk, GPUs. Pure."""

import sys
from collections.abc import Mapping
from typing import Any

from hvtrain.checks.rows import Cluster, Row, all_or, copy_to, fail, skip
from hvtrain.system.text import human_bytes

CLOCK_SECONDS = 1.0
SHARED_MEMORY_BYTES = 64 << 20
"""For each slot: MPI and NCCL pass data between ranks of one host there."""
DISK_BYTES = 1 << 30


def judge_machines(cluster: Cluster, slots: Mapping[str, int]) -> list[Row]:
    """Rows on what hosts have. slots: of all hosts, also those that did not answer."""
    return [row for judge in (_shared_memory, _open_files, _disk, _gpus) for row in judge(cluster, slots)]


def clock_differences(
    by_ssh: Mapping[str, tuple[float, float]], by_port: Mapping[str, Mapping[str, Any] | None]
) -> dict[str, tuple[float, float]]:
    """Seconds that each host's clock is ahead of the first one's, and the error of that.

    by_ssh: seconds ahead of this host's clock, and the error: half of the time that ssh was under way. by_port: the
    answers of hosts that called each other; the first one's calls took far less time, if they got through.

    >>> clock_differences({"s1": (0.5, 0.1), "s2": (3.0, 0.25)}, {"s1": {"clocks": {"s2": (2.4, 0.001)}}})
    {'s1': (0.0, 0.0), 's2': (2.4, 0.001)}
    """
    first = next(iter(by_ssh))
    differences = {first: (0.0, 0.0)}
    called = (by_port.get(first) or {}).get("clocks", {})
    for host, (ahead, error) in list(by_ssh.items())[1:]:
        ways = [(ahead - by_ssh[first][0], error + by_ssh[first][1])]
        ways += [(called[host][0], called[host][1])] if host in called else []
        differences[host] = min(ways, key=lambda way: way[1])
    return differences


def judge_clocks(differences: Mapping[str, tuple[float, float]]) -> list[Row]:
    """Fails only for what is certainly more: the time under way is not the clock's."""
    first, *others = differences
    rows = []
    for host in others:
        ahead, error = differences[host]
        if abs(ahead) - error > CLOCK_SECONDS:
            found = f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} that of {first}"
            rows.append(fail("clock", host, found, f"on {host}: timedatectl set-ntp true, or start chrony"))
    most, error = max((abs(ahead), error) for ahead, error in differences.values())
    return all_or(rows, "clock", f"{most:.2f} s apart at most (within {error:.2f} s)" if others else "one host")


def _shared_memory(cluster: Cluster, slots: Mapping[str, int]) -> list[Row]:
    rows = []
    for host, facts in cluster.items():
        need, room = slots[host] * SHARED_MEMORY_BYTES, facts["shared_memory"] or {"free": 0, "total": 0}
        if room["free"] < need:
            found = f"/dev/shm has {human_bytes(room['free'])} free of {human_bytes(room['total'])}; "
            more = -(-(need + room["total"] - room["free"]) // 2**20)
            fix = f"on {host}: mount -o remount,size={more}m /dev/shm (a container: --shm-size={more}m or --ipc=host)"
            rows.append(fail("shared memory", host, f"{found}{slots[host]} slots need {human_bytes(need)}", fix))
    least = min((facts["shared_memory"] or {"free": 0})["free"] for facts in cluster.values())
    return all_or(rows, "shared memory", f"at least {human_bytes(least)} free in /dev/shm")


def files_needed(num_ranks: int) -> int:
    """Files that a rank may have open: 256 of its own, and connections and pipes for each other rank."""
    return max(1024, 256 + 8 * num_ranks)


def _open_files(cluster: Cluster, slots: Mapping[str, int]) -> list[Row]:
    num_ranks = sum(slots.values())
    need = files_needed(num_ranks)
    limits = {host: facts["open_files"]["soft"] for host, facts in cluster.items()}
    found, more = f"{num_ranks} ranks need {need}", "echo '* - nofile 65536' >> /etc/security/limits.conf"
    fix = f"{more}, then log in again (or ulimit -n 65536 before sshd starts)"
    rows = [
        fail("open files", host, f"a process may open {limit}; {found}", f"on {host}: {fix}")
        for host, limit in limits.items()
        if -1 < limit < need
    ]
    least = min((limit for limit in limits.values() if limit > -1), default=-1)
    return all_or(rows, "open files", f"at least {least}" if least > -1 else "no limit")


def _disk(cluster: Cluster, slots: Mapping[str, int]) -> list[Row]:
    """Only rank 0 writes to the run folder."""
    host = next(iter(slots))
    if host not in cluster:
        return [skip("run folder", "the host of rank 0 does not answer", host)]
    disk = cluster[host]["disk"]
    free = f"{human_bytes(disk['free'])} free for {disk['folder']}"
    if not disk["writable"]:
        return [fail("run folder", host, f"{disk['folder']} cannot be written", "run.dir=PATH names another folder")]
    if disk["free"] < DISK_BYTES:
        found = f"{free}; checkpoints need {human_bytes(DISK_BYTES)} at least"
        return [fail("run folder", host, found, "free some there, or run.dir=PATH on another disk")]
    return [Row("run folder", "PASS", f"{free} on {host}")]


def _gpus(cluster: Cluster, slots: Mapping[str, int]) -> list[Row]:
    rows, first = [], next(iter(cluster))
    some, cuda = cluster[first]["gpus"], cluster[first]["cuda"]
    if not any(facts["gpus"]["error"] or facts["gpus"]["names"] for facts in cluster.values()):
        return [Row("gpus", "PASS", "no GPU on any host")]
    for host, facts in cluster.items():
        count, driver = len(facts["gpus"]["names"]), facts["gpus"]["driver"]
        if facts["gpus"]["error"]:
            found = f"nvidia-smi fails: {facts['gpus']['error']}"
            rows.append(fail("gpus", host, found, f"on {host}: install the driver again, or load it: modprobe nvidia"))
        elif count < slots[host]:
            fix = f"-H {host}:{count}" if count else f"leave {host} out of -H, or install its driver"
            rows.append(fail("gpus", host, f"{count} GPUs for {slots[host]} slots", fix))
        elif some["driver"] and driver != some["driver"]:
            found = f"driver {driver}; {first} has {some['driver']}"
            rows.append(fail("gpus", host, found, f"install one driver version on {first} and {host}"))
        elif facts["cuda"] != cuda:
            found = f"{_versions(facts['cuda'])}; {first} has {_versions(cuda)}"
            rows.append(fail("gpus", host, found, copy_to(sys.prefix, first, host)))
    names = ", ".join(sorted(set(some["names"])))
    return all_or(rows, "gpus", f"{names}; driver {some['driver']}; {_versions(cuda)}")


def _versions(packages: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in packages.items()) or "no CUDA packages"
