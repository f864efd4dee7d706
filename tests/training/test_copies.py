"""Second copies of checkpoints on another host (checkpoint.copies): what is lost with rank 0's disk is nothing."""

import json
import os
import re
import shutil
import socket
import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from disks import small_disk
from hvtrain.checkpoint import store, writer
from hvtrain.config.schema import CheckpointConfig
from hvtrain.core.topology import Topology
from hvtrain.strategies.comm import Comm
from hvtrain.system.checkpoint_notes import NoteKeeper
from hvtrain.system.run_files import CONFIG_FILE, HISTORY_FILE, RECEIPTS_FILE
from hvtrain.training import copies
from lab import PYTHON, Lab, needs_lab
from launcher_lab import started, wait_for
from launching import ROOT, WORKERS, finish, many_runs

META = {"epoch": 1, "step_in_epoch": 0, "metrics": {}}


def write(folder, step, size=1000):
    (folder / CONFIG_FILE).write_text("settings")
    (folder / HISTORY_FILE).write_text(f"rows up to {step}")
    return writer.write(
        folder / "checkpoints", step, {"model/0000/a": np.full(size, step, np.float32)}, META
    )


def names(folder):
    return [path.name for path in store.list_checkpoints(folder / "checkpoints")]


@pytest.fixture
def hosts(tmp_path):
    """The run folders on two hosts."""
    folders = [tmp_path / name / "run" for name in ("s1", "s2")]
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def tcp_pair():
    """Rank 0's end of a connection and the receiver's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end = socket.create_connection(listener.getsockname())
        return listener.accept()[0], end


def receiving(folder, end, keep=2):
    """The receiver's side, as begin_copies makes it."""
    arguments = [folder, end, CheckpointConfig(keep=keep)]
    threading.Thread(target=copies.receive_all, args=arguments, daemon=True).start()
    return copies.Copies(end)


@contextmanager
def connected(first, second, keep=2):
    """Rank 0's side of copies from one folder to another."""
    ends = tcp_pair()
    with receiving(second, ends[1], keep), copies.Sender(first, ends[0], "s2") as sender:
        yield sender


@pytest.fixture
def pair(hosts):
    """Rank 0's side, where the receiver keeps two checkpoints."""
    with connected(*hosts) as sender:
        yield sender


def test_the_receiver_gets_what_it_lacks_and_keeps_as_many(hosts, pair):
    """With the history and the settings. What it has already does not travel again."""
    first, second = hosts
    for step in (4, 8):
        write(first, step)
    writer.mark_best(first / "checkpoints", 4, "loss", 0.5)
    pair.send()
    assert copies.sums_of(second / "checkpoints") == copies.sums_of(first / "checkpoints") != {}
    for step in (12, 16):
        write(first, step)
        writer.prune(first / "checkpoints", CheckpointConfig(keep=2), step)
        pair.send()
    assert names(second) == names(first) == ["step-00000004", "step-00000012", "step-00000016"], (
        "4 is the best"
    )
    assert np.all(store.read(second / "checkpoints/step-00000016").arrays["model/0000/a"] == 16)
    assert [(second / name).read_text() for name in (CONFIG_FILE, HISTORY_FILE)] == [
        "settings",
        "rows up to 16",
    ]
    write(first, 16, size=10)
    pair.send()
    assert store.read(second / "checkpoints/step-00000016").arrays["model/0000/a"].size == 10, (
        "another of that step"
    )


def test_what_is_damaged_on_its_way_is_not_kept_and_the_next_one_tries_again(
    hosts, pair, monkeypatch, caplog
):
    write(hosts[0], 4)
    with monkeypatch.context() as patched:
        patched.setattr(store, "digest_of", lambda path: "0" * 64)
        pair.send()
    assert names(hosts[1]) == []
    assert caplog.messages == [
        "s2 lacks a copy of a checkpoint: the copy of step-00000004 was damaged in transit; "
        "training continues, and the copy is retried with the next checkpoint"
    ]
    write(hosts[0], 8)
    pair.send()
    assert names(hosts[1]) == ["step-00000004", "step-00000008"] and len(caplog.messages) == 1


def test_rank_0_does_not_wait_for_a_receiver_that_has_ended(hosts, pair, monkeypatch, caplog):
    def fail(*_):
        raise SystemExit  # Ends the receiver's thread without a traceback.

    monkeypatch.setattr(copies, "_receive", fail)
    write(hosts[0], 4)
    pair.send()
    assert names(hosts[1]) == []
    assert "s2 lacks a copy of a checkpoint" in caplog.text


def test_a_full_disk_on_the_other_host_is_named(hosts, tmp_path, caplog):
    with (
        small_disk(tmp_path / "disk", "size=1m") as disk,
        connected(hosts[0], disk / "run") as sender,
    ):
        (disk / "filler").write_bytes(bytes(900_000))
        write(hosts[0], 4, size=1_000_000)
        sender.send()
        (message,) = caplog.messages
        assert "the copy of step-00000004 was not written: No space left on device (4,00" in message
        assert not list((disk / "run").rglob("step-*")), "nothing is left of it"
        (disk / "filler").unlink()
        write(hosts[0], 8)
        writer.prune(hosts[0] / "checkpoints", CheckpointConfig(keep=1), 8)
        sender.send()
        assert names(disk / "run") == ["step-00000008"]


def test_a_new_receiver_gets_what_there_is_and_a_known_one_what_it_lacks(
    hosts, tmp_path, monkeypatch
):
    for step in (4, 8):
        write(hosts[0], step)
    sent = []
    send_checkpoint = copies.Sender._send_checkpoint
    monkeypatch.setattr(
        copies.Sender,
        "_send_checkpoint",
        lambda self, path: sent.append(path.name) or send_checkpoint(self, path),
    )
    with connected(*hosts) as sender:
        sender.send()
    shutil.rmtree(hosts[1] / "checkpoints/step-00000004")
    with connected(*hosts) as sender:
        sender.send()
    assert sent == ["step-00000008", "step-00000004", "step-00000004"], "the newest first"
    assert names(hosts[1]) == names(hosts[0])


def test_strangers_are_not_connected(monkeypatch):
    """Who sends nothing, less, garbage, or the token of another run."""
    monkeypatch.setattr(copies, "SECONDS_TO_CONNECT", 0.5)
    token = bytes(range(32))
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    ends = [socket.create_connection(address) for _ in range(5)]
    for end, line in zip(
        ends, (b"", token[:31], b"\x80\x04garbage" * 9, bytes(32), token + b"more")
    ):
        end.sendall(line)
        if len(line) < 32:
            end.shutdown(socket.SHUT_WR)
    with copies.accept(listener, token) as connection:
        assert connection.getpeername() == ends[-1].getsockname()
        assert connection.recv(9) == b"more"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
    for end in ends:
        end.close()
    with pytest.raises(TimeoutError):
        copies.accept(socket.create_server(("127.0.0.1", 0)), token)


def test_a_copy_that_is_cut_short_leaves_nothing(hosts):
    """Rank 0's host is lost while it sends, and then the receiver's."""
    path = write(hosts[0], 4)
    end, other = tcp_pair()
    with receiving(hosts[1], other), end.makefile("rb") as answers:
        assert json.loads(answers.readline()) == {}
        header = {"name": path.name, "sizes": {"state.safetensors": 4000}, "records": {}}
        end.sendall(copies.encode(header) + bytes(1000))
        end.shutdown(socket.SHUT_WR)
        assert "rank 0 has closed the connection" in json.loads(answers.readline())["problem"]
    end.close()
    assert not list(hosts[1].rglob("*step*"))


def test_the_loss_of_the_receiver_is_a_warning(hosts, caplog):
    write(hosts[0], 4)
    end, other = tcp_pair()
    other.sendall(copies.encode({}))
    sender = copies.Sender(hosts[0], end, "s2")
    other.shutdown(socket.SHUT_WR)
    sender.send()
    assert caplog.messages == [
        "s2 lacks a copy of a checkpoint: the connection is lost; training continues, "
        "and the copy is retried with the next checkpoint"
    ]
    other.close()


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ("s1", "all ranks are on s1"),
        ("s2", "all hosts share {folder}, and a copy would be the same files"),
    ],
)
def test_where_there_is_no_other_disk_a_line_says_so(other, problem, tmp_path, monkeypatch, caplog):
    """The run goes on: a restart on the hosts that are left has the same settings."""
    comm = Comm()
    comm.topology = Topology(0, 1, host="s1")
    gathered = iter([["s1", other], [False, False]])
    monkeypatch.setattr(comm, "gather", lambda value: next(gathered))
    run = SimpleNamespace(
        config=SimpleNamespace(checkpoint=CheckpointConfig(copies=1)),
        strategy=SimpleNamespace(comm=comm),
        state=SimpleNamespace(note_keeper=NoteKeeper()),
        folder=tmp_path,
    )
    assert type(copies.begin_copies(run)) is copies.Copies
    assert caplog.messages == [
        f"checkpoint.copies=1 has no effect: {problem.format(folder=tmp_path)}"
    ]
    run.config.checkpoint = replace(run.config.checkpoint, copies=0)
    assert type(copies.begin_copies(run)) is copies.Copies and len(caplog.messages) == 1


LOSES_DISK = """
import shutil
from pathlib import Path

import hvtrain.keras as hvd
import keras


class LoseDisk(keras.callbacks.Callback):
    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)

    def on_train_end(self, logs=None):
        if hvd.rank() == 0:
            shutil.copytree(self.folder, f"{self.folder}-before")
            shutil.rmtree(self.folder / "checkpoints")
            (self.folder / "history.csv").unlink()
"""


def on_own_disks(tmp_path, hosts, runs, timeout=300):
    """What ranks with a disk each saw of the runs, and all output."""
    for name in ("run", *(f"disks/{host}" for host in hosts)):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    (tmp_path / "lose_disk.py").write_text(LOSES_DISK)
    variables = {"DISKS": f"{tmp_path}/disks", "RUN": f"{tmp_path}/run", "HOSTS": ",".join(hosts)}
    through = [str(WORKERS / "own_disk")]
    return many_runs(
        "mpirun",
        len(hosts),
        runs,
        tmp_path,
        through,
        timeout,
        PYTHONPATH=f"{ROOT}:{tmp_path}",
        **variables,
    )


@pytest.mark.distributed
@pytest.mark.skipif(os.geteuid() != 0, reason="a mount needs root")
def test_a_run_goes_on_where_rank_0s_disk_is_lost(tmp_path):
    """Two ranks, each with a disk of its own. Without copies the run begins anew; with them its history is whole."""
    runs = {}
    for name, number in (("copied", 1), ("alone", 0)):
        folder = f"{tmp_path}/run/{name}"
        settings = [
            "train.deterministic=true",
            "checkpoint.every_steps=3",
            f"checkpoint.copies={number}",
            f"run.dir={folder}",
        ]
        lose = ["+callbacks.lose._target_=lose_disk.LoseDisk", f"+callbacks.lose.folder={folder}"]
        runs |= {
            name: [*settings, *lose, "train.epochs=3"],
            f"{name}/again": [*settings, "train.epochs=4"],
        }
    results, output = on_own_disks(tmp_path, ["s1", "s2"], runs)
    assert all("record" in result for rank in results for result in rank.values()), output

    of_s1, of_s2 = (tmp_path / "disks" / host for host in ("s1", "s2"))
    assert not (of_s2 / "alone" / "checkpoints").exists() and output.count("resumed ") == 1
    assert "resumed        step-00000018 on s2: 18 of 24 steps were done" in output
    receipts = [(host / "copied" / RECEIPTS_FILE).read_text() for host in (of_s1, of_s2)]
    assert receipts[0] == receipts[1] and '"step": 24' in receipts[0]
    # s1 has what it was sent, and s2 what s1 wrote before and after its loss.
    assert names(of_s1 / "copied-before") == ["step-00000015", "step-00000018"]
    assert names(of_s1 / "copied") == names(of_s2 / "copied") == ["step-00000021", "step-00000024"]
    histories = [
        (of_s1 / name / HISTORY_FILE).read_text().splitlines() for name in ("copied", "alone")
    ]
    rows = [[line.split(",")[:3] for line in history] for history in histories]
    assert rows[0] == rows[1] and len(rows[0]) == 5
    ends = [
        (run / "checkpoints" / "step-00000024" / "state.safetensors").read_bytes()
        for run in (of_s1 / "copied", of_s2 / "copied", of_s1 / "alone")
    ]
    assert ends[0] == ends[1] == ends[2]


@needs_lab
@pytest.mark.distributed
@pytest.mark.nightly
def test_a_run_goes_on_where_rank_0s_host_is_lost_and_then_its_successor():
    """The launcher, on the last of three hosts, restarts the run on those that are left."""
    settings = ["model=mlp", "train.epochs=300", "checkpoint.every_steps=50", "checkpoint.keep=500"]
    settings += ["train.deterministic=true", "schedule=cosine", "run.report=false"]
    with Lab(3) as lab:

        def launch(hosts, run, *own):
            command = [PYTHON, "-m", "hvtrain", "launch", "--gloo", "-np", str(len(hosts)), "-H"]
            command += [
                ",".join(f"{host}:1" for host in hosts),
                "--max-restarts",
                "3",
                "--min-np",
                "1",
            ]
            command += ["--", *settings, *own, f"run.dir={lab.home / run}"]
            return started(lab, command, "s3")

        launched = launch(["s1", "s2", "s3"], "run", "checkpoint.copies=1")
        lost = []
        step = 100
        for host in ("s1", "s2"):
            run = lab.of(host) / "run"
            wait_for(run / "checkpoints" / f"step-{step:08d}")
            lab("stop", host)
            lost.append(store.step_of(store.list_checkpoints(run / "checkpoints")[-1]))
            step = lost[-1] + 200
        output = finish(launched)
        assert launched.returncode == 0, output
        resumed = [
            int(number) for number in re.findall(r"^resumed +step-(\d+): ", output, re.MULTILINE)
        ]
        assert len(resumed) == 2, output
        assert all(0 <= newest - taken <= 50 for newest, taken in zip(lost, resumed)), (
            lost,
            resumed,
            output,
        )

        # Resumed from the same checkpoint, without copies and losses, one rank ends with the same bits.
        reference = lab.of("s3") / "reference" / "checkpoints"
        name = f"step-{resumed[1]:08d}"
        shutil.copytree(lab.of("s3") / "run" / "checkpoints" / name, reference / name)
        alone = launch(["s3"], "reference")
        output = finish(alone)
        assert alone.returncode == 0, output
        paths = [
            store.list_checkpoints(lab.of("s3") / run / "checkpoints")[-1]
            for run in ("run", "reference")
        ]
        ends = [store.read(path) for path in paths]
        assert ends[0].step == ends[1].step and ends[0].arrays.keys() == ends[1].arrays.keys()
        assert all(
            np.array_equal(ends[0].arrays[key], array) for key, array in ends[1].arrays.items()
        )
