"""The process that sends a notice: it outlives the process that started it, whatever ends that one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvtrain.errors import ConfigError, LostRankError
from hvtrain.launch import on_host
from hvtrain.training import notice as notices
from hvtrain.training.notice import Notice, cause_in_words, read_messages
from receivers import SECRET, free_port, receiving

pytest.importorskip("apprise", reason="apprise is not installed; ./scripts/run pytest does it")
pytest.importorskip("aiosmtpd", reason="aiosmtpd is not installed; ./scripts/run pytest does it")

# Stands for rank 0: begins a notice to the addresses of its input, then does what the first argument says.
RANK = """
import json, os, signal, sys, time
from pathlib import Path
from hvtrain.training.notice import Notice
notice = Notice()
notice.begin(json.load(sys.stdin), Path(sys.argv[1]))
print("begun", flush=True)
{}
"""


@pytest.fixture(scope="module")
def received():
    with receiving() as server:
        yield server


def rank(folder, addresses, does, **variables):
    """Starts such a process; returns once the notice has begun."""
    process = subprocess.Popen(
        [sys.executable, "-c", RANK.format(does), str(folder)],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdin.write(json.dumps(addresses))
    process.stdin.close()
    assert process.stdout.readline() == "begun\n", process.stderr.read()
    return process


def senders(of):
    """Process -> (parent, variables and command line) of the senders that a process started."""
    command = b"\0".join([b"hvtrain.training.notice", str(of).encode(), b""])
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
            if line.endswith(command):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                processes[int(folder.name)] = parent, (folder / "environ").read_bytes() + line
        except OSError:
            continue
    return processes


def wait_until_ended(of, seconds=20):
    deadline = time.monotonic() + seconds
    while senders(of):
        assert time.monotonic() < deadline, "the sender has not ended"
        time.sleep(0.05)


def test_killed_by_the_launcher_it_is_reported_lost(received, tmp_path):
    """By what ends all processes of a launch: those with its mark. No variable of the sender holds mark or secret."""
    mark = f"notice-{os.getpid()}"
    variables = {on_host.MARK: mark, "HVTRAIN_NOTIFY": received.webhook, "HOROVOD_RANK": "0"}
    process = rank(tmp_path / "lost", [received.webhook], "time.sleep(60)", **variables)
    ((parent, shown),) = senders(process.pid).values()
    assert parent != process.pid
    assert not any(text in shown for text in (SECRET.encode(), mark.encode(), b"HOROVOD_RANK"))
    assert on_host.count_ranks(mark) == 1
    on_host.clean_up(mark)
    assert process.wait() == -signal.SIGKILL
    kind, body = received.only_post("lost has ended for an unknown reason")
    assert kind == "failure"
    assert (
        f"rank 0 was killed, by its launcher or otherwise; run the same command with run.dir={tmp_path}"
        in body
    )
    wait_until_ended(process.pid)


def test_the_last_words_of_a_process_that_the_watchdog_ends(received, tmp_path):
    does = "notice.note('rank 1 on s2 hangs'); os._exit(75)"
    process = rank(tmp_path / "hanging", [received.webhook], does)
    kind, body = received.only_post("hanging has failed")
    assert kind == "failure" and body.startswith("rank 1 on s2 hangs\n")
    wait_until_ended(process.pid)


def test_a_child_that_lives_on_does_not_hold_it_up(tmp_path):
    """It was forked, and has the pipe."""
    read_end, write_end = os.pipe()
    script = (
        "import os, sys, time; os.fork() or time.sleep(60); os.write(int(sys.argv[1]), b'{}\\n')"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(write_end)], pass_fds=[write_end])
    os.close(write_end)
    messages = read_messages(read_end, process.pid)
    try:
        assert next(messages) == {}
        process.wait()
        began = time.monotonic()
        assert list(messages) == []
        assert time.monotonic() - began < 30, "it waited for the child"
    finally:
        os.close(read_end)
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if (folder / "cmdline").read_bytes().endswith(f"{script}\0{write_end}\0".encode()):
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:
                continue


def test_to_mail_and_a_webhook(received, tmp_path, caplog):
    notice = Notice()
    notice.begin([received.mail, received.webhook], tmp_path / "both")
    notice.send_success("test_loss 0.1; 3.0 s on 2 rank(s)")
    notice.send_failure(ValueError("it has ended before"))
    notice.wait()
    notice.wait()
    kind, body = received.only_post("both has finished")
    assert kind == "success"
    assert (
        body == f"test_loss 0.1; 3.0 s on 2 rank(s)\n{tmp_path / 'both'} on {os.uname().nodename}"
    )
    ((subject, text),) = [mail for mail in received.mails if mail[0].startswith("both ")]
    assert subject == "both has finished" and "test_loss 0.1" in text
    assert [record for record in caplog.records if record.name.startswith("hvtrain")] == []


def test_an_address_that_fails_is_a_warning_without_its_secret(received, tmp_path, caplog):
    dead = f"json://me:{SECRET}@127.0.0.1:{free_port()}/"
    notice = Notice()
    notice.begin([received.webhook, dead], tmp_path / "half")
    notice.send_stop("stopped by SIGTERM")
    notice.wait()
    assert [record.getMessage() for record in caplog.records] == [
        "the notice could not be sent to address 2 of 2 (json://***); test the address with the command apprise"
    ]
    assert received.only_post("half was stopped")[0] == "warning"


@pytest.mark.nightly
def test_a_server_that_never_answers_is_not_waited_for(tmp_path, caplog):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        notice = Notice()
        notice.begin(
            [f"mailto://me:{SECRET}@127.0.0.1:{silent.getsockname()[1]}?from=me@b.org&to=a@b.org"],
            tmp_path / "silent",
        )
        began = time.monotonic()
        notice.send_success("")
        notice.wait()
        assert time.monotonic() - began < 60, "far more than its limit"
    assert len(caplog.records) == 1 and SECRET not in caplog.text
    wait_until_ended(os.getpid())


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        (f"nosuch://{SECRET}/x", "nosuch://***"),
        (f"slack://{SECRET}", "slack://***"),
        (SECRET, "***"),
    ],
)
def test_an_address_that_apprise_does_not_take_is_named_by_its_place(address, shown, tmp_path):
    with pytest.raises(ConfigError) as caught:
        Notice().begin(["json://127.0.0.1", address], tmp_path)
    assert str(caught.value) == (
        f"notify: address 2 of 2 ({shown}) is not an address that apprise supports; see docs/notices.md"
    )
    wait_until_ended(os.getpid())


def test_without_apprise_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(notices, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"^notify needs apprise, which is not installed; install: \./scripts/run uv ",
    ):
        Notice().begin(["json://127.0.0.1"], tmp_path)
    Notice().begin([], tmp_path)


def test_the_cause_of_a_failure_in_words():
    assert cause_in_words(LostRankError("rank 1 is\n gone")) == "rank 1 is gone"
    try:
        raise ValueError("a bad thing")
    except ValueError as error:
        cause = cause_in_words(error)
    assert cause.startswith(
        f"rank 0 on {os.uname().nodename} failed: ValueError: a bad thing ({__file__}, line "
    )
