"""`bench scaling`: the runner on 1, 2, 4, ... ranks, with the same batch per rank (weak) or in all (strong).

As many independent one-rank jobs are timed beside it: what the machine gives to so many processes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from benchmarks.contenders import CONTENDERS
from benchmarks.workloads import Workload
from hvtrain.compare.rounds import in_turns, progress, ratio
from hvtrain.errors import ConfigError
from hvtrain.plan.measurement import measure
from hvtrain.report.charts import BLUE, GREY, ORANGE, picture

RUNNER, APART = CONTENDERS["hvtrain-mpi"], CONTENDERS["independent"]


@dataclass
class Scaling:
    """A session. found["weak" | "strong" | "apart"][ranks] are examples/s, one value for each round.

    Raises ConfigError if the strong scaling's global batch cannot be divided.
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
        if odd := [count for count in self.counts if self.global_batch % count]:
            found = f"the global batch of {self.global_batch} cannot be divided evenly among {odd[0]} ranks"
            raise ConfigError(f"--ranks {said}: {found}; leave that number out")

    @property
    def global_batch(self) -> int:
        """Global batch of the strong scaling on any number of ranks: the largest of the weak scaling."""
        return self.workload.batch_size * max(self.counts)

    def run(self, num_rounds: int) -> None:
        """Measures every kind and number of ranks in turns. Raises LostRankError if a process fails."""
        kinds = [(kind, count) for count in self.counts for kind in ("weak", "strong", "apart")]
        for number, order in in_turns(kinds, num_rounds):
            for kind, count in order:
                title = f"round {number}/{num_rounds}  {kind:<7}{count:>4} rank(s)"
                progress(f"{title} ...")
                speed = self._once(kind, count, self.folder / f"round-{number}" / f"{kind}-{count}")
                self.found.setdefault(kind, {}).setdefault(count, []).append(speed)
                progress("")
                print(f"{title} {speed:12,.0f} examples/s", flush=True)

    def _once(self, kind: str, count: int, folder: Path) -> float:
        batch_size = self.global_batch // count if kind == "strong" else self.workload.batch_size
        work = replace(self.workload, batch_size=batch_size)
        words = work.words(self.data, 1 if kind == "apart" else count, self.steps)
        steps, contender = (work.warmup_steps, self.steps), APART if kind == "apart" else RUNNER
        return measure(contender, words, count, work.batch_size, steps, folder, self.threads).examples_per_second

    def table(self) -> list[str]:
        """Lines to print: medians over the rounds, and efficiencies as ratios with their intervals."""
        work, first = self.workload, self.counts[0]
        lines = [
            f"{work.name} ({work.about}), {self.data}, {self.threads} thread(s) per rank, batch {work.batch_size} per "
            f"rank (weak) or {self.global_batch} in all (strong), medians of {len(self.found['weak'][first])} rounds",
            f"{'ranks':>5}{'weak examples/s':>17}{'strong examples/s':>19}{'jobs apart':>12}  "
            f"{f'weak against {first} rank(s)':<32}{'weak against jobs apart':<32}",
        ]
        for count in self.counts:
            weak, strong, apart = (self.found[kind][count] for kind in ("weak", "strong", "apart"))
            efficiency = ratio([speed * first / count for speed in weak], self.found["weak"][first])
            lines.append(
                f"{count:>5}{median(weak):>17,.0f}{median(strong):>19,.0f}{median(apart):>12,.0f}  "
                f"{efficiency!s:<32}{ratio(weak, apart)!s:<32}".rstrip()
            )
        return lines

    def write(self) -> None:
        """Writes scaling.json in the folder."""
        summary = {"workload": self.workload.name, "data": self.data, "threads": self.threads, "found": self.found}
        (self.folder / "scaling.json").write_text(json.dumps(summary, indent=1))

    def plot(self) -> None:
        """Images per second by ranks, beside the line through one rank and independent jobs."""
        first = self.counts[0]
        ideal = median(self.found["weak"][first]) / first
        kinds = {
            "apart": ("jobs that never talk", GREY),
            "weak": ("hvtrain, weak", BLUE),
            "strong": ("hvtrain, strong", ORANGE),
        }
        with picture(self.folder / "bench.png", 7, 4.5) as (_, axes):
            axes.plot(self.counts, [ideal * count for count in self.counts], "--", color=GREY, label="linear")
            for kind, (label, colour) in kinds.items():
                middle = [median(self.found[kind][count]) for count in self.counts]
                axes.plot(self.counts, middle, "o-", color=colour, label=label)
            axes.set_xticks(self.counts, [str(count) for count in self.counts])
            axes.set_ylim(bottom=0)
            axes.set(xlabel="ranks", ylabel="examples/s")
            axes.set_title(f"{self.workload.name}: {self.workload.about}", loc="left")
            axes.legend(frameon=False)
