"""Every command of docs/data.md, with the files that stand on the page."""

import importlib.util
import json
import re

import pytest

from launching import ROOT, run

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

PAGE = (ROOT / "docs/data.md").read_text()
FILES = re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^(?:PYTHONPATH=\. horovodrun|horovodrun|python) .*$", PAGE, re.MULTILINE)


def done(command, folder):
    code, output = run(None, 1, "bash", "-c", command, cwd=folder)
    assert code == 0, output
    return output


def accuracy(folder):
    (result,) = (folder / "runs").glob("*/result.json")
    found = json.loads(result.read_text())
    assert found["num_ranks"] == 2
    return found["metrics"]["test_accuracy"]


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_page_has_these_commands():
    assert [command.split()[-1] for command in COMMANDS] == [
        "dataset=waves",
        "prepare.py",
        "dataset.image_shape=[8,8,1]",
    ]


def test_a_pipeline_of_ones_own_trains(folder):
    assert "Warning" not in done(COMMANDS[0], folder)
    assert accuracy(folder) > 0.9


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets (scripts/lock/data.txt) is missing")
def test_a_data_set_of_hugging_face_trains(folder):
    for command in COMMANDS[1:]:
        done(command, folder)
    assert accuracy(folder) > 0.9
