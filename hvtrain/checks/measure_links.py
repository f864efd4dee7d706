"""Measures how fast hosts reduce together, and judges which host or link is slow.

link_worker does it on one rank per host, under Horovod's launcher on Gloo. Algorithm bandwidth is
bytes / seconds. Bus bandwidth is that times 2 (n - 1) / n, what a ring sends over each link; it
compares with the link's own speed for any number of hosts n. Both are in Gbit/s.
"""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from hvtrain.checks.table import Row, fail, passed
from hvtrain.launch import environment
from hvtrain.launch.child import end, ends_within, failure, started
from hvtrain.launch.job import Host, Job, launcher_command
from hvtrain.launch.remote_hosts import Ssh
from hvtrain.system.text import human_bytes

MARK = "hvtrain-links:"
START_SECONDS = 120
SECONDS_FOR_A_PAIR = 3
SLOW_SHARE = 1 / 3
# Slower than this is slow without comparison: a step of ResNet-50, 100 MB of gradients, would wait
# 16 s.
FLOOR_GBITS = 0.1


def measure(
    hosts: Sequence[str],
    ssh: Ssh,
    interfaces: str | None,
) -> tuple[dict[str, Any] | None, list[Row]]:
    """Runs link_worker, in limited time.

    Returns:
        What link_worker prints, None if the ranks did not reduce, and the rows.
    """
    # One rank per host: ranks of one host would share its link.
    job = Job(
        ("python", "-m", "hvtrain.checks.link_worker"),
        len(hosts),
        tuple(Host(name, 1) for name in hosts),
        ssh=ssh,
        interfaces=interfaces,
    )
    launcher, *arguments = launcher_command(job)
    line = [launcher, "--prefix", *arguments]
    # Sets of two ranks come and go while the job runs.
    settings = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    of_ranks = {**environment.for_ranks(os.environ), **settings}
    variables = environment.for_launcher(os.environ, of_ranks)
    time_limit = most_seconds(len(hosts))
    with TemporaryDirectory(prefix="hvtrain-links-") as folder:
        log = Path(folder) / "output.txt"
        # Python would hold back its last lines.
        with started(line, log, environment={**variables, "PYTHONUNBUFFERED": "1"}) as process:
            has_ended = ends_within(process, time_limit)
            if not has_ended:
                # The launcher ends its ranks on other hosts if it still can.
                end(process)
        output = log.read_text(errors="replace")

    for text in output.splitlines():
        # The launcher writes the rank before it.
        if MARK in text:
            measured = json.loads(text.partition(MARK)[2])
            return measured, judge_links(measured, hosts)

    late = "" if has_ended else f"not ended in {time_limit} s; "
    finding = f"the ranks did not reduce; {late}{failure(output, process.returncode)}"
    again = shlex.join([*(f"{name}={value}" for name, value in settings.items()), *line])
    return None, [fail("allreduce", None, finding, f"look at all that they say: {again}")]


def most_seconds(num_hosts: int) -> int:
    """How long a measurement may take.

    The workers also end by then: a killed launcher cannot end them.
    """
    return START_SECONDS + SECONDS_FOR_A_PAIR * num_hosts**2 // 2


def bandwidths(num_bytes: float, seconds: float, num_hosts: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth of an all-reduce, in Gbit/s.

    >>> bandwidths(125e6, 0.5, 4)
    (2.0, 3.0)
    """
    algorithm = num_bytes * 8 / seconds / 1e9
    return algorithm, algorithm * 2 * (num_hosts - 1) / num_hosts


def judge_links(measured: Mapping[str, Any], hosts: Sequence[str]) -> list[Row]:
    """Fails links below a third of what hosts usually reach.

    A host whose links are all slow is named itself.

    A host reaches what its best link does, so that one slow host among three does not make the
    others look slow.

    Args:
        measured: What link_worker prints.
        hosts: The host of each rank.
    """
    times = measured["all"]
    algorithm, bus = bandwidths(times["bytes"], times["seconds"], len(hosts))
    together = (
        f"{human_bytes(times['bytes'])} over {len(hosts)} hosts in {times['seconds']:.3f} s: "
        f"{algorithm:.2f} Gbit/s, {bus:.2f} on the bus; 4 KiB in {times['latency_seconds'] * 1e3:.1f} ms"
    )
    speeds = {
        (hosts[first], hosts[second]): bandwidths(pair["bytes"], pair["seconds"], 2)[1]
        for first, second, pair in measured["pairs"]
    }
    # By its best link, or one slow host among three would slow the other two.
    best = {host: max(speed for pair, speed in speeds.items() if host in pair) for host in hosts}
    usual = median(best.values())
    bound = max(FLOOR_GBITS, usual * SLOW_SHARE)
    needed = f"{bound:.2f} is needed (hosts usually reach {usual:.2f})"

    # A slow host makes all its links slow; it is named once, and they are not.
    slow_hosts = [host for host in hosts if best[host] < bound]

    rows = []
    for host in slow_hosts:
        finding = f"{best[host]:.2f} Gbit/s at best, to any host; {needed}"
        fix = f"on {host}: ethtool INTERFACE shows speed and duplex; look at cable and switch; or leave it out of -H"
        rows.append(fail("links", host, finding, fix))

    for (first, second), speed in speeds.items():
        if speed < bound and not {first, second} & set(slow_hosts):
            way = f"look at what lies between {first} and {second}: traceroute {second}"
            fix = f"{way}; both are quicker to other hosts"
            rows.append(fail("links", first, f"{speed:.2f} Gbit/s to {second}; {needed}", fix))

    slowest = min(speeds, key=lambda pair: speeds[pair])
    finding = (
        f"{len(speeds)} between hosts, from {speeds[slowest]:.2f} Gbit/s ({'-'.join(slowest)}) "
        f"to {max(speeds.values()):.2f}"
    )
    return [passed("allreduce", together), *(rows or [passed("links", finding)])]
