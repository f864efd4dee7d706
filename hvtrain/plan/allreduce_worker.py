"""One rank of `bench allreduce`: seconds by size, for one of several means. Reports one JSON file.

`hvtrain` is the reduction that trainings use, inside a tf.function; `mpi4py` is MPI's own, on NumPy arrays; `memcpy`
copies in memory, a bound for anything that moves data. `small` and `whole` reduce the same bytes as NUM_SMALL tensors
and as one; `call` is a graph call that reduces nothing, which is part of `hvtrain`'s times too.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from hvtrain.plan import process_report

Action = Callable[[], object]
Means = tuple[Action, int, Callable[[list[int]], Action]]
"""A barrier, the rank, and a function that makes the action for tensors of the given numbers of floats."""
NUM_SMALL = 160
SMALL_BYTES = 64 << 10
# Each size is repeated until about BYTES_EACH are moved, FEWEST to MOST times.
BYTES_EACH, FEWEST, MOST = 1 << 29, 8, 300


def main() -> None:
    """Measures the means named first on the command line at the sizes (bytes) after it, and reports."""
    means, *sizes = sys.argv[1:]
    wait, rank, make = by_hvtrain() if means == "hvtrain" else by_mpi(copies=means == "memcpy")
    found = {str(size): seconds(make([size // 4]), wait, int(size)) for size in map(int, sizes)}
    if means == "hvtrain":
        whole = NUM_SMALL * SMALL_BYTES
        found["small"] = seconds(make([SMALL_BYTES // 4] * NUM_SMALL), wait, whole)
        found["whole"] = seconds(make([whole // 4]), wait, whole)
        found["call"] = seconds(make([]), wait, 1)
    Path(f"{os.environ[process_report.FILE]}.{rank}").write_text(json.dumps(found))


def seconds(action: Action, wait: Action, num_bytes: int) -> float:
    """Median duration of the action after a warm-up; ranks wait for each other every 20 repetitions."""
    turns = max(FEWEST, min(MOST, BYTES_EACH // num_bytes))
    times = []
    for turn in range(turns + 5):
        if turn % 20 == 0:
            wait()
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return median(times[5:])


def by_hvtrain() -> Means:
    import tensorflow as tf

    import hvtrain.keras as hvd

    hvd.init()
    hvd.pin_gpu()

    def make(lengths: list[int]) -> Action:
        if not (tensors := [tf.ones([length]) for length in lengths]):
            return tf.function(lambda: tf.identity(tf.ones([])))
        name = f"bench_{lengths[0]}_{len(lengths)}"
        return tf.function(lambda: hvd.grouped_allreduce(tensors, op=hvd.Sum, name=name))

    return (lambda: hvd.allreduce(0.0, name="bench_wait")), hvd.rank(), make


def by_mpi(copies: bool = False) -> Means:
    """MPI's own all-reduce, or a copy on all ranks at once."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def make(lengths: list[int]) -> Action:
        sent = np.ones(lengths[0], np.float32)
        received = np.empty_like(sent)
        return (lambda: np.copyto(received, sent)) if copies else (lambda: world.Allreduce(sent, received))

    return world.Barrier, world.rank, make


if __name__ == "__main__":
    main()
