"""The quick form of the soak: two kills at random moments, and the very bits of a run that nobody touched."""

import subprocess
import sys

import pytest

from launching import ROOT

pytestmark = pytest.mark.distributed


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_two_kills_lose_nothing():
    # With 20 epochs a run outlasts several kills.
    command = [sys.executable, str(ROOT / "tests/support/soak.py"), "--kills", "2", "--epochs", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 kills" in done.stderr and "the very bits of the uninterrupted run" in done.stderr
