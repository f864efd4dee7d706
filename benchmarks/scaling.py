"""`benchmarks scaling`: the runner on 1, 2, 4, ... ranks, with the same batch per rank (weak) or in all (strong).

As many independent one-rank jobs are timed beside it: what the machine gives to so many processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from benchmarks.contenders import CONTENDERS, Workload
from benchmarks.experiment import Case, Experiment
from benchmarks.measure import measure
from hvtrain.errors import ConfigError
from hvtrain.report.charts import BLUE, GREY, ORANGE, write_panels
from hvtrain.report.ratios import Ratio, ratio

KINDS = ("weak", "strong", "apart")


@dataclass
class Scaling(Experiment):
    """Weak and strong scaling. A case is a kind and a number of ranks.

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

    name = "scaling"
    keys = ("kind", "ranks")
    columns: ClassVar = {"examples/s": ("examples_per_second", 1.0, ",.0f")}

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

    def measure(self, case: Case, folder: Path) -> dict[str, float]:
        kind, count = case
        work = self.workload
        contender = CONTENDERS["independent" if kind == "apart" else "hvtrain-mpi"]
        if kind == "strong":
            work = replace(work, batch_size=self.global_batch // count)
        return measure(contender, work, self.data, count, self.steps, folder, self.threads)

    def speeds(self, kind: str, count: int) -> list[float]:
        """Examples/s by round."""
        return self.values((kind, count), "examples_per_second")

    def ratios(self, case: Case) -> dict[str, Ratio]:
        kind, count = case
        first = self.counts[0]
        speeds = self.speeds(kind, count)
        return {
            # Examples/s of one rank here / of one rank of the smallest number.
            f"each rank against {first} rank(s)": ratio(
                [speed * first / count for speed in speeds], self.speeds(kind, first)
            ),
            "against jobs apart": ratio(speeds, self.speeds("apart", count)),
        }

    def about(self) -> str:
        work = self.workload
        return (
            f"{work.name} ({work.about}), {self.data}, {self.threads} thread(s) per rank, batch {work.batch_size} per "
            f"rank (weak) or {self.global_batch} in all (strong)"
        )

    def plot(self) -> None:
        """Draws examples/s by ranks, beside the line through one rank and independent jobs."""
        first = self.counts[0]
        ideal = median(self.speeds("weak", first)) / first

        styles = {
            "apart": ("jobs that never talk", GREY),
            "weak": ("hvtrain, weak", BLUE),
            "strong": ("hvtrain, strong", ORANGE),
        }

        def draw(axes: Any) -> None:
            axes.plot(
                self.counts,
                [ideal * count for count in self.counts],
                "--",
                color=GREY,
                label="linear",
            )
            for kind, (label, color) in styles.items():
                speeds = [median(self.speeds(kind, count)) for count in self.counts]
                axes.plot(self.counts, speeds, "o-", color=color, label=label)

            axes.set_xticks(self.counts, [str(count) for count in self.counts])
            axes.set_ylim(bottom=0)
            axes.set(xlabel="ranks", ylabel="examples/s")
            axes.legend(frameon=False)

        title = f"{self.workload.name}: {self.workload.about}"
        write_panels([(title, draw)], self.folder / "bench.png", 1, (7, 4.5))
