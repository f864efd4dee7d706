"""Bars on a terminal, seen through a pseudo-terminal; plain lines anywhere else."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

from hvtrain.training.callbacks.console_progress import is_live
from tests.support import launching

WORDS = ["-m", "hvtrain", "model=cnn", "train.batch_size=1", "train.epochs=2", "train.steps_per_execution=2"]
COLUMNS = 80


def on_a_terminal(cwd, **variables):
    """Exit code and all that the run wrote to a terminal of 80 columns."""
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 30, COLUMNS, 0, 0))
    environment = launching.environment(TERM="xterm-256color", CI="", **variables)
    run = subprocess.Popen([sys.executable, *WORDS], cwd=cwd, env=environment, stdin=its, stdout=its, stderr=its)
    os.close(its)
    written = b""
    try:
        while data := os.read(own, 65536):
            written += data
    except OSError:  # Linux ends a terminal that nobody holds any more with EIO.
        pass
    os.close(own)
    return run.wait(), written.decode()


def test_a_terminal_shows_bars_and_keeps_the_lines_of_epochs(tmp_path):
    code, written = on_a_terminal(tmp_path)
    assert code == 0, written
    visible = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", written)
    lines = [line.rstrip("\r") for line in visible.replace("\r\n", "\n").split("\n")]
    drawn = [line.rsplit("\r", 1)[-1] for line in lines]
    run = [line for line in drawn if re.match(r"Run +━", line)]
    assert len(run) > 3, "drawn again and again"
    assert all(len(line) <= COLUMNS for line in run)
    shares = [int(re.search(r"(\d+)%", line)[1]) for line in run]
    assert shares == sorted(shares) and shares[0] < shares[-1]
    assert any(re.match(r"Epoch 2/2 .*/1,437 steps, .* ms/step$", line) for line in drawn)
    assert any("learning rate 0.001" in line for line in drawn)
    assert any(re.match(r"data \d+%, compute \d+%", line) for line in drawn)
    for epoch in (1, 2):
        assert f"Epoch {epoch}/2: 1,437/1,437 steps" in visible, "what scrolls by stays"
    assert written.count("\x1b[?25h") >= written.count("\x1b[?25l"), "the cursor is there again"
    assert lines[-2].startswith("a step: "), "nothing is left of the bars"


def test_bars_are_for_people_at_terminals(monkeypatch):
    for name in ("CI", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert is_live(True)
    assert not is_live(False)
    for name, value in (("TERM", "dumb"), ("CI", "true"), ("OMPI_COMM_WORLD_RANK", "0")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert not is_live(True)
