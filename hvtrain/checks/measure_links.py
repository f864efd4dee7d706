"""Measures how fast hosts all-reduce together, and finds slow hosts and links.

`python -m hvtrain.checks.measure_links` is one rank of the measurement, one on each host, under
Horovod's launcher on Gloo. Rank 0 prints one line, MARK and a JSON object: {"all": TIMES, "pairs":
[[rank, rank, TIMES], ...]}. TIMES is {"bytes", "seconds", "latency_seconds"}: a size, the best time
of an all-reduce of that size, and the best time of an all-reduce of 4 KiB.

Algorithm bandwidth is bytes / seconds. Bus bandwidth is 2 (n - 1) / n times that, because a ring of
n hosts sends 2 (n - 1) / n times the bytes over each link. So bus bandwidth can be compared with the
link's speed for any n. Both are in Gbit/s.
"""

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from hvtrain.checks.table import Row, fail, passed
from hvtrain.launch import environment
from hvtrain.launch.child import end, ends_within, failure, started
from hvtrain.launch.job import Host, Job, launcher_command
from hvtrain.launch.remote_hosts import Ssh
from hvtrain.system.console import call_later
from hvtrain.system.text import human_bytes

MARK = "hvtrain-links:"
START_SECONDS = 120
SECONDS_PER_PAIR = 3
SLOW_SHARE = 1 / 3
# Below this, a link is slow even if all others are: ResNet-50's 100 MB of
# gradients would take 16 s per step.
MIN_GBITS = 0.1


def measure(
    hosts: Sequence[str],
    ssh: Ssh,
    interfaces: str | None,
) -> tuple[dict[str, Any] | None, list[Row]]:
    """Measures the links with one rank per host, within a time limit.

    Returns:
        The measurement that rank 0 prints, or None if it failed; and the rows for doctor's table.
    """
    # One rank per host: ranks of one host would share its link.
    job = Job(
        ("python", "-m", "hvtrain.checks.measure_links"),
        len(hosts),
        tuple(Host(name, 1) for name in hosts),
        ssh=ssh,
        interfaces=interfaces,
    )
    launcher, *arguments = launcher_command(job)
    command = [launcher, "--prefix", *arguments]
    # Process sets of two ranks are added and removed while the job runs.
    settings = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    rank_variables = environment.for_ranks(os.environ) | settings
    variables = environment.for_launcher(os.environ, rank_variables)
    time_limit = max_seconds(len(hosts))
    with TemporaryDirectory(prefix="hvtrain-links-") as folder:
        log = Path(folder) / "output.txt"
        with started(command, log, environment=variables) as process:
            has_ended = ends_within(process, time_limit)
            if not has_ended:
                # The launcher ends its ranks on other hosts if it still can.
                end(process)
        output = log.read_text(errors="replace")

    for text in output.splitlines():
        # The launcher prefixes each line with the rank.
        if MARK in text:
            measured = json.loads(text.partition(MARK)[2])
            return measured, judge_links(measured, hosts)

    timeout = "" if has_ended else f"no result within {time_limit} s; "
    finding = f"the measurement failed; {timeout}{failure(output, process.returncode)}"
    assignments = [f"{name}={value}" for name, value in settings.items()]
    fix = f"to see the full output, run: {shlex.join([*assignments, *command])}"
    return None, [fail("allreduce", None, finding, fix)]


def max_seconds(num_hosts: int) -> int:
    """Returns the time limit of a measurement, in seconds.

    The ranks also enforce it, since a killed launcher cannot end them.
    """
    num_partners = min(num_hosts, MAX_HOSTS_FOR_ALL_PAIRS)
    return START_SECONDS + SECONDS_PER_PAIR * num_hosts * num_partners // 2


def bandwidths(num_bytes: float, seconds: float, num_hosts: int) -> tuple[float, float]:
    """Returns the algorithm and bus bandwidth of an all-reduce, in Gbit/s.

    >>> bandwidths(125e6, 0.5, 4)
    (2.0, 3.0)
    """
    algorithm = num_bytes * 8 / seconds / 1e9
    return algorithm, algorithm * 2 * (num_hosts - 1) / num_hosts


def judge_links(measured: Mapping[str, Any], hosts: Sequence[str]) -> list[Row]:
    """Returns the rows for doctor's table.

    A link fails if it is slower than a third of the usual speed, or than MIN_GBITS. If all links of a
    host are that slow, the host fails instead of its links.

    The usual speed is the median of the hosts' best links, so that one slow host among three does
    not make the others look slow.

    Args:
        measured: The JSON object that rank 0 prints.
        hosts: The host of each rank.
    """
    times = measured["all"]
    algorithm, bus = bandwidths(times["bytes"], times["seconds"], len(hosts))
    summary = (
        f"{human_bytes(times['bytes'])} over {len(hosts)} hosts in {times['seconds']:.3f} s: "
        f"{algorithm:.2f} Gbit/s, {bus:.2f} on the bus; 4 KiB in {times['latency_seconds'] * 1e3:.1f} ms"
    )
    speeds = {
        (hosts[first], hosts[second]): bandwidths(pair["bytes"], pair["seconds"], 2)[1]
        for first, second, pair in measured["pairs"]
    }
    best = {host: max(speed for pair, speed in speeds.items() if host in pair) for host in hosts}
    typical_gbits = median(best.values())
    threshold = max(MIN_GBITS, typical_gbits * SLOW_SHARE)
    needed = f"{threshold:.2f} is needed (hosts usually reach {typical_gbits:.2f})"

    # A slow host makes all its links slow; it is reported instead of them.
    slow_hosts = [host for host in hosts if best[host] < threshold]

    rows = []
    for host in slow_hosts:
        finding = f"{best[host]:.2f} Gbit/s at best, to any host; {needed}"
        fix = (
            f"on {host}: ethtool INTERFACE shows speed and duplex; check the cable and the switch; "
            f"or leave {host} out of -H"
        )
        rows.append(fail("links", host, finding, fix))

    for (first, second), speed in speeds.items():
        if speed < threshold and not {first, second} & set(slow_hosts):
            fix = (
                f"look for a slow hop between {first} and {second}: traceroute {second}; both are faster "
                "to other hosts"
            )
            rows.append(fail("links", first, f"{speed:.2f} Gbit/s to {second}; {needed}", fix))

    slowest = min(speeds, key=speeds.__getitem__)
    finding = (
        f"{len(speeds)} between hosts, from {speeds[slowest]:.2f} Gbit/s ({'-'.join(slowest)}) "
        f"to {max(speeds.values()):.2f}"
    )
    return [passed("allreduce", summary), *(rows or [passed("links", finding)])]


ALL_BYTES = 64 << 20
# Smaller, since there are many pairs: over a link of 50 Mbit/s even this takes more than a second.
PAIR_BYTES = 8 << 20
SMALL_BYTES = 4 << 10
MAX_HOSTS_FOR_ALL_PAIRS = 16
REPEATS = 5
# A repetition this slow is the last: another one would take long and add nothing.
SLOW_SECONDS = 0.5


def time_allreduce(num_bytes: int, process_set: Any, name: str) -> dict[str, float]:
    """Times all-reduces over a process set (every rank of the set).

    Returns TIMES (see the module's docstring), the same on all ranks of the set.

    Args:
        num_bytes: Size of the large all-reduce.
        process_set: The ranks that take part.
        name: Prefix of the names of Horovod's tensors.
    """
    import tensorflow as tf

    import hvtrain.keras as hvd

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def reduce(value):
        # Only one element is returned: otherwise the time to copy the whole result out
        # of the graph would count as the link's.
        return hvd.allreduce(value, name=name, process_set=process_set)[0]

    def best(size):
        value = tf.ones([size // 4])
        best_seconds = float("inf")

        for _ in range(REPEATS):
            began = time.perf_counter()
            reduce(value).numpy()
            seconds = time.perf_counter() - began
            # The slowest rank's time: a rank that enters late finds the others
            # waiting and measures too little.
            slowest = float(
                hvd.allreduce(seconds, name=f"{name}.time", op=hvd.Max, process_set=process_set)
            )
            best_seconds = min(best_seconds, slowest)
            if slowest > SLOW_SECONDS:
                break

        return best_seconds

    best(SMALL_BYTES)  # Warm-up: connects the ranks and traces the graph.
    return {"bytes": num_bytes, "seconds": best(num_bytes), "latency_seconds": best(SMALL_BYTES)}


def rank_main() -> None:
    """Measures all hosts together, then pair by pair while the other ranks wait."""
    import hvtrain.keras as hvd

    # If the launcher is killed, nothing else ends this rank.
    call_later(max_seconds(int(os.environ["HOROVOD_SIZE"])), os._exit, 1)
    hvd.init()
    hvd.pin_gpu()

    all_hosts = time_allreduce(ALL_BYTES, hvd.global_process_set, "hvtrain.links.all")
    pairs = list(combinations(range(hvd.size()), 2))
    if hvd.size() > MAX_HOSTS_FOR_ALL_PAIRS:
        # Only neighbours in the ring: all pairs would take too long.
        pairs = [(rank, (rank + 1) % hvd.size()) for rank in range(hvd.size())]

    # One after the other: pairs that share a host would share its link.
    by_pair = {pair: _measure_pair(pair, "first") for pair in pairs}
    fastest = min(times["seconds"] for times in by_pair.values())

    for pair, times in by_pair.items():
        # A slow pair is measured again, since a host may have been busy at that moment.
        if times["seconds"] > 2 * fastest:
            second = _measure_pair(pair, "again")
            by_pair[pair] = {name: min(value, second[name]) for name, value in times.items()}

    if hvd.rank() == 0:
        measured = {"all": all_hosts, "pairs": [[*pair, times] for pair, times in by_pair.items()]}
        # One write, because the launcher puts the rank before each piece of output.
        print(f"{MARK} {json.dumps(measured)}\n", end="", flush=True)

    hvd.shutdown()


def _measure_pair(pair: tuple[int, int], attempt: str) -> dict[str, float]:
    """Returns the pair's times (every rank)."""
    import hvtrain.keras as hvd

    name = f"hvtrain.links.{pair[0]}.{pair[1]}.{attempt}"
    if hvd.size() == 2:
        return time_allreduce(PAIR_BYTES, hvd.global_process_set, name)

    process_set = hvd.add_process_set(pair)
    times = time_allreduce(PAIR_BYTES, process_set, name) if process_set.included() else None
    times = hvd.broadcast_object(times, root_rank=pair[0], name=f"{name}.times")
    # Each process set slows Horovod's background loop.
    hvd.remove_process_set(process_set)
    return times


if __name__ == "__main__":
    rank_main()
