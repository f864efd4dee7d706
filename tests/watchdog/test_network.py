"""The network between two hosts of the lab goes bad, or away: survived where it can be, a clear end where not."""

import contextlib
import os
import subprocess
import threading
import time

import pytest
from safetensors.numpy import load_file

from lab import PYTHON, SCRIPT, Lab, needs_lab
from launching import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900), needs_lab]
nightly, release = pytest.mark.nightly, pytest.mark.release

WORDS = ["model=mlp", "train.deterministic=true", "train.epochs=100000"]
STEPS = ["model=mlp", "train.deterministic=true", "train.steps=330", "checkpoint.every_epochs=5"]


@pytest.fixture
def lab():
    with Lab(2) as made:
        yield made


class Run:
    """python -m hvtrain launch on s1, one rank a host, with its lines as they come."""

    def __init__(self, lab, how, name, *overrides):
        self.lab, self.name, self.lines = lab, name, []
        line = [PYTHON, "-m", "hvtrain", "launch", "-np", "2", "-H", "s1,s2", f"--{how}", "--"]
        self.process = subprocess.Popen(
            [
                SCRIPT,
                "exec",
                "s1",
                "env",
                f"PYTHONPATH={ROOT}",
                *line,
                f"run.dir={lab.home}/{name}",
                *overrides,
            ],
            env={**os.environ, "HVTRAIN_LAB": lab.name},
            cwd=lab.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.reader = threading.Thread(
            target=lambda: self.lines.extend(self.process.stdout), daemon=True
        )
        self.reader.start()

    @property
    def output(self):
        return "".join(self.lines)

    def wait_for(self, text, seconds=300):
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < deadline and self.process.poll() is None, self.output
            time.sleep(0.05)

    def end(self, seconds):
        code = self.process.wait(seconds)
        self.reader.join(5)
        return code

    def state(self):
        newest = max((self.lab.of("s1") / self.name / "checkpoints").glob("step-*"))
        return newest.name, load_file(newest / "state.safetensors")


def left(lab):
    """What runs on either host besides the hosts' own processes."""
    remaining = []
    for host in ("s1", "s2"):
        listed = lab("exec", host, "ps", "-eo", "args=").stdout.splitlines()
        remaining += [
            f"{host}: {line}"
            for line in listed
            if any(name in line for name in ("-m hvtrain", "orted", "mpirun"))
        ]
    return [line for line in remaining if " ps " not in line]


def on_a_bad_link(lab, how):
    """A training through a link that is down for 5 s, then loses 20%, then takes 200 ms, each for a while."""
    run = Run(lab, how, how, *STEPS)
    run.wait_for("Epoch 2/")
    for change in (("down",), ("loss", "20%"), ("delay", "200ms")):
        lab("net", "s2", *change)
        time.sleep(5)
        lab("net", "s2", *(("up",) if change == ("down",) else ("clear",)))
        assert run.process.poll() is None or run.process.returncode == 0, run.output
    assert run.end(400) == 0, run.output
    return run


@nightly
def test_a_bad_link_is_survived(lab):
    run = on_a_bad_link(lab, "gloo")
    assert run.state()[0] == "step-00000330" and "weights equal on 2/2 ranks" in run.output, (
        run.output
    )


@release
@pytest.mark.parametrize("how", ["gloo", "mpi", "mpirun"])
def test_a_bad_link_is_survived_with_the_same_result(lab, how):
    """The end equals that of a good link."""
    quiet = Run(lab, "gloo", "quiet", *STEPS)
    assert quiet.end(400) == 0, quiet.output
    run = on_a_bad_link(lab, how)
    (step, state), (expected_step, expected) = run.state(), quiet.state()
    assert step == expected_step == "step-00000330"
    if how == "gloo":
        assert [key for key in expected if (state[key] != expected[key]).any()] == []


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("gloo", marks=nightly),
        *(pytest.param(how, marks=release) for how in ("mpi", "mpirun")),
    ],
)
def test_a_network_that_is_cut_for_good(lab, how):
    """Rank and host are named, and both sides end."""
    run = Run(lab, how, "run", *WORDS)
    run.wait_for("Epoch 3/")
    lab("net", "s2", "down")
    began = time.monotonic()
    code = run.end(400)
    print(f"{how}: the launcher ended {time.monotonic() - began:.0f} s after the cut, with {code}")
    reason = "stopped because rank 1 on s2 cannot be reached any more (its host is down, or the network is cut)"
    assert reason in run.output
    assert (
        f"run the same command with run.dir={lab.home}/run to resume from step-000000" in run.output
    )
    assert "Traceback" not in run.output
    assert code == 75 or how == "mpirun", run.output
    deadline = began + 400
    while left(lab) and time.monotonic() < deadline:
        time.sleep(0.5)
    print(f"{how}: nothing was left {time.monotonic() - began:.0f} s after the cut")
    assert left(lab) == []
    assert "stopped because rank 0" in next((lab.of("s2") / "run" / "logs").iterdir()).read_text()


@release
def test_a_host_that_dies(lab):
    """Its power is cut: no connection is closed."""
    run = Run(lab, "gloo", "run", *WORDS)
    run.wait_for("Epoch 3/")
    lab("net", "s2", "down")
    lab("stop", "s2")
    run.end(400)
    assert "rank 1 on s2 cannot be reached any more" in run.output


@release
@pytest.mark.parametrize("how", ["gloo", "mpi", "mpirun"])
def test_the_launcher_is_killed(lab, how):
    """kill -9 of what started the ranks, on the first host; those on the other go too."""
    run = Run(lab, how, "run", *WORDS)
    run.wait_for("Epoch 3/")
    name = "[h]vtrain.horovodrun" if how == "gloo" else "[m]pirun"
    ranks = len(left(lab))
    lab("exec", "s1", "pkill", "-9", "-f", name)
    began = time.monotonic()
    while left(lab) and time.monotonic() < began + 300:
        time.sleep(0.5)
    print(f"{how}: nothing of {ranks} processes was left {time.monotonic() - began:.0f} s later")
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.end(5)
    assert left(lab) == []
