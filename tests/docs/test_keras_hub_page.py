"""The command of docs/keras-hub.md."""

import json
import re

import pytest

from launching import ROOT, run

pytest.importorskip("keras_hub", reason="keras-hub is not installed; scripts/install-test-tools does it")
pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

COMMANDS = re.findall(r"^horovodrun .*$", (ROOT / "docs/keras-hub.md").read_text(), re.MULTILINE)


def test_the_command_trains(tmp_path):
    (command,) = COMMANDS
    code, output = run(None, 1, "bash", "-c", command, cwd=tmp_path)
    assert code == 0, output
    assert "Warning" not in output
    found = json.loads((tmp_path / "runs/vit/result.json").read_text())
    assert found["num_ranks"] == 2 and found["metrics"]["test_accuracy"] > 0.12
