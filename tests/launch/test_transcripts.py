"""What a front makes of a launcher's end: replayed from what each launcher really said, for each launcher and fate.

tests/support/transcripts.py recorded it, on a lab. Everything between the launcher's pipes and the exit code is the
product's own; only ssh to the other host is not. test_launch_faults.py strikes real ranks.
"""

import os
import re
import signal
import socket
import sys
import threading
from dataclasses import dataclass, field
from functools import partial

import pytest

from hvtrain.launch import horovodrun, on_host, restart, supervisor
from hvtrain.launch.first_failure import AGAIN, Ending
from hvtrain.launch.job import Job, parse_hosts
from hvtrain.launch.remote_hosts import Answers, HostCalls
from hvtrain.system.run_lock import RunLock
from lab import Lab, needs_lab
from launcher_lab import HOW, last_line
from launching import ROOT
from transcripts import FATES, FOLDER, record, said

SPEAKER = ROOT / "tests" / "support" / "launched" / "speaker.py"
KILLED = f"killed by SIGKILL; {AGAIN}"
RAISED = "ValueError: a bad thing; see its traceback above"
LOST = f"FIRST FAILURE rank 1 host s2: the connection to host s2 was lost; check that it is up, then {AGAIN}"
ENDS = {
    "sigkill-of-rank-0": (75, f"FIRST FAILURE rank 0 host s1: {KILLED}"),
    "sigkill-of-rank-1": (75, f"FIRST FAILURE rank 1 host s2: {KILLED}"),
    "rank-0-raises": (1, f"FIRST FAILURE rank 0 host s1: {RAISED}"),
    "rank-1-raises": (1, f"FIRST FAILURE rank 1 host s2: {RAISED}"),
    "rank-1-exits-with-7": (
        7,
        "FIRST FAILURE rank 1 host s2: ended with exit code 7; see its output above",
    ),
    "sigterm": (75, f"preempted after saving; {AGAIN}"),
    "sigterm-twice": (75, f"ended by force after SIGTERM; {AGAIN}"),
    "s2-stops": (75, LOST),
    "s2-is-cut-off": (75, LOST),
}
CASES = [(how, name) for how in HOW for name in FATES]


class Replayed(supervisor.Launch):
    """A launch whose launcher is the speaker, and whose other host answers as it did then."""

    transcript = FOLDER
    short_of_memory = ""
    environments = ()
    commands = ()

    def __init__(self, line, environment, output, folder, *more):
        self.commands.append(line)
        line = [sys.executable, "-I", "-S", str(SPEAKER), str(self.transcript)]
        is_lost = self.transcript.read_text().startswith("unreachable hosts: s2\n")
        answer = None if is_lost else int(self.short_of_memory == "s2")
        self.other_host = OtherHost(("s1", "s2"), {"s2": 0}, answers={"s2": answer})
        self.environments.append(environment)
        # With a rank's variable it is one that can be asked to save.
        super().__init__(line, {**environment, "HOROVOD_RANK": "0"}, output, folder, *more)

    def _hosts(self):
        return self.other_host


@dataclass(frozen=True)
class OtherHost(HostCalls):
    answers: Answers = field(default_factory=dict)

    def clean_up(self, folder):
        on_host.clean_up(str(folder))
        return self.answers


@pytest.fixture
def replay(monkeypatch, tmp_path, capfd):
    """Exit code and both outputs of a front for which a transcript is replayed."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    for module in (restart, horovodrun):
        monkeypatch.setattr(module, "Launch", Replayed)
    monkeypatch.setattr(restart.remote_hosts, "check", lambda *_: None)
    monkeypatch.setattr(restart.remote_hosts, "absent", lambda *_: {})
    monkeypatch.setattr(Replayed, "environments", [])
    monkeypatch.setattr(Replayed, "commands", [])

    def run(how, name, *options, max_restarts=0, transcript=None, run_dir=None, settings=()):
        monkeypatch.setattr(Replayed, "transcript", transcript or FOLDER / how / f"{name}.txt")
        if how.startswith("launch"):
            controller = "gloo" if how == "launch-gloo" else "mpi"
            job = Job(
                ("python", "fate.py", *settings), 2, parse_hosts("s1:1,s2:1"), controller, dict(os.environ),
                mpirun=how == "launch-mpirun",
            )  # fmt: skip
            code = restart.run(job, tmp_path / "logs", run_dir, max_restarts)
        else:
            arguments = [HOW[how][-1], "-np", "2", "-H", "s1:1,s2:1", "python", "fate.py"]
            monkeypatch.setattr(sys, "argv", ["horovodrun", *options, *arguments])
            with pytest.raises(SystemExit) as ended:
                horovodrun.main()
            code = ended.value.code
        return code, capfd.readouterr()

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("how", "name"), CASES)
def test_the_end_of_a_launch(replay, how, name):
    """The last line names rank, host and cause; the code says whether a restart can help; nothing is said twice."""
    code, shown = replay(how, name)
    output = "".join(shown)
    expected, line = ENDS[name]
    assert (code, last_line(output)) == (expected, f"hvtrain: {line}"), output
    assert output.count("Traceback (most recent call last)") == name.endswith("raises"), output
    assert output.count("ValueError: a bad thing") == 2 * name.endswith("raises"), (
        "in the traceback and the last line"
    )
    for noise in (
        "Primary job",
        "HOROVOD_RANK",
        "hvtrain-verdict",
        "resource_tracker",
        "<stdout>:rank 0",
    ):
        assert noise not in output


@pytest.mark.parametrize("name", FATES)
@pytest.mark.parametrize("how", [how for how in HOW if how.startswith("horovodrun")])
def test_with_prefix_it_is_the_same_end_with_all_marks(replay, how, name):
    code, shown = replay(how, name, "--prefix")
    assert (code, last_line(shown.err)) == (ENDS[name][0], f"hvtrain: {ENDS[name][1]}"), shown
    for rank in (0, 1):
        assert re.search(
            rf"^\[(1,)?{rank}\]<stdout>:rank {rank} first$", shown.out, re.MULTILINE
        ), shown
    for rank in range(2) if name.endswith("raises") else ():
        marked = rf"^\[(1,)?{rank}\]<stderr>:ValueError: a bad thing$"
        assert bool(re.search(marked, shown.err, re.MULTILINE)) == (
            name == f"rank-{rank}-raises"
        ), shown


@pytest.mark.parametrize("how", [how for how in HOW if how.startswith("horovodrun")])
def test_without_prefix_rank_0_alone_has_no_mark(replay, how):
    """Each output to where it belongs."""
    _, shown = replay(how, "rank-0-raises")
    assert re.search(r"^rank 0 first$", shown.out, re.MULTILINE), shown
    assert re.search(r"^\[(1,)?1\]<stdout>:rank 1 first$", shown.out, re.MULTILINE), shown
    assert re.search(r"^ValueError: a bad thing$", shown.err, re.MULTILINE), shown


@pytest.mark.parametrize("how", HOW)
def test_a_rank_killed_for_lack_of_memory(replay, how, monkeypatch):
    """The other host's kernel has killed a process meanwhile; a restart cannot help."""
    monkeypatch.setattr(Replayed, "short_of_memory", "s2")
    code, shown = replay(how, "sigkill-of-rank-1")
    cause = "killed for lack of memory on s2; lower train.batch_size or use more hosts"
    assert (code, last_line(shown.err)) == (1, f"hvtrain: FIRST FAILURE rank 1 host s2: {cause}"), (
        shown
    )


@pytest.mark.parametrize(("name", "code"), [("rank-1-raises", 1), ("rank-1-exits-with-7", 7)])
def test_what_cannot_heal_is_not_started_again(replay, tmp_path, name, code):
    assert replay("launch-gloo", name, max_restarts=3)[0] == code
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["attempt-0001"]


def test_what_can_heal_is_started_again_as_often_as_it_may(replay, tmp_path):
    """From the newest checkpoint, of which the ranks are told."""
    for step in (7, 28, 21):
        (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    code, shown = replay(
        "launch-mpi", "sigkill-of-rank-1", max_restarts=1, run_dir=tmp_path / "run"
    )
    message = "hvtrain: restart 1 of 1 in 1 s, from the newest checkpoint (here: step-00000028), on s1:1,s2:1\n"
    assert code == 75 and message in shown.err, shown
    notes = [variables.get("HVTRAIN_NEWEST_CHECKPOINT") for variables in Replayed.environments]
    assert notes == [f"28@{socket.gethostname()}"] * 2
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "attempt-0001",
        "attempt-0002",
    ]


@pytest.mark.parametrize("earlier_run", [False, True])
def test_a_restart_goes_on_with_what_its_own_launch_began(
    replay, tmp_path, monkeypatch, earlier_run
):
    """resume=never refuses the checkpoints of an earlier run alone."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000007"

    def absent(*_):
        """Called between the attempts: the first one has written a checkpoint."""
        checkpoint.mkdir(parents=True, exist_ok=True)
        return {}

    monkeypatch.setattr(restart.remote_hosts, "absent", absent)
    if earlier_run:
        absent()
    replay(
        "launch-gloo", "sigkill-of-rank-1", max_restarts=1, run_dir=tmp_path / "run",
        settings=["resume=never"],
    )  # fmt: skip
    words = [re.search(r"resume=\w+", " ".join(line))[0] for line in Replayed.commands]
    assert words == ["resume=never", "resume=never" if earlier_run else "resume=auto"]


def test_hosts_that_no_longer_answer_after_the_pause_are_looked_for_again(monkeypatch, tmp_path):
    endings = iter([Ending(75, "killed", "s2"), Ending(2), Ending(0)])
    monkeypatch.setattr(restart, "_run_once", lambda *_: next(endings))
    monkeypatch.setattr(restart, "LONGEST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(restart.remote_hosts, "absent", lambda *_: {})
    job = Job(("true",), 2, parse_hosts("s1:1,s2:1"))
    assert restart.run(job, tmp_path, None, max_restarts=3) == 0


@pytest.mark.parametrize("is_in_use", [True, False])
def test_a_refused_launch_removes_no_folder_that_another_run_uses(is_in_use, monkeypatch, tmp_path):
    """Both began when the folder did not exist."""
    monkeypatch.setattr(restart, "_run_once", lambda *_: Ending(2, "refused", is_shown=True))
    run_dir = tmp_path / "run"
    (run_dir / "launch").mkdir(parents=True)
    job = Job(("true",), 1, parse_hosts("localhost"))
    with RunLock() as lock:
        if is_in_use:
            lock.take(run_dir)
        assert restart.run(job, run_dir / "launch", run_dir, is_new_run=True) == 2
        assert run_dir.exists() == is_in_use


def test_the_restart_of_an_elastic_job_names_its_script():
    job = Job(("true",), 2, discovery_script="hosts.sh")
    _, plan = restart._plan_restart(job, None, 2, {}, 1)
    assert plan == "in 1 s, from the newest checkpoint, on the hosts that hosts.sh lists"


def test_ctrl_c_ends_the_pause_before_a_restart(replay, monkeypatch):
    say = restart.console.say_error

    def say_and_press(message, *arguments):
        say(message, *arguments)
        if "restart 1 of 9" in message:
            threading.Timer(0.1, partial(os.kill, os.getpid(), signal.SIGINT)).start()

    monkeypatch.setattr(restart.console, "say_error", say_and_press)
    code, shown = replay("launch-gloo", "sigkill-of-rank-1", max_restarts=9)
    assert code == 130 and "restart 2" not in shown.err, shown


def test_some_time_after_sigterm_all_is_ended_by_force(replay, monkeypatch, tmp_path):
    """Half a minute, here half a second."""
    monkeypatch.setattr(supervisor, "SECONDS_TO_SAVE", 0.5)
    text = (FOLDER / "horovodrun-gloo" / "sigterm-twice.txt").read_text()
    assert text.count("SIGTERM\n") == 2
    (tmp_path / "once.txt").write_text(text.replace("SIGTERM\n", "", 1))
    code, shown = replay("horovodrun-gloo", "sigterm-twice", transcript=tmp_path / "once.txt")
    assert (code, last_line(shown.err)) == (
        75,
        f"hvtrain: ended by force after SIGTERM; {AGAIN}",
    ), shown


@needs_lab
@pytest.mark.distributed
@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", HOW)
def test_the_launchers_still_say_what_was_recorded(how):
    """All fates anew. How a lost host is told is chance: ssh or Open MPI may notice it first."""
    of_lost_hosts = {
        line for path in FOLDER.glob("*/s2-*.txt") for _, line in said(path.read_text())
    }
    for name in FATES:
        with Lab(2) as lab:
            now = said(record(lab, how, name))
        if name.startswith("s2-"):
            assert {line for _, line in now} <= of_lost_hosts, (name, sorted(now))
        else:
            kept = said((FOLDER / how / f"{name}.txt").read_text())
            assert now == kept, (name, sorted(now ^ kept))
