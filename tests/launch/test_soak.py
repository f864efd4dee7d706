"""The soak: kills at random moments, and the very bits of a run that nobody touched."""

import subprocess
import sys

import pytest

from launching import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


LOCAL_STEPS = [
    "strategy=diloco",
    "strategy.every=3",
    "strategy.warmup_steps=4",
    "strategy.compression=int8",
]


@pytest.mark.parametrize(
    ("kills", "settings"),
    [
        # With state that differs by rank, which a kill could lose too.
        pytest.param(
            1, ["--epochs", "6", "--launchers", "gloo", *LOCAL_STEPS], marks=pytest.mark.nightly
        ),
        # With 20 epochs a run outlasts several kills.
        pytest.param(2, ["--epochs", "20"], marks=pytest.mark.release),
    ],
    ids=["short", "full"],
)
def test_kills_lose_nothing(kills, settings):
    command = [sys.executable, "-m", "benchmarks.soak", "--kills", str(kills), *settings]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (
        f"{kills} kills" in done.stderr and "the very bits of the uninterrupted run" in done.stderr
    )
