"""The lab itself: hosts that are apart, cables that can be bad, and nothing left behind."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lab import PYTHON, SCRIPT, Lab, needs_lab

pytestmark = [pytest.mark.distributed, needs_lab]

SERVE = """
import socket
listener = socket.create_server(("", 5555), backlog=1)
print("ready", flush=True)
connection, _ = listener.accept()
while connection.recv(1 << 20):
    pass
"""
SEND = """
import socket, sys, time
began = time.monotonic()
connection = socket.create_connection(("s2", 5555), timeout=5)
print("connected", time.monotonic() - began)
connection.sendall(bytes(int(sys.argv[1])))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print("sent", time.monotonic() - began)
"""


@pytest.fixture(scope="module")
def lab():
    with Lab(3) as made:
        yield made


def send(lab, num_bytes):
    """Seconds until connected, and until all bytes had arrived, from s1 to s2; None when it did not get there."""
    server = subprocess.Popen(
        [SCRIPT, "exec", "s2", PYTHON, "-c", SERVE],
        env={**os.environ, "HVTRAIN_LAB": lab.name},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout.readline() == "ready\n"
    try:
        code, output = lab.run("s1", PYTHON, "-c", SEND, str(num_bytes))
        return None if code else [float(line.split()[1]) for line in output.splitlines()]
    finally:
        lab("exec", "s2", "pkill", "-f", "create_server", check=False)
        server.wait(timeout=10)


def holders(lab):
    """The processes that carry the lab's mark, whatever became of it."""
    files = Path("/proc").glob("[0-9]*/environ")
    line = ["grep", "-alzsx", f"HVTRAIN_LAB_STATE={lab.state}", *files]
    return subprocess.run(line, capture_output=True, text=True, check=False).stdout.split()


def test_hosts_have_names_addresses_homes_and_processes_of_their_own(lab):
    for host, address in (("s1", "10.213.0.1"), ("s2", "10.213.0.2")):
        code, output = lab.run(
            host,
            "bash",
            "-c",
            "hostname; ip -brief -4 address show eth0; touch ~/here; ls ~; ps ax",
        )
        assert code == 0, output
        assert output.split()[0] == host and f" {address}/24" in output and "here" in output
        assert "pytest" not in output, "other processes are not seen"
        assert (lab.of(host) / "here").exists() and not (lab.of("s3") / "here").exists()


def test_ssh_goes_without_a_question_and_finds_a_bare_login(lab):
    code, output = lab.run(
        "s1",
        "ssh",
        "-o",
        "BatchMode=yes",
        "s2",
        "hostname; echo $PATH; command -v python || echo none",
    )
    assert code == 0, output
    assert output.split()[0] == "s2" and ".venv" not in output


@pytest.mark.nightly
def test_a_cable_can_be_slow_narrow_lossy_and_pulled(lab):
    assert send(lab, 1000)
    lab("net", "s2", "delay", "60ms")
    assert send(lab, 1000)[0] > 0.1, "there and back is twice the delay"
    lab("net", "s2", "rate", "20mbit")
    assert send(lab, 2_500_000)[1] > 0.7, "a second's worth, less what the bucket holds"
    lab("net", "s2", "loss", "20%")
    assert any(send(lab, 50_000) for _ in range(5)), (
        "TCP gets through, within its 5 s at least once"
    )
    lab("net", "s2", "clear")
    assert send(lab, 1000)[0] < 0.1
    lab("net", "s2", "block", "5000-6000")
    assert send(lab, 1000) is None
    assert lab.run("s1", "ssh", "s2", "true")[0] == 0
    lab("net", "s2", "unblock")
    lab("net", "s2", "down")
    assert send(lab, 1000) is None
    lab("net", "s2", "up")
    assert send(lab, 1000)


def test_a_host_can_die(lab):
    lab("stop", "s3")
    done = lab("exec", "s3", "true", check=False)
    assert done.returncode and "host s3 is not running" in done.stderr


@pytest.mark.nightly
def test_nothing_is_left_behind():
    before = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    with Lab(2) as made:
        made("net", "s1", "delay", "5ms")
        assert holders(made)
        assert made("up", "2", check=False).returncode, "it is up already"
    assert not made.state.exists()
    assert holders(made) == []
    assert (
        subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout == before
    )


@pytest.mark.nightly
def test_nothing_is_left_behind_after_a_crash():
    """kill -9 of `up` at some point, then down."""
    made = Lab(4)
    environment = {**os.environ, "HVTRAIN_LAB": made.name}
    for seconds in (0.02, 0.1, 0.2, 0.3):
        starting = subprocess.Popen([SCRIPT, "up", "4"], env=environment, stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        starting.send_signal(signal.SIGKILL)
        starting.wait()
        made("down")
        assert not made.state.exists()
        assert holders(made) == []


@pytest.mark.nightly
def test_nothing_is_left_behind_by_a_signal_while_it_starts():
    class Interrupted(Lab):
        def __call__(self, *command, **options):
            done = super().__call__(*command, **options)
            if command[0] == "up":
                raise KeyboardInterrupt
            return done

    made = Interrupted(1)
    with pytest.raises(KeyboardInterrupt), made:
        pass
    assert not made.state.exists()
    assert holders(made) == []
