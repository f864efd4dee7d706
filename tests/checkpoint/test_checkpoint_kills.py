"""kill -9 while checkpoints are written and rotated: at every file-system call of it, and of the clean-up after it."""

import json
import subprocess
import sys
from pathlib import Path


def test_a_kill_at_any_point_loses_no_checkpoint_and_leaves_nothing(tmp_path):
    """At over fifty points, with one checkpoint kept, so that there is never another to fall back to."""
    script = Path(__file__).parents[1] / "support" / "killed_writer.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["found"] == []
    assert outcome["points"] >= 50, outcome
    assert outcome["sweeps"] >= 50, "the clean-up was killed too"
