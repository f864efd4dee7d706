"""`bench steps` and `startup`: contenders take turns at one workload and are compared within each round."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.contenders import TRAIN
from benchmarks.workloads import Workload
from hvtrain.compare.rounds import Ratio, in_turns, progress, ratio
from hvtrain.errors import RankError
from hvtrain.plan.measurement import Contender, Measured, measure
from hvtrain.report.charts import BLUE, picture

# Relative. Contenders that do the same work differ only in the order of floating-point sums: less, in so few steps.
LOSS_TOLERANCE = 1e-3
NOISY = 0.02  # typical difference between two runs of the same contender
COMPARED = {"step_seconds": "step time", "first_step_seconds": "time to the first step"}


@dataclass
class Session:
    """All rounds of one workload. Its methods are called in the order run, write, plot, table.

    figure: the field of Measured that is compared. runs: by contender, one for each round. repeats: second runs of the
    first contender, one for each round; they show the noise.
    """

    workload: Workload
    data: str
    num_ranks: int
    threads: int
    contenders: Sequence[Contender]
    folder: Path
    steps: int
    figure: str = "step_seconds"
    epochs: int = 1
    runs: dict[str, list[Measured]] = field(default_factory=dict)
    repeats: list[Measured] = field(default_factory=list)

    def run(self, num_rounds: int) -> None:
        """Runs every contender once per round, and the first one twice.

        Raises LostRankError if a contender fails, RankError if contenders with the same work report different losses.
        """
        first = self.contenders[0]
        for number, order in in_turns(self.contenders, num_rounds):
            for contender in order:
                measured = self._once(contender, contender.name, number, num_rounds)
                self.runs.setdefault(contender.name, []).append(measured)
            self.repeats.append(self._once(first, f"{first.name} again", number, num_rounds))
            self.check_losses()

    def _once(self, contender: Contender, name: str, number: int, num_rounds: int) -> Measured:
        title, work = f"round {number}/{num_rounds}  {name}", self.workload
        progress(f"{title} ...")
        num_ranks = 1 if contender.is_one_rank else self.num_ranks
        words = work.words(contender.data or self.data, num_ranks, self.steps, self.epochs)
        folder = self.folder / f"round-{number}" / name.replace(" ", "-")
        steps = (work.warmup_steps, self.steps)
        measured = measure(contender, words, self.num_ranks, work.batch_size, steps, folder, self.threads)
        progress("")
        speed = f"{1000 * measured.step_seconds:9.2f} ms/step {measured.examples_per_second:12,.0f} examples/s"
        print(f"{title:<40} {speed}", flush=True)
        return measured

    def check_losses(self) -> None:
        """Raises RankError if contenders that do the same work ended the latest round with different losses."""
        same = [one for one in self.contenders if one.name in TRAIN and not (one.words or one.data)]
        for names in ([c.name for c in same if c.is_one_job], [c.name for c in same if c.is_one_rank]):
            losses = {name: self.runs[name][-1].loss for name in names}
            if losses and max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE * abs(min(losses.values())):
                listed = ", ".join(f"{name} {loss:.5f}" for name, loss in losses.items())
                raise RankError(f"the contenders' losses differ, so they do not do the same work: {listed}")

    def values(self, runs: Sequence[Measured]) -> list[float]:
        """The compared figure of each run."""
        return [getattr(run, self.figure) for run in runs]

    @property
    def noise(self) -> Ratio:
        """Ratio of the first contender's repeated runs to its first ones."""
        return ratio(self.values(self.repeats), self.values(self.runs[self.contenders[0].name]))

    def table(self) -> list[str]:
        """Lines to print: medians over the rounds, and the ratio of each contender's figure to the first one's."""
        work, first = self.workload, self.contenders[0].name
        width = max(14, *(len(contender.name) + 1 for contender in self.contenders))
        lines = [
            f"{work.name} ({work.about}), {self.data}, batch {work.batch_size} per rank, {self.num_ranks} ranks, "
            f"{self.threads} thread(s) per rank, {self.steps} steps, median of {len(self.repeats)} rounds",
            f"{'contender':<{width}}{'ms/step':>10}{'examples/s':>12}{'first step s':>14}{'peak MB':>9}{'loss':>9}  "
            f"{COMPARED[self.figure]} against {first}",
        ]
        for name, runs in self.runs.items():
            middle = Measured(*(median(getattr(run, key) for run in runs) for key in Measured.__dataclass_fields__))
            lines.append(
                f"{name:<{width}}{1000 * middle.step_seconds:>10.2f}{middle.examples_per_second:>12,.0f}"
                f"{middle.first_step_seconds:>14.1f}{middle.peak_bytes / 1e6:>9,.0f}{middle.loss:>9.4f}  "
                f"{ratio(self.values(runs), self.values(self.runs[first]))}"
            )
        twice = zip(self.values(self.repeats), self.values(self.runs[first]))
        spread = median(abs(repeat / once - 1) for repeat, once in twice)
        noisy = f"; more than {NOISY:.0%}: use it with care, or repeat on a quieter machine" if spread > NOISY else ""
        lines.append(f"noise: {first} against itself {self.noise}, typically {spread:.1%} off{noisy}")
        return lines

    def write(self) -> None:
        """Writes bench.json, with settings, noise and runs, and bench.csv, with one row per run."""
        rows = [
            {"contender": name, "round": number, **asdict(run)}
            for name, runs in {**self.runs, f"{self.contenders[0].name} again": self.repeats}.items()
            for number, run in enumerate(runs, 1)
        ]
        with (self.folder / "bench.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        settings = {name: getattr(self, name) for name in ("data", "num_ranks", "threads", "steps", "epochs")}
        summary = {"workload": asdict(self.workload), **settings, "noise": asdict(self.noise), "runs": rows}
        (self.folder / "bench.json").write_text(json.dumps(summary, indent=1))

    def plot(self) -> None:
        """Writes bench.png: examples/s of each contender, or seconds to the first step (bars: medians, dots: runs)."""
        shown = "examples_per_second" if self.figure == "step_seconds" else self.figure
        names, work = [contender.name for contender in reversed(self.contenders)], self.workload
        with picture(self.folder / "bench.png", 9, 1.2 + 0.45 * len(names)) as (_, axes):
            for place, name in enumerate(names):
                values = [getattr(run, shown) for run in self.runs[name]]
                axes.barh(place, median(values), color=BLUE if name.startswith("hvtrain") else "#b9c3cc", height=0.65)
                axes.plot(values, [place] * len(values), "o", color="#222222", markersize=3, alpha=0.7)
            axes.set_yticks(range(len(names)), names)
            what = "examples/s" if shown == "examples_per_second" else "seconds to the first step"
            axes.set_xlabel(f"{what} (bar: median)")
            about = f"{work.name}: {work.about}, {self.num_ranks} ranks, batch {work.batch_size} per rank"
            axes.set_title(about, loc="left")
