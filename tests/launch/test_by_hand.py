"""Processes that are started one by one: they find each other, wrong use is one line, signals and codes pass."""

import http.client
import json
import re
import signal
import socket
import socketserver
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

import launching
from hvtrain.core.topology import Roles
from hvtrain.errors import ConfigError, LostRankError
from hvtrain.launch.by_hand import start
from hvtrain.launch.rendezvous import MAX_MISSED_CLAIMS, Rendezvous, claim, pause_seconds
from lab import PYTHON, Lab, needs_lab
from launcher_lab import fate, wait_for

SERVERS = Roles(2, 1)
TWO = Roles(2)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def meeting(roles):
    """A rendezvous, and in the background the claim of each rank that is asked for, as (rank, host, seconds)."""
    server = Rendezvous("127.0.0.1", 0, roles.names)
    server.serve()
    coordinator = ("127.0.0.1", server.server_port)
    results = {}

    def claims(rank, host, seconds):
        try:
            results[rank] = claim(coordinator, rank, roles.names, [host, "10.0.0.1"], seconds)
        except (ConfigError, LostRankError) as error:
            results[rank] = str(error)

    def comes(rank, host="s1", seconds=60):
        thread = threading.Thread(target=claims, args=(rank, host, seconds))
        thread.start()
        deadline = time.monotonic() + 30
        while rank not in server._claims and rank not in results and time.monotonic() < deadline:
            time.sleep(0.01)
        return thread

    try:
        yield coordinator, comes, results, server
    finally:
        server.close()


def test_all_learn_everyones_place_once_all_have_come():
    with meeting(SERVERS) as (_, comes, results, _):
        threads = [comes(rank, "s2" if rank == 3 else "s1") for rank in (2, 0, 3, 1)]
        for thread in threads:
            thread.join()
        everyone = [[host, "10.0.0.1"] for host in ("s1", "s1", "s1", "s2")]
        assert results == dict.fromkeys(range(4), everyone)


def test_a_rank_that_is_taken_is_refused_with_the_host_that_has_it():
    with meeting(SERVERS) as (coordinator, comes, _, server):
        comes(3, "s2")
        with pytest.raises(
            ConfigError, match=r"^worker 1 is already running on host s2; end one of the two$"
        ):
            claim(coordinator, 3, SERVERS.names, ["s3", "10.0.0.3"], 60)
        message = "this process expects worker 0, worker 1, and rank 0 expects coordinator 0, ps 0, worker 0"
        with pytest.raises(ConfigError, match=message):
            claim(coordinator, 1, TWO.names, ["s3", "10.0.0.3"], 60)
        assert {rank: holder["host"] for rank, holder in server._claims.items()} == {
            3: ["s2", "10.0.0.1"]
        }


def test_who_is_missing_is_named_to_all():
    with meeting(SERVERS) as (_, comes, results, server):
        waiting = comes(2)
        comes(0, seconds=0.4).join()
        assert re.fullmatch(
            r"ps 0, worker 1 did not connect to 127.0.0.1:\d+ in time \(0.4 s\); start the missing processes "
            "with the same --coordinator, or raise --start-timeout",
            results[0],
        )
        server.close()  # As rank 0 does at its end.
        waiting.join(timeout=30)
        assert re.fullmatch(
            r"coordinator 0 at 127.0.0.1:\d+ ended before (coordinator 0, )?ps 0, worker 1 connected; "
            "look at the output of coordinator 0",
            results[2],
        ), "and not 60 s later"


def test_a_process_that_has_ended_while_it_waited_may_come_again():
    with meeting(TWO) as ((address, port), comes, results, _):
        gone = http.client.HTTPConnection(address, port)
        request = {
            "rank": 1,
            "names": list(TWO.names),
            "host": ["s9", "10.0.0.9"],
            "process": "gone",
        }
        gone.request("POST", "/claim", json.dumps(request))
        response = gone.getresponse()
        assert (response.status, json.load(response)) == (202, ["worker 0"])
        gone.close()
        comes(1, "s2").join()
        assert results.pop(1) == "worker 1 is already running on host s9; end one of the two"
        time.sleep(MAX_MISSED_CLAIMS * pause_seconds(2))
        for thread in (comes(1, "s2"), comes(0)):
            thread.join()
        assert results[0] == [["s1", "10.0.0.1"], ["s2", "10.0.0.1"]]


UNKNOWN_RANK = b'{"rank": 7, "names": ["worker 0", "worker 1"], "host": ["s9"], "process": "x"}'


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\xff\n",
        b"PUT /a HTTP/1.0\r\n\r\n",
        b"POST /claim HTTP/1.0\r\nContent-Length: 9\r\n\r\n{garbage}",
        b"POST /claim HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(UNKNOWN_RANK), UNKNOWN_RANK),
    ],
)
def test_what_no_rank_would_send_changes_nothing(sent, capfd):
    with meeting(TWO) as (coordinator, comes, results, _):
        with socket.create_connection(coordinator, timeout=10) as stranger:
            stranger.sendall(sent)
            stranger.recv(1 << 16)
        for thread in (comes(0), comes(1)):
            thread.join()
        assert results[0] == results[1] == [["s1", "10.0.0.1"]] * 2
    dropped = "hvtrain: dropped a request from 127.0.0.1 to this launch's port, since no rank sends such requests\n"
    assert capfd.readouterr().err == dropped * (not sent.startswith(b"\x00"))


@pytest.mark.parametrize(
    ("coordinator", "index", "seconds", "error", "message"),
    [
        ("s1", 0, 1, ConfigError, "--coordinator s1 is not HOST:PORT; give rank 0's host and a free port: s1:2222"),
        ("localhost:0", 0, 1, ConfigError, "--coordinator localhost:0 is not HOST:PORT"),
        ("no-host.invalid:2222", 1, 1, ConfigError, "host no-host.invalid has no IPv4 .* or give its address$"),
        ("localhost:FREE", 2, 1, ConfigError, "--task-index 2 is out of range: worker has indices 0 to 1; -np sets"),
        ("192.0.2.1:FREE", 0, 1, ConfigError, "cannot listen on port .* of 192.0.2.1: Cannot .* host of worker 0"),
        ("localhost:USED", 0, 1, ConfigError, r"cannot listen on port \d+ of .*: Address already in use; give all"),
        ("localhost:FREE", 0, 0.2, LostRankError, r"^worker 1 did not connect to \S+ in time \(0.2 s\); start"),
        ("localhost:FREE", 1, 0.2, LostRankError, "cannot reach worker 0: nothing answered at .* for 0.2 s"),
        ("localhost:USED", 1, 1, ConfigError, r"the server at 127.0.0.1:\d+ is not this run's worker 0; give the"),
    ],
)  # fmt: skip
def test_what_cannot_start_is_one_line(coordinator, index, seconds, error, message):
    with another_service(b"HTTP/1.0 404 Not Found\r\n\r\n<html>") as used:
        coordinator = coordinator.replace("FREE", str(free_port())).replace("USED", str(used))
        with pytest.raises(error, match=message) as raised:
            start(TWO, TWO.rank_of("worker", index), coordinator, ["true"], {}, seconds)
    assert "\n" not in str(raised.value)


def test_a_host_whose_name_leads_to_itself_alone(monkeypatch, capsys):
    """As on Debian: /etc/hosts has the host's own name at 127.0.1.1."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(LostRankError, match=r"^worker 1 did not connect"):
        start(TWO, 0, f"s1:{free_port()}", ["true"], {}, 0.2)
    assert (
        "hvtrain: s1 is 127.0.1.1 here, which other hosts cannot reach; if there are any"
        in capsys.readouterr().err
    )


def test_a_preempted_process_that_waits_for_the_others_ends_with_75(tmp_path):
    """It dies of the signal otherwise, and as the first process of a container not even that."""
    line = f"launch -np 2 --job-name worker --task-index 0 --coordinator localhost:{free_port()} --"
    words = [PYTHON, "-m", "hvtrain", *line.split(), "model=mlp"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as waiting:
        assert "waiting up to 120 s for all processes" in waiting.stderr.readline()
        waiting.terminate()
        _, errors = waiting.communicate(timeout=60)
    assert (waiting.returncode, errors) == (
        75,
        "hvtrain: SIGTERM arrived before training began, so nothing was saved\n",
    )


def test_of_several_interfaces_gloo_gets_the_first(monkeypatch):
    monkeypatch.setattr("hvtrain.launch.by_hand._run", lambda command, environment: environment)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    variables = start(Roles(1), 0, f"localhost:{free_port()}", ["true"], {}, 1, "lo,eth0")
    assert variables["HOROVOD_GLOO_IFACE"] == "lo"
    assert variables["NCCL_SOCKET_IFNAME"] == "lo,eth0"


@contextmanager
def another_service(reply):
    """The port of something that is no rendezvous."""

    class Greeting(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(1 << 16)
            self.request.sendall(reply)

    with socketserver.TCPServer(("127.0.0.1", 0), Greeting) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--job-name worker --coordinator s1:2222", "start one process together; give --task-index too, or none"),
        ("--job-name worker --task-index 0", "start one process together; give --coordinator too, or none"),
        ("--job-name worker --task-index 0 --coordinator s1:1 --max-restarts 1", "--max-restarts cannot be combined"),
        ("--job-name worker --task-index 0 --coordinator s1:1 --mpi", "--mpi cannot be combined with --job-name"),
        ("--job-name ps --task-index 0 --coordinator s1:2222", "--job-name ps is not a job of this run; choose from w"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together(monkeypatch, options, message):
    from hvtrain.launch.command import main

    monkeypatch.setattr("sys.argv", ["launch", *options.split(), "--", "python", "x.py"])
    with pytest.raises(ConfigError, match=message):
        main()


def by_hand(port, index, *command):
    where = (
        "--job-name",
        "worker",
        "--task-index",
        str(index),
        "--coordinator",
        f"localhost:{port}",
    )
    return "python", "-m", "hvtrain", "launch", "-np", "2", *where, "--", *command


@pytest.mark.distributed
def test_two_processes_sum_and_end_well(tmp_path):
    port = free_port()
    command = ("python", str(launching.WORKERS / "places.py"))
    first, second = (
        launching.start(None, 1, *by_hand(port, index, *command), cwd=tmp_path)
        for index in range(2)
    )
    output, other = launching.finish(first), launching.finish(second)
    assert (first.returncode, second.returncode) == (0, 0), output + other
    assert "rank 0 sum 1 local 0" in output and "rank 1 sum 1 local 1" in other
    assert "worker 1 is rank 1 of 2; waiting up to" in other


@pytest.mark.nightly
@pytest.mark.distributed
def test_signals_and_exit_codes_pass(tmp_path):
    """Each process has its own: Ctrl-C ends the second one, and the first one saves when a scheduler asks."""
    port = free_port()
    command = fate(tmp_path, "wait", "0")
    first, second = (
        launching.start(None, 1, *by_hand(port, index, *command), cwd=tmp_path)
        for index in range(2)
    )
    for rank in range(2):
        wait_for(tmp_path / f"rank-{rank}")
    second.send_signal(signal.SIGINT)
    other = launching.finish(second)
    first.send_signal(signal.SIGUSR1)
    output = launching.finish(first)
    assert (first.returncode, second.returncode) == (75, 130), output + other


@pytest.mark.distributed
@pytest.mark.nightly
def test_ctrl_c_to_one_of_two_trainings(tmp_path):
    """Both save and stop."""
    port = free_port()
    folder = tmp_path / "run"
    settings = (
        "model=mlp",
        "train.epochs=100000",
        "checkpoint.every_epochs=null",
        f"run.dir={folder}",
    )
    first, second = (
        launching.start(None, 1, *by_hand(port, index, *settings), cwd=tmp_path)
        for index in range(2)
    )
    deadline = time.monotonic() + 200
    while (
        not (folder / "history.csv").exists()
        and first.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    second.send_signal(signal.SIGINT)
    output, other = launching.finish(first), launching.finish(second)
    assert (first.returncode, second.returncode) == (130, 130), output + other
    assert "ranks          2 (Horovod on Gloo)" in output and list(
        (folder / "checkpoints").glob("step-*")
    )
    assert "Epoch" not in other


@needs_lab
@pytest.mark.distributed
@pytest.mark.nightly
def test_over_two_hosts():
    """No ssh from one to the other."""
    command = ("python", str(launching.WORKERS / "places.py"))
    with Lab(2) as lab, ThreadPoolExecutor(2) as pool:

        def run(index):
            lab("exec", f"s{index + 1}", "sh", "-c", "kill $(cat /run/sshd.pid)")
            _, *line = (
                argument.replace("localhost", "s1") for argument in by_hand(2222, index, *command)
            )
            return lab.run(f"s{index + 1}", PYTHON, *line)

        (code, output), (other_code, other) = pool.map(run, range(2))
    assert (code, other_code) == (0, 0), output + other
    assert "rank 0 sum 1 local 0 host s1 over eth0" in output, output
    assert (
        "worker 1 is rank 1 of 2" in other and "rank 1 sum 1 local 0 host s2 over eth0" in other
    ), other
