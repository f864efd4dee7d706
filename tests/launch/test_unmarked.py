"""horovodrun's outputs without rank 0's marks, whatever the pieces; drawings; and --prefix."""

import io
import itertools
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from hvtrain.launch import horovodrun
from hvtrain.launch.output import PlainOutput, PlainStream, RankOutput
from hvtrain.system.console import Verdict
from hvtrain.system.drawing import Bar, Drawing
from launching import BIN, environment

DRAWN = Drawing((Bar("Run", 1, 2, "50%"),), ("loss 1",))


def in_pieces(channel, text, size):
    pieces = ["".join(part) for part in itertools.zip_longest(*[iter(text)] * size, fillvalue="")]
    return "".join(channel.feed(piece) for piece in pieces) + channel.flush()


def plain(line):
    return line.text


@pytest.mark.parametrize("size", [1, 7, 80, 1000])
def test_rank_0_speaks_without_marks_and_others_in_whole_lines(size):
    text = "usage: x\n[1,0]<stdout>:Epoch 1\r[1,0]<stdout>:Epoch 2[1,1]<stdout>:one[1,0]<stdout>:, done\n"
    text += "[1,1]<stdout>: two\n[0]<stdout>:[x] it[1]<stdout>:late\n[0]<stdout>: ends [2]<stdout>:no end"
    shown = in_pieces(PlainStream(plain, lambda: False), text, size)
    assert shown == (
        "usage: x\nEpoch 1\rEpoch 2, done\n[1,1]<stdout>:one two\n[x] it\n[1]<stdout>:late\n ends \n[2]<stdout>:no end"
    )


def test_a_line_that_ends_like_a_mark_is_shown_as_it_is():
    """Also where a read of the pipe ends with it."""
    channel = PlainStream(plain, lambda: False)
    lines = ["[3]\n", "[1,2\n", "[0]<stdout>\n"]
    assert [
        channel.feed(f"[1,0]<stdout>:{line}") for line in lines
    ] == lines and not channel.flush()


def test_a_bar_that_moves_does_not_wait_for_its_lines_end():
    channel = PlainStream(plain, lambda: False)
    assert channel.feed("[1,0]<stdout>:10%") == "10%"
    assert channel.feed("[1,0]<stdout>:\r20% h") == "\r20% " and channel.feed("\r30%") == "h\r30%"
    waits = PlainStream(plain, lambda: True)
    assert (waits.feed("[1,0]<stdout>:10%"), waits.feed("\n")) == ("", "10%\n"), (
        "below a live display it would break"
    )


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_drawings_and_verdicts_are_not_shown(size):
    output = PlainOutput()
    text = f"[1,0]<stdout>:a\n[1,0]<stdout>:{DRAWN.line()}[1,0]<stdout>:...[1,0]<stdout>:{DRAWN.line()}"
    text += "[1,0]<stdout>:hvtrain-drawing: of my own\n"
    assert in_pieces(PlainStream(output._filter_output, lambda: False), text, size) == (
        "a\n...\nhvtrain-drawing: of my own\n"
    )
    assert output.drawing == DRAWN
    text = '[1,1]<stderr>:hvtrain-verdict: {"rank": 1, "cause": "no"}\n[1,1]<stderr>:said\n[1,0]<stderr>:b\n'
    assert (
        in_pieces(PlainStream(output._filter_error, lambda: False), text, size)
        == "[1,1]<stderr>:said\nb\n"
    )
    assert output.listener.verdicts == {1: Verdict(1, "no")}


def test_the_launchers_logs_hold_no_drawings(tmp_path, capsys):
    output = RankOutput(tmp_path, ["s1"])
    output.read(
        [
            f"[1,0]<stdout>:{DRAWN.line()}",
            "[1,0]<stdout>:Epoch 1\n",
            f"[1,0]<stdout>:{Drawing().line()}",
        ]
    )
    assert capsys.readouterr().out == "Epoch 1\n", "no terminal, no bars"
    assert (tmp_path / "rank-0000-s1.log").read_text() == "Epoch 1\n"


@pytest.mark.parametrize(
    ("line", "own", "keeps"),
    [
        ("-np 2 python x.py", "-np 2 python x.py", False),
        ("-np 2 --prefix python x.py", "-np 2 python x.py", True),
        ("--prefix -np 2 --gloo ./x --prefix", "-np 2 --gloo ./x --prefix", True),
        ("-np 2 --gloo ./x --prefix", "-np 2 --gloo ./x --prefix", False),
        (
            "-np 2 --prefix-output-with-timestamp ./x",
            "-np 2 --prefix-output-with-timestamp ./x",
            True,
        ),
        # Wrong options are the launcher's to refuse.
        ("--prefix -np two ./x", "--prefix -np two ./x", False),
    ],
)
def test_prefix_is_for_horovodrun_only_before_the_program(line, own, keeps, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["horovodrun", *line.split()])
    assert horovodrun._launcher_arguments(line.split()) == (own.split(), keeps)


SPEAKS = """
import os, sys
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"]
sys.stdout.write(f"out {rank}\\n")  # In one piece, because with --prefix each piece has a mark.
sys.stderr.write(f"err {rank}\\n")
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("mpi", marks=pytest.mark.nightly),
        pytest.param("gloo", marks=pytest.mark.release),
    ],
)
def test_only_prefix_puts_marks_before_rank_0s_lines(launcher, tmp_path):
    """Each output to where it belongs, and what the launcher itself says as it says it. By default, without ranks, in
    test_transcripts.py.
    """
    (tmp_path / "speaks.py").write_text(SPEAKS)

    def lines(*arguments):
        line = [str(BIN / "horovodrun"), *arguments]
        done = subprocess.run(
            line, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
        )
        return {*done.stdout.splitlines()}, {*done.stderr.splitlines()}

    job = "" if launcher == "gloo" else "1,"
    start = [f"--{launcher}", "-np", "2", "python", "speaks.py"]
    assert lines(*start) == (
        {"out 0", f"[{job}1]<stdout>:out 1"},
        {"err 0", f"[{job}1]<stderr>:err 1"},
    )
    marked = tuple(
        {f"[{job}{rank}]<std{name}>:{name} {rank}" for rank in (0, 1)} for name in ("out", "err")
    )
    assert lines("--prefix", *start) == marked
    (version,), errors = lines("--version")
    assert version == metadata.version("horovod") and not errors


@pytest.mark.parametrize("where", ["log", "console", "encoding"])
def test_what_cannot_be_written_keeps_no_rank_from_being_read(tmp_path, monkeypatch, capsys, where):
    """A full disk, or a terminal that has no such letter: unread, a rank would wait for ever to go on."""
    output = RankOutput(tmp_path, ["s1", "s2"])
    if where == "log":
        output.path(0).unlink()
        output.path(0).symlink_to("/dev/full")
    elif where == "console":
        monkeypatch.setattr(sys, "stdout", Path("/dev/full").open("w", encoding="utf-8"))  # noqa: SIM115
    else:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    lines = iter(["[0]<stdout>:größer\n", "[0]<stdout>:more\n", "[1]<stderr>:last\n"])
    output.read(lines)
    assert next(lines, None) is None and output.path(1).read_text() == "last\n"
    shown = capsys.readouterr()
    assert shown.err.endswith("[rank 1 s2] last\n")
    if where == "log":
        assert (
            "rank-0000-s1.log is no longer written: No space left on device; make room there"
            in shown.err
        )
        assert shown.out == "größer\nmore\n"
    else:
        assert output.path(0).read_text() == "größer\nmore\n"
    if where == "encoding":
        assert sys.stdout.buffer.getvalue() == rb"gr\xf6\xdfer" + b"\nmore\n"
