"""What ranks say of the checkpoints that they have, and when a run must not go on from them. Pure."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvtrain.checkpoint.notes import Note
from hvtrain.checkpoint.store import name_of
from hvtrain.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Offer:
    """The newest checkpoint that a rank has: in memory (path None) or on its disk.

    run_id is None in checkpoints of older versions. seen_step is the newest step of all on its disk, damaged or not.
    """

    rank: int
    host: str
    step: int
    run_id: str | None
    path: Path | None
    seen_step: int

    def __str__(self) -> str:
        of = f"of run {self.run_id}" if self.run_id else "of a run that is not known"
        return f"{name_of(self.step)} {of} on {self.host}"


def this_runs(offers: Sequence[Offer], run_id: str | None) -> list[Offer]:
    """The offers that are this run's, where run_id says which it is, as it does once the run has begun; else all."""
    if run_id is None:
        return list(offers)
    ours = [offer for offer in offers if offer.run_id == run_id]
    ours = ours or [offer for offer in offers if offer.run_id is None]  # It may have gone on from one of those.
    for offer in offers:
        if offer not in ours:
            log.warning("%s is left alone: this is run %s", offer, run_id)
    return ours


def check_one_run(offers: Sequence[Offer], root: int, folder: Path) -> None:
    """Raises CheckpointError where the offers are of different runs; the root's is the newest.

    One of a run that is not known may be older than the others, whose run went on from it; where it is the newest,
    nobody can tell.
    """
    newest = next(offer for offer in offers if offer.rank == root)
    known = {offer.run_id for offer in offers if offer.run_id}
    if not known or known == {newest.run_id}:
        return
    shown: dict[str | None, Offer] = {}
    for offer in offers:
        shown.setdefault(offer.run_id, offer)
    raise CheckpointError(
        f"the hosts hold checkpoints of different runs in {folder / 'checkpoints'}: "
        f"{', '.join(map(str, shown.values()))}; remove those of the other run, or choose another run.dir"
    )


def check_resume(offers: Sequence[Offer], resume: str, folder: Path) -> None:
    """Raises ConfigError for resume=never where any host holds a checkpoint."""
    if resume == "never" and offers:
        raise ConfigError(
            f"run.dir={folder} holds checkpoints of an earlier run on host {offers[0].host}; "
            "go on with resume=auto or choose another run.dir"
        )


def check_notes(notes: Sequence[Note], hosts: Sequence[str], offers: Sequence[Offer], folder: Path) -> None:
    """Raises CheckpointError where a newer checkpoint of this run is known to lie on a host that has no rank.

    hosts are those that have. With a damaged checkpoint of that step on one of them, the steps are lost and said to be.
    """
    known = {offer.run_id for offer in offers if offer.run_id}
    seen = max((offer.seen_step for offer in offers), default=-1)
    away = [note for note in notes if note.host not in hosts and note.step > seen]
    away = [note for note in away if not known or note.run_id is None or note.run_id in known]
    if not away:
        return
    newest = max(away, key=lambda note: note.step)
    what = f"checkpoint {name_of(newest.step)} of this run lies" if newest.step else "this run's first checkpoints lie"
    here = ", ".join(dict.fromkeys(hosts))
    have = f"the newest on {here} is {name_of(seen)}" if seen >= 0 else f"there is none on {here}"
    raise CheckpointError(
        f"{what} on host {newest.host}, which has no rank now, and {have}; start with that host too, copy "
        f"{folder / 'checkpoints'} from there, or go on all the same with resume=available"
    )
