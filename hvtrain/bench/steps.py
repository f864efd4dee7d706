"""`bench steps`: contenders take turns at one workload, and are compared within each round."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from hvtrain.bench.contenders import Contender, Measured, Steps, measure
from hvtrain.bench.goals import Goal, goals_of
from hvtrain.bench.statistics import Ratio, ratio
from hvtrain.bench.words import in_words, progress
from hvtrain.bench.workloads import Workload
from hvtrain.errors import RankError

# Same work, same losses: sums of floats in another order, over so few steps, differ by less.
LOSS_TOLERANCE = 1e-3
NOISY = 0.02
COMPARED = {"step_seconds": "step time", "first_step_seconds": "time to the first step"}


@dataclass
class Session:
    """All rounds of one workload. again: the first contender's second run in each round, which shows the noise."""

    workload: Workload
    data: str
    num_ranks: int
    threads: int
    contenders: Sequence[Contender]
    folder: Path
    steps: int
    figure: str = "step_seconds"
    """Of Measured: what the table compares."""
    found: dict[str, list[Measured]] = field(default_factory=dict)
    again: list[Measured] = field(default_factory=list)

    def run(self, num_rounds: int) -> None:
        """Every contender once a round, in turning order, and the first one twice.

        Raises:
            LostRankError: a contender failed.
            RankError: the losses of contenders that do the same work differ.
        """
        for number in range(num_rounds):
            order = list(self.contenders) if number % 2 == 0 else list(reversed(self.contenders))
            for contender in order:
                self.found.setdefault(contender.name, []).append(self._once(contender, number, num_rounds))
            self.again.append(self._once(self.contenders[0], number, num_rounds, again=True))
            self.check_losses()

    def _once(self, contender: Contender, number: int, num_rounds: int, again: bool = False) -> Measured:
        name = f"{contender.name}{' again' if again else ''}"
        progress(f"round {number + 1}/{num_rounds}  {name} ...")
        work = self.workload
        num_ranks = 1 if contender.is_one_rank else self.num_ranks
        words = work.words(contender.data or self.data, num_ranks, self.steps)
        folder = self.folder / f"round-{number + 1}" / name.replace(" ", "-")
        steps = Steps(work.warmup_steps, self.steps)
        measured = measure(contender, words, self.num_ranks, work.batch_size, steps, folder, self.threads)
        progress("")
        print(
            f"round {number + 1}/{num_rounds}  {name:<28} {1000 * measured.step_seconds:9.2f} ms/step "
            f"{measured.images_per_second:12,.0f} images/s",
            flush=True,
        )
        return measured

    def check_losses(self) -> None:
        same = [
            contender for contender in self.contenders if contender.trains and not (contender.words or contender.data)
        ]
        joint = [contender.name for contender in same if contender.is_one_job]
        alone = [contender.name for contender in same if contender.is_one_rank]
        for names in (joint, alone):
            losses = {name: self.found[name][-1].loss for name in names}
            if losses and max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE * abs(min(losses.values())):
                said = ", ".join(f"{name} {loss:.5f}" for name, loss in losses.items())
                raise RankError(f"the contenders' losses differ, so they do not do the same work: {said}")

    def seconds(self, name: str) -> list[float]:
        """What is compared, by round."""
        return [getattr(measured, self.figure) for measured in self.found[name]]

    @property
    def noise(self) -> Ratio:
        """The first contender against itself."""
        return ratio([getattr(measured, self.figure) for measured in self.again], self.seconds(self.contenders[0].name))

    @property
    def spread(self) -> float:
        """Median distance from 1 of the first contender's ratio to itself in the same round."""
        first = self.seconds(self.contenders[0].name)
        return median(abs(getattr(again, self.figure) / once - 1) for again, once in zip(self.again, first))

    def goals(self) -> list[tuple[Goal, Ratio, str]]:
        """The goals that this session can judge: which, the ratio found, and whether it holds."""
        judged = []
        for goal in goals_of(self.workload.name):
            if self.figure != "step_seconds" and goal.figure != self.figure:
                continue  # So few steps say nothing of their time.
            if goal.ours in self.found and goal.theirs in self.found:
                values = [[getattr(m, goal.figure) for m in self.found[name]] for name in (goal.ours, goal.theirs)]
                found = ratio(*values)
                judged.append((goal, found, found.verdict(goal.limit, goal.smaller_is_better)))
        return judged


def table(session: Session) -> list[str]:
    """The session in lines: medians, and each contender's step time against the first one's."""
    first = session.contenders[0].name
    work = session.workload
    width = max(14, *(len(contender.name) + 1 for contender in session.contenders))
    lines = [
        f"{work.name} ({work.about}), {session.data}, batch {work.batch_size} a rank, {session.num_ranks} ranks, "
        f"{session.threads} thread(s) a rank, {session.steps} steps, median of {len(session.again)} rounds",
        f"{'contender':<{width}}{'ms/step':>10}{'images/s':>12}{'first step s':>14}{'peak MB':>9}{'loss':>9}  "
        f"{COMPARED[session.figure]} against {first}",
    ]
    for contender in session.contenders:
        runs = session.found[contender.name]
        middle = {name: median(getattr(run, name) for run in runs) for name in Measured.__dataclass_fields__}
        against = ratio(session.seconds(contender.name), session.seconds(first))
        lines.append(
            f"{contender.name:<{width}}{1000 * middle['step_seconds']:>10.2f}{middle['images_per_second']:>12,.0f}"
            f"{middle['first_step_seconds']:>14.1f}{middle['peak_bytes'] / 1e6:>9,.0f}{middle['loss']:>9.4f}  "
            f"{in_words(against)}"
        )
    noisy = f"; more than {NOISY:.0%}: use it with care, or find a quieter hour" if session.spread > NOISY else ""
    lines.append(f"noise: {first} against itself {in_words(session.noise)}, typically {session.spread:.1%} off{noisy}")
    for goal, found, verdict in session.goals():
        sign = "<=" if goal.smaller_is_better else ">="
        lines.append(
            f"goal: {goal.figure} of {goal.ours} / {goal.theirs} {sign} {goal.limit:.2f}: {in_words(found)}, {verdict}"
        )
    return lines


def write(session: Session) -> None:
    """bench.json and bench.csv, one row for each run."""
    rows = [
        {"contender": name, "round": number + 1, **asdict(run)}
        for name, runs in {**session.found, f"{session.contenders[0].name} again": session.again}.items()
        for number, run in enumerate(runs)
    ]
    with (session.folder / "bench.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    summary = {
        "workload": asdict(session.workload),
        "data": session.data,
        "num_ranks": session.num_ranks,
        "threads": session.threads,
        "steps": session.steps,
        "noise": asdict(session.noise),
        "goals": [{**asdict(goal), "found": asdict(found), "verdict": said} for goal, found, said in session.goals()],
        "runs": rows,
    }
    (session.folder / "bench.json").write_text(json.dumps(summary, indent=1))
