"""`hvtrain allreduce` on MPI, in turns with MPI's own all-reduce and with a copy in memory.

    python -m benchmarks.allreduce --rounds 7 --largest 128     for benchmarks.goals, and for docs/bench.md

The options are those of `python -m hvtrain allreduce`. `mpi4py` is MPI's own, on NumPy arrays; `memcpy`
copies in memory, a bound for anything that moves data. `small` and `whole` reduce the same bytes as
NUM_SMALL tensors and as one; `call` is a graph call that reduces nothing, which is part of
hvtrain's times.
"""

import json
import sys
from pathlib import Path
from typing import ClassVar

from hvtrain.plan.allreduce import (
    Action,
    Collectives,
    Method,
    hvtrain_method,
    main,
    median_seconds,
    seconds_by_kind,
    seconds_by_size,
)
from hvtrain.report.ratios import ratio
from hvtrain.system.text import human_bytes

WORKER = "benchmarks.allreduce"
NUM_SMALL = 160
SMALL_BYTES = 64 << 10


class BesideMpi(Collectives):
    """Two more methods, and the reduction of many small tensors; all ranks are this module."""

    workers: ClassVar[dict[str, str]] = dict.fromkeys(("hvtrain", "mpi4py", "memcpy"), WORKER)

    def table(self) -> list[str]:
        ours = self.seconds["hvtrain"]
        heading = (
            f"{'bytes':>8}{'mpi4py us':>11}{'bus GB/s':>10}{'copy GB/s':>11}  bandwidth / mpi4py's"
        )
        lines = [*super().table(), heading]
        for size in self.sizes:
            copied = size / self.microseconds("memcpy", size) / 1e3
            lines.append(
                f"{human_bytes(size):>8}{self.microseconds('mpi4py', size):>11,.0f}"
                f"{self.bus_bandwidth('mpi4py', size):>10.2f}{copied:>11.2f}  "
                f"{ratio(self.seconds['mpi4py'][str(size)], ours[str(size)])}"
            )

        call, small, whole = (
            self.microseconds("hvtrain", name) for name in ("call", "small", "whole")
        )
        return [
            *lines,
            f"{call:,.0f} us of hvtrain's times are the call of a graph that reduces nothing",
            f"{NUM_SMALL} tensors of 64 KiB: {small:,.0f} us, one tensor of 10 MiB: {whole:,.0f} us; "
            f"bandwidth / that of one tensor {ratio(ours['whole'], ours['small'])}",
        ]


def mpi_method(copies: bool = False) -> Method:
    """MPI's own all-reduce, or a copy on all ranks at once."""
    import numpy as np
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


def call_nothing() -> Action:
    """The call of a graph that reduces nothing."""
    import tensorflow as tf

    return tf.function(lambda: tf.identity(tf.ones([])))


def rank_main() -> None:
    """Measures. Command line: as of hvtrain.plan.allreduce.rank_main."""
    name, report_path, *sizes = sys.argv[1:]
    method = hvtrain_method() if name == "hvtrain" else mpi_method(copies=name == "memcpy")
    report = seconds_by_size(method, sizes)
    if name == "hvtrain":
        whole_bytes = NUM_SMALL * SMALL_BYTES
        report["small"] = median_seconds(
            method, method.make([SMALL_BYTES // 4] * NUM_SMALL), whole_bytes
        )
        report["whole"] = median_seconds(method, method.make([whole_bytes // 4]), whole_bytes)
        report["call"] = median_seconds(method, call_nothing(), 1)
        report |= seconds_by_kind(method, sizes)
    Path(f"{report_path}.{method.rank}").write_text(json.dumps(report))


if __name__ == "__main__":
    # Ranks get the name of a method.
    if sys.argv[1:2] and sys.argv[1] in BesideMpi.workers:
        rank_main()
    elif "gloo" in sys.argv:
        sys.exit("benchmarks.allreduce: mpi4py's ranks need MPI; leave --transport gloo out")
    else:
        sys.exit(main(BesideMpi))
