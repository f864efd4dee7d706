"""Every command of docs/tasks.md and docs/segmentation.md, with the files that stand on the page."""

import json
import re

import pytest

from launching import ROOT, run

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

PAGE = "".join((ROOT / f"docs/{name}.md").read_text() for name in ("tasks", "segmentation"))
FILES = re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^(?:PYTHONPATH=\. |python \S+ && )?horovodrun .*$", PAGE, re.MULTILINE)
# By the end of the command: a metric of the test data, and its range.
EXPECTED = {
    "table_regression": ("test_mean_absolute_error", 40, 48),
    "digits_multilabel": ("test_accuracy", 0.96, 1),
    "houses": ("test_price_error", 0, 0.2),
    "shapes_deeplab": ("test_mean_iou", 0.5, 1),
    "leaves": ("test_mean_iou", 0.9, 1),
}
SHORTER = {"shapes_deeplab": " train.epochs=5"}  # A quarter of it, which reaches about 0.6.


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.rpartition("=")[2])
def test_a_command_trains_to_what_the_page_says(command, tmp_path):
    for name, text in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    key = command.rpartition("=")[2]
    code, output = run(None, 1, "bash", "-c", command + SHORTER.get(key, ""), cwd=tmp_path)
    assert code == 0, output
    assert "Warning" not in output
    (result,) = (tmp_path / "runs").glob("*/result.json")
    found = json.loads(result.read_text())
    name, low, high = EXPECTED[key]
    assert found["num_ranks"] == 2 and low <= found["metrics"][name] <= high


def test_the_page_has_these_commands():
    assert [command.rpartition("=")[2] for command in COMMANDS] == list(EXPECTED)
