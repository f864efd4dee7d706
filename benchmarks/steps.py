"""`benchmarks steps` and `startup`: contenders take turns at one workload and are compared within each round."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.contenders import TRAIN, Contender, Workload
from benchmarks.experiment import Experiment, plot_bars
from benchmarks.measure import Measured, measure
from hvtrain.compare.rounds import Ratio, ratio
from hvtrain.errors import RankError

# Relative. Contenders that do the same work differ only in the order of floating-point sums: less,
# in so few steps.
LOSS_TOLERANCE = 1e-3
NOISY = 0.02  # typical difference between two runs of the same contender
COMPARED = {"step_seconds": "step time", "first_step_seconds": "time to the first step"}


@dataclass
class Steps(Experiment[str, Measured]):
    """All rounds of one workload. Its cases are names of contenders.

    The first contender runs once more at the end of each round, as "NAME again": its ratio to
    itself is the noise.

    Attributes:
        workload: What all contenders train.
        data: synthetic or fashion_mnist.
        num_ranks: Processes of each contender.
        contenders: What is compared.
        steps: Timed steps.
        figure: The field of Measured that is compared.
        epochs: Epochs of all steps.
    """

    workload: Workload
    data: str
    num_ranks: int
    contenders: Sequence[Contender]
    steps: int
    figure: str = "step_seconds"
    epochs: int = 1

    def cases(self) -> list[str]:
        return [contender.name for contender in self.contenders]

    @property
    def first(self) -> str:
        return self.contenders[0].name

    @property
    def again(self) -> str:
        return f"{self.first} again"

    def measure(self, case: str, folder: Path) -> Measured:
        name = case.removesuffix(" again")
        contender = next(contender for contender in self.contenders if contender.name == name)
        work = self.workload
        num_ranks = 1 if contender.is_one_rank else self.num_ranks

        return measure(
            contender,
            work.overrides(contender.data or self.data, num_ranks, self.steps, self.epochs),
            self.num_ranks,
            work.batch_size,
            (work.warmup_steps, self.steps),
            folder,
            self.threads,
        )

    def describe(self, result: Measured) -> str:
        return f"{1000 * result.step_seconds:9.2f} ms/step {result.examples_per_second:12,.0f} examples/s"

    def end_round(self, number: int, num_rounds: int) -> None:
        self.measure_and_print(self.again, number, num_rounds)
        self.check_losses()

    def check_losses(self) -> None:
        """Raises RankError if contenders that do the same work ended the latest round with different losses."""
        # Settings or data of its own may change the work.
        same_work = [
            contender
            for contender in self.contenders
            if contender.name in TRAIN and not (contender.overrides or contender.data)
        ]
        joint = [contender.name for contender in same_work if contender.is_one_job]
        alone = [contender.name for contender in same_work if contender.is_one_rank]

        for names in (joint, alone):
            losses = {name: self.results[name][-1].loss for name in names}
            if losses and max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE * abs(min(losses.values())):
                shown = ", ".join(f"{name} {loss:.5f}" for name, loss in losses.items())
                raise RankError(f"the contenders' losses differ, so they do not do the same work: {shown}")

    def values(self, case: str) -> list[float]:
        """The compared figure of each run."""
        return [getattr(run, self.figure) for run in self.results[case]]

    @property
    def noise(self) -> Ratio:
        """Ratio of the first contender's repeated runs to its first ones."""
        return ratio(self.values(self.again), self.values(self.first))

    def table(self) -> list[str]:
        """Lines to print: medians over the rounds, and the ratio of each contender's figure to the first one's."""
        work = self.workload
        names = self.cases()
        width = max(14, *(len(name) + 1 for name in names))

        lines = [
            f"{work.name} ({work.about}), {self.data}, batch {work.batch_size} per rank, {self.num_ranks} ranks, "
            f"{self.threads} thread(s) per rank, {self.steps} steps, median of {len(self.results[self.again])} rounds",
            f"{'contender':<{width}}{'ms/step':>10}{'examples/s':>12}{'first step s':>14}{'peak MB':>9}{'loss':>9}  "
            f"{COMPARED[self.figure]} against {self.first}",
        ]
        for name in names:
            runs = self.results[name]
            middle = Measured(*(median(getattr(run, key) for run in runs) for key in Measured.__dataclass_fields__))
            lines.append(
                f"{name:<{width}}{1000 * middle.step_seconds:>10.2f}{middle.examples_per_second:>12,.0f}"
                f"{middle.first_step_seconds:>14.1f}{middle.peak_bytes / 1e6:>9,.0f}{middle.loss:>9.4f}  "
                f"{ratio(self.values(name), self.values(self.first))}"
            )

        # The first contender against itself, in the same round.
        pairs = zip(self.values(self.again), self.values(self.first))
        spread = median(abs(repeat / once - 1) for repeat, once in pairs)
        noisy = ""
        if spread > NOISY:
            noisy = f"; more than {NOISY:.0%}: use it with care, or repeat on a quieter machine"

        lines.append(f"noise: {self.first} against itself {self.noise}, typically {spread:.1%} off{noisy}")
        return lines

    def write(self) -> None:
        """Writes bench.json, with settings, noise and runs, and bench.csv, with one row per run."""
        rows = [
            {"contender": name, "round": number, **asdict(run)}
            for name in (*self.cases(), self.again)
            for number, run in enumerate(self.results[name], 1)
        ]

        with (self.folder / "bench.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

        settings = {name: getattr(self, name) for name in ("data", "num_ranks", "threads", "steps", "epochs")}
        summary = {
            "workload": asdict(self.workload),
            **settings,
            "noise": asdict(self.noise),
            "runs": rows,
        }
        (self.folder / "bench.json").write_text(json.dumps(summary, indent=1))

    def plot(self) -> None:
        """Writes bench.png: examples/s of each contender, or seconds to the first step."""
        figure = self.figure
        label = "seconds to the first step"
        if figure == "step_seconds":
            figure = "examples_per_second"
            label = "examples/s"

        values = {name: [getattr(run, figure) for run in self.results[name]] for name in self.cases()}
        work = self.workload
        title = f"{work.name}: {work.about}, {self.num_ranks} ranks, batch {work.batch_size} per rank"
        plot_bars(self.folder / "bench.png", values, label, title)
