"""Times all-reduces over all hosts and over pairs of hosts. measure_links starts it, with one rank per host.

Rank 0 prints one line, MARK and a JSON object: {"all": TIMES, "pairs": [[rank, rank, TIMES], ...]}.
TIMES is {"bytes", "seconds", "latency_seconds"}: a size, the best time of an all-reduce of that
size, and that of one of 4 KiB.
"""

import json
import sys
import time
from itertools import combinations
from typing import Any

import tensorflow as tf

import hvtrain.keras as hvd
from hvtrain.checks.measure_links import MARK, most_seconds
from hvtrain.keras.process import launched_size
from hvtrain.system.command import end_within

ALL_BYTES = 64 << 20
# Smaller, since there are many pairs: over a link of 50 Mbit/s even this takes more than a second.
PAIR_BYTES = 8 << 20
SMALL_BYTES = 4 << 10
MOST_HOSTS_FOR_ALL_PAIRS = 16
REPEATS = 5
# A repetition this slow is the last: more of them take long and tell nothing new.
SLOW_SECONDS = 0.5


def measure(num_bytes: int, process_set: Any, name: str) -> dict[str, float]:
    """Returns the best times over a process set, the same on all its ranks (every rank of the set).

    Args:
        num_bytes: Size of the large all-reduce.
        process_set: The ranks that take part.
        name: Prefix of the names of Horovod's tensors.
    """

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def reduce(value: tf.Tensor) -> tf.Tensor:
        # Only one element: copying the whole result out of the graph would be counted as the link's
        # time.
        return hvd.allreduce(value, name=name, process_set=process_set)[0]

    def best(size: int) -> float:
        value = tf.ones([size // 4])
        best_seconds = float("inf")

        for _ in range(REPEATS):
            began = time.perf_counter()
            reduce(value).numpy()
            seconds = time.perf_counter() - began
            # The slowest rank's time: a rank that enters late finds the others waiting and measures
            # too little.
            slowest = float(hvd.allreduce(seconds, name=f"{name}.time", op=hvd.Max, process_set=process_set))
            best_seconds = min(best_seconds, slowest)
            if slowest > SLOW_SECONDS:
                break

        return best_seconds

    best(SMALL_BYTES)  # Warm-up: connects the ranks and traces the graph.
    return {"bytes": num_bytes, "seconds": best(num_bytes), "latency_seconds": best(SMALL_BYTES)}


def main() -> None:
    """Measures all hosts together, then pair by pair while the other ranks wait."""
    # If the launcher is killed, nobody else ends this rank.
    end_within(most_seconds(launched_size() or 1), 1)
    hvd.init()
    hvd.pin_gpu()

    together = measure(ALL_BYTES, hvd.global_process_set, "hvtrain.links.all")
    pairs = list(combinations(range(hvd.size()), 2))
    if hvd.size() > MOST_HOSTS_FOR_ALL_PAIRS:
        pairs = [(rank, (rank + 1) % hvd.size()) for rank in range(hvd.size())]  # neighbours in the ring

    # One after the other: pairs that share a host would share its link.
    by_pair = {pair: _measure_pair(pair, "first") for pair in pairs}
    quickest = min(times["seconds"] for times in by_pair.values())

    for pair, times in by_pair.items():
        # A slow pair is measured once more: a host may have been busy at that moment.
        if times["seconds"] > 2 * quickest:
            again = _measure_pair(pair, "again")
            by_pair[pair] = {name: min(value, again[name]) for name, value in times.items()}

    if hvd.rank() == 0:
        measured = {"all": together, "pairs": [[*pair, times] for pair, times in by_pair.items()]}
        # One write, because the launcher puts the rank before each piece of output.
        sys.stdout.write(f"{MARK} {json.dumps(measured)}\n")
        sys.stdout.flush()

    hvd.shutdown()


def _measure_pair(pair: tuple[int, int], attempt: str) -> dict[str, float]:
    """Returns the pair's times (every rank)."""
    name = f"hvtrain.links.{pair[0]}.{pair[1]}.{attempt}"
    if hvd.size() == 2:
        return measure(PAIR_BYTES, hvd.global_process_set, name)

    process_set = hvd.add_process_set(pair)
    times = measure(PAIR_BYTES, process_set, name) if process_set.included() else None
    times = hvd.broadcast_object(times, root_rank=pair[0], name=f"{name}.times")
    # Each process set slows Horovod's background loop.
    hvd.remove_process_set(process_set)
    return dict(times)


if __name__ == "__main__":
    main()
