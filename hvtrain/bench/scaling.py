"""`bench scaling`: the runner on 1, 2, 4, ... ranks, with the same batch a rank (weak) or in all (strong).

Beside it as many one-rank jobs at once that never talk: what the machine gives to so many processes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from hvtrain.bench.contenders import CONTENDERS, Steps, measure
from hvtrain.bench.statistics import ratio
from hvtrain.bench.words import in_words, progress
from hvtrain.bench.workloads import Workload
from hvtrain.errors import ConfigError

RUNNER, APART = CONTENDERS["hvtrain-mpi"], CONTENDERS["independent"]


@dataclass
class Scaling:
    """All rounds. found["weak" | "strong" | "apart"][ranks] are images/s, one for each round.

    Raises:
        ConfigError: the global batch of the strong one cannot be divided.
    """

    workload: Workload
    data: str
    counts: Sequence[int]
    threads: int
    folder: Path
    steps: int
    found: dict[str, dict[int, list[float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        said = ",".join(map(str, self.counts))
        if len(set(self.counts)) < len(self.counts):
            raise ConfigError(f"--ranks {said} names a number twice")
        odd = [count for count in self.counts if self.global_batch % count]
        if odd:
            raise ConfigError(
                f"--ranks {said}: the global batch of {self.global_batch} cannot be dealt to {odd[0]} ranks evenly; "
                "leave that number out"
            )

    @property
    def global_batch(self) -> int:
        """Of the strong scaling, on any number of ranks: the largest of the weak one."""
        return self.workload.batch_size * max(self.counts)

    def run(self, num_rounds: int) -> None:
        """Every kind and number of ranks once a round, in turning order.

        Raises:
            LostRankError: one failed.
        """
        kinds = [(kind, count) for count in self.counts for kind in ("weak", "strong", "apart")]
        for number in range(num_rounds):
            for kind, count in kinds if number % 2 == 0 else reversed(kinds):
                progress(f"round {number + 1}/{num_rounds}  {kind}, {count} rank(s) ...")
                speed = self._once(kind, count, self.folder / f"round-{number + 1}" / f"{kind}-{count}")
                self.found.setdefault(kind, {}).setdefault(count, []).append(speed)
                progress("")
                print(
                    f"round {number + 1}/{num_rounds}  {kind:<7}{count:>4} rank(s) {speed:12,.0f} images/s", flush=True
                )

    def _once(self, kind: str, count: int, folder: Path) -> float:
        work = self.workload
        batch_size = self.global_batch // count if kind == "strong" else work.batch_size
        contender = APART if kind == "apart" else RUNNER
        total = (work.warmup_steps + self.steps) * batch_size * (1 if kind == "apart" else count)
        words = [
            f"train.batch_size={batch_size}"
            if word.startswith("train.batch_size=")
            else f"dataset.num_train={total}"
            if word.startswith("dataset.num_train=")
            else word
            for word in work.words(self.data, count, self.steps)
        ]
        steps = Steps(work.warmup_steps, self.steps)
        return measure(contender, words, count, batch_size, steps, folder, self.threads).images_per_second

    def table(self) -> list[str]:
        """In lines: medians over the rounds; efficiencies are ratios of the same round, with their intervals."""
        work, first = self.workload, self.counts[0]
        lines = [
            f"{work.name} ({work.about}), {self.data}, {self.threads} thread(s) a rank, batch {work.batch_size} a rank "
            f"(weak) or {self.global_batch} in all (strong), medians of {len(self.found['weak'][first])} rounds",
            f"{'ranks':>5}{'weak images/s':>15}{'strong images/s':>17}{'jobs apart':>12}  "
            f"{f'weak against {first} rank(s)':<32}{'weak against jobs apart':<32}",
        ]
        for count in self.counts:
            weak, strong, apart = (self.found[kind][count] for kind in ("weak", "strong", "apart"))
            efficiency = ratio([speed * first / count for speed in weak], self.found["weak"][first])
            lines.append(
                f"{count:>5}{median(weak):>15,.0f}{median(strong):>17,.0f}{median(apart):>12,.0f}  "
                f"{in_words(efficiency):<32}{in_words(ratio(weak, apart)):<32}".rstrip()
            )
        return lines

    def write(self) -> None:
        """scaling.json in the folder."""
        summary = {"workload": self.workload.name, "data": self.data, "threads": self.threads, "found": self.found}
        (self.folder / "scaling.json").write_text(json.dumps(summary, indent=1))
