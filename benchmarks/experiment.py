"""An experiment: cases that take turns, round by round, and what was measured of each."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Generic, TypeVar

from hvtrain.compare.rounds import in_turns, progress
from hvtrain.report.charts import BLUE, picture

Case = TypeVar("Case", bound=Hashable)
Result = TypeVar("Result")


@dataclass
class Experiment(ABC, Generic[Case, Result]):
    """Rounds of the same cases. Its methods are called in the order run, write, plot, table.

    Attributes:
        folder: Where the results and the output of every process go.
        threads: TensorFlow's threads of a process.
        results: One result of each case for each round.
    """

    folder: Path
    threads: int
    results: dict[Case, list[Result]] = field(default_factory=dict, init=False)

    @abstractmethod
    def cases(self) -> Sequence[Case]:
        """All cases, in the order of the first round."""

    @abstractmethod
    def measure(self, case: Case, folder: Path) -> Result:
        """Measures a case once. The folder keeps the output. Raises LostRankError if a process fails."""

    @abstractmethod
    def describe(self, result: Result) -> str:
        """A result in a few words."""

    @abstractmethod
    def table(self) -> list[str]:
        """Lines to print."""

    @abstractmethod
    def write(self) -> None:
        """Writes the results as JSON."""

    @abstractmethod
    def plot(self) -> None:
        """Writes bench.png."""

    def name(self, case: Case) -> str:
        return str(case)

    def end_round(self, number: int, num_rounds: int) -> None:
        """Does what comes after the cases of a round."""

    def run(self, num_rounds: int) -> None:
        """Measures all cases in turns."""
        # A shared machine can be slower for minutes: only runs of the same round are compared.
        for number, order in in_turns(self.cases(), num_rounds):
            for case in order:
                self.measure_and_print(case, number, num_rounds)
            self.end_round(number, num_rounds)

    def measure_and_print(self, case: Case, number: int, num_rounds: int) -> None:
        name = self.name(case)
        title = f"round {number}/{num_rounds}  {name}"
        progress(f"{title} ...")
        result = self.measure(case, self.folder / f"round-{number}" / name.replace(" ", "-"))
        self.results.setdefault(case, []).append(result)
        progress("")
        print(f"{title:<60} {self.describe(result)}", flush=True)


def plot_bars(path: Path, values: Mapping[str, Sequence[float]], xlabel: str, title: str = "") -> None:
    """Draws a bar for each case, in the order from top to bottom (bars: medians, dots: runs)."""
    names = list(reversed(values))

    with picture(path, 9, 1.2 + 0.4 * len(names)) as (_, axes):
        for height, name in enumerate(names):
            runs = values[name]
            color = BLUE if "hvtrain" in name else "#b9c3cc"
            axes.barh(height, median(runs), color=color, height=0.65)
            axes.plot(runs, [height] * len(runs), "o", color="#222222", markersize=3, alpha=0.7)

        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel(f"{xlabel} (bar: median)")
        axes.set_title(title, loc="left")
