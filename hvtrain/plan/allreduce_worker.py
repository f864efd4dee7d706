"""One rank of `hvtrain allreduce`: seconds by size, for one of several methods. Reports one JSON file.

`hvtrain` is the reduction that trainings use, inside a tf.function; `mpi4py` is MPI's own, on NumPy
arrays; `memcpy` copies in memory, a bound for anything that moves data. `small` and `whole` reduce
the same bytes as NUM_SMALL tensors and as one; `call` is a graph call that reduces nothing, which
is part of `hvtrain`'s times too.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

NUM_SMALL = 160
SMALL_BYTES = 64 << 10
# Each size is repeated until about BYTES_EACH are moved, FEWEST to MOST times.
BYTES_EACH = 1 << 29
FEWEST = 8
MOST = 300
WARMUP_REPETITIONS = 5

Action = Callable[[], object]


@dataclass(frozen=True)
class Method:
    """One way to reduce.

    Attributes:
        rank: This process's rank.
        barrier: Waits for all ranks.
        make: Gets the numbers of floats of some tensors and returns the action that reduces them.
    """

    rank: int
    barrier: Action
    make: Callable[[list[int]], Action]


def main() -> None:
    """Measures. Command line: the method, the path of the report without its rank, and the sizes in bytes."""
    name, report_path, *sizes = sys.argv[1:]
    method = hvtrain_method() if name == "hvtrain" else mpi_method(copies=name == "memcpy")
    report = {size: seconds(method, [int(size) // 4], int(size)) for size in sizes}
    if name == "hvtrain":
        whole_bytes = NUM_SMALL * SMALL_BYTES
        report["small"] = seconds(method, [SMALL_BYTES // 4] * NUM_SMALL, whole_bytes)
        report["whole"] = seconds(method, [whole_bytes // 4], whole_bytes)
        report["call"] = seconds(method, [], 1)

    Path(f"{report_path}.{method.rank}").write_text(json.dumps(report))


def seconds(method: Method, lengths: list[int], num_bytes: int) -> float:
    """Median duration of an action after a warm-up; ranks wait for each other every 20 repetitions.

    Args:
        method: The way to reduce.
        lengths: Numbers of floats of the tensors.
        num_bytes: Decides how often the action is repeated.
    """
    action = method.make(lengths)
    repetitions = max(FEWEST, min(MOST, BYTES_EACH // num_bytes))

    times = []
    for repetition in range(WARMUP_REPETITIONS + repetitions):
        if repetition % 20 == 0:
            method.barrier()
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)

    return median(times[WARMUP_REPETITIONS:])


def hvtrain_method() -> Method:
    """hvtrain's grouped all-reduce in a graph."""
    import tensorflow as tf

    import hvtrain.keras as hvd

    # Before TensorFlow initializes a device.
    hvd.init()
    hvd.pin_gpu()

    def make(lengths: list[int]) -> Action:
        tensors = [tf.ones([length]) for length in lengths]
        if not tensors:
            return tf.function(lambda: tf.identity(tf.ones([])))
        name = f"bench_{lengths[0]}_{len(lengths)}"
        return tf.function(lambda: hvd.grouped_allreduce(tensors, op=hvd.Sum, name=name))

    return Method(hvd.rank(), lambda: hvd.allreduce(0.0, name="bench_wait"), make)


def mpi_method(copies: bool = False) -> Method:
    """MPI's own all-reduce, or a copy on all ranks at once."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def make(lengths: list[int]) -> Action:
        # MPI reduces one array; `small` is measured for hvtrain only.
        sent = np.ones(lengths[0], np.float32)
        received = np.empty_like(sent)
        if copies:
            return lambda: np.copyto(received, sent)
        return lambda: world.Allreduce(sent, received)

    return Method(world.rank, world.Barrier, make)


if __name__ == "__main__":
    main()
