"""`python -m hvtrain bisect`: the first step at which two runs part, and why.

Receipts name the interval. Two repetitions of it, one of each run, take digests of every step.
"""

from typing import TYPE_CHECKING

from hvtrain.checkpoint.receipts import Receipt, read_receipts
from hvtrain.errors import CheckpointError, ConfigError
from hvtrain.finished.arguments import FinishedConfig, finished_config, parse_command
from hvtrain.finished.replay import cause_lines, causes_of, choose_stretch, first_difference, refuse_checkpoint
from hvtrain.system import console

if TYPE_CHECKING:
    from hvtrain.finished.repeat import Repetition

CONTINUE = -1
ABOUT = """\
Finds the first receipts at which two runs differ, then repeats both from the checkpoint before and compares each step,
to name the first step and variable, and says why. Exits with 0 if no receipts differ, 1 if some do, 2 if they cannot be
compared."""
EXAMPLES = """\
  horovodrun -np 2 python -m hvtrain bisect run=runs/first with=runs/second
"""


def bisect() -> int:
    """Compares the runs, and repeats both where that can say more; rank 0 prints the result."""
    options, finished = parse_command("bisect", "with=RUN", ABOUT, EXAMPLES, "with")
    refuse_checkpoint(finished)
    folder = finished.arguments.get("with")
    if not folder:
        raise ConfigError("with=RUN is missing; name the folder of the other run")
    settings = [text for text in options.overrides if "=" in text and not text.startswith(("run=", "with="))]
    other = finished_config([f"run={folder}", *settings], trust=options.trust)
    with console.quiet_import(finished.config.verbose):
        from hvtrain.finished.repeat import repeat

    parting = Parting((finished, other))
    code = repeat(finished.config, parting.compare, parting.keep, stays=True)
    if code != CONTINUE:
        return code
    return repeat(other.config, lambda _: parting.stretches[1], parting.conclude)


class Parting:
    """Where two runs part (chief only)."""

    def __init__(self, runs: tuple[FinishedConfig, FinishedConfig]) -> None:
        self.runs = runs
        self.receipts: list[dict[int, Receipt]] = []
        self.stretches: list[Repetition] = []

    def compare(self, num_ranks: int) -> "Repetition | int":
        """Prints between which receipts they part; returns what to repeat of the first run, or the exit code."""
        self.receipts = [read_receipts(run.folder) for run in self.runs]
        mine, others = self.receipts
        steps = [step for step in mine if step in others]
        if not steps:
            raise ConfigError(
                "no two receipts are of the same step; train one run again with checkpoints as the other's"
            )
        step = next((step for step in steps if mine[step].digests != others[step].digests), None)
        if step is None:
            print(f"same bits: {len(steps)} receipts of steps {steps[0]:,} to {steps[-1]:,}")
            return 0

        before = max((equal for equal in steps if equal < step), default=0)
        print(f"the runs part after step {before:,}, up to step {step:,}")
        causes = causes_of(mine[step].facts, others[step].facts)
        is_deterministic = all(run.config.train.deterministic for run in self.runs)
        print("\n".join(cause_lines(causes, is_deterministic)))
        self.stretches = []
        note = f"at step {step:,}: {first_difference(mine[step].digests, others[step].digests)}"
        try:
            for run, receipts in zip(self.runs, self.receipts):
                of_run = receipts[step].facts.get("ranks", {}).get("number of ranks")
                if of_run != num_ranks:
                    raise ConfigError(f"{run.folder} had {of_run} ranks and {num_ranks} were started")
                self.stretches.append(choose_stretch(run.folder, list(receipts), (before, step), each_step=True))
        except (CheckpointError, ConfigError) as error:
            print(f"{note}\nsteps between are not known: {error}")
            return 1
        return self.stretches[0]

    def keep(self, repetition: "Repetition") -> int:
        """Keeps the repetition of the first run."""
        self.stretches[0] = repetition
        return CONTINUE

    def conclude(self, repetition: "Repetition") -> int:
        """Compares both repetitions step by step, and prints the result."""
        self.stretches[1] = repetition
        mine, others = (stretch.digests for stretch in self.stretches)
        steps = sorted(mine.keys() & others.keys())
        step = next((step for step in steps if mine[step] != others[step]), None)
        if step is None:
            print("the repetitions do not part: what made the runs differ did not come back")
        else:
            print(f"first at step {step:,}: {first_difference(mine[step], others[step])}")
        for stretch, receipts in zip(self.stretches, self.receipts):
            if any(receipts[save].digests != stretch.digests[save] for save in stretch.saves):
                print(f"{stretch.folder} has not repeated its own bits, so that step may be another than then")
        return 1
