"""`python -m hvtrain replay` and `bisect`: repeat a stretch of training, and compare the bits.

replay compares the repeated stretch with the run's own receipts. bisect finds the first step at
which two runs diverge, and why: receipts narrow it down to an interval, over which both runs are
repeated with digests at every step. repeat.py does the training.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvtrain.checkpoint import store
from hvtrain.checkpoint.receipts import Digests, Facts, Receipt, read_receipts
from hvtrain.errors import CheckpointError, ConfigError
from hvtrain.finished.arguments import FinishedConfig, finished_config, parse_command
from hvtrain.system import console
from hvtrain.system.command import not_negative

if TYPE_CHECKING:
    from hvtrain.checks.repeat import Repetition

TOLERANCE = 1e-4
REPLAY_ABOUT = """\
Repeats a stretch of a run's training from a checkpoint, on the ranks that are started, and compares weights and slots
with the run's receipts. Writes nothing into the run's folder. Exits with 0 for the same bits, or without
train.deterministic for weights within the tolerance; 1 if they differ; 2 if the stretch cannot be repeated."""
REPLAY_EXAMPLES = """\
  horovodrun -np 2 python -m hvtrain replay runs/first
  horovodrun -np 2 python -m hvtrain replay runs/first steps=0:44
"""


def replay() -> int:
    """Repeats the stretch on all ranks; rank 0 prints the result."""
    options, finished = parse_command(
        "replay",
        "[steps=FROM:TO] [--tolerance T]",
        REPLAY_ABOUT,
        REPLAY_EXAMPLES,
        "steps",
        trains=True,
        tolerance={
            "type": not_negative,
            "default": TOLERANCE,
            "metavar": "T",
            "help": "largest relative difference of weights to accept without train.deterministic; "
            f"default: {TOLERANCE:g}",
        },
    )
    refuse_checkpoint(finished)
    bounds = parse_steps(finished.arguments.get("steps"))
    with console.quiet_import(finished.config.verbose):
        from hvtrain.checks.repeat import repeat

    receipts = {}  # Filled on the chief, by choose().

    def choose(_):
        receipts.update(read_receipts(finished.folder))
        return choose_stretch(finished.folder, receipts, bounds)

    def conclude(repetition):
        tolerance = None if finished.config.train.deterministic else options.tolerance
        code, lines = judge(receipts, repetition, tolerance)
        print("\n".join(lines))
        return code

    return repeat(finished.config, choose, conclude)


def refuse_checkpoint(finished: FinishedConfig) -> None:
    """Raises ConfigError for checkpoint=NAME, which other commands accept."""
    if "checkpoint" in finished.arguments:
        raise ConfigError(
            "checkpoint= has no effect here: the receipts decide which checkpoint to begin with; leave it out"
        )


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """Parses FROM:TO into two steps; returns None for None. Raises ConfigError for any other text.

    >>> parse_steps("400:450")
    (400, 450)
    """
    if text is None:
        return None
    match = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", text)
    if not match or int(match[1]) >= int(match[2]):
        raise ConfigError(
            f"steps={text} is not FROM:TO with FROM below TO; give steps=400:450, for instance"
        )
    return int(match[1]), int(match[2])


def choose_stretch(
    folder: Path, steps: Collection[int], bounds: tuple[int, int] | None, each_step: bool = False
) -> "Repetition":
    """Returns the stretch to repeat: the checkpoint to start from, and the steps to compare.

    Args:
        folder: The run folder.
        steps: The steps of the run's receipts, in order.
        bounds: FROM and TO; None: from the last checkpoint before the last receipt to that receipt.
        each_step: See Repetition.

    Raises:
        CheckpointError: There is no checkpoint to start from.
        ConfigError: There is no receipt to compare with.
    """
    from hvtrain.checks.repeat import Repetition

    checkpoints = [store.step_of(path) for path in store.list_checkpoints(folder / "checkpoints")]
    newest = max(steps, default=0)
    first, last = bounds or (newest - 1, newest)
    begin = max((step for step in checkpoints if step <= first), default=0)
    # Repeating a run from its beginning may take weeks, so it is done only on request.
    if begin == 0 < first:
        raise CheckpointError(
            f"{folder} has no checkpoint up to step {first} (there are: {checkpoints or 'none'}); choose a later FROM, "
            f"repeat the run from its beginning (steps=0:{last}), or keep more checkpoints (checkpoint.keep)"
        )
    saves = tuple(step for step in steps if begin < step <= last)
    if not saves:
        receipt_steps = ", ".join(map(str, steps)) or "none"
        raise ConfigError(
            f"{folder} has no receipt after step {begin} up to {last} "
            f"(there are: {receipt_steps}); choose other steps"
        )
    # Receipts outlive most checkpoints; weights can be compared only where a checkpoint was kept.
    with_checkpoint = [step for step in saves if step in checkpoints]
    compared_step = max(with_checkpoint, default=0)
    return Repetition(folder, begin, saves, each_step, compared_step=compared_step)


def judge(
    receipts: dict[int, Receipt], repetition: "Repetition", tolerance: float | None
) -> tuple[int, list[str]]:
    """Compares a repetition with the run's receipts; returns the exit code, and lines for the user.

    Args:
        receipts: The run's receipts, by step.
        repetition: The repeated stretch.
        tolerance: The largest relative difference allowed in a weight; None: operations are
            deterministic, so no difference is allowed.
    """
    originals = digests_by_step(receipts)
    equal, step = split_at_difference(originals, repetition.digests)
    if step is None:
        return 0, [same_bits_line(equal)]

    difference = first_difference(originals[step], repetition.digests[step])
    lines = [f"differs at step {step:,}: {difference}"]
    if step == repetition.begin:
        return 1, [*lines, "cause: the checkpoint has changed since it was written"]
    last_equal = equal[-1] if equal else repetition.begin
    lines.append(f"the last step with the same bits: {last_equal:,}")
    causes = causes_of(receipts[step].facts, repetition.facts)
    lines += cause_lines(causes, tolerance is None)
    gap = repetition.difference
    if gap is None or repetition.compared_step < step:
        # The run kept no checkpoint from that step on, so there are no weights to compare with.
        return 1, lines
    lines.append(
        f"largest relative difference of a weight at step {repetition.compared_step:,}: {gap:.2g}"
    )
    if causes or tolerance is None or gap > tolerance:
        return 1, lines
    return 0, [*lines, f"within the tolerance of {tolerance:g}"]


def digests_by_step(receipts: dict[int, Receipt]) -> dict[int, Digests]:
    return {step: receipt.digests for step, receipt in receipts.items()}


def split_at_difference(
    mine: dict[int, Digests], others: dict[int, Digests]
) -> tuple[list[int], int | None]:
    """Returns the common steps before the first one whose digests differ, and that step; None if no digests differ.

    >>> split_at_difference({1: {"a": "1"}, 2: {"a": "2"}, 3: {"a": "3"}}, {1: {"a": "1"}, 3: {"a": "4"}})
    ([1], 3)
    """
    equal: list[int] = []
    for step in sorted(mine.keys() & others.keys()):
        if mine[step] != others[step]:
            return equal, step
        equal.append(step)
    return equal, None


def same_bits_line(steps: list[int]) -> str:
    if len(steps) == 1:
        return f"same bits: 1 receipt, of step {steps[0]:,}"
    return f"same bits: {len(steps)} receipts of steps {steps[0]:,} to {steps[-1]:,}"


def first_difference(digests: Digests, others: Digests) -> str:
    """Names the first variable whose digests differ, and counts all that differ; at least one must differ.

    >>> first_difference({"model/0000/a/kernel": "1", "model/0001/a/bias": "2"}, {"model/0000/a/kernel": "1"})
    'a/bias (1 of 2 variables differ)'
    """
    every_key = digests | others
    keys = [key for key in every_key if digests.get(key) != others.get(key)]
    # Keys of a checkpoint's arrays: GROUP/NUMBER/NAME.
    group, *_, name = keys[0].split("/", 2)
    owner = "the optimizer's " if group == "optimizer" else ""
    return f"{owner}{name} ({len(keys)} of {len(every_key)} variables differ)"


def causes_of(before: Facts, now: Facts) -> list[str]:
    """Describes the facts that differ, in one text for each kind of fact."""
    from hvtrain.training.consistency import difference_of

    texts = {kind: difference_of(before.get(kind, {}), now.get(kind, {})) for kind in before | now}
    return [f"{kind}: {text}" for kind, text in texts.items() if text]


def cause_lines(causes: Sequence[str], is_deterministic: bool) -> list[str]:
    """Returns a line for each cause; if the receipts show none, a line on what else to suspect."""
    if causes:
        return [f"cause: {cause}" for cause in causes]
    if not is_deterministic:
        return [
            "cause: an operation without a fixed order (train.deterministic=false); receipts show no other difference"
        ]
    return [
        "cause: none that receipts show, and operations are deterministic; repeat the run on another host, and look "
        "for data files whose content has changed and whose size has not"
    ]


# Takes the place of an exit code after bisect's first repetition: the other run is still to be repeated.
CONTINUE = -1
BISECT_ABOUT = """\
Finds the first receipts at which two runs differ, and the likely cause. Then repeats both runs from the checkpoint
before that step and compares each step, to name the first step and variable that differ. Exits with 0 if no receipts
differ, 1 if some do, 2 if they cannot be compared."""
BISECT_EXAMPLES = """\
  horovodrun -np 2 python -m hvtrain bisect run=runs/first with=runs/second
"""


def bisect() -> int:
    """Compares two runs' receipts; if they differ, repeats both runs to find the step.

    Rank 0 prints the result.
    """
    options, finished = parse_command(
        "bisect", "with=RUN", BISECT_ABOUT, BISECT_EXAMPLES, "with", trains=True
    )
    refuse_checkpoint(finished)
    folder = finished.arguments.get("with")
    if not folder:
        raise ConfigError("with=RUN is missing; name the folder of the other run")
    # Overrides apply to both runs. An argument without "=" is RUN, another form of run=RUN.
    settings = [
        argument
        for argument in options.overrides
        if "=" in argument and not argument.startswith(("run=", "with="))
    ]
    other = finished_config([f"run={folder}", *settings], trust=options.trust, trains=True)
    with console.quiet_import(finished.config.verbose):
        from hvtrain.checks.repeat import repeat

    divergence = Divergence((finished, other))
    code = repeat(finished.config, divergence.compare, lambda _: CONTINUE, keeps_ranks=True)
    if code != CONTINUE:
        return code
    return repeat(other.config, lambda _: divergence.stretches[1], divergence.conclude)


class Divergence:
    """Finds where two runs diverge (its methods are called on the chief only).

    Attributes:
        stretches: The stretch of each run that compare() chose to repeat.
    """

    def __init__(self, runs: tuple[FinishedConfig, FinishedConfig]) -> None:
        self.runs = runs
        self.stretches: list[Repetition] = []

    def compare(self, num_ranks: int) -> "Repetition | int":
        """Compares the runs' receipts, and prints the steps between which they diverge.

        Returns the first run's stretch to repeat, or the exit code if nothing is to be repeated.
        Raises ConfigError if the runs have no receipts of the same step.
        """
        receipts = [read_receipts(run.folder) for run in self.runs]
        mine, others = map(digests_by_step, receipts)
        if not mine.keys() & others.keys():
            raise ConfigError(
                "the runs have no receipts of the same step; train one of them again, saving at the other's steps"
            )
        equal, step = split_at_difference(mine, others)
        if step is None:
            print(same_bits_line(equal))
            return 0

        last_equal = equal[-1] if equal else 0
        print(f"the runs diverge between steps {last_equal:,} and {step:,}")
        facts = [run_receipts[step].facts for run_receipts in receipts]
        causes = causes_of(*facts)
        is_deterministic = all(run.config.train.deterministic for run in self.runs)
        print("\n".join(cause_lines(causes, is_deterministic)))
        difference = f"at step {step:,}: {first_difference(mine[step], others[step])}"
        try:
            for run, run_facts, saves in zip(self.runs, facts, (mine, others)):
                run_ranks = run_facts.get("ranks", {}).get("number of ranks")
                if run_ranks != num_ranks:
                    raise ConfigError(
                        f"{run.folder} had {run_ranks} rank(s), but {num_ranks} started; start as many as it had"
                    )
                bounds = (last_equal, step)
                self.stretches.append(choose_stretch(run.folder, saves, bounds, each_step=True))
        except (CheckpointError, ConfigError) as error:
            print(f"{difference}\nthe first step at which the runs differ is unknown: {error}")
            return 1
        return self.stretches[0]

    def conclude(self, _second: "Repetition") -> int:
        """Compares both repetitions step by step, and prints the result.

        Returns the exit code 1, since the receipts differ whatever the repetitions show.
        """
        # Each repetition has put its digests into its stretch.
        mine, others = (stretch.digests for stretch in self.stretches)
        _, step = split_at_difference(mine, others)
        if step is None:
            print(
                "the repetitions do not diverge: whatever made the runs differ did not happen again"
            )
        else:
            print(f"first at step {step:,}: {first_difference(mine[step], others[step])}")
        for stretch in self.stretches:
            receipts = read_receipts(stretch.folder)
            if any(receipts[save].digests != stretch.digests[save] for save in stretch.saves):
                print(
                    f"{stretch.folder} did not repeat its own bits, so the runs may have diverged at another step"
                )
        return 1
