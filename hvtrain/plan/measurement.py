"""The time of a training step, measured by a short training in processes of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from hvtrain.config.words import word
from hvtrain.plan import process_report
from hvtrain.plan.processes import HOROVOD, launch_and_report

RUNNER = "hvtrain"
CLOCK = "hvtrain.plan.clock.Clock"


@dataclass(frozen=True)
class Contender:
    """One way to train.

    module is what `python -m` runs, and way how: one of HOROVOD, alone, independent, workers, or servers. variables,
    words and data are settings of its own, on top of the session's. on_terminal: its output goes to a terminal.
    """

    name: str
    about: str
    module: str
    way: str
    variables: tuple[tuple[str, str], ...] = ()
    words: tuple[str, ...] = ()
    data: str | None = None
    on_terminal: bool = False

    @property
    def is_one_job(self) -> bool:
        """Whether its processes take each step together."""
        return self.way in (*HOROVOD, "workers")

    @property
    def is_one_rank(self) -> bool:
        """Whether each process trains a model of its own, unaware of the others."""
        return self.way in ("alone", "independent")


RUNNER_ALONE = Contender("hvtrain-1", "the runner on one rank", RUNNER, "alone")


@dataclass(frozen=True)
class Measured:
    """One run of a contender.

    step_seconds is the time of a joint step and examples_per_second the rate of all processes; first_step_seconds is
    the slowest process's and peak_bytes the largest's.
    """

    step_seconds: float
    examples_per_second: float
    first_step_seconds: float
    peak_bytes: int
    loss: float


def measure(
    contender: Contender,
    words: Sequence[str],
    num_ranks: int,
    batch_size: int,
    steps: tuple[int, int],
    folder: Path,
    threads: int,
) -> Measured:
    """Runs the contender once: so many warm-up steps, and so many timed ones. The folder keeps its output.

    Raises LostRankError, which names the file with its output, if it fails.
    """
    size = 1 if contender.way == "alone" else num_ranks
    more = list(contender.words)
    if contender.module == RUNNER:
        more += [f"+callbacks.bench._target_={CLOCK}", f"+callbacks.bench.num_steps={sum(steps)}"]
        more.append(word("run.dir", f"{folder}/run"))
    variables = {process_report.WARMUP: str(steps[0]), **dict(contender.variables)}
    what = contender.way, contender.module, [*words, *more]
    reports = launch_and_report(*what, size, folder, threads, variables, contender.on_terminal)
    examples_per_second = sum(batch_size / found["step_seconds"] for found in reports)
    return Measured(
        step_seconds=batch_size * size / examples_per_second,
        examples_per_second=examples_per_second,
        first_step_seconds=max(found["first_step_seconds"] for found in reports),
        peak_bytes=max(found["peak_bytes"] for found in reports),
        loss=mean(found["loss"] for found in reports),
    )
