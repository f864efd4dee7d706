"""Bars on a terminal, seen through a pseudo-terminal, also where a launcher draws them; plain lines anywhere else."""

import re
import sys

import pytest

import terminal
from hvtrain.system.console import SIZE_VARIABLES
from hvtrain.system.drawing import Bar, Drawing, LiveDisplay, Sender, request
from hvtrain.training.callbacks.console_progress import display
from launching import BIN

EPOCHS = 3  # Fast machines take less than a second for one, and bars are drawn twice a second.
SETTINGS = [
    "model=cnn",
    "train.batch_size=1",
    f"train.epochs={EPOCHS}",
    "train.steps_per_execution=2",
    "run.report=false",
]
RUN = [sys.executable, "-m", "hvtrain", *SETTINGS]
STARTS = {
    "alone": RUN,
    "launch": [sys.executable, "-m", "hvtrain", "launch", "-np", "2", "--", *SETTINGS],
    "launch-gloo": [
        sys.executable,
        "-m",
        "hvtrain",
        "launch",
        "--gloo",
        "-np",
        "2",
        "--",
        *SETTINGS,
    ],
    "launch-mpirun": [
        sys.executable,
        "-m",
        "hvtrain",
        "launch",
        "--mpirun",
        "-np",
        "2",
        "--",
        *SETTINGS,
    ],
    "horovodrun": [str(BIN / "horovodrun"), "-np", "2", *RUN],
    "horovodrun-gloo": [str(BIN / "horovodrun"), "--gloo", "-np", "2", *RUN],
}
BAR = "[━╸╺]"
RANKS = pytest.mark.distributed
MORE = (RANKS, pytest.mark.release)


@pytest.mark.parametrize(
    ("start", "columns"),
    [
        pytest.param("alone", 80, marks=pytest.mark.nightly),
        pytest.param("horovodrun", 80, marks=(RANKS, pytest.mark.nightly)),
        pytest.param("launch", 80, marks=MORE),
        pytest.param("launch-gloo", 120, marks=MORE),
        pytest.param("launch-mpirun", 120, marks=MORE),
        pytest.param("horovodrun-gloo", 120, marks=MORE),
    ],
)
def test_a_terminal_shows_bars_and_keeps_the_lines_of_epochs(start, columns, tmp_path):
    """At every moment the bars are whole and below everything else, and in the end nothing is left of them."""
    seen = []
    code, screen = terminal.run(STARTS[start], tmp_path, columns, lambda now: seen.append(now.text))
    assert code == 0, screen.text
    drawn = [
        bars
        for text in seen
        if (bars := re.search(rf"^Run +{BAR}.*\Z", text, re.MULTILINE | re.DOTALL))
    ]
    assert len(drawn) > 3, f"drawn again and again:\n{screen.text}"
    steps = "1,437" if start == "alone" else "718"
    shares = []
    for bars in drawn:
        run, epoch, *more = bars[0].splitlines()
        assert re.fullmatch(
            rf"Epoch \d/{EPOCHS} {BAR}+ +[\d,]+/{steps} steps(, .* ms/step)?", epoch
        ), bars[0]
        shares.append(int(re.search(r"(\d+)%", run)[1]))
        text_in_one_line = " ".join(more)
        assert re.match(
            r"accuracy \d.*, loss \d.*, \d.* examples/s, learning rate 0\.00", text_in_one_line
        ), bars[0]
        assert len(more) <= 3
    assert shares == sorted(shares) and shares[0] < shares[-1]
    last = drawn[-1][0]
    assert re.search(r", [\d a-z]+ left\n.* ms/step\n", last) and re.search(
        r"data\s\d+%,\s+compute\s\d+%", last
    ), last
    if start != "alone":
        assert re.search(r"communication\s+\d+%;\s+slowest:\s+rank\s+[01]", last), last
    for epoch in range(1, EPOCHS + 1):
        assert f"Epoch {epoch}/{EPOCHS}: {steps}/{steps} steps" in screen.text, (
            "what scrolls by stays"
        )
    assert not re.search(BAR, screen.text)
    assert "hvtrain-" not in screen.text and "[1,0]" not in screen.text
    assert screen.shows_cursor
    assert all(text.count("\nRun ") <= 1 for text in seen), "nothing is left of an older drawing"


TALKATIVE = """
import os, sys, time
from hvtrain.system.drawing import Bar, Drawing, Sender
for step in range(20):
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        print("half a line", end="", flush=True)
        Sender().show(Drawing((Bar("Run", step, 20, f"{step} of 20"),), ("loss 0.1",)))
    else:
        print(f"[red]{step}", *["word"] * 20, file=(sys.stdout, sys.stderr)[step % 2])
    time.sleep(0.05)
"""


@RANKS
def test_nothing_that_ranks_print_breaks_the_bars(tmp_path):
    """Another rank's lines on both outputs, longer than the terminal is wide, and rank 0's without an end."""
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    seen = []
    line = [str(BIN / "horovodrun"), "-np", "2", "python", "talkative.py"]
    code, screen = terminal.run(line, tmp_path, 80, lambda now: seen.append(now.text))
    assert code == 0, screen.text
    drawn = [text for text in seen if re.search(BAR, text)]
    assert len(drawn) > 3
    for text in drawn:
        *above, run, loss = text.splitlines()
        assert re.fullmatch(rf"Run {BAR}+ +\d+ of 20", run) and loss == "loss 0.1", text
        assert not re.search(BAR, "".join(above)), text
    text_in_one_line = " ".join(screen.text.split())
    for step in range(20):
        stream = "stderr" if step % 2 else "stdout"
        assert f"[1,1]<{stream}>:[red]{step}" + " word" * 20 in text_in_one_line, screen.text
    assert screen.text.count("half a line") == 20 and not re.search(BAR, screen.text)


def test_bars_are_for_people_at_terminals(monkeypatch):
    for name in ("CI", *SIZE_VARIABLES, *request(True)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert isinstance(display(), LiveDisplay)
    for name, value in (("TERM", "dumb"), ("CI", "true"), ("OMPI_COMM_WORLD_SIZE", "1")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert display() is None
            changed.setenv(*request(True).popitem())
            assert isinstance(display(), Sender), "the launcher knows its terminal"
            changed.setenv(*request(False).popitem())
            assert display() is None
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert display() is None


def test_a_narrow_terminal_shows_all_words():
    """Long lines are wrapped between words; bars give way to their numbers."""
    drawing = Drawing(
        (Bar("Run", 1, 4, "25%, 1:02:05 left"),), ("loss 0.25, " * 8 + "learning rate 0.1",)
    )
    for columns in (40, 80, 120):
        text = pictured(drawing, columns)
        text_in_one_line = " ".join(text.split())
        assert "25%, 1:02:05 left" in text_in_one_line and text_in_one_line.endswith(
            "loss 0.25, " * 8 + "learning rate 0.1"
        ), text


def pictured(drawing, columns):
    """The drawing as a terminal of that width shows it."""
    from rich.console import Console

    from hvtrain.system.drawing import _picture

    console = Console(width=columns, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(_picture(drawing))
    return captured.get()
