"""Which checkpoint a run goes on from: the newest whole one of this run, on whichever host it lies.

Without a shared disk each host has its own, and rank 0 may be on another host than before. Each rank says what is
the newest that it has; the first rank that has the newest of all reads it, and it travels to rank 0. resuming
restores it.
"""

from __future__ import annotations

import logging
import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvtrain.checkpoint import notes, store
from hvtrain.checkpoint.notes import Note, Noting, checked_run_id
from hvtrain.checkpoint.store import Checkpoint
from hvtrain.checkpoint.writer import mark_best, read_best
from hvtrain.core.records import read_history, write_history
from hvtrain.errors import CheckpointError
from hvtrain.restore.offers import Offer, check_notes, check_one_run, check_resume, this_runs
from hvtrain.restore.resume import Found, RunState
from hvtrain.restore.transfer import bring
from hvtrain.strategies.comm import Comm
from hvtrain.system.run_lock import LOCK_FILE

log = logging.getLogger(__name__)

# Without these, of these types, a checkpoint does not say how its run went.
_NEEDED: dict[str, type | tuple[type, ...]] = {
    "num_ranks": int,
    "batch_size": (int, list),
    "batch_sizes": list,
    "epoch": int,
    "step_in_epoch": int,
}


def find(
    folder: Path, comm: Comm, run_state: RunState, resume: str = "auto", on_all_ranks: bool = False
) -> Found | None:
    """The newest whole checkpoint of this run, in memory or on the disk of any host; or None (every rank).

    Args:
        folder: the run folder.
        comm: collectives.
        run_state: gets the run's identifier, this host's note, and with on_all_ranks the checkpoint.
        resume: see RunConfig.
        on_all_ranks: all ranks get the arrays, not the chief alone.

    Raises:
        CheckpointError: hosts hold checkpoints of different runs; a newer one lies on a host that is not there;
            or all that there are are damaged.
        ConfigError: resume=never, and another host than rank 0's holds a checkpoint.
    """
    search = _Search(folder, comm, run_state, on_all_ranks)
    found = search.newest()
    hosts = comm.gather(comm.topology.host)
    if search.run_id is None:
        check_resume(search.offers, resume, folder)
        if resume == "auto" and run_state.checkpoint is None:
            check_notes(search.notes(), hosts, search.offers, folder)
    whole = search.bring(found) if found else None
    run_id = found and checked_run_id(found.meta.get("run_id"))
    run_state.run_id = run_id or search.run_id or comm.broadcast(uuid.uuid4().hex[:12])
    rank = comm.topology.rank
    if search.has_own_disk and hosts.index(hosts[rank]) == rank:
        run_state.noting = _noting(folder, rank, hosts, run_state.run_id, found, resume)
    else:
        run_state.noting = Noting()
    if on_all_ranks and whole:
        run_state.checkpoint = whole
    return replace(found, whole=whole) if found else None


class _Search:
    """What all ranks have, round by round, until the newest of it is found whole."""

    def __init__(self, folder: Path, comm: Comm, run_state: RunState, on_all_ranks: bool) -> None:
        self.folder = folder
        self.comm = comm
        self.run_state = run_state
        self.on_all_ranks = on_all_ranks
        self.offers: list[Offer] = []
        # Of a run that has begun already, whose ranks are others now.
        self.run_id = next(filter(None, comm.gather(run_state.run_id)), None)
        self.has_own_disk = _has_own_disk(folder, comm)
        self._damaged: dict[Path, str] = {}
        self._whole: Checkpoint | None = None
        self._root = 0

    def newest(self) -> Found | None:
        """Every rank. It is read, checked, and kept on one rank, the root."""
        found = None
        while found is None:
            everyone = self.comm.gather(self.comm.all_or_raise(self._own))
            self.offers = this_runs([offer for offer in everyone if offer], self.run_id)
            if not self.offers:
                break
            chosen = max(self.offers, key=lambda offer: (offer.step, -offer.rank))
            self._root = chosen.rank
            found = self.comm.on_rank(self._root, self._read)
        if found and self.run_id is None:
            check_one_run(self.offers, self._root, self.folder)
        self._tell_damaged(found)
        return found

    def notes(self) -> list[Note]:
        """What the hosts, and the launcher, know of the newest checkpoint (every rank)."""
        own = [notes.read(self.folder), notes.from_launcher(os.environ)]
        return [note for notes in self.comm.gather(own) for note in notes if note]

    def bring(self, found: Found) -> Checkpoint | None:
        """Sends it to the ranks that need it; None on the others (every rank)."""
        committed = self.run_state.checkpoint
        has_it = self._whole is not None or (committed is not None and committed.step == found.step)
        if self._whole is None and has_it:
            self._whole = committed
        wanted = self.comm.topology.is_chief or self.on_all_ranks
        if any(self.comm.gather(wanted and not has_it)):
            arrays = bring(self._whole.arrays if self._whole else None, self._root, self.comm, wanted and not has_it)
            if arrays is not None:
                self._whole = Checkpoint(Path(store.name_of(found.step)), found.step, dict(found.meta), arrays)
        if self._root and found.host:
            self._bring_records()
        return self._whole if wanted else None

    def _own(self) -> Offer | None:
        """The newest that this rank has, but for those that it found damaged."""
        topology, checkpoints = self.comm.topology, self.folder / "checkpoints"
        if checkpoints.is_symlink():
            raise CheckpointError(
                f"{checkpoints} is a symbolic link, and may lead out of the run folder; make it a folder"
            )
        paths = store.listed(checkpoints) if self.has_own_disk else []
        paths = [path for path in paths if path not in self._damaged]
        committed = self.run_state.checkpoint
        step = store.step_of(paths[-1]) if paths else -1
        seen = max([step, *map(store.step_of, self._damaged)])
        if committed is not None and committed.step >= step:
            return Offer(topology.rank, topology.host, committed.step, self.run_state.run_id, None, seen)
        if not paths:
            return None
        run_ids = (store.run_id(path) for path in reversed(paths))
        return Offer(topology.rank, topology.host, step, next(filter(None, run_ids), None), paths[-1], seen)

    def _read(self) -> Found | None:
        """The root's offer, whole; None where it is damaged (root only)."""
        offer = next(offer for offer in self.offers if offer.rank == self.comm.topology.rank)
        where = f" on {offer.host}" if offer.rank else ""
        if offer.path is None:
            assert self.run_state.checkpoint is not None
            newest, where = self.run_state.checkpoint, f" in memory{where}"
        else:
            try:
                newest = store.read(offer.path)
            except CheckpointError as error:
                self._damaged[offer.path] = str(error)
                return None
        missing = [name for name, kind in _NEEDED.items() if not isinstance(newest.meta.get(name), kind)]
        if missing:
            raise CheckpointError(
                f"checkpoint {newest.path.name} lacks {', '.join(missing)} and so is of no run; choose another run.dir"
            )
        self._whole = newest
        return Found(newest.path.name + where, newest.step, newest.meta, host=offer.host if offer.path else "")

    def _tell_damaged(self, found: Found | None) -> None:
        """Sets aside what was damaged, and says so; raises CheckpointError where nothing else is there (every rank)."""
        place = self.comm.topology
        where = "" if place.is_chief else f"host {place.host}: "
        if found:
            own = [store.passed_over(path, line, found.step) for path, line in self._damaged.items()]
        else:
            own = list(self._damaged.values())
        lines = [line for lines in self.comm.gather([f"{where}{line}" for line in own]) for line in lines]
        if lines and not found:
            raise CheckpointError(
                f"{lines[0]}; no other checkpoint in {self.folder / 'checkpoints'} is whole; "
                "choose another run.dir to start anew"
            )
        for line in lines if place.is_chief else ():
            log.warning("%s", line)

    def _bring_records(self) -> None:
        """The rows of the history, and which checkpoint was the best, from the root to the chief (every rank)."""

        def read() -> tuple[Any, Any, str]:
            return read_history(self.folder), read_best(self.folder / "checkpoints"), self.comm.topology.host

        rows, best, host = self.comm.on_rank(self._root, read)

        def write() -> None:
            if rows:
                write_history(self.folder, rows)
            if best:
                there = best.get("host", host)
                place = {} if there == self.comm.topology.host else {"host": there}
                mark_best(self.folder / "checkpoints", best["step"], best["metric"], best["value"], **place)

        self.comm.on_chief(write)


def _noting(folder: Path, rank: int, hosts: list[str], run_id: str, found: Found | None, resume: str) -> Noting:
    """Notes on this host where the checkpoint lies that the run goes on from; returns what notes those that follow.

    By the first rank of each host that has a disk of its own; rank 0's host needs no note of what rank 0 writes.
    """
    notes.forget(folder, None if resume == "available" else run_id)
    if found and found.host not in ("", hosts[rank]):
        Noting(folder, found.host, run_id).note(found.step)
    return Noting(folder if rank else None, hosts[0], run_id)


def _has_own_disk(folder: Path, comm: Comm) -> bool:
    """False on a rank that sees the run folder of the chief, by what that wrote into its lock (every rank)."""
    try:
        seen = (folder / LOCK_FILE).read_text(encoding="utf-8", errors="replace")[:200]
    except OSError:
        seen = ""
    of_chief = comm.broadcast(seen)
    return comm.topology.is_chief or not seen or seen != of_chief
