"""`python -m hvtrain allreduce`: latency and bandwidth by size, beside those of MPI's own and of a copy in memory.

Bandwidths are defined as in nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): algorithm bandwidth is
bytes / time, and bus bandwidth is that times 2 (n - 1) / n, the share that each of n ranks has to send.
"""

import json
import os
import signal
import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median

from hvtrain.compare.rounds import in_turns, progress, ratio
from hvtrain.plan.processes import launch_and_report
from hvtrain.report.charts import BLUE, GREY, ORANGE, picture
from hvtrain.system.command import Parser, at_least, make_output
from hvtrain.system.text import human_bytes

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4, 256, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 128 * MIB, 256 * MIB)
WORKER = "hvtrain.plan.allreduce_worker"
# mpi4py is compared only with ranks that use MPI too.
MEANS = {"mpi": ("hvtrain", "mpi4py", "memcpy"), "gloo": ("hvtrain",)}


@dataclass
class Collectives:
    """A session. found[means][size] are seconds of the slowest rank, one value for each round."""

    num_ranks: int
    transport: str
    threads: int
    folder: Path
    sizes: tuple[int, ...] = SIZES
    found: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def run(self, num_rounds: int) -> None:
        """Measures all means in turns. Raises LostRankError if a process fails."""
        for number, order in in_turns(MEANS[self.transport], num_rounds):
            for name in order:
                progress(f"round {number}/{num_rounds}  {name} ...")
                words, folder = [name, *map(str, self.sizes)], self.folder / f"round-{number}" / name
                way = f"horovodrun-{self.transport}"
                reports = launch_and_report(way, WORKER, words, self.num_ranks, folder, self.threads, {})
                for size in reports[0]:
                    slowest = max(report[size] for report in reports)
                    self.found.setdefault(name, {}).setdefault(size, []).append(slowest)
        progress("")

    def bus_bandwidth(self, means: str, size: int) -> list[float]:
        """GB/s in each round."""
        factor = 2 * (self.num_ranks - 1) / self.num_ranks
        return [size * factor / seconds / 1e9 for seconds in self.found[means][str(size)]]

    def table(self) -> list[str]:
        """Lines to print: medians over the rounds."""
        ours, theirs = self.found["hvtrain"], self.found.get("mpi4py")
        lines = [
            f"allreduce of float32 over {self.num_ranks} ranks, {self.transport}; medians of "
            f"{len(ours['small'])} rounds",
            f"{'bytes':>8}{'us':>11}{'algorithm GB/s':>16}{'bus GB/s':>10}"
            + (f"{'mpi4py us':>11}{'bus GB/s':>10}{'copy GB/s':>11}  bandwidth / mpi4py's" if theirs else ""),
        ]
        for size in self.sizes:
            seconds = median(ours[str(size)])
            bus = median(self.bus_bandwidth("hvtrain", size))
            line = f"{human_bytes(size):>8}{1e6 * seconds:>11,.0f}{size / seconds / 1e9:>16.2f}{bus:>10.2f}"
            if theirs:
                copied = size / median(self.found["memcpy"][str(size)]) / 1e9
                line += f"{1e6 * median(theirs[str(size)]):>11,.0f}{median(self.bus_bandwidth('mpi4py', size)):>10.2f}"
                line += f"{copied:>11.2f}  {ratio(theirs[str(size)], ours[str(size)])}"
            lines.append(line)
        call, small, whole = (1e6 * median(ours[name]) for name in ("call", "small", "whole"))
        return [
            *lines,
            f"{call:,.0f} us of hvtrain's times are the call of a graph that reduces nothing",
            f"160 tensors of 64 KiB: {small:,.0f} us, one tensor of 10 MiB: {whole:,.0f} us; "
            f"bandwidth / that of one tensor {ratio(ours['whole'], ours['small'])}",
        ]

    def write(self) -> None:
        """Writes allreduce.json in the folder."""
        summary = {"num_ranks": self.num_ranks, "transport": self.transport, "seconds": self.found}
        (self.folder / "allreduce.json").write_text(json.dumps(summary, indent=1))

    def plot(self) -> None:
        """Time and bus bandwidth by size, for each means."""
        marks = {"hvtrain": (BLUE, "o"), "mpi4py": (ORANGE, "s"), "memcpy": (GREY, "^")}
        with picture(self.folder / "bench.png", 11, 4.2, columns=2) as (_, (left, right)):
            for means, by_size in self.found.items():
                colour, mark = marks[means]
                micros = [1e6 * median(by_size[str(size)]) for size in self.sizes]
                label = {"hvtrain": f"hvtrain, {self.transport}", "memcpy": "a copy"}.get(means, means)
                left.loglog(self.sizes, micros, mark + "-", color=colour, label=label)
                rates = [median(self.bus_bandwidth(means, size)) for size in self.sizes]
                right.semilogx(self.sizes, rates, mark + "-", color=colour, label=label)
            for axes, title in ((left, "time, µs"), (right, "bus bandwidth, GB/s")):
                axes.set_title(title, loc="left")
                axes.set_xticks(self.sizes[::2], [human_bytes(size) for size in self.sizes[::2]], rotation=30)
                axes.minorticks_off()
                axes.legend(frameon=False)


def main() -> int:
    """Measures in rounds, prints a table, and writes allreduce.json and a picture."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the processes that it started end too.
    options = _parser().parse_args(sys.argv[1:])
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // options.ranks)
    started = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path(options.output or f"allreduce/{started}-{options.transport}").absolute()
    sizes = tuple(size for size in SIZES if size <= options.largest * MIB)
    session = Collectives(options.ranks, options.transport, threads, folder, sizes)
    make_output(folder)
    session.run(options.rounds)
    session.write()
    session.plot()
    print("\n" + "\n".join(session.table()))
    print(f"results in {folder}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        "python -m hvtrain allreduce",
        description="""\
Latency, algorithm bandwidth and bus bandwidth of an all-reduce over all ranks of this host, by size. Over MPI, mpi4py's
all-reduce and a copy in memory take turns with it. Writes allreduce.json, which plan --calibrate reads.""",
    )
    option = parser.add_argument
    option("--ranks", "-np", type=at_least(1), default=2, metavar="N", help="default: 2")
    option("--transport", choices=MEANS, default="mpi", help="default: mpi")
    option("--largest", type=at_least(1), default=256, metavar="MIB", help="largest size; default: 256")
    option("--rounds", type=at_least(1), default=7, metavar="N", help="default: 7")
    option("--threads", type=at_least(1), metavar="N", help="TensorFlow's threads of a rank; default: cores / ranks")
    option("--output", metavar="DIR", help="default: allreduce/DATE_TIME-TRANSPORT")
    return parser
