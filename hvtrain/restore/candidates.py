"""The checkpoints that ranks have, and the reasons not to resume from them. Pure."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvtrain.checkpoint.notes import Note
from hvtrain.checkpoint.store import folder_name
from hvtrain.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """The newest checkpoint of a rank, in memory (path None) or on its disk.

    run_id is None in checkpoints of older versions. seen_step is the newest step on its disk, damaged or not.
    """

    rank: int
    host: str
    step: int
    run_id: str | None
    path: Path | None
    seen_step: int

    def __str__(self) -> str:
        return f"{folder_name(self.step)} of {f'run {self.run_id}' if self.run_id else 'an unknown run'} on {self.host}"


def of_run(candidates: Sequence[Candidate], run_id: str | None) -> list[Candidate]:
    """The candidates of a run that has begun; all of them if run_id is None."""
    if run_id is None:
        return list(candidates)
    ours = [candidate for candidate in candidates if candidate.run_id == run_id]
    # The run may have begun from a checkpoint of an older version.
    ours = ours or [candidate for candidate in candidates if candidate.run_id is None]
    for candidate in candidates:
        if candidate not in ours:
            log.warning("%s is ignored: this is run %s", candidate, run_id)
    return ours


def check_one_run(candidates: Sequence[Candidate], newest: Candidate, folder: Path) -> None:
    """Raises CheckpointError if the candidates are of different runs.

    An older candidate of an unknown run may be the one that the known run began from. If the newest candidate is of
    an unknown run, its order among the others is unknown too.
    """
    if {candidate.run_id for candidate in candidates} - {None} <= {newest.run_id}:
        return
    first_of_runs: dict[str | None, Candidate] = {}
    for candidate in candidates:
        first_of_runs.setdefault(candidate.run_id, candidate)
    raise CheckpointError(
        f"the hosts have checkpoints of different runs in {folder / 'checkpoints'}: "
        f"{', '.join(map(str, first_of_runs.values()))}; remove those of the other run, or choose another run.dir"
    )


def check_notes(notes: Sequence[Note], hosts: Sequence[str], candidates: Sequence[Candidate], folder: Path) -> None:
    """Raises CheckpointError if a note names a newer checkpoint of this run on a host without ranks.

    hosts are those with ranks. A damaged checkpoint of the noted step on one of them counts: its loss is reported.
    """
    known = {candidate.run_id for candidate in candidates} - {None}
    seen = max((candidate.seen_step for candidate in candidates), default=-1)
    away = [note for note in notes if note.host not in hosts and note.step > seen]
    away = [note for note in away if not known or note.run_id is None or note.run_id in known]
    if not away:
        return
    newest = max(away, key=lambda note: note.step)
    missing = (
        f"checkpoint {folder_name(newest.step)} of this run is" if newest.step else "this run's first checkpoints are"
    )
    here = ", ".join(dict.fromkeys(hosts))
    present = f"the newest on {here} is {folder_name(seen)}" if seen >= 0 else f"there is none on {here}"
    raise CheckpointError(
        f"{missing} on host {newest.host}, which has no rank now, and {present}; start with that host too, copy "
        f"{folder / 'checkpoints'} from there, or continue without it with resume=available"
    )
