"""The quick form of the soak: three kills at random moments, and the very bits of a run that nobody touched."""

import subprocess
import sys

import pytest

from launching import ROOT

pytestmark = pytest.mark.distributed


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_three_kills_lose_nothing():
    # With 30 epochs a run outlasts several kills, and most rounds are resumed more than once.
    command = [sys.executable, str(ROOT / "tests/support/soak.py"), "--kills", "3", "--epochs", "30"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 kills" in done.stderr and "the very bits of the uninterrupted run" in done.stderr
