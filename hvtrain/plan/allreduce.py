"""`python -m hvtrain allreduce`: measures latency and bandwidth of an all-reduce by size, on ranks of this host.

Bandwidths are defined as in nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): the
algorithm bandwidth is bytes / time, and the bus bandwidth is that times 2 (n - 1) / n, since each of
n ranks has to send that many times the bytes.

`python -m hvtrain.plan.allreduce METHOD REPORT BYTES ...` runs as one rank: it times the reduction that
training uses, inside a tf.function, and writes the seconds by size to the JSON file REPORT.RANK. The
keys `half-BYTES`, `gather-BYTES` and `bytes-BYTES` are other exchanges of training: sums in half precision,
all-gathers, and, on two ranks, swaps of bytes as for bf16 and int8. benchmarks/allreduce.py has other methods.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import ClassVar

from hvtrain.errors import LostRankError
from hvtrain.launch.child import end, ends_within, exit_at_signals, failure, in_turns, started
from hvtrain.system.command import Parser, add_number, at_least, make_output
from hvtrain.system.console import progress
from hvtrain.system.files import write_json
from hvtrain.system.resources import cores_of_each
from hvtrain.system.text import counted, human_bytes

KIB = 1 << 10
MIB = 1 << 20
# This module, which each rank of the command runs.
WORKER = "hvtrain.plan.allreduce"
SIZES = (
    4,
    256,
    4 * KIB,
    64 * KIB,
    256 * KIB,
    MIB,
    4 * MIB,
    16 * MIB,
    64 * MIB,
    128 * MIB,
    256 * MIB,
)
# Time limit of one round of a method; without it, a hung launcher would block the command forever.
SECONDS_PER_ROUND = 900.0
# Environment variables that limit the compute threads of a process.
THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
# Each size is repeated often enough to reduce about TARGET_BYTES, within these limits.
TARGET_BYTES = 1 << 27
MIN_REPETITIONS = 8
MAX_REPETITIONS = 300
# Calls before the timed ones: the first one traces the graph.
WARMUP_REPETITIONS = 5

Action = Callable[[], object]


@dataclass
class Collectives:
    """Measurements of all-reduces, made in rounds.

    Attributes:
        num_ranks: Number of ranks, all on this host.
        transport: "mpi" or "gloo".
        threads: TensorFlow's threads for each rank.
        folder: Where the output of every process and the results go.
        sizes: Sizes of the messages in bytes.
        seconds: The slowest rank's time in each round, as seconds[method][size].
        workers: The module that each rank runs, by method; methods take turns.
    """

    num_ranks: int
    transport: str
    threads: int
    folder: Path
    sizes: tuple[int, ...]
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    workers: ClassVar[dict[str, str]] = {"hvtrain": WORKER}

    def run(self, num_rounds: int) -> None:
        """Measures all methods in turn, `num_rounds` times. Raises LostRankError if a process fails."""
        for number, order in in_turns(list(self.workers), num_rounds):
            for method in order:
                progress(f"round {number}/{num_rounds}  {method} ...")
                reports = self._measure(method, self.folder / f"round-{number}" / method)
                # The slowest rank's time counts: an all-reduce ends when it has ended on all ranks.
                by_size = self.seconds.setdefault(method, {})
                for size in reports[0]:
                    by_size.setdefault(size, []).append(max(report[size] for report in reports))

        progress("")

    def _measure(self, method: str, folder: Path) -> list[dict[str, float]]:
        """Runs all ranks of a method, and returns each rank's seconds by size.

        Creates the folder, which keeps the output and the reports.
        """
        folder.mkdir(parents=True)
        log = folder / "output.txt"
        launcher = [f"{sys.prefix}/bin/horovodrun", f"--{self.transport}"]
        worker = [sys.executable, "-m", self.workers[method], method, f"{folder}/report"]
        command = [*launcher, "-np", str(self.num_ranks), *worker, *map(str, self.sizes)]
        threads = dict.fromkeys(THREADS, str(self.threads))
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **threads}
        with started(command, log, environment=environment) as process:
            if not ends_within(process, SECONDS_PER_ROUND):
                end(process)

        if process.returncode:
            output = log.read_text(errors="replace")
            raise LostRankError(
                f"{method}: {failure(output, process.returncode)}; all output is in {log}"
            )
        return [json.loads(path.read_text()) for path in folder.glob("report.*")]

    def bus_bandwidth(self, method: str, size: int) -> float:
        """Returns the bus bandwidth in GB/s, from the median time of the rounds."""
        # Each rank has to send this many times the bytes; see the module's docstring.
        factor = 2 * (self.num_ranks - 1) / self.num_ranks
        return factor * size / self.microseconds(method, size) / 1e3

    def microseconds(self, method: str, size: int | str) -> float:
        """Returns the time in microseconds, the median over the rounds."""
        return 1e6 * median(self.seconds[method][str(size)])

    def table(self) -> list[str]:
        """Returns the lines to print, with medians over the rounds."""
        num_rounds = len(self.seconds["hvtrain"][str(self.sizes[0])])
        lines = [
            f"allreduce of float32 over {counted(self.num_ranks, 'rank')}, {self.transport}; "
            f"medians of {counted(num_rounds, 'round')}; half: in half precision; "
            "gather: gathered, not added",
            f"{'bytes':>8}{'us':>11}{'algorithm GB/s':>16}{'bus GB/s':>10}{'half us':>11}{'gather us':>11}",
        ]
        for size in self.sizes:
            microseconds = self.microseconds("hvtrain", size)
            lines.append(
                f"{human_bytes(size):>8}{microseconds:>11,.0f}{size / microseconds / 1e3:>16.2f}"
                f"{self.bus_bandwidth('hvtrain', size):>10.2f}"
                f"{self.microseconds('hvtrain', f'half-{size}'):>11,.0f}"
                f"{self.microseconds('hvtrain', f'gather-{size}'):>11,.0f}"
            )
        return lines


def main(collectives_class: type[Collectives] = Collectives) -> int:
    """Measures in rounds, prints a table, and writes allreduce.json."""
    exit_at_signals()
    parser = Parser(
        "python -m hvtrain allreduce",
        description="""\
Measures latency, algorithm bandwidth and bus bandwidth of an all-reduce over all ranks of this host, by size. Writes
allreduce.json, which plan --calibrate reads.""",
    )
    option = parser.add_argument
    option("--ranks", "-np", type=at_least(1), default=2, metavar="N", help="default: 2")
    option("--transport", choices=("mpi", "gloo"), default="mpi", help="default: mpi")
    add_number(parser, "--largest", at_least(1), "largest size", 256, "MIB")
    add_number(parser, "--rounds", at_least(1), "times that each size is measured", 7)
    option("--output", metavar="DIR", help="default: allreduce/DATE_TIME-TRANSPORT")
    options = parser.parse_args()
    # Ranks share the cores, as in a run.
    threads = cores_of_each(options.ranks)
    folder = Path(
        options.output or f"allreduce/{datetime.now():%Y-%m-%d_%H-%M-%S}-{options.transport}"
    ).absolute()
    # A small machine may not have memory for the largest buffers of all ranks.
    sizes = tuple(size for size in SIZES if size <= options.largest * MIB)
    collectives = collectives_class(options.ranks, options.transport, threads, folder, sizes)

    make_output(folder)
    collectives.run(options.rounds)
    results = {
        "num_ranks": options.ranks,
        "transport": options.transport,
        "seconds": collectives.seconds,
    }
    write_json(folder / "allreduce.json", results)
    print("\n" + "\n".join(collectives.table()))
    print(f"results in {folder}")
    return 0


@dataclass(frozen=True)
class Method:
    """A way to reduce tensors, which a rank measures.

    Attributes:
        rank: This process's rank.
        barrier: Waits for all ranks.
        make: Takes the lengths of float32 tensors; returns the action that reduces them.
    """

    rank: int
    barrier: Action
    make: Callable[[list[int]], Action]


def rank_main() -> None:
    """Measures as one rank, and writes the rank's report.

    The arguments are the method, the path of the report without the rank, and the sizes in bytes.
    """
    _, report_path, *sizes = sys.argv[1:]
    method = hvtrain_method()
    report = seconds_by_size(method, sizes) | seconds_by_kind(method, sizes)
    Path(f"{report_path}.{method.rank}").write_text(json.dumps(report))


def seconds_by_size(method: Method, sizes: Sequence[str]) -> dict[str, float]:
    """Returns the seconds to reduce one float32 tensor, by its size in bytes."""
    return {
        size: median_seconds(method, method.make([int(size) // 4]), int(size)) for size in sizes
    }


def median_seconds(method: Method, action: Action, num_bytes: int) -> float:
    """Returns the median duration of an action after a warm-up, in seconds.

    Args:
        method: The way to reduce, whose barrier is used.
        action: The action to time.
        num_bytes: The bytes that it moves, which decide how often it is repeated.
    """
    repetitions = max(MIN_REPETITIONS, min(MAX_REPETITIONS, TARGET_BYTES // num_bytes))

    times = []
    for repetition in range(WARMUP_REPETITIONS + repetitions):
        # Ranks drift apart, and a rank's time includes its wait for the others. Synchronizing every
        # 20 repetitions limits this drift, without a barrier before every measurement.
        if repetition % 20 == 0:
            method.barrier()
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)

    # The median ignores calls that were delayed by other work on the machine.
    return median(times[WARMUP_REPETITIONS:])


def hvtrain_method() -> Method:
    """Returns hvtrain's grouped all-reduce in a graph."""
    import tensorflow as tf

    import hvtrain.keras as hvd

    # Must come before TensorFlow initializes a device.
    hvd.init()
    hvd.pin_gpu()

    def make(lengths: list[int]) -> Action:
        tensors = [tf.ones([length]) for length in lengths]
        # Horovod matches tensors of different ranks by their names.
        name = f"bench_{lengths[0]}_{len(lengths)}"
        return tf.function(lambda: hvd.grouped_allreduce(tensors, op=hvd.Sum, name=name))

    return Method(hvd.rank(), lambda: hvd.allreduce(0.0, name="bench_wait"), make)


def seconds_by_kind(method: Method, sizes: Sequence[str]) -> dict[str, float]:
    """Returns the seconds of exchanges other than a float32 all-reduce, by kind and size: see Machine.exchanges.

    For all kinds, a rank sends as many bytes as in an all-reduce of a float32 tensor of this size.
    """
    import tensorflow as tf

    import hvtrain.keras as hvd
    from hvtrain.keras.wire_formats import swap

    def gather(num_bytes: int) -> Action:
        part = tf.ones([2 * num_bytes // hvd.size()], tf.uint8)
        return tf.function(lambda: hvd.allgather(part, name=f"bench_gather_{num_bytes}"))

    def swap_bytes(num_bytes: int) -> Action:
        part = tf.ones([num_bytes], tf.uint8)
        name = f"bench_bytes_{num_bytes}"
        return tf.function(lambda: swap(part, name, hvd.global_process_set))

    def add_halves(num_bytes: int) -> Action:
        # Like most gradients, too small for the normal range of half precision. Gloo adds such
        # numbers in software, and takes twice as long as for numbers near 1.
        halves = tf.cast(tf.random.normal([num_bytes // 2], stddev=1e-5), tf.float16)
        name = f"bench_half_{num_bytes}"
        return tf.function(lambda: hvd.allreduce(halves, op=hvd.Sum, name=name))

    kinds = {"gather": gather, "half": add_halves}
    if hvd.size() == 2:
        kinds["bytes"] = swap_bytes
    return {
        f"{kind}-{size}": median_seconds(method, make(int(size)), int(size))
        for kind, make in kinds.items()
        for size in sizes
    }


if __name__ == "__main__":
    rank_main()
