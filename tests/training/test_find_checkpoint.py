"""Which checkpoint a run goes on from: with ranks that are threads here, each host with a folder of its own."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from hvtrain.checkpoint import store, writer
from hvtrain.checkpoint.store import Checkpoint
from hvtrain.core.topology import Topology
from hvtrain.errors import CheckpointError, ConfigError
from hvtrain.strategies.comm import Comm
from hvtrain.system import checkpoint_notes as notes
from hvtrain.system.files import write_json
from hvtrain.system.run_files import (
    STARTS_FILE,
    EpochRecord,
    history_table,
    ranks_table,
    read_history,
    read_rank_seconds,
    read_starts,
)
from hvtrain.system.run_lock import RunLock
from hvtrain.training.find_checkpoint import find_checkpoint
from hvtrain.training.resume import send_arrays
from hvtrain.training.run import RunState
from hvtrain.watchdog.processes import resume_advice

META = {
    "num_ranks": 2,
    "batch_size": 32,
    "batch_sizes": [32, 32],
    "world_size": 2,
    "epoch": 1,
    "step_in_epoch": 2,
    "metrics": {},
}
OURS, OTHER = "0123456789ab", "ba9876543210"
ARRAYS = {
    "model/0000/a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "model/0001/b": np.arange(5).astype(ml_dtypes.bfloat16),
    "optimizer/0000/c": np.array(7),
    "rank/0/d": np.zeros((0, 3)),
    "rank/1/e": np.array([True, False]),
}


class Meeting:
    """What one rank at a time says, all ranks hear."""

    def __init__(self, size):
        self.said = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def gather(self, rank, value):
        self.said[rank] = value
        self.barrier.wait()
        heard = list(self.said)
        self.barrier.wait()
        return heard


class Rank(Comm):
    def __init__(self, rank, hosts, meeting):
        super().__init__()
        self.topology = Topology(rank, len(hosts), host=hosts[rank])
        self.meeting = meeting

    def gather(self, value):
        return self.meeting.gather(self.topology.rank, value)

    def broadcast(self, value, root=0):
        return self.gather(value)[root]


def on_ranks(hosts, action):
    """What action(comm) returns, or raises for the user, on each rank."""
    meeting = Meeting(len(hosts))

    def act(rank):
        try:
            return action(Rank(rank, hosts, meeting))
        except (CheckpointError, ConfigError) as error:
            return error
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(act, range(len(hosts))))


def write(folder, step, run_id=OURS, arrays=ARRAYS):
    return writer.write(folder / "checkpoints", step, arrays, {**META, "run_id": run_id})


def find_on(tmp_path, hosts, run_states=None, resume="auto", on_all_ranks=False, copies=0):
    """What each rank finds in the folder of its host."""
    run_states = run_states or [RunState(0.0) for _ in hosts]

    def action(comm):
        folder = tmp_path / comm.topology.host
        folder.mkdir(exist_ok=True)
        return find_checkpoint(
            folder, comm, run_states[comm.topology.rank], resume, on_all_ranks, copies
        )

    return on_ranks(hosts, action)


def in_memory(step, run_id=OURS):
    meta = {**META, "run_id": run_id, "step": step}
    return RunState(0.0, checkpoint=Checkpoint(step, meta, ARRAYS), run_id=run_id)


def assert_equal(ours, expected):
    assert sorted(ours) == sorted(expected)
    for name in expected:
        assert ours[name].dtype == expected[name].dtype and np.array_equal(
            ours[name], expected[name]
        )


def the_error(errors):
    """The one error of all ranks, whose folders are called RUN here, as they are one path in a real run."""
    assert all(isinstance(error, Exception) for error in errors), errors
    (error,) = {
        re.sub(r"/\S*/s\d\b", "RUN", f"{type(error).__name__}: {error}") for error in errors
    }
    return error.partition(": ")[2]


def test_what_is_in_memory_is_taken_unless_the_disk_is_newer(tmp_path):
    assert find_checkpoint(tmp_path, Comm(), RunState(0.0)) is None
    assert find_checkpoint(tmp_path, Comm(), in_memory(24)).name == "step-00000024 in memory"
    for step, name in (
        (20, "step-00000024 in memory"),
        (24, "step-00000024 in memory"),
        (28, "step-00000028"),
    ):
        write(tmp_path, step)
        saved = find_checkpoint(tmp_path, Comm(), in_memory(24))
        assert saved.name == name
        assert saved.step == saved.checkpoint.step == saved.meta["step"]
    assert find_checkpoint(tmp_path, Comm(), RunState(0.0)).name == "step-00000028"


def test_a_checkpoint_of_no_run_is_refused(tmp_path):
    writer.write(tmp_path / "checkpoints", 3, ARRAYS, {"epoch": 1})
    with pytest.raises(
        CheckpointError,
        match="step-00000003 lacks num_ranks, batch_size, batch_sizes, world_size, step_in_epoch, run_id and",
    ):
        find_checkpoint(tmp_path, Comm(), RunState(0.0))


def test_the_newest_of_all_hosts_travels_to_rank_0(tmp_path):
    """With the rows of the history, and what was the best."""
    write(tmp_path / "s1", 8)
    write(tmp_path / "s2", 16)
    history_table(tmp_path / "s2").save([EpochRecord(1, 10, 0.1, 1.0, 2.0, {})])
    ranks_table(tmp_path / "s2").save([(1, [0.5, 0.25])])
    write_json(tmp_path / "s2" / STARTS_FILE, [{"first_step": 0}])
    writer.mark_best(tmp_path / "s2" / "checkpoints", 16, "loss", 0.5)
    run_states = [RunState(0.0) for _ in range(3)]
    first, second, third = find_on(tmp_path, ["s1", "s2", "s3"], run_states)
    assert {saved.name for saved in (first, second, third)} == {"step-00000016 on s2"}
    assert_equal(
        first.checkpoint.arrays,
        store.read(tmp_path / "s2" / "checkpoints" / "step-00000016").arrays,
    )
    assert first.checkpoint.meta == first.meta == third.meta and first.checkpoint.step == 16
    assert second.checkpoint is None and third.checkpoint is None
    assert {run_state.run_id for run_state in run_states} == {OURS}
    assert [row.step for row in read_history(tmp_path / "s1")] == [10]
    assert read_rank_seconds(tmp_path / "s1") == {1: [0.5, 0.25]} and read_starts(
        tmp_path / "s1"
    ) == [{"first_step": 0}]
    best = {"step": 16, "metric": "loss", "value": 0.5, "host": "s2"}
    assert writer.read_best(tmp_path / "s1" / "checkpoints") == best
    assert not (tmp_path / "s3" / "checkpoints").exists()
    written = [notes.read(tmp_path / host) for host in ("s1", "s2", "s3")]
    assert written == [notes.Note(16, "s2", OURS), None, notes.Note(16, "s2", OURS)]
    message = "step-00000016 of this run is on host s2, which has no rank now, and the newest on s1 is step-00000008"
    assert message in the_error(find_on(tmp_path, ["s1"])), (
        "killed before it has written one of its own"
    )
    assert resume_advice(tmp_path / "s1").endswith(
        " to resume from step-00000016 on s2, or a newer one"
    )
    assert [saved.step for saved in find_on(tmp_path, ["s1"], resume="available")] == [8]
    assert [saved.step for saved in find_on(tmp_path, ["s1"])] == [8], "that has been decided"


def test_a_best_checkpoint_that_comes_home(tmp_path):
    write(tmp_path / "s1", 8)
    write(tmp_path / "s2", 16)
    writer.mark_best(tmp_path / "s2" / "checkpoints", 8, "loss", 0.5, host="s1")
    find_on(tmp_path, ["s1", "s2"])
    assert writer.read_best(tmp_path / "s1" / "checkpoints") == {
        "step": 8,
        "metric": "loss",
        "value": 0.5,
    }


def test_a_damaged_one_is_named_with_its_host_and_the_next_is_taken_wherever_it_lies(
    tmp_path, caplog
):
    write(tmp_path / "s1", 8)
    for step in (12, 16):
        (write(tmp_path / "s2", step) / "state.safetensors").write_bytes(b"")
    saved = find_on(tmp_path, ["s1", "s2", "s2"])
    assert [item.name for item in saved] == ["step-00000008"] * 3
    assert (tmp_path / "s2/checkpoints/damaged-step-00000016").is_dir()
    assert [
        re.sub(r"damaged: .* lists \w+ ", "damaged: ... ", line) for line in caplog.messages
    ] == [
        f"host s2: checkpoint step-000000{step} is damaged: ... (kept as damaged-step-000000{step}); "
        f"step-00000008 is used instead (steps lost: {step - 8})"
        for step in (16, 12)
    ]
    assert not store.list_checkpoints(tmp_path / "s2" / "checkpoints")


def test_all_are_damaged(tmp_path):
    (write(tmp_path / "s2", 16) / "meta.json").write_bytes(b"")
    message = the_error(find_on(tmp_path, ["s1", "s2"]))
    assert message.startswith("host s2: checkpoint step-00000016 is damaged: ")
    assert "no other checkpoint in" in message
    assert store.list_checkpoints(tmp_path / "s2" / "checkpoints")


def test_what_cannot_be_read_is_said_with_its_host(tmp_path):
    (tmp_path / "s2").mkdir()
    (tmp_path / "s2" / "checkpoints").symlink_to(tmp_path)
    assert (
        "rank 1 on s2: " in (message := the_error(find_on(tmp_path, ["s1", "s2"])))
        and "symbolic link" in message
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [((8, OURS), (16, OTHER)), ((16, OURS), (8, OTHER))],
)
def test_checkpoints_of_different_runs_are_refused(tmp_path, first, second):
    write(tmp_path / "s1", *first)
    write(tmp_path / "s2", *second)
    assert the_error(find_on(tmp_path, ["s1", "s2"])) == (
        "the hosts have checkpoints of different runs in RUN/checkpoints: "
        f"step-{first[0]:08d} of run {first[1]} on s1, step-{second[0]:08d} of run {second[1]} on s2; "
        "remove those of the other run, or choose another run.dir"
    )


def test_a_shared_disk_is_read_by_rank_0_alone(tmp_path, monkeypatch):
    readers = []
    read = store.read
    monkeypatch.setattr(store, "read", lambda path: readers.append(path) or read(path))
    write(tmp_path, 8)
    run_states = [RunState(0.0), RunState(0.0)]
    with RunLock() as lock:
        lock.take(tmp_path)
        saved = on_ranks(
            ["s1", "s2"],
            lambda comm: find_checkpoint(tmp_path, comm, run_states[comm.topology.rank]),
        )
        assert [item.name for item in saved] == ["step-00000008"] * 2
        assert len(readers) == 1
        for run_state in run_states:
            run_state.note_keeper.note(8)
    assert not (tmp_path / notes.NOTE_FILE).exists(), "every host sees the checkpoints"


def test_a_run_begins_with_one_identifier_on_all_ranks(tmp_path):
    run_states = [RunState(0.0) for _ in range(3)]
    assert find_on(tmp_path, ["s1", "s2", "s2"], run_states) == [None] * 3
    assert len({run_state.run_id for run_state in run_states}) == 1 and notes.checked_run_id(
        run_states[0].run_id
    )
    for run_state in run_states:
        run_state.note_keeper.note(0)
    written = [notes.read(tmp_path / host) for host in ("s1", "s2")]
    assert written == [None, notes.Note(0, "s1", run_states[0].run_id)]


def note(folder, step, host, run_id=OURS):
    folder.mkdir(exist_ok=True)
    notes.NoteKeeper(folder, host, run_id).note(step)


@pytest.mark.parametrize(
    ("step", "advice"),
    [
        (0, "this run's first checkpoints are on host s1, "),
        (28, "checkpoint step-00000028 of this run is on host"),
    ],
)
def test_nothing_is_begun_anew_where_another_host_has_checkpoints(tmp_path, step, advice):
    note(tmp_path / "s2", step, "s1")
    message = the_error(find_on(tmp_path, ["s3", "s2"]))
    assert message.startswith(advice)
    assert (
        "which has no rank now, and there is none on s3, s2; start with that host too, copy "
        in message
    )
    assert message.endswith("or continue without it with resume=available")
    assert find_on(tmp_path, ["s3", "s2"], resume="available") == [None, None]
    assert find_on(tmp_path, ["s1", "s2"]) == [None, None], (
        "that host has lost them; there is nothing to wait for"
    )


def test_a_stale_checkpoint_is_not_gone_on_from(tmp_path):
    write(tmp_path / "s2", 8)
    note(tmp_path / "s3", 28, "s1")
    assert "and the newest on s2, s3 is step-00000008; " in the_error(
        find_on(tmp_path, ["s2", "s3"])
    )
    note(tmp_path / "s3", 28, "s1", OTHER)
    assert [saved.step for saved in find_on(tmp_path, ["s2", "s3"])] == [8, 8], (
        "that was another run's"
    )
    write(tmp_path / "s2", 32)
    note(tmp_path / "s3", 28, "s1")
    assert [saved.step for saved in find_on(tmp_path, ["s2", "s3"])] == [32, 32]


def test_what_the_launcher_knows(tmp_path, monkeypatch):
    monkeypatch.setenv(notes.VARIABLE, "28@s1")
    assert "step-00000028 of this run is on host s1" in the_error(find_on(tmp_path, ["s2"]))
    monkeypatch.setenv(notes.VARIABLE, "28@s2")
    assert find_on(tmp_path, ["s2"]) == [None]


def test_with_copies_a_host_that_is_left_has_one_that_is_new_enough(tmp_path, monkeypatch):
    """The launcher may know a checkpoint of which the copy was still on its way; a note is of one that was copied."""
    write(tmp_path / "s2", 28)
    monkeypatch.setenv(notes.VARIABLE, "32@s1")
    assert "step-00000032 of this run is on host s1" in the_error(find_on(tmp_path, ["s2", "s3"]))
    saved = find_on(tmp_path, ["s3", "s2"], copies=1)
    assert [item.name for item in saved] == ["step-00000028 on s2"] * 2
    sums = [
        (tmp_path / host / "checkpoints/step-00000028/SHA256SUMS").read_text()
        for host in ("s2", "s3")
    ]
    assert sums[0] == sums[1], "rank 0 keeps what it was sent"
    note(tmp_path / "s2", 32, "s1")
    assert "step-00000032 of this run is on host s1" in the_error(
        find_on(tmp_path, ["s2"], copies=1)
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"step": 1}', '{"step": true, "host": "s1", "run_id": "0"}',
                                  json.dumps({"step": 1, "host": "a\nb", "run_id": OURS}), "[" * 10_000])  # fmt: skip
def test_a_note_that_is_none_is_no_note(tmp_path, text):
    (tmp_path / notes.NOTE_FILE).write_text(text)
    assert notes.read(tmp_path) is None


def test_a_note_keeps_the_step_that_it_knows_until_there_is_another(tmp_path):
    note(tmp_path, 28, "s1")
    note(tmp_path, 0, "s1")
    assert notes.read(tmp_path).step == 28
    note(tmp_path, 0, "s2", OTHER)
    assert notes.read(tmp_path) == notes.Note(0, "s2", OTHER)


def test_resume_never_looks_at_all_hosts(tmp_path):
    write(tmp_path / "s2", 8)
    saved = find_on(tmp_path, ["s1", "s2"], resume="never")
    assert "holds checkpoints of an earlier run on host s2; use resume=auto or" in the_error(saved)


def test_a_new_chief_that_holds_nothing_gets_what_another_rank_holds(tmp_path):
    """Where ranks come and go, all of them hold it from then on. What another run left is left alone."""
    write(tmp_path / "s3", 99, OTHER)
    run_states = [RunState(0.0), in_memory(24), RunState(0.0)]
    saved = find_on(tmp_path, ["s1", "s2", "s3"], run_states, on_all_ranks=True)
    assert [item.name for item in saved] == ["step-00000024 in memory on s2"] * 3
    assert [run_state.checkpoint.step for run_state in run_states] == [24] * 3 and {
        run_state.run_id for run_state in run_states
    } == {OURS}
    for run_state in run_states:
        assert_equal(run_state.checkpoint.arrays, ARRAYS)
    write(tmp_path / "s3", 28)
    saved = find_on(tmp_path, ["s1", "s2", "s3"], run_states, on_all_ranks=True)
    assert [item.name for item in saved] == ["step-00000024 in memory"] * 3, (
        "99 stands before it on that disk"
    )


def test_a_damaged_checkpoint_of_an_unknown_run_keeps_a_run_from_beginning_anew(tmp_path):
    """One that knows its run: its ranks have changed, and what it had saved may be what is damaged."""
    (write(tmp_path / "s1", 8) / "meta.json").write_bytes(b"")
    run_states = [RunState(0.0, run_id=OURS)]
    assert "checkpoint step-00000008 is damaged: " in the_error(
        find_on(tmp_path, ["s1"], run_states)
    )
    write(tmp_path / "s1", 8)
    for _ in range(2):
        assert [saved.step for saved in find_on(tmp_path, ["s1"], run_states)] == [8]


def test_a_newer_checkpoint_on_any_disk_is_better_than_what_is_in_memory(tmp_path):
    write(tmp_path / "s2", 28)
    run_states = [in_memory(24), in_memory(24)]
    saved = find_on(tmp_path, ["s1", "s2"], run_states, on_all_ranks=True)
    assert [item.name for item in saved] == ["step-00000028 on s2"] * 2
    assert [run_state.checkpoint.step for run_state in run_states] == [28, 28]


@pytest.mark.parametrize("message_bytes", [1, 7, 64, 1 << 20])
def test_arrays_arrive_as_they_left(message_bytes):
    def action(comm):
        rank = comm.topology.rank
        return send_arrays(
            ARRAYS if rank == 1 else {},
            1,
            comm,
            is_receiver=rank != 2,
            message_bytes=message_bytes,
        )

    first, _, third = on_ranks(["s1", "s2", "s3"], action)
    assert_equal(first, ARRAYS)
    assert third == {}
