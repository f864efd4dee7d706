"""`benchmarks steps` and `startup`: contenders take turns at one workload and are compared within each round."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import ClassVar

from benchmarks.contenders import TRAIN, Contender, Workload
from benchmarks.experiment import Case, Experiment
from benchmarks.measure import measure
from hvtrain.errors import RankError
from hvtrain.report.ratios import Ratio, ratio

# Relative. Contenders that do the same work differ only in the order of floating-point sums: less,
# in so few steps.
LOSS_TOLERANCE = 1e-3
NOISY = 0.02  # typical difference between two runs of the same contender
COMPARED = {"step_seconds": "step time", "first_step_seconds": "time to the first step"}


@dataclass
class Steps(Experiment):
    """All rounds of one workload, by contenders.

    The first contender runs once more in each round, as "NAME again": its ratio to itself is the noise.

    Attributes:
        workload: What all contenders train.
        data: synthetic or fashion_mnist.
        num_ranks: Processes of each contender.
        contenders: What is compared.
        steps: Timed steps.
        figure: The one that is compared: a key of COMPARED.
        epochs: Epochs of all steps.
    """

    workload: Workload
    data: str
    num_ranks: int
    contenders: Sequence[Contender]
    steps: int
    figure: str = "step_seconds"
    epochs: int = 1

    name = "bench"
    keys = ("contender",)
    columns: ClassVar = {
        "ms/step": ("step_seconds", 1e3, ",.2f"),
        "examples/s": ("examples_per_second", 1.0, ",.0f"),
        "first step s": ("first_step_seconds", 1.0, ".1f"),
        "peak MB": ("peak_bytes", 1e-6, ",.0f"),
        "loss": ("loss", 1.0, ".4f"),
    }

    def cases(self) -> list[Case]:
        names = [contender.name for contender in self.contenders]
        return [(name,) for name in (*names, self.again)]

    @property
    def first(self) -> str:
        return self.contenders[0].name

    @property
    def again(self) -> str:
        return f"{self.first} again"

    def measure(self, case: Case, folder: Path) -> dict[str, float]:
        name = case[0].removesuffix(" again")
        contender = next(contender for contender in self.contenders if contender.name == name)
        return measure(
            contender,
            self.workload,
            self.data,
            self.num_ranks,
            self.steps,
            folder,
            self.threads,
            self.epochs,
        )

    def check_round(self) -> None:
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
            losses = {name: self.of(name, "loss")[-1] for name in names}
            if losses and max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE * abs(
                min(losses.values())
            ):
                shown = ", ".join(f"{name} {loss:.5f}" for name, loss in losses.items())
                raise RankError(
                    f"the contenders' losses differ, so they do not do the same work: {shown}"
                )

    def of(self, name: str, figure: str | None = None) -> list[float]:
        """A figure of a contender, by round; default: the compared one."""
        return self.values((name,), figure or self.figure)

    def ratios(self, case: Case) -> dict[str, Ratio]:
        (name,) = case
        return {
            f"{COMPARED[self.figure]} against {self.first}": ratio(
                self.of(name), self.of(self.first)
            )
        }

    def about(self) -> str:
        work = self.workload
        return (
            f"{work.name} ({work.about}), {self.data}, batch {work.batch_size} per rank, {self.num_ranks} ranks, "
            f"{self.threads} thread(s) per rank, {self.steps} steps"
        )

    def table(self) -> list[str]:
        # The first contender against itself, in the same round.
        pairs = zip(self.of(self.again), self.of(self.first))
        spread = median(abs(repeat / once - 1) for repeat, once in pairs)
        noisy = ""
        if spread > NOISY:
            noisy = f"; more than {NOISY:.0%}: use it with care, or repeat on a quieter machine"

        return [
            *super().table(),
            f"noise: {self.first} against itself is typically {spread:.1%} off{noisy}",
        ]

    def bars(self) -> tuple[str, str]:
        if self.figure == "step_seconds":
            return "examples_per_second", "examples/s"
        return self.figure, "seconds to the first step"
