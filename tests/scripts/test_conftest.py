"""tests/conftest.py: what it leaves out when there is no time for it."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
FILE = """
import pytest


def test_by_default():
    pass


@pytest.mark.nightly
def test_nightly():
    pass
"""


def outcomes(folder, until):
    path = os.pathsep.join([str(TESTS), str(TESTS / "support")])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "conftest",
        "-p",
        "pytest_timeout",
        "-q",
        "-ra",
        f"--rootdir={folder}",
    ]
    done = subprocess.run(
        [*command, f"--nightly-until={until}", folder],
        env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nightly_tests_are_skipped_when_their_time_is_up(tmp_path):
    (tmp_path / "test_file.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 60\nmarkers = nightly\n")

    assert "2 passed" in outcomes(tmp_path, until=1e12)
    late = outcomes(tmp_path, until=0)
    assert "1 passed, 1 skipped" in late
    assert "no time left for nightly tests" in late
