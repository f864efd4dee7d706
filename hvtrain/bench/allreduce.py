"""`bench allreduce`: latency and bandwidth of a reduction over all ranks, against MPI's own and against a copy.

Bandwidths are those that nccl-tests define (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): the algorithm's is
bytes / time, and the bus bandwidth is that times 2 (n - 1) / n, the share that each of n ranks has to send.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from hvtrain.bench.processes import launch_and_report
from hvtrain.bench.statistics import Ratio, ratio
from hvtrain.bench.words import human_bytes, in_words, progress

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4, 256, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 128 * MIB, 256 * MIB)
WORKER = "hvtrain.bench.by_hand.allreduce_worker"
# Where mpi4py's own transport is what the ranks use.
MEANS = {"mpi": ("hvtrain", "mpi4py", "memcpy"), "gloo": ("hvtrain",)}


@dataclass
class Collectives:
    """All rounds. found[means][size] are seconds, one for each round, of the slowest rank."""

    num_ranks: int
    transport: str
    threads: int
    folder: Path
    sizes: tuple[int, ...] = SIZES
    found: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def run(self, num_rounds: int) -> None:
        """Every means once a round, in turning order.

        Raises:
            LostRankError: one failed.
        """
        for number in range(num_rounds):
            means = MEANS[self.transport]
            for name in means if number % 2 == 0 else reversed(means):
                progress(f"round {number + 1}/{num_rounds}  {name} ...")
                words = [name, *map(str, self.sizes)]
                folder = self.folder / f"round-{number + 1}" / name
                reports = launch_and_report(
                    f"horovodrun-{self.transport}", WORKER, words, self.num_ranks, folder, self.threads
                )
                for size in reports[0]:
                    slowest = max(report[size] for report in reports)
                    self.found.setdefault(name, {}).setdefault(size, []).append(slowest)
        progress("")

    def bus_bandwidth(self, means: str, size: int) -> list[float]:
        """GB/s, by round."""
        factor = 2 * (self.num_ranks - 1) / self.num_ranks
        return [size * factor / seconds / 1e9 for seconds in self.found[means][str(size)]]

    def goals(self) -> list[tuple[str, Ratio, str]]:
        """What is held to, the ratio found, and whether it holds."""
        ours = self.found["hvtrain"]
        judged = []
        if "mpi4py" in self.found:
            for size in self.sizes:
                if 4 * MIB <= size <= 128 * MIB:
                    found = ratio(self.bus_bandwidth("hvtrain", size), self.bus_bandwidth("mpi4py", size))
                    name = f"bus bandwidth at {human_bytes(size)}, hvtrain / mpi4py >= 0.95"
                    judged.append((name, found, found.verdict(0.95, smaller_is_better=False)))
            if 4 * KIB in self.sizes:
                found = ratio(ours[str(4 * KIB)], self.found["mpi4py"][str(4 * KIB)])
                judged.append(("latency at 4 KiB, hvtrain / mpi4py <= 3", found, found.verdict(3.0)))
        if 4 * KIB in self.sizes:
            found = ratio([1000 * seconds for seconds in ours[str(4 * KIB)]], [1.0] * len(ours[str(4 * KIB)]))
            judged.append(("latency at 4 KiB in ms <= 0.3", found, found.verdict(0.3)))
        found = ratio(ours["whole"], ours["small"])
        judged.append(
            ("bandwidth of 160 small tensors / one >= 0.85", found, found.verdict(0.85, smaller_is_better=False))
        )
        return judged

    def table(self) -> list[str]:
        """In lines: medians over the rounds."""
        rounds = len(self.found["hvtrain"]["small"])
        lines = [
            f"allreduce of float32 over {self.num_ranks} ranks, {self.transport}; medians of {rounds} rounds",
            f"{'bytes':>8}{'us':>11}{'algorithm GB/s':>16}{'bus GB/s':>10}"
            + (f"{'mpi4py us':>11}{'bus GB/s':>10}{'copy GB/s':>11}" if "mpi4py" in self.found else ""),
        ]
        for size in self.sizes:
            seconds = median(self.found["hvtrain"][str(size)])
            bus = median(self.bus_bandwidth("hvtrain", size))
            line = f"{human_bytes(size):>8}{1e6 * seconds:>11,.0f}{size / seconds / 1e9:>16.2f}{bus:>10.2f}"
            if "mpi4py" in self.found:
                theirs = median(self.found["mpi4py"][str(size)])
                copied = size / median(self.found["memcpy"][str(size)]) / 1e9
                line += f"{1e6 * theirs:>11,.0f}{median(self.bus_bandwidth('mpi4py', size)):>10.2f}{copied:>11.2f}"
            lines.append(line)
        lines.append(f"of hvtrain's us, {1e6 * median(self.found['hvtrain']['call']):,.0f} are the graph's call")
        return lines + [f"goal: {name}: {in_words(found)}, {verdict}" for name, found, verdict in self.goals()]

    def write(self) -> None:
        """allreduce.json in the folder."""
        summary = {
            "num_ranks": self.num_ranks,
            "transport": self.transport,
            "seconds": self.found,
            "goals": [{"goal": name, "found": vars(found), "verdict": said} for name, found, said in self.goals()],
        }
        (self.folder / "allreduce.json").write_text(json.dumps(summary, indent=1))
