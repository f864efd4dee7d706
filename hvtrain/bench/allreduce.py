"""`bench allreduce`: latency and bandwidth of an all-reduce over all ranks, beside MPI's own and a copy in memory.

Bandwidths are defined as in nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): algorithm bandwidth is
bytes / time, and bus bandwidth is that times 2 (n - 1) / n, the share that each of n ranks has to send.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from hvtrain.bench.processes import launch_and_report
from hvtrain.bench.rounds import BLUE, GREY, ORANGE, in_turns, picture, progress, ratio
from hvtrain.doctor.rows import human_bytes

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4, 256, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 128 * MIB, 256 * MIB)
WORKER = "hvtrain.bench.by_hand.allreduce_worker"
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
