"""Repeats a stretch of a run's training on the ranks that were started, and records digests of its variables.

Writes nothing into the run's folder: it resumes the run as runner.py does, with callbacks that take
digests in place of those that write.
"""

import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hvtrain import runner
from hvtrain.checkpoint import model_state, store
from hvtrain.checkpoint.receipts import Digests, Facts, digests_of
from hvtrain.checkpoint.writer import Writer
from hvtrain.checks.joint_batch import largest_difference
from hvtrain.config.schema import RunConfig
from hvtrain.data import fitted
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.comm import Comm
from hvtrain.system.run_files import HISTORY_FILE
from hvtrain.training import comm_tuning
from hvtrain.training.callbacks.checkpointing import Checkpointing, Interruption
from hvtrain.training.callbacks.console_progress import Progress
from hvtrain.training.callbacks.epochs import Recording
from hvtrain.training.callbacks.guard import explain_errors
from hvtrain.training.callbacks.make_callbacks import WRITERS, call_steps, make_callbacks
from hvtrain.training.callbacks.run_context import RunContext
from hvtrain.training.consistency import facts_of
from hvtrain.training.run import ResumePoint, RunState

NOT_REPEATED = (Recording, Progress, *WRITERS)


@dataclass
class Repetition:
    """A stretch of a run, and the results of its repetition, which only the chief has.

    Attributes:
        folder: The run folder.
        begin: Step of the checkpoint at which the stretch begins; 0: the start of the run.
        saves: Later steps at which the run saved, in order; the last one ends the stretch.
        each_step: True to take digests after every step, not only after `saves`.
        compared_step: Step at which weights are compared with the run's checkpoint; 0: no step.
        facts: See consistency.facts_of.
        digests: Digests of the variables, by step; at `begin`, those of the checkpoint.
        difference: The largest_difference of the weights at `compared_step`; None if not compared.
    """

    folder: Path
    begin: int
    saves: tuple[int, ...]
    each_step: bool = False
    compared_step: int = 0
    facts: Facts = field(default_factory=dict)
    digests: dict[int, Digests] = field(default_factory=dict)
    difference: float | None = None

    def checkpoint(self, step: int) -> store.Checkpoint:
        """Reads a checkpoint of the run."""
        return store.read(self.folder / "checkpoints" / store.folder_name(step))


def repeat(
    config: RunConfig,
    choose: Callable[[int], Repetition | int],
    conclude: Callable[[Repetition], int],
    keeps_ranks: bool = False,
) -> int:
    """Joins the ranks, repeats the stretch that the chief chooses, and returns the exit code.

    Args:
        config: The run's settings.
        choose: Given the number of ranks, returns a stretch, or an exit code to repeat nothing (chief only).
        conclude: Given the repetition, returns the exit code (chief only).
        keeps_ranks: True to leave the ranks running, for another repetition.
    """

    def attempt(quiet_config, strategy, state):
        runner.join_ranks(quiet_config, strategy)
        # The log of a run's start would only hide the command's result.
        logging.getLogger("hvtrain").setLevel(logging.WARNING)
        # The user's callbacks may warn about an epoch that ends early.
        logging.getLogger("py.warnings").setLevel(logging.ERROR)
        comm = strategy.comm
        repetition = comm.on_chief(lambda: choose(comm.topology.size))
        if isinstance(repetition, int):
            strategy.stop()
            return repetition
        if comm.topology.is_chief:
            print(
                f"repeating steps {repetition.begin:,} to {repetition.saves[-1]:,} of {repetition.folder} "
                f"on {comm.topology.size} rank(s)",
                flush=True,
            )
        with TemporaryDirectory(prefix="hvtrain-replay-") as scratch:
            comm.on_chief(lambda: _copy_inputs(repetition.folder, Path(scratch)))
            # All ranks use the chief's folder; the others write nothing.
            run_folder = replace(quiet_config.run, dir=comm.broadcast(scratch))
            scratch_config = replace(quiet_config, run=run_folder)
            code = _train(scratch_config, strategy, state, repetition, config)
            code = code or comm.on_chief(lambda: conclude(repetition))
        if keeps_ranks:
            strategy.watchdog.stop()
        else:
            strategy.stop()
        return code

    quiet_config = replace(
        config,
        run=replace(config.run, dir=None),
        tracker={},
        notify=None,
        train=replace(config.train, max_time=None, balance=False),
        checkpoint=replace(config.checkpoint, every_minutes=None),
        profile=replace(config.profile, timeline=False),
        # Changed data do not stop a repetition; they are reported as a cause of differences.
        guard=replace(config.guard, data=False, layers=False),
    )
    return runner.run_attempts(quiet_config, attempt)


def _copy_inputs(run: Path, scratch: Path) -> None:
    """Copies those files of a run folder that training reads."""
    fitted.write(fitted.read(run), scratch)
    for name in (HISTORY_FILE, comm_tuning.FILE):
        if (run / name).is_file():
            shutil.copy(run / name, scratch)


def _train(
    config: RunConfig,
    strategy: Strategy,
    state: RunState,
    repetition: Repetition,
    original: RunConfig,
) -> int:
    """Trains the stretch; returns the exit code after a signal, else 0 (every rank).

    The facts are recorded with `original`, the run's own settings, of which `config` is a quiet variant.
    """
    saved = _read_resume_point(repetition, strategy.comm)
    run = runner.open_inputs(config, strategy, state, saved)
    repetition.facts = facts_of(replace(run, config=original))
    model = runner.make_model(run)
    start = runner.restore(run, model, saved)
    del saved  # Frees the checkpoint, which is as large as the model and the optimizer.
    context = RunContext.begin(run, model, start.step)

    interruption = Interruption(context)
    writer = Writer(run.folder, config.checkpoint)
    callbacks = make_callbacks(context, start, interruption, writer, tracking=None, search=None)
    callbacks = [
        DigestRecording(callback, context, repetition)
        if isinstance(callback, Checkpointing)
        else callback
        for callback in callbacks
        if not isinstance(callback, NOT_REPEATED)
    ]
    with explain_errors(context):
        runner.build_metrics(model, runner.add_batch_axis(run.source.element_spec))
        steps = call_steps(run, callbacks)
        strategy.fit(model, run.batches_from, run.plan, start.step, callbacks, steps)
    return context.report.exit_code


def _read_resume_point(repetition: Repetition, comm: Comm) -> ResumePoint | None:
    """Reads the checkpoint at which the stretch begins; None if it begins at step 0 (every rank).

    Only the chief reads the file, and gets the arrays.
    """
    step = repetition.begin
    if step == 0:
        return None
    checkpoint = None

    def read():
        nonlocal checkpoint
        checkpoint = repetition.checkpoint(step)
        repetition.digests[step] = digests_of(checkpoint.arrays)
        return checkpoint.meta

    meta = comm.on_chief(read)
    return ResumePoint(store.folder_name(step), step, meta, checkpoint)


class DigestRecording(Checkpointing):
    """Takes digests where the run saved, instead of saving, and stops at the end of the stretch (every rank).

    save_freq keeps a call of several steps from crossing a step with digests; see call_steps.
    """

    def __init__(
        self, checkpointing: Checkpointing, context: RunContext, repetition: Repetition
    ) -> None:
        super().__init__(
            context,
            checkpointing.callback_state,
            checkpointing.validation,
            checkpointing.interruption,
            checkpointing.writer,
        )
        self.repetition = repetition
        self.save_freq = math.gcd(repetition.begin, *repetition.saves)
        if repetition.each_step:
            self.save_freq = math.lcm(self.plan.accumulate, self.run.strategy.sync_every)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        step = self.step
        if (
            self.repetition.each_step
            and step not in self.repetition.saves
            and step % self.save_freq == 0
        ):
            self._record_digests()
        if step >= self.repetition.saves[-1]:
            self.model.stop_training = True

    def _minutes_due(self) -> bool:
        # The run may have saved at this step because of the clock or a signal.
        return self.step in self.repetition.saves

    def _save(self, metrics: dict[str, float]) -> None:
        # As the run did before each checkpoint: it synchronized local steps, even within a round if
        # it was interrupted, and averaged weights that no gradient touches.
        self.strategy.settle()
        self.weights.average_untrained()
        self._record_digests()

    def _record_digests(self) -> None:
        step = self.step
        parts = self.comm.gather_parts(model_state.sharded_variables(self.model), self.run.folder)
        if self.is_chief:
            arrays = model_state.snapshot(self.model, [], {}, parts)
            self.repetition.digests[step] = digests_of(arrays)
            if step == self.repetition.compared_step:
                before = self.repetition.checkpoint(step).arrays
                weights = [key for key in arrays if key.startswith("model/")]
                self.repetition.difference = largest_difference(
                    [arrays[key] for key in weights], [before[key] for key in weights]
                )
