"""Every training of the pages on tasks, with the files that stand on the page, comes to what the page says."""

import json
import re

import pytest

from hvtrain.data.formats.documents import embedded
from hvtrain.data.formats.tokenizer import train_tokenizer
from launching import ROOT, run, without_hvtrain

pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

PAGES = {
    name: (ROOT / f"docs/{name}.md").read_text()
    for name in ("tasks", "text", "segmentation", "augmentation")
}  # fmt: skip
FILES = re.compile(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:PYTHONPATH=\. |python \S+ && )?horovodrun .*$", re.MULTILINE)
COMMANDS = [(page, command) for page, text in PAGES.items() for command in COMMAND.findall(text)]
# By the end of the command: a metric of the test data, and its range.
EXPECTED = {
    "table_regression": ("test_mean_absolute_error", 40, 48),
    "digits_multilabel": ("test_accuracy", 0.96, 1),
    "denoise": ("test_error", 0, 0.03),
    "houses": ("test_price_error", 0, 0.2),
    "text_transformer": ("test_perplexity", 100, 500),
    "runs/tales": ("test_perplexity", 20, 500),
    "runs/own": ("test_perplexity", 20, 400),
    "runs/masked": ("test_perplexity", 50, 900),
    "shapes_deeplab": ("test_mean_iou", 0.5, 1),
    "leaves": ("test_mean_iou", 0.9, 1),
    "runs/mixed": ("test_accuracy", 0.85, 1),
    "runs/sheared": ("test_accuracy", 0.85, 1),
    "runs/striped": ("test_accuracy", 0.85, 1),
}
# A quarter of those that take minutes; their files say what the whole comes to.
SHORTER = {"text_transformer": " train.epochs=3", "runs/masked": " train.epochs=2", "shapes_deeplab": " train.epochs=5"}


def end(command):
    return command.rpartition("=")[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[end(command) for _, command in COMMANDS])
def test_a_command_trains_to_what_the_page_says(page, command, tmp_path):
    for name, text in FILES.findall(PAGES[page]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if page == "text":
        write_tales(tmp_path)
    shorter = SHORTER.get(end(command), "")
    code, output = run(None, 1, "bash", "-c", command + shorter, cwd=tmp_path, timeout=580)
    assert code == 0, output
    assert "Warning" not in output
    (result,) = (tmp_path / "runs").glob("*/result.json")
    found = json.loads(result.read_text())
    name, low, high = EXPECTED[end(command)]
    assert found["num_ranks"] == 2 and low <= found["metrics"][name] <= high
    if end(command) == "runs/tales":
        assert without_hvtrain((tmp_path / "write.py").read_text(), cwd=tmp_path).startswith("The statement")


def write_tales(folder):
    """What docs/text.md supposes: a folder of texts, and a tokenizer."""
    documents = embedded()[:30]
    (folder / "tales").mkdir()
    for number, text in enumerate(documents):
        (folder / f"tales/{number}.txt").write_text(text)
    (folder / "own.model").write_bytes(train_tokenizer(documents, 800).model)


def test_the_pages_have_these_commands():
    assert [end(command) for _, command in COMMANDS] == list(EXPECTED)
