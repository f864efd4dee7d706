"""Measures how fast hosts reduce together: one rank per host, started by measure_links.

Rank 0 prints one line, MARK and a JSON object: {"all": TIMES, "pairs": [[rank, rank, TIMES], ...]}, where TIMES is
{"bytes", "seconds", "latency_seconds"}: the best time of an allreduce of so many bytes, and of one of 4 KiB.
"""

import json
import os
import sys
import threading
import time
from itertools import combinations
from typing import Any

import tensorflow as tf

import hvtrain.keras as hvd
from hvtrain.doctor.measure_links import MARK, most_seconds
from hvtrain.keras.process import launched_size

ALL_BYTES = 64 << 20
# There are many pairs, and over a link of 50 Mbit/s this takes more than a second.
PAIR_BYTES = 8 << 20
SMALL_BYTES = 4 << 10
MOST_HOSTS_FOR_ALL_PAIRS = 16
REPEATS = 5
# After a measurement as slow as this another one tells nothing new.
SLOW_SECONDS = 0.5


def measure(num_bytes: int, process_set: Any, name: str) -> dict[str, float]:
    """The best times of one process set (every rank of the set). All get the same numbers."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def reduce(value: tf.Tensor) -> tf.Tensor:
        # One number of the result: copying all of it out of the graph would count as the link's time.
        return hvd.allreduce(value, name=name, process_set=process_set)[0]

    def best(size: int) -> float:
        value = tf.ones([size // 4])
        slowest = float("inf")
        for _ in range(REPEATS):
            began = time.perf_counter()
            reduce(value).numpy()
            own = time.perf_counter() - began
            # The slowest rank's time: a late rank finds the others waiting.
            agreed = float(hvd.allreduce(own, name=f"{name}.time", op=hvd.Max, process_set=process_set))
            slowest = min(slowest, agreed)
            if agreed > SLOW_SECONDS:
                break
        return slowest

    best(SMALL_BYTES)  # Makes connections and the graph.
    return {"bytes": num_bytes, "seconds": best(num_bytes), "latency_seconds": best(SMALL_BYTES)}


def main() -> None:
    """Measures all hosts together, then each pair while the other ranks wait."""
    last_resort = threading.Timer(most_seconds(launched_size() or 1), os._exit, [1])
    last_resort.daemon = True
    last_resort.start()
    hvd.init()
    hvd.pin_gpu()
    together = measure(ALL_BYTES, hvd.global_process_set, "hvtrain.links.all")
    pairs = list(combinations(range(hvd.size()), 2))
    if hvd.size() > MOST_HOSTS_FOR_ALL_PAIRS:
        pairs = [(rank, (rank + 1) % hvd.size()) for rank in range(hvd.size())]  # the neighbours of a ring
    found = {pair: _measure_pair(pair, "first") for pair in pairs}
    quickest = min(times["seconds"] for times in found.values())
    for pair, times in found.items():
        # A slow pair is measured again: a host may have been busy just then.
        if times["seconds"] > 2 * quickest:
            again = _measure_pair(pair, "again")
            found[pair] = {name: min(value, again[name]) for name, value in times.items()}
    if hvd.rank() == 0:
        measured = {"all": together, "pairs": [[*pair, times] for pair, times in found.items()]}
        # In one write, for the launcher puts its mark before each piece.
        sys.stdout.write(f"{MARK} {json.dumps(measured)}\n")
        sys.stdout.flush()
    hvd.shutdown()


def _measure_pair(pair: tuple[int, int], attempt: str) -> dict[str, float]:
    """The pair's times (every rank). Its process set is removed again: each one slows Horovod's loop a little."""
    name = f"hvtrain.links.{pair[0]}.{pair[1]}.{attempt}"
    if hvd.size() == 2:
        return measure(PAIR_BYTES, hvd.global_process_set, name)
    process_set = hvd.add_process_set(pair)
    times = measure(PAIR_BYTES, process_set, name) if process_set.included() else None
    times = hvd.broadcast_object(times, root_rank=pair[0], name=f"{name}.times")
    hvd.remove_process_set(process_set)
    return dict(times)


if __name__ == "__main__":
    main()
