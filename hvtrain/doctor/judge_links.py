"""Judges how fast hosts reduce together, and which host or link is slow. Pure.

Algorithm bandwidth is bytes / seconds. Bus bandwidth is that times 2 (n - 1) / n, what a ring sends over each link;
it compares with the link's own speed for any number of hosts n. Both are in Gbit/s.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from hvtrain.doctor.rows import Row, all_or, fail, size

SLOW_SHARE = 1 / 3
FLOOR_GBITS = 0.1
"""Slower than this is slow without comparison: a step of ResNet-50, 100 MB of gradients, would wait 16 s."""


def bandwidths(num_bytes: float, seconds: float, num_hosts: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth of an allreduce, in Gbit/s.

    >>> bandwidths(125e6, 0.5, 4)
    (2.0, 3.0)
    """
    algorithm = num_bytes * 8 / seconds / 1e9
    return algorithm, algorithm * 2 * (num_hosts - 1) / num_hosts


def judge_links(measured: Mapping[str, Any], hosts: Sequence[str]) -> list[Row]:
    """A link is slow below a third of what hosts usually reach. A host whose links are all slow is named itself.

    measured: what link_worker prints. A host reaches what its best link does, so that one slow host among three does
    not make the others look slow.
    """
    times = measured["all"]
    algorithm, bus = bandwidths(times["bytes"], times["seconds"], len(hosts))
    together = (
        f"{size(times['bytes'])} over {len(hosts)} hosts in {times['seconds']:.3f} s: {algorithm:.2f} Gbit/s, "
        f"{bus:.2f} on the bus; 4 KiB in {times['latency_seconds'] * 1e3:.1f} ms"
    )
    speeds = {
        (hosts[one], hosts[other]): bandwidths(pair["bytes"], pair["seconds"], 2)[1]
        for one, other, pair in measured["pairs"]
    }
    return [Row("allreduce", "PASS", together), *_slow(speeds, hosts)]


def _slow(speeds: Mapping[tuple[str, str], float], hosts: Sequence[str]) -> list[Row]:
    """speeds: Gbit/s of each measured pair."""
    best = {host: max(speed for pair, speed in speeds.items() if host in pair) for host in hosts}
    usual = median(best.values())
    bound = max(FLOOR_GBITS, usual * SLOW_SHARE)
    slow_hosts = [host for host in hosts if best[host] < bound]
    rows = [
        fail(
            "links",
            host,
            f"{best[host]:.2f} Gbit/s at best, to any host; {bound:.2f} is needed (hosts usually reach {usual:.2f})",
            f"on {host}: ethtool INTERFACE shows speed and duplex; look at cable and switch; or leave it out of -H",
        )
        for host in slow_hosts
    ]
    rows += [
        fail(
            "links",
            one,
            f"{speed:.2f} Gbit/s to {other}; {bound:.2f} is needed (hosts usually reach {usual:.2f})",
            f"look at what lies between {one} and {other}: traceroute {other}; both are quicker to other hosts",
        )
        for (one, other), speed in speeds.items()
        if speed < bound and not {one, other} & set(slow_hosts)
    ]
    pair = min(speeds, key=lambda pair: speeds[pair])
    found = f"{len(speeds)} between hosts, from {speeds[pair]:.2f} Gbit/s ({'-'.join(pair)})"
    return all_or(rows, "links", f"{found} to {max(speeds.values()):.2f}")
