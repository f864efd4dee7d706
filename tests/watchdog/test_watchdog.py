"""The watchdog over ranks that hang, stop, fail and die: real processes that only pretend to train (no TensorFlow)."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hvtrain.watchdog import connections
from hvtrain.watchdog.hub import Hub
from hvtrain.watchdog.member import Member
from hvtrain.watchdog.processes import Stacks
from hvtrain.watchdog.progress import Progress, Rules

WORKER = Path(__file__).parents[1] / "support" / "workers" / "watched.py"


class Ranks:
    """Ranks of workers/watched.py. Their errors go to one file, as to a console."""

    def __init__(self, folder, size, limit, *events, steps=100_000, through=(), more=()):
        self.folder, self.size = folder, size
        (folder / "checkpoints" / "step-00000012").mkdir(parents=True)
        self.console = (folder / "console").open("w+")
        line = [folder, limit, json.dumps(events), steps, *more]
        self.processes = [
            subprocess.Popen(
                [*through, sys.executable, WORKER, str(rank), str(size), *map(str, line)],
                stdout=(folder / f"out-{rank}").open("w"),
                stderr=self.console,
                stdin=subprocess.DEVNULL,
                # A shell that starts the tests in the background has them ignore Ctrl-C, which children inherit.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
            for rank in range(size)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.wait()
        for path in self.folder.glob("pid-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)

    def codes(self, seconds=30):
        """Exit codes; a rank that does not end is a failure."""
        deadline = time.monotonic() + seconds
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]

    def said(self):
        """The lines of errors."""
        return [
            line
            for line in (self.folder / "console").read_text().splitlines()
            if line.startswith("hvtrain: ")
        ]

    def out(self, rank):
        return (self.folder / f"out-{rank}").read_text()

    def stacks(self, rank):
        return (self.folder / "stacks" / f"rank-{rank:04d}.txt").read_text()

    def wait_for(self, rank, text):
        deadline = time.monotonic() + 20
        while text not in self.out(rank):
            assert time.monotonic() < deadline and self.processes[rank].poll() is None, self.out(
                rank
            ) + str(self.said())
            time.sleep(0.02)


GOES_ON = "run the same command with run.dir={folder} to resume from step-00000012"


@pytest.mark.parametrize(
    ("event", "phase"),
    [([1, 30, "data: hang"], "data since step 31"),
     pytest.param([0, 30, "forward: hang"], "forward since step 31", marks=pytest.mark.nightly),
     pytest.param([1, 30, "hang"], "callbacks since step 31", marks=pytest.mark.release)],
)  # fmt: skip
def test_a_rank_that_hangs_is_named_with_what_it_does(tmp_path, event, phase):
    with Ranks(tmp_path, 3, 2, event) as ranks:
        assert ranks.codes() == [75, 75, 75], ranks.said()
    line = ranks.said()[-1]
    pattern = r"hvtrain: no progress for [23] s \(watchdog.abort_seconds=2\): "
    pattern += rf"rank {event[0]} on h{event[0]} hangs in {phase} \(\d\d:\d\d:\d\d\); "
    assert re.match(pattern, line), line
    assert line.endswith(
        f"Python stacks are in {tmp_path}/stacks; {GOES_ON.format(folder=tmp_path)}"
    )
    assert len(ranks.said()) == 1
    assert f"no progress for 0 s: rank {event[0]} on h{event[0]} hangs in {phase}" in ranks.out(
        0
    ), "a warning before"
    for rank in range(3):
        assert "watched.py" in ranks.stacks(rank)
        assert ("in act" in ranks.stacks(rank)) == (rank == event[0])


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.release)])
def test_a_rank_that_is_stopped_is_named_and_woken_for_its_stacks(tmp_path, rank):
    with Ranks(tmp_path, 3, 2, [rank, 30, "stop"]) as ranks:
        codes = ranks.codes()
    line = ranks.said()[0]
    assert re.search(rf"rank {rank}( on h1)? has not answered since \d\d:\d\d:\d\d", line), (
        ranks.said()
    )
    assert " and is stopped by a signal (SIGSTOP, Ctrl-Z); " in line
    assert f"{tmp_path}/stacks; {GOES_ON.format(folder=tmp_path)}" in line
    assert "in act" in ranks.stacks(rank), "where it was stopped"
    assert codes == [75, 75, 75], ranks.said()


def test_a_process_does_not_end_when_the_clock_is_set(tmp_path, monkeypatch):
    """psutil gives its start by the clock, so every silent rank was "no longer running" and kept its stacks."""
    stacks = Stacks()
    stacks.close()
    later = re.sub(
        r"btime (\d+)", lambda boot: f"btime {int(boot[1]) + 3600}", Path("/proc/stat").read_text()
    )
    (tmp_path / "stat").write_text(later)
    (tmp_path / str(os.getpid())).symlink_to("/proc/self")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert stacks.process.state() == ""


def test_a_rank_that_holds_pythons_lock(tmp_path):
    """None of its threads runs Python; C code writes its stacks."""
    with Ranks(tmp_path, 2, 2, [1, 30, "grip"]) as ranks:
        assert ranks.processes[0].wait(30) == 75
        line = ranks.said()[-1]
        assert "rank 1 on h1 has not answered since " in line and "stopped" not in line
        assert "in act" in ranks.stacks(1)


def test_a_rank_that_was_killed(tmp_path):
    with Ranks(tmp_path, 3, 60, [1, 30, "die"]) as ranks:
        assert ranks.codes() == [75, -9, 75]
    expected = (
        f"hvtrain: stopped because rank 1 on h1 is gone (killed, or its host is lost); {GOES_ON}"
    )
    assert ranks.said()[0] == expected.format(folder=tmp_path)


@pytest.mark.nightly
def test_rank_0_that_was_killed(tmp_path):
    with Ranks(tmp_path, 3, 60, [0, 30, "die"]) as ranks:
        assert ranks.codes() == [-9, 75, 75]
    assert (
        "hvtrain: rank 1: stopped because rank 0 is gone (killed, or its host is lost)"
        in ranks.said()[0]
    )


@pytest.mark.parametrize(
    ("rank", "what", "error"),
    [
        pytest.param(0, "raise", "RuntimeError: a leaf fell off", marks=pytest.mark.release),
        (1, "raise", "RuntimeError: a leaf fell off"),
        pytest.param(1, "memory", "MemoryError: no room for a leaf", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_fails_says_why(tmp_path, rank, what, error):
    """The other's main thread is blocked, and ended by the watchdog with the code of the one that failed."""
    with Ranks(tmp_path, 2, 60, [rank, 30, what]) as ranks:
        assert ranks.codes() == [1, 1]
    lines = [line for line in ranks.said() if "stopped because" in line]
    assert len(lines) == 1
    assert lines[0].endswith(f"stopped because rank {rank} on h{rank} failed: {error}")


def test_who_asks_for_the_cause_is_told_and_ends_by_itself(tmp_path):
    with Ranks(tmp_path, 3, 60, [1, 30, "raise"], [0, 30, "ask"], [2, 30, "ask"]) as ranks:
        assert ranks.codes() == [1, 1, 1]
    for rank in (0, 2):
        assert "cause: rank 1 on h1 failed: RuntimeError: a leaf fell off" in ranks.out(rank)
    assert [line for line in ranks.said() if "stopped because" in line] == []


@pytest.mark.nightly
def test_nobody_to_blame(tmp_path):
    with Ranks(tmp_path, 2, 60, [-1, 30, "ask"]) as ranks:
        assert ranks.codes() == [9, 9]
    assert "cause: None" in ranks.out(0)


@pytest.mark.nightly
def test_ranks_that_wait_for_each_other_at_different_places(tmp_path):
    """Rank 1 never comes to the reduction of step 31: it exchanges something of which rank 0 knows nothing."""
    with Ranks(tmp_path, 2, 2, [1, 30, "data: exchange"]) as ranks:
        assert ranks.codes() == [75, 75]
    pattern = r"ranks wait for each other at different places: rank 1 on h1 hangs in exchange since step 30 \(.*\), "
    pattern += (
        r"rank 0 on h0 hangs in reduction since step 31 \(.*\); do all run the same program\?"
    )
    assert re.search(pattern, ranks.said()[-1]), ranks.said()


@pytest.mark.nightly
def test_work_that_takes_long_is_no_hang(tmp_path):
    """Longer than the limit: validation by its batches, a checkpoint by what it writes, and the start; others wait."""
    with Ranks(
        tmp_path,
        2,
        1,
        [-1, 0, "forward: hang 2"],
        [0, 20, "write 3"],
        [1, 30, "validate 3"],
        steps=40,
    ) as ranks:
        assert ranks.codes() == [0, 0], ranks.said()
    assert ranks.said() == []
    assert "done 40, threads left: []" in ranks.out(0) and "done 40, threads left: []" in ranks.out(
        1
    )


@pytest.mark.nightly
def test_ranks_that_only_serve_are_no_hang_when_rank_0_has_ended(tmp_path):
    """As parameter servers do, for longer than the time without progress after which there is a warning."""
    with Ranks(tmp_path, 2, 20, steps=300, more=("serves",)) as ranks:
        assert ranks.codes() == [0, 0]
        assert "served: None" in ranks.out(1)
        assert "no progress" not in ranks.out(0) and not ranks.said()


def test_a_signal_to_a_rank_that_only_serves_is_rank_0s(tmp_path):
    with Ranks(tmp_path, 2, 60, more=("serves", "interrupts")) as ranks:
        assert ranks.processes[0].wait(30) == -signal.SIGINT, "KeyboardInterrupt"
        assert "failed: \n" in ranks.out(0)
        assert "StopReason(text='rank 0 on h0 failed: KeyboardInterrupt'" in ranks.out(1)


@pytest.mark.nightly
def test_all_ranks_stopped_and_continued_go_on(tmp_path):
    """A suspended job; nobody was at fault."""
    with Ranks(tmp_path, 2, 2, steps=500) as ranks:
        ranks.wait_for(0, "")
        time.sleep(2)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in ranks.processes:
                process.send_signal(number)
            time.sleep(5 if number == signal.SIGSTOP else 0)
        assert ranks.codes(60) == [0, 0], ranks.said()


@pytest.mark.nightly
def test_the_launcher_is_killed(tmp_path):
    """Its ranks change their parent, and go."""
    through = [
        sys.executable,
        "-c",
        "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))",
    ]
    with Ranks(tmp_path, 2, 60, through=through) as ranks:
        deadline = time.monotonic() + 20
        while len(list(tmp_path.glob("meeting-50-*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
        for process in ranks.processes:
            process.kill()
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline + 40
            time.sleep(0.05)
    assert (
        f"hvtrain: stopped because the launcher of the ranks is gone; {GOES_ON}".format(
            folder=tmp_path
        )
        in ranks.said()
    )


FORGED = (
    '{"rank": 1}\n', '{"rank": 1, "proof": 3}\n', '{"rank": 1, "proof": "é"}\n', '{"rank": null, "proof": ""}\n',
    '{"kind": "bye"}\n', "[]\n", "\n", "{" * 100_000, "[" * 1000 + "\n",
)  # fmt: skip


def test_strangers_at_the_port(tmp_path):
    """Garbage, a forged pickle, endless lines and silent connections: closed, and the run goes on."""
    marker = tmp_path / "marker"
    pickle = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    with Ranks(tmp_path, 2, 60, steps=300) as ranks:
        deadline = time.monotonic() + 20
        while len(list(tmp_path.glob("meeting-20-*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        addresses = listening(ranks.processes[0].pid)
        assert [address for address, _ in addresses] == ["127.0.0.1"]
        held = [socket.create_connection(addresses[0]) for _ in range(200)]
        before = memory(ranks.processes[0].pid)
        for payload in (
            pickle,
            os.urandom(5000),
            *(line.encode() for line in FORGED),
            b"x" * 30_000_000,
        ):
            assert closed_after(addresses[0], payload)
        assert memory(ranks.processes[0].pid) - before < 8 << 20
        assert ranks.codes() == [0, 0], ranks.said()
        for connection in held:
            connection.close()
    assert not marker.exists()
    assert ranks.said() == []


def test_idle_connections_do_not_keep_a_rank_out():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub_side = connections.Connections(listener, "token", 1, {})
        idle = []
        for _ in range(connections.MAX_STRANGERS + 1):
            idle.append(socket.create_connection(listener.getsockname()))
            assert list(hub_side.messages(5)) == []
        with socket.create_connection(listener.getsockname()) as rank:
            assert list(hub_side.messages(5)) == []
            assert b"challenge" in rank.recv(1000)
        assert [len(connection.recv(1000)) > 0 for connection in idle] == [True] * len(idle)
        assert idle[0].recv(1000) == b"", "the oldest made room"
        hub_side.close()
        for connection in idle:
            connection.close()


def test_without_file_descriptors_the_hub_waits_for_its_next_tick():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub_side = connections.Connections(listener, "token", 1, {})
        with socket.create_connection(listener.getsockname(), timeout=5) as rank:
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            next_free = os.dup(0)
            os.close(next_free)
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, limits[1]))
                assert list(hub_side.messages(5)) == []
                assert hub_side._selector.select(0) == [], "it would wait for the listener in vain"
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            hub_side.close_strangers()
            assert list(hub_side.messages(5)) == []
            assert b"challenge" in rank.recv(1000)
        hub_side.close()


def listening(pid):
    """Addresses at which a process listens, from /proc."""
    inodes = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        match = re.match(r"socket:\[(\d+)\]", str(path.readlink()))
        inodes |= {match[1]} if match else set()
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in inodes]
    return [
        (socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in local
    ]


def memory(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def closed_after(address, payload):
    with socket.create_connection(address, timeout=15) as connection:
        try:
            connection.sendall(payload)
            while connection.recv(1 << 16):
                pass
        except (ConnectionResetError, BrokenPipeError):
            pass
    return True


def test_no_watch_no_port(tmp_path):
    with Ranks(tmp_path, 2, 0, steps=100) as ranks:
        while not list(tmp_path.glob("meeting-20-*")):
            time.sleep(0.02)
        assert listening(ranks.processes[0].pid) == []
        assert ranks.codes() == [0, 0]


@pytest.mark.nightly
def test_an_elastic_job_goes_on_without_a_lost_rank(tmp_path):
    """Nobody is ended for it; here the others then wait forever, which is a hang like any other."""
    with Ranks(tmp_path, 3, 3, [1, 30, "die"], more=["survives"]) as ranks:
        assert ranks.codes() == [75, -9, 75]
    assert "stopped because" not in str(ranks.said())
    assert "all 2 ranks wait in reduction since step 32 " in ranks.said()[0]


MANY_FILES = """
import fcntl, resource, socket
from types import SimpleNamespace
from hvtrain.system.host_facts import raise_file_limit
from hvtrain.watchdog.member import Member

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
raise_file_limit()
hub, own = socket.socketpair()
high = socket.socket(fileno=fcntl.fcntl(own, fcntl.F_DUPFD, 1500))
member = SimpleNamespace(_connection=high)
before = Member._is_readable(member, 0)
hub.send(b"x")
print(high.fileno(), before, Member._is_readable(member, 10))
"""


@pytest.mark.skipif(
    0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2000, reason="ulimit -Hn is below 2,000"
)
def test_rank_0_of_more_than_a_thousand_may_open_a_file_for_each():
    """It could open 1,024, and listen on file numbers below that alone."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_FILES], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1500 False True\n"


def test_rank_0_serves_512_ranks_and_names_the_one_that_dies():
    """The hub and rank 0's own member are real; the other ranks are sockets that speak their protocol."""
    rules = Rules(abort_seconds=60.0, beat_seconds=0.5)
    progress = Progress()
    status, process = (
        vars(progress.status()),
        vars(Member(0, "h0", rules, progress, False).stacks.process),
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    member = Member(0, "h0", rules, progress, False)
    hub = Hub(listener, "token", 512, member)
    member.join(listener.getsockname(), "token")
    ranks = {}
    for rank in range(1, 512):
        connection = socket.create_connection(listener.getsockname(), timeout=20)
        ranks[rank] = lines = connection.makefile("rw", encoding="ascii", newline="\n")
        connection.close()  # Its file keeps it open.
        answer = connections.proof("token", json.loads(lines.readline())["challenge"], rank)
        say(lines, rank=rank, host=f"h{rank}", proof=answer, process=process, status=status)
        assert json.loads(lines.readline())["kind"] == "welcome"
    for lines in ranks.values():
        say(lines, kind="beat", status=status)
    for lines in ranks.values():
        assert json.loads(lines.readline())["kind"] == "heard"
    ranks.pop(300).close()
    for lines in ranks.values():
        reason = json.loads(lines.readline())["reason"]
        assert reason["rank"] == 300 and reason["text"].startswith("rank 300 on h300 is gone")
    assert member.wait().rank == 300
    member.stop()
    hub.thread.join(10)
    assert not hub.thread.is_alive()
    for lines in ranks.values():
        lines.close()


def say(lines, **message):
    lines.write(json.dumps(message) + "\n")
    lines.flush()
