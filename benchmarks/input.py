"""`bench input`: how fast image files become batches, against Keras's reader and pipelines by hand, in one process."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from benchmarks import input_data
from benchmarks.input_data import BATCH_SIZE, FORMATS, TRAINED
from hvtrain.compare.rounds import Ratio, in_turns, progress, ratio
from hvtrain.plan import process_report
from hvtrain.plan.processes import launch_and_report
from hvtrain.report.charts import BLUE, picture

WORKER = "benchmarks.by_hand.input_pipelines"
WARMUP_STEPS = 12
Case = tuple[str, str, str]
"""Size of the files, format, contender."""


@dataclass(frozen=True)
class Reading:
    """One run of a contender."""

    examples_per_second: float
    cpu_ms_per_example: float
    """Time of all threads of the process on cores, which depends less on what else the machine does."""
    peak_bytes: int


@dataclass
class Inputs:
    """A session. found[case] has one value for each round."""

    sizes: Sequence[tuple[int, int]]
    """Heights and widths of the files. All become TRAINED."""
    num_images: int
    steps: int
    threads: int
    folder: Path
    found: dict[Case, list[Reading]] = field(default_factory=dict)

    def cases(self) -> list[Case]:
        """All contenders. Only hvtrain antialiases by itself, so a pipeline by hand that does it too stands beside."""
        cases = []
        for height, width in self.sizes:
            for kind in FORMATS:
                names = ["hvtrain", "by-hand", *(["keras"] if kind == "image_folder" else [])]
                names += ["by-hand-antialiased"] if (height, width) != TRAINED[:2] else []
                cases += [(f"{height}x{width}", kind, name) for name in names]
        return cases

    def run(self, num_rounds: int) -> None:
        """Writes the images, and measures all contenders in turns. Raises LostRankError if a process fails."""
        for height, width in self.sizes:
            progress(f"writing {self.num_images} images of {height}x{width} ...")
            input_data.write(self.folder / "data" / f"{height}x{width}", self.num_images, height, width)
        for number, order in in_turns(self.cases(), num_rounds):
            for case in order:
                title = f"round {number}/{num_rounds}  {' '.join(case)}"
                progress(f"{title} ...")
                reading = self._once(case, self.folder / f"round-{number}" / "-".join(case))
                self.found.setdefault(case, []).append(reading)
                progress("")
                speed = f"{reading.examples_per_second:10,.0f} examples/s{reading.cpu_ms_per_example:8.3f} CPU ms each"
                print(f"{title:<60} {speed}", flush=True)

    def _once(self, case: Case, folder: Path) -> Reading:
        size, kind, name = case
        data, steps = self.folder / "data" / size / kind, WARMUP_STEPS + self.steps
        words = [name, kind, *map(str, (data, self.num_images, self.threads, steps))]
        variables = {process_report.WARMUP: str(WARMUP_STEPS)}
        (report,) = launch_and_report("alone", WORKER, words, 1, folder, self.threads, variables)
        return Reading(
            BATCH_SIZE / report["step_seconds"], 1000 * report["step_cpu_seconds"] / BATCH_SIZE, report["peak_bytes"]
        )

    def _against(self, case: Case, figure: str) -> Ratio:
        """hvtrain's figure / that of the case, in the same rounds."""
        ours = self.found[case[0], case[1], "hvtrain"]
        return ratio([getattr(one, figure) for one in ours], [getattr(one, figure) for one in self.found[case]])

    def table(self) -> list[str]:
        """Lines to print: medians over the rounds, and ratios with their intervals."""
        rounds = len(next(iter(self.found.values())))
        lines = [
            f"{self.num_images} JPEG images to {TRAINED[0]}x{TRAINED[1]} float32, batch {BATCH_SIZE}, {self.threads} "
            f"thread(s), {self.steps} steps, medians of {rounds} rounds",
            f"{'files':<9}{'format':<14}{'contender':<21}{'examples/s':>10}{'CPU ms':>8}{'peak MB':>9}  "
            f"{'examples/s, hvtrain / it':<34}CPU time, hvtrain / it",
        ]
        for case, runs in self.found.items():
            middle = Reading(*(median(getattr(run, key) for run in runs) for key in Reading.__dataclass_fields__))
            size, kind, name = case
            speed, cpu = (self._against(case, key) for key in ("examples_per_second", "cpu_ms_per_example"))
            lines.append(
                f"{size:<9}{kind:<14}{name:<21}{middle.examples_per_second:>10,.0f}{middle.cpu_ms_per_example:>8.3f}"
                f"{middle.peak_bytes / 1e6:>9,.0f}  " + ("" if name == "hvtrain" else f"{speed!s:<34}{cpu}")
            )
        return lines

    def write(self) -> None:
        """Writes input.json in the folder: settings, and one row per run."""
        names = ("size", "format", "contender")
        rows = [
            {**dict(zip(names, case)), "round": number, **asdict(run)}
            for case, runs in self.found.items()
            for number, run in enumerate(runs, 1)
        ]
        settings = {name: getattr(self, name) for name in ("num_images", "steps", "threads")}
        (self.folder / "input.json").write_text(json.dumps({**settings, "runs": rows}, indent=1))

    def plot(self) -> None:
        """Writes bench.png: CPU time per example of each contender (bars: medians, dots: runs)."""
        cases = list(reversed(self.found))
        with picture(self.folder / "bench.png", 9, 1.2 + 0.35 * len(cases)) as (_, axes):
            for place, case in enumerate(cases):
                values = [run.cpu_ms_per_example for run in self.found[case]]
                colour = BLUE if case[-1] == "hvtrain" else "#b9c3cc"
                axes.barh(place, median(values), color=colour, height=0.65)
                axes.plot(values, [place] * len(values), "o", color="#222222", markersize=3, alpha=0.7)
            axes.set_yticks(range(len(cases)), [" ".join(case) for case in cases])
            axes.set_xlabel("CPU ms per example (bar: median)")
