"""`benchmarks scaling`: the runner on 1, 2, 4, ... ranks, with the same batch per rank (weak) or in all (strong).

As many independent one-rank jobs are timed beside it: what the machine gives to so many processes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.contenders import CONTENDERS, Workload
from benchmarks.experiment import Experiment
from benchmarks.measure import measure
from hvtrain.compare.rounds import ratio
from hvtrain.errors import ConfigError
from hvtrain.report.charts import BLUE, GREY, ORANGE, picture

KINDS = ("weak", "strong", "apart")
Case = tuple[str, int]


@dataclass
class Scaling(Experiment[Case, float]):
    """Weak and strong scaling. A case is a kind and a number of ranks; a result is in examples/s.

    Attributes:
        workload: Its batch is that of the weak scaling.
        data: synthetic or fashion_mnist.
        counts: Numbers of ranks.
        steps: Timed steps.

    Raises:
        ConfigError: A number comes twice, or the strong scaling's global batch cannot be divided.
    """

    workload: Workload
    data: str
    counts: Sequence[int]
    steps: int

    def __post_init__(self) -> None:
        option = f"--ranks {','.join(map(str, self.counts))}"
        if len(set(self.counts)) < len(self.counts):
            raise ConfigError(f"{option} names a number twice")

        for count in self.counts:
            if self.global_batch % count:
                raise ConfigError(
                    f"{option}: the global batch of {self.global_batch} cannot be divided evenly among "
                    f"{count} ranks; leave that number out"
                )

    @property
    def global_batch(self) -> int:
        """Global batch of the strong scaling on any number of ranks: the largest of the weak scaling."""
        return self.workload.batch_size * max(self.counts)

    def cases(self) -> list[Case]:
        return [(kind, count) for count in self.counts for kind in KINDS]

    def name(self, case: Case) -> str:
        kind, count = case
        return f"{kind}-{count}"

    def measure(self, case: Case, folder: Path) -> float:
        kind, count = case
        work = self.workload
        contender = CONTENDERS["hvtrain-mpi"]
        num_ranks = count
        if kind == "strong":
            work = replace(work, batch_size=self.global_batch // count)
        if kind == "apart":
            # Each job has the data set of one rank.
            contender = CONTENDERS["independent"]
            num_ranks = 1

        return measure(
            contender,
            work.overrides(self.data, num_ranks, self.steps),
            count,
            work.batch_size,
            (work.warmup_steps, self.steps),
            folder,
            self.threads,
        ).examples_per_second

    def describe(self, result: float) -> str:
        return f"{result:12,.0f} examples/s"

    def table(self) -> list[str]:
        """Lines to print: medians over the rounds, and efficiencies as ratios with their intervals."""
        work = self.workload
        first = self.counts[0]
        first_weak = self.results["weak", first]

        lines = [
            f"{work.name} ({work.about}), {self.data}, {self.threads} thread(s) per rank, batch {work.batch_size} per "
            f"rank (weak) or {self.global_batch} in all (strong), medians of {len(first_weak)} rounds",
            f"{'ranks':>5}{'weak examples/s':>17}{'strong examples/s':>19}{'jobs apart':>12}  "
            f"{f'weak against {first} rank(s)':<32}{'weak against jobs apart':<32}",
        ]
        for count in self.counts:
            weak, strong, apart = (self.results[kind, count] for kind in KINDS)
            # Examples/s of one rank here / of one rank of the smallest number.
            efficiency = ratio([speed * first / count for speed in weak], first_weak)
            lines.append(
                f"{count:>5}{median(weak):>17,.0f}{median(strong):>19,.0f}{median(apart):>12,.0f}  "
                f"{efficiency!s:<32}{ratio(weak, apart)!s:<32}".rstrip()
            )

        return lines

    def write(self) -> None:
        """Writes scaling.json in the folder."""
        by_kind = {kind: {count: self.results[kind, count] for count in self.counts} for kind in KINDS}

        summary = {
            "workload": self.workload.name,
            "data": self.data,
            "threads": self.threads,
            "found": by_kind,
        }
        (self.folder / "scaling.json").write_text(json.dumps(summary, indent=1))

    def plot(self) -> None:
        """Draws examples/s by ranks, beside the line through one rank and independent jobs."""
        first = self.counts[0]
        ideal = median(self.results["weak", first]) / first

        styles = {
            "apart": ("jobs that never talk", GREY),
            "weak": ("hvtrain, weak", BLUE),
            "strong": ("hvtrain, strong", ORANGE),
        }
        with picture(self.folder / "bench.png", 7, 4.5) as (_, axes):
            axes.plot(
                self.counts,
                [ideal * count for count in self.counts],
                "--",
                color=GREY,
                label="linear",
            )
            for kind, (label, color) in styles.items():
                speeds = [median(self.results[kind, count]) for count in self.counts]
                axes.plot(self.counts, speeds, "o-", color=color, label=label)

            axes.set_xticks(self.counts, [str(count) for count in self.counts])
            axes.set_ylim(bottom=0)
            axes.set(xlabel="ranks", ylabel="examples/s")
            axes.set_title(f"{self.workload.name}: {self.workload.about}", loc="left")
            axes.legend(frameon=False)
