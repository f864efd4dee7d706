"""Every command of docs/use.md, one after the other, in one folder."""

import importlib.util
import json
import re

import pytest

from hvtrain.data.formats.documents import embedded
from kernel import execute, notebook, text_of
from launching import ROOT, run, train

pytestmark = [pytest.mark.distributed, pytest.mark.nightly, pytest.mark.timeout(900)]

PAGE = (ROOT / "docs/use.md").read_text()
COMMANDS = re.findall(r"^(?:horovodrun -np 2 )?python -m hvtrain.*$", PAGE, re.MULTILINE)

BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_commands_do_what_the_page_says(tmp_path):
    (tmp_path / "tales").mkdir()
    for number, text in enumerate(embedded()[:12]):
        (tmp_path / f"tales/{number}.txt").write_text(text)
    words = ["dataset=text", "dataset.file=tales", "dataset.vocabulary_size=500", "dataset.length=16", "task=language"]
    words += ["model=transformer", "model.width=16", "model.blocks=1", "train.steps=20", "run.dir=runs/tales"]
    code, output = train(None, 1, *words, cwd=tmp_path)
    assert code == 0, output
    printed = {}
    for command in COMMANDS:
        code, printed[command] = run(None, 1, "bash", "-c", command, cwd=tmp_path)
        assert code == 0, printed[command]
    assert len(printed) == 8
    assert json.loads((tmp_path / "metrics.json").read_text())["metrics"]["accuracy"] > 0.9
    made = {path.name for path in tmp_path.iterdir()}
    assert {"predictions.parquet", "digits.keras", "digits", "digits.onnx", "digits.tflite", "digits.json"} <= made
    assert [text for command, text in printed.items() if "generate" in command and "The statement" in text]
    (script,) = [block for block in BLOCKS if block.startswith("# use.py")]
    (tmp_path / "use.py").write_text(script)
    code, output = run(None, 1, "python", "use.py", cwd=tmp_path)
    found = re.search(r"^(0\.\d{4}), and the run says (0\.\d{4})$", output, re.MULTILINE)
    assert code == 0 and found and found[1] == found[2], output


@pytest.mark.skipif(
    importlib.util.find_spec("nbclient") is None, reason="nbclient (scripts/lock/notebook.txt) is missing"
)
def test_the_cells_of_a_notebook(tmp_path):
    cells = BLOCKS[BLOCKS.index(next(block for block in BLOCKS if "run_ranks" in block)) :]
    _, values, shown = map(text_of, execute(notebook(["%load_ext hvtrain", *cells], tmp_path)).cells)
    assert re.search(r"^\[(0\.\d+), \1\]$", values, re.MULTILINE), values
    assert "2 ranks, the sum is 3.0" in shown
