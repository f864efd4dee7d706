"""Verdicts, and launchers' texts captured on a lab of hosts, become one line and an exit code."""

import itertools

import pytest

from hvtrain.core.topology import Topology
from hvtrain.errors import StorageError
from hvtrain.launch import on_host
from hvtrain.launch.first_failure import AGAIN, RULER, End, Listener, judge
from hvtrain.launch.output import PlainOutput, RankOutput
from hvtrain.strategies.comm import Comm
from hvtrain.system import command, console
from hvtrain.system.console import UNSAVED, Verdict

ABORTED = f"""\
{RULER}
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
{RULER}
"""
KILLED = f"""\
{ABORTED}{RULER}
mpirun noticed that process rank 1 with PID 50 on node s2 exited on signal 9 (Killed).
{RULER}
"""
EXITED = f"""\
{ABORTED}{RULER}
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[7581,1],1]
  Exit code:    7
{RULER}
"""
HOST_DIED = f"""\
Connection to s3 closed by remote host.
{RULER}
ORTE was unable to reliably start one or more daemons.
This usually is caused by:

* not finding the required libraries and/or binaries on
  one or more nodes. Please check your PATH and LD_LIBRARY_PATH
  settings, or configure OMPI with --enable-orterun-prefix-by-default
{RULER}
"""
LOST = f"""\
{RULER}
ORTE has lost communication with a remote daemon.

  HNP daemon   : [[7529,0],0] on node s1
  Remote daemon: [[7529,0],1] on node s3

This is usually due to either a failure of the TCP network
connection to the node, or possibly an internal failure of
the daemon itself. We cannot recover from this failure, and
therefore will terminate the job.
{RULER}
"""
NO_SLOTS = f"""\
{RULER}
There are not enough slots available in the system to satisfy the 9
slots that were requested by the application:

  python
{RULER}
"""
HOSTS = ("s1", "s2", "s3")


def heard(text):
    """All that a listener is told, and what of it is to be shown."""
    output = PlainOutput(keeps_marks=True)
    shown = output.error_stream.feed(text)
    return output.listener, shown + output.error_stream.flush() + output.listener.flush()


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (KILLED, End("1", 137, "s2")),
        (EXITED, End("1", 7)),
        (LOST, End("", 255, "s3")),
        ('hvtrain-verdict: {"rank": "1", "code": 137}\n', End("1", 137)),
        ('hvtrain-verdict: {"rank": "0", "cause": "", "code": -9}\n', End("0", 137)),
        ('hvtrain-verdict: {"rank": "s2[0]", "code": 7}\n', End("s2[0]", 7)),
    ],
)
def test_the_first_end_is_found_and_its_text_is_not_shown(text, end):
    listener, shown = heard(text)
    assert (listener.first, shown) == (end, "")


def test_an_end_in_a_line_that_another_process_began():
    """One that Horovod puts between launcher and rank, and that dies as it complains, has the same error output."""
    begun = "Exception in thread "
    text = f'{begun}hvtrain-verdict: {{"rank": "1", "code": 255}}\n'
    listener, shown = heard(text)
    assert (listener.first, shown) == (End("1", 255), f"{begun}\n")
    channel = PlainOutput().error_stream
    assert "".join(channel.feed(letter) for letter in text) + channel.flush() == f"{begun}\n"


def test_a_host_that_died_under_mpi():
    listener, shown = heard(HOST_DIED)
    assert listener.first == End("", 255, "s3")
    assert shown == "Connection to s3 closed by remote host.\n", "ssh's own words stay"


def test_other_words_of_mpirun_are_shown_whole():
    """Without ssh's word that a connection was lost, that daemons did not start may be anything."""
    for text in (NO_SLOTS, HOST_DIED.partition("\n")[2]):
        listener, shown = heard(f"before\n{text}after\n")
        assert (listener.first, shown) == (None, f"before\n{text}after\n")


BLAME = 'hvtrain-verdict: {"rank": 1, "cause": "no \\"leaf\\""}\n'


def test_a_text_in_any_pieces_is_shown_at_once_and_once():
    text = (
        f"[1,0]<stderr>:Epoch 1\rEpoch 2\n---- a line of the user's\n{KILLED}[1,0]<stderr>:{BLAME}"
    )
    text += f"[1,0]<stderr>:bar[1,1]<stderr>:{BLAME}[1,1]<stderr>:no end"
    for size in (1, 7, 80, 1000):
        output = PlainOutput(keeps_marks=True)
        pieces = [
            "".join(part) for part in itertools.zip_longest(*[iter(text)] * size, fillvalue="")
        ]
        shown = "".join(output.error_stream.feed(piece) for piece in pieces)
        assert shown == (
            "[1,0]<stderr>:Epoch 1\rEpoch 2\n---- a line of the user's\n[1,0]<stderr>:bar\n[1,1]<stderr>:no end"
        )
        assert output.listener.verdicts == dict.fromkeys((0, 1), Verdict(1, 'no "leaf"'))
    stream = PlainOutput(keeps_marks=True).output_stream
    assert stream.feed("[1,0]<stdout>:10%") == "[1,0]<stdout>:10%", (
        "a bar that moves does not wait for its line's end"
    )
    assert stream.feed("\r20%[1,1]<stdout>:5%") == "\r20%\n[1,1]<stdout>:5%"
    assert stream.feed("[1,0]<stdout>:\r30%\n") == "\n[1,0]<stdout>:\r30%\n"


def test_logs_of_an_earlier_launch_are_deleted(tmp_path):
    RankOutput(tmp_path, ["s1", "s1", "s2", "s2"])
    (tmp_path / "rank-notes.log").touch()
    RankOutput(tmp_path, ["s1", "s3"])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["rank-0000-s1.log", "rank-0001-s3.log", "rank-notes.log"]


def test_a_time_before_a_mark_stays_with_it():
    """As --prefix-output-with-timestamp puts it there; what the rank says is understood all the same."""
    time = "Thu Nov  6 09:05:40 2026"
    text = f"{time}[1]<stderr>:oh no\n{time}[1,1]<stderr>:{BLAME}{time}[0]<stderr>:well\n"
    listener, shown = heard(text)
    assert shown == f"{time}[1]<stderr>:oh no\n{time}[0]<stderr>:well\n"
    assert listener.verdicts == {1: Verdict(1, 'no "leaf"')}


def test_what_a_rank_says_of_itself_goes_before_what_it_says_of_others():
    """Also in pieces that mpirun marks; a program without hvtrain ends with a traceback."""
    listener, _ = heard(
        "[1,1]<stderr>:Traceback (most recent call last):\n"
        '[1,1]<stderr>:  File "x.py", line 1, in <module>\n'
        '[1,1]<stderr>:ValueError[1,0]<stderr>:hvtrain-verdict: {"rank": null,[1,1]<stderr>:: bad thing\n'
        '[1,0]<stderr>: "cause": "another rank did"}\n'
        """[2]<stderr>:hvtrain-verdict: {"rank": 2, "cause": "KeyError: 'x'"}\n"""
        '[2]<stderr>:hvtrain-verdict: {"rank": 1, "cause": "stopped because of it"}\n'
    )
    assert listener.verdicts == {
        0: Verdict(None, "another rank did"),
        1: Verdict(1, "ValueError: bad thing; see its traceback above"),
        2: Verdict(2, "KeyError: 'x'"),
    }
    listener, _ = heard(
        """[1]<stderr>:hvtrain-verdict: {"rank": 1, "cause": "no leaf", "code": 1}\n"""
        "[1]<stderr>:Traceback (most recent call last):\n[1]<stderr>:AttributeError: at exit\n"
    )
    assert listener.verdicts == {1: Verdict(1, "no leaf", 1)}


def test_an_error_has_a_verdict_where_a_launcher_reads_it(monkeypatch, capsys):
    monkeypatch.delenv(on_host.MARK, raising=False)
    console.say_error("rank 1 on s2 failed: no leaf", 1, 0.0)
    assert capsys.readouterr().err == "hvtrain: rank 1 on s2 failed: no leaf\n"
    monkeypatch.setenv(on_host.MARK, "/tmp/x")
    console.say_error("rank 1 on s2 failed: no leaf", 1, 0.0)
    console.say_error("stopped because all wait", 2, 0.0, culprit=None)
    first, message, second, _ = capsys.readouterr().err.splitlines()
    assert message == "hvtrain: rank 1 on s2 failed: no leaf"
    assert (console.read_verdict(first), console.read_verdict(second)) == (
        Verdict(1, "no leaf"),
        Verdict(None, "stopped because all wait"),
    )
    assert (
        console.read_verdict("hvtrain-verdict: no JSON") is None
        and console.read_verdict('hvtrain-verdict: {"a": 1}') is None
    )


@pytest.mark.parametrize(
    ("end", "verdicts", "memory", "lost", "code", "line"),
    [
        (End("1", 137, "node2"), {}, (), (), 75, f"FIRST FAILURE rank 1 host s2: killed by SIGKILL; {AGAIN}"),
        (End("1", 139), {}, (), (), 75, f"FIRST FAILURE rank 1 host s2: killed by SIGSEGV; {AGAIN}"),
        (End("1", 137), {}, ("s1",), (), 75, f"FIRST FAILURE rank 1 host s2: killed by SIGKILL; {AGAIN}"),
        (End("1", 137), {}, ("s2",), (), 1,
         "FIRST FAILURE rank 1 host s2: killed for lack of memory on s2; lower train.batch_size or use more hosts"),
        (End("2", 255), {}, (), ("s3",), 75,
         f"FIRST FAILURE rank 2 host s3: the connection to host s3 was lost; check that it is up, then {AGAIN}"),
        (End("", 255, "s3"), {}, (), (), 75,
         f"FIRST FAILURE rank 2 host s3: the connection to host s3 was lost; check that it is up, then {AGAIN}"),
        (End("2", 255), {}, (), (), 255,
         "FIRST FAILURE rank 2 host s3: ended with exit code 255; see its output above"),
        (End("0", 2), {0: Verdict(0, "no such file; give dataset.dir")}, (), (), 2,
         "FIRST FAILURE rank 0 host s1: no such file; give dataset.dir"),
        (End("0", 1), {0: Verdict(None, "another rank did"), 1: Verdict(1, "ValueError: x")}, (), (), 1,
         "FIRST FAILURE rank 1 host s2: ValueError: x"),
        (End("0", 75), {}, (), (), 75, f"preempted after saving; {AGAIN}"),
        (End("0", 75), {0: Verdict(0, f"it arrived {UNSAVED}")}, (), (), 75, f"it arrived {UNSAVED}; {AGAIN}"),
        (End("0", 75), {0: Verdict(1, "rank 1 makes no progress")}, (), (), 75,
         f"FIRST FAILURE rank 1 host s2: rank 1 makes no progress; {AGAIN}"),
        (End("0", 75), {1: Verdict(2, "stopped because rank 2 on s3 is gone")}, (), (), 75,
         f"FIRST FAILURE rank 2 host s3: stopped because rank 2 on s3 is gone; {AGAIN}"),
        (End("1", 2), {1: Verdict(0, "no space left")}, (), (), 2, "FIRST FAILURE rank 0 host s1: no space left"),
        (End("1", 134), {1: Verdict(1, "no connection", 2)}, (), (), 2, "FIRST FAILURE rank 1 host s2: no connection"),
        (End("s2[0]", 137), {}, (), (), 75, f"FIRST FAILURE s2[0] host s2: killed by SIGKILL; {AGAIN}"),
        (End("0", 130), {}, (), (), 130,
         "FIRST FAILURE rank 0 host s1: ended with exit code 130; see its output above"),
    ],
)  # fmt: skip
def test_what_an_end_means(end, verdicts, memory, lost, code, line):
    ending = judge(end, verdicts, HOSTS, memory, lost)
    assert (ending.code, ending.message) == (code, line)


def test_a_full_disk_of_one_rank_is_the_failure_of_that_rank(monkeypatch, capsys):
    """All ranks raise the error, and any of them may end first."""
    monkeypatch.setenv(on_host.MARK, "/tmp/x")
    monkeypatch.setattr(console, "SECONDS_FOR_ANOTHER_RANK", 0.0)
    text = "/cache/shard-1 cannot be written: No space left on device; make room"
    listener = Listener()
    for rank in (2, 1, 0):
        comm = Comm()
        comm.topology = Topology(rank=rank, size=3)
        monkeypatch.setattr(comm, "gather", lambda _: [None, (StorageError(text), "s2"), None])
        with pytest.raises(StorageError) as raised:
            comm.all_or_raise(lambda: None)
        assert command._report(raised.value, rank) == 2
        for line in capsys.readouterr().err.splitlines():
            listener.read_rank(rank, line)
    for first in "012":
        ending = judge(End(first, 2), listener.verdicts, HOSTS)
        assert (ending.code, ending.message) == (2, f"FIRST FAILURE rank 1 host s2: {text}")


def test_a_dropped_packet_of_gloos_names_the_ports():
    """What ranks wrote on hosts between which nothing but ssh passed. A connection that ends is no sign of that."""
    what = "  what():  [/src/third_party/gloo/gloo/transport/tcp/pair.h:324] Connect timeout [10.77.0.2]:39213"
    listener, shown = heard(
        f"[1]<stderr>:{what}\n[0]<stderr>:{what.replace('Connect timeout', 'Read error')}\n"
    )
    cause = "no connection to another rank or to the launcher (Connect timeout [10.77.0.2]:39213); open all "
    assert list(listener.verdicts) == [1] and listener.verdicts[1].cause.startswith(cause)
    assert (listener.verdicts[1].code, shown.count("what()")) == (2, 2)


def test_a_block_without_end_is_shown():
    listener = Listener()
    assert listener.read_launcher(f"{RULER}\n") == "" and listener.read_launcher("half\n") == ""
    assert listener.flush() == f"{RULER}\nhalf\n"
