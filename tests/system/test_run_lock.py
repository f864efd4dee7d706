"""Two runs in one run folder: the second one is refused, and the first one ends as if nothing had been."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hvtrain.errors import BusyError
from hvtrain.system.run_lock import CLAIM_FILE, LOCK_FILE, RunLock, _create_claim, start_of
from launching import HASTY, finish, run, start

HOLD = """
import sys, time
from pathlib import Path
from hvtrain.system.run_lock import RunLock
lock = RunLock()
lock.take(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_who_holds_it_is_named(holder, tmp_path):
    expected = (
        rf"in use by another run \(process {holder.pid} on \S+, since .*\); "
        "wait until it ends, or choose another run.dir"
    )
    with pytest.raises(BusyError, match=expected) as caught:
        RunLock().take(tmp_path, wait_seconds=0)
    assert caught.value.exit_code == 75, "time can help"


def test_a_killed_holder_leaves_none_behind(holder, tmp_path):
    holder.kill()
    holder.wait()
    with RunLock() as lock:
        lock.take(tmp_path, wait_seconds=0)
        lock.take(tmp_path, wait_seconds=0)
        assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on "), (
            "of this holder alone"
        )
        with pytest.raises(BusyError):
            RunLock().take(tmp_path, wait_seconds=0)
    RunLock().take(tmp_path, wait_seconds=0)


def test_its_end_is_waited_for(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.replace("60", "1"), tmp_path], stdout=subprocess.PIPE
    )
    process.stdout.readline()
    RunLock().take(tmp_path)
    assert process.wait(5) == 0


def test_no_link_is_followed_out_of_the_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("data")
    (tmp_path / "run" / LOCK_FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        RunLock().take(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "data"


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with RunLock() as lock:
        lock.take(tmp_path)
        with pytest.raises(
            BusyError,
            match=rf"in use by another run .*, remove {tmp_path}/{CLAIM_FILE} if that run is gone",
        ):
            RunLock().take(tmp_path, wait_seconds=0)
    with RunLock() as lock:
        lock.take(tmp_path, wait_seconds=0)
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    for process in (int(ended.stdout), os.getpid()):
        # The process that claimed it was killed; the second number is that of a later process.
        (tmp_path / CLAIM_FILE).write_text(f"{process} {socket.gethostname()} 1000")
        with RunLock() as lock:
            lock.take(tmp_path, wait_seconds=0)
    assert not list(tmp_path.glob(f"{CLAIM_FILE}*"))
    claim = tmp_path / CLAIM_FILE
    claim.write_text(f"{ended.stdout.decode().strip()} {socket.gethostname()} 1000")
    others = []
    with monkeypatch.context() as patch:
        # Another process finds the same claim at the same moment.
        gone = tmp_path / "gone"
        patch.setattr(
            Path, "unlink", lambda path: others.append(_create_claim(path)) or path.rename(gone)
        )
        assert _create_claim(claim) and others == [False]
    claim.write_text("1 another-host 1000")
    with pytest.raises(BusyError):
        RunLock().take(tmp_path, wait_seconds=0)


def test_the_start_of_a_process_does_not_depend_on_the_clock(monkeypatch):
    """psutil 7.0 adds the boot time of an earlier call, from which the present one may differ."""
    before = start_of(os.getpid())
    monkeypatch.setattr(psutil, "boot_time", lambda: 0.0)
    assert start_of(os.getpid()) == before


@pytest.mark.nightly
def test_a_second_run_is_refused_and_the_first_one_ends_well(tmp_path):
    arguments = ["model=mlp", "train.epochs=2000", f"run.dir={tmp_path / 'run'}"]
    first = start(None, 1, "python", "-m", "hvtrain", *arguments, cwd=tmp_path)
    while not list(tmp_path.glob("run/checkpoints/step-*")):
        assert first.poll() is None, finish(first)
    hasty = [
        "python",
        str(HASTY / "module.py"),
        "hvtrain.system.run_lock:RunLock.take=1",
        "--",
        "hvtrain",
    ]
    code, output = run(None, 1, *hasty, *arguments, cwd=tmp_path)
    assert first.poll() is None, "it was there all the time"
    assert code == 75, output
    assert len(re.findall(r"hvtrain: run.dir=\S+ is in use by another run ", output)) == 1, output
    assert "Traceback" not in output
    first.send_signal(signal.SIGTERM)
    output = finish(first)
    assert first.returncode == 75 and "stopped by SIGTERM" in output, "saved, and nothing was wrong"
