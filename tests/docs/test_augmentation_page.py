"""Every command of docs/augmentation.md, with the file that stands on the page."""

import json
import re

import pytest

from launching import ROOT, run

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

PAGE = (ROOT / "docs/augmentation.md").read_text()
((NAME, CODE),) = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^(?:PYTHONPATH=\. )?horovodrun .*$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.rpartition("/")[2])
def test_a_command_trains(command, tmp_path):
    (tmp_path / NAME).write_text(CODE)
    code, output = run(None, 1, "bash", "-c", command, cwd=tmp_path)
    assert code == 0, output
    (result,) = (tmp_path / "runs").glob("*/result.json")
    found = json.loads(result.read_text())
    assert found["num_ranks"] == 2 and found["metrics"]["test_accuracy"] > 0.85


def test_the_page_has_these_commands():
    assert [command.rpartition("/")[2] for command in COMMANDS] == ["mixed", "sheared", "striped"]
