"""An experiment: cases that take turns, round by round, and a row for each run; its files, table and picture."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from hvtrain.launch.child import in_turns
from hvtrain.report.charts import BLUE, write_panels
from hvtrain.report.ratios import Ratio, draw_rounds
from hvtrain.system.console import progress
from hvtrain.system.files import csv_text, write_json
from hvtrain.system.text import aligned

# Values of the columns that tell cases apart.
Case = tuple[Any, ...]


@dataclass
class Experiment(ABC):
    """Rounds of the same cases. Its methods are called in the order run, write, plot, table.

    Attributes:
        folder: Where the results and the output of every process go.
        threads: TensorFlow's threads of a process.
        rows: One for each run: its case, the number of its round, and its figures.
        name: Of the files with the rows, without a suffix.
        keys: The columns that tell cases apart.
        columns: By the title of a column in the table: its figure, the factor of its unit, and its format.
    """

    folder: Path
    threads: int
    rows: list[dict[str, Any]] = field(default_factory=list, init=False)
    name: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    columns: ClassVar[Mapping[str, tuple[str, float, str]]]

    @abstractmethod
    def cases(self) -> Sequence[Case]:
        """All cases, in the order of the first round."""

    @abstractmethod
    def measure(self, case: Case, folder: Path) -> dict[str, float]:
        """Measures the figures of a case once. The folder keeps the output. Raises LostRankError if a process fails."""

    @abstractmethod
    def ratios(self, case: Case) -> dict[str, Ratio]:
        """How a case compares with others in the same rounds, by the title of the column."""

    @abstractmethod
    def about(self) -> str:
        """The work that was measured, in a line."""

    def bars(self) -> tuple[str, str]:
        """The figure that the picture shows, and its label; default: the first column."""
        title, (figure, _, _) = next(iter(self.columns.items()))
        return figure, title

    def check_round(self) -> None:  # noqa: B027 - most have nothing to check.
        """Raises an error if the results of the latest round cannot be compared."""

    def run(self, num_rounds: int) -> None:
        """Measures all cases in turns."""
        # A shared machine can be slower for minutes: only runs of the same round are compared.
        for number, order in in_turns(self.cases(), num_rounds):
            for case in order:
                title = f"round {number}/{num_rounds}  {_label(case)}"
                progress(f"{title} ...")
                figures = self.measure(
                    case, self.folder / f"round-{number}" / _label(case).replace(" ", "-")
                )
                self.rows.append({**dict(zip(self.keys, case)), "round": number, **figures})
                progress("")
                cells = [
                    f"{cell} {column}" for column, cell in zip(self.columns, self._cells([figures]))
                ]
                print(f"{title:<60} {', '.join(cells[:2])}", flush=True)

            self.check_round()

    def runs(self, case: Case) -> list[dict[str, Any]]:
        """The rows of a case, by round."""
        return [row for row in self.rows if tuple(row[key] for key in self.keys) == case]

    def values(self, case: Case, figure: str) -> list[float]:
        """A figure of a case, by round."""
        return [row[figure] for row in self.runs(case)]

    def _cells(self, runs: Sequence[Mapping[str, float]]) -> list[str]:
        """Medians, as the table has them."""
        return [
            format(factor * median(run[figure] for run in runs), form)
            for figure, factor, form in self.columns.values()
        ]

    def table(self) -> list[str]:
        """Lines to print: medians over the rounds, and ratios with their intervals."""
        cases = self.cases()
        rows = [[" ".join(self.keys), *self.columns, *self.ratios(cases[0])]]
        rows += [
            [_label(case), *self._cells(self.runs(case)), *map(str, self.ratios(case).values())]
            for case in cases
        ]
        return [f"{self.about()}, medians of {self.rows[-1]['round']} rounds", *aligned(rows)]

    def write(self) -> None:
        """Writes the rows, as JSON with the settings and as CSV."""
        settings = asdict(self)
        settings["runs"] = settings.pop("rows")
        write_json(self.folder / f"{self.name}.json", {**settings, "folder": str(self.folder)})
        rows = csv_text([self.rows[0], *(row.values() for row in self.rows)])
        (self.folder / f"{self.name}.csv").write_text(rows)

    def plot(self) -> None:
        """Writes bench.png: a bar for each case."""
        figure, label = self.bars()
        values = {_label(case): self.values(case, figure) for case in self.cases()}
        colors = [BLUE if "hvtrain" in name else "#b9c3cc" for name in values]

        def draw(axes: Any) -> None:
            draw_rounds(axes, values, colors)
            axes.set_xlabel(f"{label} (bar: median, dots: rounds)")

        size = (9, 1.2 + 0.4 * len(values))
        write_panels([(self.about(), draw)], self.folder / "bench.png", 1, size)


def _label(case: Case) -> str:
    return " ".join(map(str, case))
