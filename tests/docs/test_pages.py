"""Commands of the pages: composed by default, parts of four pages nightly, all pages before a release."""

import ast
import importlib.util
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from page_table import NIGHTLY, TABLE, Row

from hvtrain import compose
from hvtrain.core.commands import first_word
from hvtrain.data.formats.documents import python_documentation, train_tokenizer
from kernel import execute, notebook, text_of
from launching import ROOT, run, train, without_hvtrain
from pages import PAGES, blocks, commands, files, languages

# These take the settings of a run, beside options of their own; hvtrain launch takes them after --.
COMMANDS = ("doctor", "find_batch", "find_lr", "launch", "plan", "verify")
# What comes before a page's blocks of Python that are no files, in one script with them.
BEFORE = {
    # Stands for the file that the block would load from the network.
    "finetuning": """
from pathlib import Path
import keras
name = "mobilenet_v2_weights_tf_dim_ordering_tf_kernels_1.0_96_no_top.h5"
Path("models").mkdir()
keras.applications.MobileNetV2(include_top=False, weights=None, input_shape=(96, 96, 3)).save(f"models/{name}")
""",
    "networks": "import hvtrain.keras as hvd\nhvd.init()\n",
    "separable": "import keras\n",
}
NEEDS = {"data": "datasets", "keras-hub": "keras_hub"}


def settings(command: str) -> list[str]:
    """The settings of a run in a command; none where a page leaves out the value (`...`) or a shell has it (`$NAME`).

    >>> settings("horovodrun -np 2 python -m hvtrain 'model.freeze=[conv*]' dataset=...")
    ['model.freeze=[conv*]']
    >>> settings("python -m hvtrain launch -np 2 cluster=slurm -- model=mlp")
    ['model=mlp']
    """
    arguments = shlex.split(command)
    if "-m" not in arguments:
        return []
    module, *arguments = arguments[arguments.index("-m") + 1 :]
    if module != "hvtrain":
        return []
    command = first_word(arguments)
    if command and command not in COMMANDS:
        return []
    if command == "launch":
        arguments = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    if arguments[:1] == ["python"]:
        return []
    return [
        argument
        for argument in arguments
        if re.match(r"~\w+$|[+~]?[\w.@/]+=(?!\.\.\.|\$)", argument)
    ]


def composed_commands() -> list[object]:
    """Each page's sets of settings, once, with the page."""
    results = {}
    for name, text in PAGES.items():
        for command in commands(text):
            arguments = settings(command)
            if arguments:
                results[(name, *arguments)] = pytest.param(
                    name, arguments, id=f"{name} {arguments[0]}"
                )
    return list(results.values())


@pytest.mark.parametrize(("name", "arguments"), composed_commands())
def test_the_settings_of_a_command_are_settings(name, arguments, tmp_path, monkeypatch):
    """Where a page has files for conf/, they are copied as they stand there."""
    monkeypatch.chdir(tmp_path)
    write_files(name, tmp_path)
    folder = ["--config-dir", "conf"] if (tmp_path / "conf").exists() else []
    compose([*folder, *arguments])


def test_a_block_is_whole_as_it_is_copied():
    """Bash, Python and YAML can read each one; running them takes the release."""
    for text in PAGES.values():
        for block in blocks(text, "python"):
            ast.parse(block.removeprefix("%%ranks 2\n"))
        for block in blocks(text, "yaml"):
            assert list(yaml.safe_load_all(block))
    lines = "\n".join(line for text in PAGES.values() for line in commands(text))
    done = subprocess.run(["bash", "-n"], input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_each_command_is_run_or_stands_with_its_reason():
    assert len(composed_commands()) >= 50
    assert {name for name, text in PAGES.items() if commands(text)} == {*TABLE, "tutorial"}
    for name, rows in TABLE.items():
        parts = [row.part for row in rows if row.is_on_page]
        pairs = itertools.zip_longest(commands(PAGES[name]), parts, fillvalue="")
        assert [pair for pair in pairs if not pair[1] or pair[1] not in pair[0]] == [], name
        reasons = [path for row in rows for path in re.findall(r"[\w/-]+/[\w./-]+", row.held)]
        assert [path for path in reasons if not (ROOT / path).exists()] == []
    assert {row.part.split()[-1] for row in TABLE["library"] if not row.is_on_page} == set(
        files(PAGES["library"])
    )
    assert all(len(steps(name, rows)) == len(rows) for name, rows in NIGHTLY.items())
    known = {"", "console", "python", "yaml"}
    assert set().union(*map(languages, PAGES.values())) == known, (
        "commands stand in blocks of no language or a console"
    )


def write_files(name: str, folder: Path) -> None:
    """Copies the files of a page into a folder."""
    for path, text in files(PAGES[name]).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def write_tales(folder: Path) -> None:
    """A folder of texts, and a tokenizer."""
    documents = python_documentation()[:30]
    (folder / "tales").mkdir()
    for number, text in enumerate(documents):
        (folder / f"tales/{number}.txt").write_text(text)
    (folder / "own.model").write_bytes(train_tokenizer(documents, 800).model)


def train_on_tales(folder: Path) -> None:
    """A finished run of a language model."""
    write_tales(folder)
    arguments = [
        "dataset=text",
        "dataset.file=tales",
        "dataset.vocabulary_size=500",
        "dataset.length=16",
        "task=language",
    ]
    arguments += [
        "model=transformer",
        "model.width=16",
        "model.blocks=1",
        "train.steps=20",
        "run.dir=runs/tales",
    ]
    code, output = train(None, 1, *arguments, cwd=folder)
    assert code == 0, output


def make_three_runs(folder: Path) -> None:
    for name in ("first", "second", "third"):
        code, output = train(
            None, 1, "strategy=single", "train.steps=2", f"run.dir=runs/{name}", cwd=folder
        )
        assert code == 0, output


def write_measurements(folder: Path) -> None:
    """All-reduces of two and of four ranks, as the command allreduce leaves them."""
    seconds = {str(size): [1e-4 + size / 1e9] * 3 for size in (4, 4096, 1 << 20, 1 << 26)}
    for name, num_ranks in (("two", 2), ("four", 4)):
        (folder / "allreduce" / name).mkdir(parents=True)
        measured = {"num_ranks": num_ranks, "seconds": {"hvtrain": seconds}}
        (folder / "allreduce" / name / "allreduce.json").write_text(json.dumps(measured))


def check_plain_keras(folder: Path) -> None:
    assert without_hvtrain((folder / "write.py").read_text(), cwd=folder).startswith(
        "The statement"
    )


def check_metrics_and_export(folder: Path) -> None:
    assert json.loads((folder / "metrics.json").read_text())["metrics"]["accuracy"] > 0.9
    assert (folder / "digits.json").exists(), "the description of the exported model"


SUPPOSED: dict[str, Callable[[Path], None]] = {
    "plan": write_measurements,
    "report": make_three_runs,
    "text": write_tales,
    "use": train_on_tales,
}
CHECKS: dict[str, Callable[[Path], None]] = {
    "text": check_plain_keras,
    "use": check_metrics_and_export,
}


def steps(name: str, rows: list[Row]) -> list[tuple[str, Row]]:
    """The rows that tests run, each with the page's next command that fits it."""
    lines = iter(commands(PAGES[name]))
    pairs = [
        (next(line for line in lines if row.part in line) if row.is_on_page else row.part, row)
        for row in rows
    ]
    return [(command, row) for command, row in pairs if not row.held]


def as_run(command: str, row: Row) -> str:
    """The command with the row's stand-ins, and its words at the end; in a loop, at the end of what it repeats."""
    for text, stand_in in row.swaps:
        assert text in command
        command = command.replace(text, stand_in)
    command, done = re.fullmatch(r"(.*?)((?:; done)*)", command).groups()
    return f"{command} {row.more}{done}"


def follow(name: str, rows: list[Row], folder: Path, cold: bool = False) -> None:
    """Runs these commands in one folder, with what the page supposes, and checks what the table says of them."""
    (folder / "scripts").symlink_to(ROOT / "scripts")
    (folder / "hosts.sh").write_text("#!/bin/sh\necho localhost:2\n")
    (folder / "hosts.sh").chmod(0o755)
    write_files(name, folder)
    if name in SUPPOSED:
        SUPPOSED[name](folder)
    for command, row in steps(name, rows):
        earlier = set(folder.glob("runs/*/result.json"))
        line = as_run(command, row)
        code, output = run(None, 1, "bash", "-ec", line, cwd=folder, timeout=800, cold=cold)
        assert code == 0, f"{command}\nas {line}\n{output}"
        assert re.search(row.prints, output), output
        assert (folder / row.makes).exists(), output
        if row.metric:
            assert "Warning" not in output
            (path,) = set(folder.glob("runs/*/result.json")) - earlier
            result = json.loads(path.read_text())
            assert result["num_ranks"] == 2
            assert row.low <= result["metrics"][row.metric] <= row.high, command
    if name in CHECKS:
        CHECKS[name](folder)


@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.parametrize("name", NIGHTLY)
def test_a_part_of_a_page(name, tmp_path):
    follow(name, NIGHTLY[name], tmp_path)


# Whole trainings and up to nine commands take minutes; within one page a command needs what another one left. Each
# python is a fresh process, as it is for a reader.
@pytest.mark.distributed
@pytest.mark.release
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name", [name for name, rows in TABLE.items() if not all(row.held for row in rows)]
)
def test_a_page(name, tmp_path):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed; ./scripts/run pytest does it")
    follow(name, TABLE[name], tmp_path, cold=True)


@pytest.mark.distributed
@pytest.mark.release
@pytest.mark.parametrize("name", BEFORE)
def test_the_python_of_a_page(name, tmp_path):
    """Two ranks run it as it stands; only one loads weights."""
    text = "".join([BEFORE[name], *blocks(PAGES[name], "python")])
    (tmp_path / "page.py").write_text(text)
    num_ranks = 1 if name == "finetuning" else 2
    # Cold, because a process that has imported Keras already has its home.
    code, output = run(
        "mpirun",
        num_ranks,
        "python",
        "page.py",
        cwd=tmp_path,
        cold=True,
        KERAS_HOME=str(tmp_path),
    )
    assert code == 0, output
    assert (tmp_path / "mobilenet.keras").exists() == (name == "finetuning")


@pytest.mark.distributed
@pytest.mark.release
@pytest.mark.skipif(
    importlib.util.find_spec("nbclient") is None,
    reason="nbclient (scripts/lock/notebook.txt) is missing",
)
def test_the_cells_of_a_notebook(tmp_path):
    cells = [block for block in blocks(PAGES["use"], "python") if not block.startswith("# use.py")]
    _, values, shown = map(
        text_of, execute(notebook(["%load_ext hvtrain", *cells], tmp_path)).cells
    )
    assert re.search(r"^\[(0\.\d+), \1\]$", values, re.MULTILINE), values
    assert "2 ranks, the sum is 3.0" in shown
