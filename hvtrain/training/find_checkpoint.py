"""Finds the checkpoint to resume from: the newest readable one of this run, on any host.

Without a shared disk each host has its own checkpoints, and rank 0 may run on another host than
before. Each rank reports its newest checkpoint; the first rank that has the newest of all (the root)
reads it and sends it to rank 0.
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

from hvtrain.checkpoint import store, writer
from hvtrain.checkpoint.store import Checkpoint, folder_name
from hvtrain.checkpoint.writer import mark_best, read_best
from hvtrain.data import fitted
from hvtrain.data.kinds import KINDS_FILE
from hvtrain.errors import CheckpointError, ConfigError
from hvtrain.strategies.comm import Comm
from hvtrain.system import checkpoint_notes as notes
from hvtrain.system.checkpoint_notes import Note, NoteKeeper, checked_run_id
from hvtrain.system.files import is_own_file, read_bytes, read_file, refuse_link, write_atomic
from hvtrain.system.run_files import (
    HISTORY_FILE,
    RANKS_FILE,
    RECEIPTS_FILE,
    STARTS_FILE,
    TRACKERS_FILE,
)
from hvtrain.system.run_lock import LOCK_FILE
from hvtrain.training.resume import send_arrays
from hvtrain.training.run import ResumePoint, RunState

log = logging.getLogger(__name__)

# Keys that a checkpoint's meta must have for a resume, and the types of their values.
_NEEDED: dict[str, Any] = {
    "num_ranks": int,
    "batch_size": int | list,
    "batch_sizes": list,
    "world_size": int,
    "epoch": int,
    "step_in_epoch": int,
}
# Records of a run's epochs and starts, sent to rank 0 when the checkpoint comes from another host.
RECORDS = (HISTORY_FILE, RANKS_FILE, RECEIPTS_FILE, STARTS_FILE, TRACKERS_FILE)


@dataclass(frozen=True)
class Candidate:
    """A rank's newest checkpoint that is not known to be damaged: in memory (path None) or on disk.

    run_id is None if no checkpoint on the disk names its run, for example because all are damaged.
    seen_step is the newest step on the disk, damaged or not.
    """

    rank: int
    host: str
    step: int
    run_id: str | None
    path: Path | None
    seen_step: int

    def __str__(self) -> str:
        run = f"run {self.run_id}" if self.run_id else "an unknown run"
        return f"{folder_name(self.step)} of {run} on {self.host}"


def find_checkpoint(
    folder: Path,
    comm: Comm,
    run_state: RunState,
    resume: str = "auto",
    on_all_ranks: bool = False,
    copies: int = 0,
) -> ResumePoint | None:
    """Returns the newest readable checkpoint of this run, in memory or on any host; None without one (every rank).

    Args:
        folder: The run folder, the same path on all hosts.
        comm: The collectives.
        run_state: Holds the checkpoint in memory, if any. Receives the run's identifier, this host's
            note keeper, and with on_all_ranks the checkpoint.
        resume: The setting `resume`.
        on_all_ranks: All ranks get the checkpoint's arrays, not only the chief.
        copies: The setting checkpoint.copies; if set, the chief also writes a received checkpoint to its disk.

    Raises:
        CheckpointError: Hosts have checkpoints of different runs, a newer one is on an absent host,
            or all are damaged.
        ConfigError: resume=never, and a host has a checkpoint. (run_folder.py already refuses rank 0's own.)
    """
    search = _Search(folder, comm, run_state, on_all_ranks)
    saved = search.newest()
    hosts = comm.gather(comm.topology.host)
    rank = comm.topology.rank
    # Checked only when the run starts: after a change of ranks its identifier is known.
    if search.run_id is None:
        if resume == "never" and search.candidates:
            raise ConfigError(
                f"run.dir={folder} holds checkpoints of an earlier run on host {search.candidates[0].host}; "
                "use resume=auto or choose another run.dir"
            )
        if resume == "auto" and run_state.checkpoint is None:
            own_notes = [notes.read(folder)]
            # With copies, the launcher's note may name a checkpoint that was never copied
            # completely; a copy of an older one will do.
            if not copies or not search.candidates:
                own_notes.append(notes.from_environment(os.environ))
            all_notes = [
                note for rank_notes in comm.gather(own_notes) for note in rank_notes if note
            ]
            _check_notes(all_notes, hosts, search.candidates, folder)

    checkpoint = None
    run_id = search.run_id
    if saved:
        checkpoint = search.send(saved, copies)
        run_id = saved.meta["run_id"]
    run_state.run_id = run_id or comm.broadcast(uuid.uuid4().hex[:12])

    run_state.note_keeper = NoteKeeper()
    if search.has_own_disk and hosts.index(hosts[rank]) == rank:
        # On each host with its own disk the first rank keeps the note, except on rank 0's host,
        # which has the checkpoints themselves. With resume=available the user has accepted that the
        # newest checkpoint is absent, so even this run's own note is forgotten.
        notes.forget(folder, run_state.run_id if resume != "available" else None)
        if saved and saved.host not in ("", hosts[rank]):
            NoteKeeper(folder, saved.host, run_state.run_id).note(saved.step)
        run_state.note_keeper = NoteKeeper(folder if rank else None, hosts[0], run_state.run_id)
    if saved is None:
        return None
    if on_all_ranks:
        run_state.checkpoint = checkpoint
    return replace(saved, checkpoint=checkpoint)


class _Search:
    """Gathers every rank's candidate until the newest of them can be read."""

    def __init__(self, folder: Path, comm: Comm, run_state: RunState, on_all_ranks: bool) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.comm = comm
        self.run_state = run_state
        self.needs_arrays = on_all_ranks or comm.topology.is_chief
        self.candidates: list[Candidate] = []

        # Not None if the run continues after a change of ranks.
        self.run_id = next(filter(None, comm.gather(run_state.run_id)), None)

        # A rank shares the chief's disk if the lock file in its run folder has the same content.
        own_lock = ""  # If the file is missing or unreadable, the disk counts as the rank's own.
        with suppress(OSError, ValueError):
            own_lock = read_file(folder / LOCK_FILE)[:200]
        self.has_own_disk = (
            comm.broadcast(own_lock) != own_lock or comm.topology.is_chief or not own_lock
        )

        self._damaged: dict[Path, str] = {}
        self._checkpoint: Checkpoint | None = None
        self._root = 0

    def newest(self) -> ResumePoint | None:
        """Reads the newest readable checkpoint on the root; returns None if there is none (every rank)."""
        saved = None
        while saved is None:
            candidates = self.comm.gather(self.comm.all_or_raise(self._candidate))
            candidates = [candidate for candidate in candidates if candidate]
            self.candidates = _candidates_of_run(candidates, self.run_id)
            if not self.candidates:
                break
            # The lowest rank on a tie, so that rank 0 is not sent what it already has.
            newest = max(self.candidates, key=lambda candidate: (candidate.step, -candidate.rank))
            self._root = newest.rank
            saved = self.comm.on_rank(self._root, partial(self._read, newest))

        run_ids = {candidate.run_id for candidate in self.candidates} - {None}
        if saved and self.run_id is None and len(run_ids) > 1:
            first_of_runs: dict[str | None, Candidate] = {}
            for candidate in self.candidates:
                first_of_runs.setdefault(candidate.run_id, candidate)
            raise CheckpointError(
                f"the hosts have checkpoints of different runs in {self.checkpoints}: "
                f"{', '.join(map(str, first_of_runs.values()))}; remove those of the other run, or choose "
                "another run.dir"
            )
        self._report_damaged(saved)
        return saved

    def send(self, saved: ResumePoint, copies: int) -> Checkpoint | None:
        """Sends the checkpoint to the ranks that need it (every rank).

        Returns it on those ranks, and None on the others.
        """
        committed = self.run_state.checkpoint
        if self._checkpoint is None and committed is not None and committed.step == saved.step:
            self._checkpoint = committed

        is_missing = self.needs_arrays and self._checkpoint is None
        if any(self.comm.gather(is_missing)):
            own_arrays = self._checkpoint.arrays if self._checkpoint else {}
            arrays = send_arrays(own_arrays, self._root, self.comm, is_missing)
            if is_missing:
                self._checkpoint = Checkpoint(saved.step, saved.meta, arrays)
        # A checkpoint in memory has no records on a disk, and the chief's own are already in place.
        if self._root and saved.host:
            self._send_records()
            if copies:
                self.comm.on_chief(self._write)
        return self._checkpoint if self.needs_arrays else None

    def _candidate(self) -> Candidate | None:
        """Returns this rank's candidate, or None if it has no checkpoint.

        Raises CheckpointError if the folder of checkpoints is a symbolic link.
        """
        topology = self.comm.topology
        refuse_link(self.checkpoints, CheckpointError, "make it a folder")
        paths: list[Path] = []
        # Only rank 0 reports what is on a shared disk.
        if self.has_own_disk:
            paths = [
                path
                for path in store.list_checkpoints(self.checkpoints)
                if path not in self._damaged
            ]
        step = max(map(store.step_of, paths), default=-1)
        seen_step = max([step, *map(store.step_of, self._damaged)])

        committed = self.run_state.checkpoint
        path = None
        if committed is not None and committed.step >= step:
            step = committed.step
            run_id = self.run_state.run_id
        elif paths:
            path = paths[-1]
            # If its meta is unreadable, an older checkpoint in the folder names the run.
            metas = map(store.unchecked_meta, reversed(paths))
            run_ids = (checked_run_id(meta.get("run_id")) for meta in metas)
            run_id = next(filter(None, run_ids), None)
        else:
            return None
        return Candidate(topology.rank, topology.host, step, run_id, path, seen_step)

    def _read(self, candidate: Candidate) -> ResumePoint | None:
        """Reads the root's candidate; returns None if it is damaged (root only)."""
        location = f" on {candidate.host}" if candidate.rank else ""
        host = ""
        if candidate.path is None:
            assert self.run_state.checkpoint is not None
            checkpoint = self.run_state.checkpoint
            location = f" in memory{location}"
        else:
            host = candidate.host
            try:
                checkpoint = store.read(candidate.path)
            except CheckpointError as error:
                self._damaged[candidate.path] = str(error)
                return None

        name = folder_name(checkpoint.step)
        meta = checkpoint.meta
        # Matching checksums prove that the files are intact, not that a run wrote them.
        missing = [key for key, kind in _NEEDED.items() if not isinstance(meta.get(key), kind)]
        if checked_run_id(meta.get("run_id")) is None:
            missing.append("run_id")
        if missing:
            raise CheckpointError(
                f"checkpoint {name} lacks {', '.join(missing)} and cannot be resumed; choose another run.dir"
            )
        self._checkpoint = checkpoint
        return ResumePoint(name + location, checkpoint.step, meta, host=host)

    def _write(self) -> None:
        """Writes the checkpoint that this rank received."""
        assert self._checkpoint
        writer.write(
            self.checkpoints, self._checkpoint.step, self._checkpoint.arrays, self._checkpoint.meta
        )

    def _report_damaged(self, saved: ResumePoint | None) -> None:
        """Sets damaged checkpoints aside and logs them (every rank).

        Raises CheckpointError if no other checkpoint is left. The damaged ones then keep their names,
        since someone may be able to repair them.
        """
        topology = self.comm.topology
        # Of several ranks on a host that met the same damage, the first reports it.
        by_rank = self.comm.gather((topology.host, set(self._damaged)))
        reported = {
            path
            for host, paths in by_rank[: topology.rank]
            for path in paths
            if host == topology.host
        }
        damaged = {path: text for path, text in self._damaged.items() if path not in reported}
        own_lines = list(damaged.values())
        if saved:
            own_lines = [store.set_aside(path, text, saved.step) for path, text in damaged.items()]
        if not topology.is_chief:
            own_lines = [f"host {topology.host}: {line}" for line in own_lines]

        lines = [line for rank_lines in self.comm.gather(own_lines) for line in rank_lines]
        if lines and not saved:
            raise CheckpointError(
                f"{lines[0]}; no other checkpoint in {self.checkpoints} is intact; choose another run.dir to start over"
            )
        if topology.is_chief:
            for line in lines:
                log.warning(line)

    def _send_records(self) -> None:
        """Sends the records, and the record of the best checkpoint, from the root to the chief (every rank)."""
        own_host = self.comm.topology.host
        records, best, root_host = self.comm.on_rank(
            self._root,
            lambda: (read_records(self.folder), read_best(self.checkpoints), own_host),
        )

        def write():
            for name, content in records.items():
                with suppress(
                    OSError
                ):  # write_atomic raises the error for a folder that is missing.
                    (self.folder / name).parent.mkdir(exist_ok=True)
                write_atomic(self.folder / name, content)
            if best:
                # A record without a host means the root's own disk, which need not be the chief's.
                best_host = best.get("host", root_host)
                elsewhere = {"host": best_host} if best_host != own_host else {}
                mark_best(
                    self.checkpoints, best["step"], best["metric"], best["value"], **elsewhere
                )

        self.comm.on_chief(write)


def read_records(folder: Path) -> dict[str, bytes]:
    """Reads the RECORDS, the kinds of the inputs and the fitted preprocessing that exist in the run folder, by path."""
    names = (*RECORDS, KINDS_FILE)
    paths = [*(folder / name for name in names), *(folder / fitted.FOLDER).glob("[!.]*")]
    return {str(path.relative_to(folder)): read_bytes(path) for path in paths if is_own_file(path)}


def _candidates_of_run(candidates: list[Candidate], run_id: str | None) -> list[Candidate]:
    """Returns the candidates of the run with this identifier; all of them if it is None."""
    if run_id is None:
        return candidates
    ours = [candidate for candidate in candidates if candidate.run_id == run_id]
    if not ours:
        # Those of an unknown run are damaged, which must be reported before the run starts over.
        ours = [candidate for candidate in candidates if candidate.run_id is None]
    for candidate in candidates:
        if candidate not in ours:
            log.warning("%s is ignored: this is run %s", candidate, run_id)
    return ours


def _check_notes(
    all_notes: Sequence[Note],
    hosts: Sequence[str],
    candidates: Sequence[Candidate],
    folder: Path,
) -> None:
    """Raises CheckpointError if a note names a newer checkpoint of this run on an absent host.

    A damaged checkpoint of that step on a present host counts as present; _report_damaged reports it.
    """
    run_ids = {candidate.run_id for candidate in candidates} - {None}
    seen_step = max((candidate.seen_step for candidate in candidates), default=-1)
    away = [note for note in all_notes if note.host not in hosts and note.step > seen_step]
    # A note without a run is the launcher's, and counts as this run's.
    away = [note for note in away if not run_ids or note.run_id is None or note.run_id in run_ids]
    newest = max(away, key=lambda note: note.step, default=None)
    if newest is None:
        return

    subject = "this run's first checkpoints are"
    if newest.step:
        subject = f"checkpoint {folder_name(newest.step)} of this run is"
    here = ", ".join(dict.fromkeys(hosts))
    present = f"there is none on {here}"
    if seen_step >= 0:
        present = f"the newest on {here} is {folder_name(seen_step)}"
    raise CheckpointError(
        f"{subject} on host {newest.host}, which has no rank now, and {present}; start with "
        f"that host too, copy {folder / 'checkpoints'} from there, or continue without it with resume=available"
    )
