"""Finds the checkpoint to resume from: the newest one of this run, on whichever host, that can be read.

Without a shared disk each host has its own, and rank 0 may be on another host than before. Each rank reports the
newest checkpoint that it has; the first rank with the newest of all (the root) reads it and sends it to rank 0.
"""

import logging
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hvtrain.checkpoint import notes, store
from hvtrain.checkpoint.notes import Note, NoteKeeper, checked_run_id
from hvtrain.checkpoint.store import Checkpoint, folder_name
from hvtrain.checkpoint.writer import mark_best, read_best
from hvtrain.core.records import read_file
from hvtrain.errors import CheckpointError, ConfigError
from hvtrain.strategies.comm import Comm
from hvtrain.system.run_lock import LOCK_FILE
from hvtrain.training.resume import ResumePoint, RunState, send_arrays
from hvtrain.training.run_records import read_records, write_records

log = logging.getLogger(__name__)

# The meta that a checkpoint needs to be resumed, with its types.
_NEEDED: Any = {"num_ranks": int, "batch_size": int | list, "batch_sizes": list, "epoch": int, "step_in_epoch": int}


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


def find(
    folder: Path, comm: Comm, run_state: RunState, resume: str = "auto", on_all_ranks: bool = False
) -> ResumePoint | None:
    """Finds the newest readable checkpoint of this run, in memory or on the disk of any host (every rank).

    run_state gets the run's identifier, this host's note, and with on_all_ranks the checkpoint, whose arrays all ranks
    then get, not the chief alone. Raises CheckpointError if hosts have checkpoints of different runs, a newer one is on
    an absent host, or all are damaged; ConfigError if resume=never, and another host than rank 0's has a checkpoint.
    """
    search = _Search(folder, comm, run_state, on_all_ranks)
    saved = search.newest()
    hosts, rank = comm.gather(comm.topology.host), comm.topology.rank
    if search.run_id is None:
        if resume == "never" and search.candidates:
            raise ConfigError(
                f"run.dir={folder} holds checkpoints of an earlier run on host {search.candidates[0].host}; "
                "use resume=auto or choose another run.dir"
            )
        if resume == "auto" and run_state.checkpoint is None:
            own = [notes.read(folder), notes.from_launcher(os.environ)]
            known = [note for both in comm.gather(own) for note in both if note]
            _check_notes(known, hosts, search.candidates, folder)
    checkpoint = search.send(saved) if saved else None
    run_id = saved and checked_run_id(saved.meta.get("run_id"))
    run_state.run_id = run_id or search.run_id or comm.broadcast(uuid.uuid4().hex[:12])
    run_state.note_keeper = NoteKeeper()
    if search.has_own_disk and hosts.index(hosts[rank]) == rank:
        # The first rank of each host with its own disk keeps the note; rank 0's host has the checkpoints themselves.
        notes.forget(folder, None if resume == "available" else run_state.run_id)
        if saved and saved.host not in ("", hosts[rank]):
            NoteKeeper(folder, saved.host, run_state.run_id).note(saved.step)
        run_state.note_keeper = NoteKeeper(folder if rank else None, hosts[0], run_state.run_id)
    if on_all_ranks and checkpoint:
        run_state.checkpoint = checkpoint
    return replace(saved, checkpoint=checkpoint) if saved else None


class _Search:
    """Gathers every rank's candidate until the newest of them can be read."""

    def __init__(self, folder: Path, comm: Comm, run_state: RunState, on_all_ranks: bool) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.comm = comm
        self.run_state = run_state
        self.wanted = on_all_ranks or comm.topology.is_chief
        self.candidates: list[Candidate] = []
        # Set if the run has begun already, on ranks that have changed since.
        self.run_id = next(filter(None, comm.gather(run_state.run_id)), None)
        # A rank shares the chief's run folder if the lock in it has the same contents.
        seen = ""
        with suppress(OSError, ValueError):
            seen = read_file(folder / LOCK_FILE)[:200]
        self.has_own_disk = comm.broadcast(seen) != seen or comm.topology.is_chief or not seen
        self._damaged: dict[Path, str] = {}
        self._checkpoint: Checkpoint | None = None
        self._root = 0

    def newest(self) -> ResumePoint | None:
        """Finds the checkpoint, and reads it on the root (every rank)."""
        saved = None
        while saved is None:
            everyone = self.comm.gather(self.comm.all_or_raise(self._candidate))
            self.candidates = _of_run([candidate for candidate in everyone if candidate], self.run_id)
            if not self.candidates:
                break
            newest = max(self.candidates, key=lambda candidate: (candidate.step, -candidate.rank))
            self._root = newest.rank
            saved = self.comm.on_rank(self._root, partial(self._read, newest))
        # An older candidate of an unknown run may be the one that the known run began from. If the newest candidate is
        # of an unknown run, its order among the others is unknown too.
        if saved and self.run_id is None and {one.run_id for one in self.candidates} - {None, newest.run_id}:
            first_of_runs = {one.run_id: one for one in reversed(self.candidates)}.values()
            raise CheckpointError(
                f"the hosts have checkpoints of different runs in {self.checkpoints}: "
                f"{', '.join(map(str, sorted(first_of_runs, key=lambda one: one.rank)))}; "
                "remove those of the other run, or choose another run.dir"
            )
        self._report_damaged(saved)
        return saved

    def send(self, saved: ResumePoint) -> Checkpoint | None:
        """Sends the checkpoint to the ranks that need it; returns None on the others (every rank)."""
        committed = self.run_state.checkpoint
        if self._checkpoint is None and committed is not None and committed.step == saved.step:
            self._checkpoint = committed
        is_missing = self.wanted and self._checkpoint is None
        if any(self.comm.gather(is_missing)):
            known = self._checkpoint.arrays if self._checkpoint else None
            if (arrays := send_arrays(known, self._root, self.comm, is_missing)) is not None:
                self._checkpoint = Checkpoint(Path(folder_name(saved.step)), saved.step, dict(saved.meta), arrays)
        if self._root and saved.host:
            self._send_records()
        return self._checkpoint if self.wanted else None

    def _candidate(self) -> Candidate | None:
        """The newest checkpoint of this rank, apart from those that it knows to be damaged."""
        topology = self.comm.topology
        if self.checkpoints.is_symlink():
            raise CheckpointError(
                f"{self.checkpoints} is a symbolic link, and may lead out of the run folder; make it a folder"
            )
        paths = store.list_checkpoints(self.checkpoints) if self.has_own_disk else []
        paths = [path for path in paths if path not in self._damaged]
        committed = self.run_state.checkpoint
        step = store.step_of(paths[-1]) if paths else -1
        seen = max([step, *map(store.step_of, self._damaged)])
        if committed is not None and committed.step >= step:
            return Candidate(topology.rank, topology.host, committed.step, self.run_state.run_id, None, seen)
        if not paths:
            return None
        run_ids = (store.run_id(path) for path in reversed(paths))
        return Candidate(topology.rank, topology.host, step, next(filter(None, run_ids), None), paths[-1], seen)

    def _read(self, candidate: Candidate) -> ResumePoint | None:
        """Reads the root's candidate; returns None if it is damaged (root only)."""
        where = f" on {candidate.host}" if candidate.rank else ""
        if candidate.path is None:
            assert self.run_state.checkpoint is not None
            checkpoint, where = self.run_state.checkpoint, f" in memory{where}"
        else:
            try:
                checkpoint = store.read(candidate.path)
            except CheckpointError as error:
                self._damaged[candidate.path] = str(error)
                return None
        name, meta = checkpoint.path.name, checkpoint.meta
        missing = [key for key, kind in _NEEDED.items() if not isinstance(meta.get(key), kind)]
        if missing:
            raise CheckpointError(
                f"checkpoint {name} lacks {', '.join(missing)} and cannot be resumed; choose another run.dir"
            )
        self._checkpoint = checkpoint
        return ResumePoint(name + where, checkpoint.step, meta, host=candidate.host if candidate.path else "")

    def _report_damaged(self, saved: ResumePoint | None) -> None:
        """Sets damaged checkpoints aside and logs them; raises CheckpointError if there are no others (every rank)."""
        place = self.comm.topology
        where = "" if place.is_chief else f"host {place.host}: "
        own = [store.set_aside(path, line, saved.step) if saved else line for path, line in self._damaged.items()]
        lines = [line for lines in self.comm.gather([f"{where}{line}" for line in own]) for line in lines]
        if lines and not saved:
            raise CheckpointError(
                f"{lines[0]}; no other checkpoint in {self.checkpoints} is whole; choose another run.dir to start anew"
            )
        for line in lines if place.is_chief else ():
            log.warning("%s", line)

    def _send_records(self) -> None:
        """Sends the records and the name of the best checkpoint from the root to the chief (every rank)."""
        place = self.comm.topology
        records, best, host = self.comm.on_rank(
            self._root, lambda: (read_records(self.folder), read_best(self.checkpoints), place.host)
        )

        def write() -> None:
            write_records(self.folder, records)
            if best:
                best_host = best.get("host", host)
                elsewhere = {} if best_host == place.host else {"host": best_host}
                mark_best(self.checkpoints, best["step"], best["metric"], best["value"], **elsewhere)

        self.comm.on_chief(write)


def _of_run(candidates: Sequence[Candidate], run_id: str | None) -> list[Candidate]:
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


def _check_notes(notes: Sequence[Note], hosts: Sequence[str], candidates: Sequence[Candidate], folder: Path) -> None:
    """Raises CheckpointError if a note names a newer checkpoint of this run on a host that is not among these hosts.

    A damaged checkpoint of the noted step on one of them counts: its loss is reported.
    """
    known = {candidate.run_id for candidate in candidates} - {None}
    seen = max((candidate.seen_step for candidate in candidates), default=-1)
    away = [note for note in notes if note.host not in hosts and note.step > seen]
    away = [note for note in away if not known or note.run_id is None or note.run_id in known]
    newest = max(away, key=lambda note: note.step, default=None)
    if newest is None:
        return
    first, later = "this run's first checkpoints are", f"checkpoint {folder_name(newest.step)} of this run is"
    here = ", ".join(dict.fromkeys(hosts))
    present = f"the newest on {here} is {folder_name(seen)}" if seen >= 0 else f"there is none on {here}"
    raise CheckpointError(
        f"{later if newest.step else first} on host {newest.host}, which has no rank now, and {present}; start with "
        f"that host too, copy {folder / 'checkpoints'} from there, or continue without it with resume=available"
    )
