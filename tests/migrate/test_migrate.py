"""The command, and twenty scripts: as they were they do not train together, migrated they do.

Ten have the usual shapes, and nothing in them is left to decide. Ten are like those of third parties: models with a
compile of their own, loops in half precision, elastic jobs, old schedules, names that choose weights.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from in_process import run_command
from launching import WORKERS, run

pytest.importorskip("libcst", reason="libcst is not installed; ./scripts/run pytest does it")

from hvtrain.migrate.rewriting import migrate

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
THIRD_PARTY = sorted((Path(__file__).parent / "scripts/third_party").glob("*.py"))
# What is left to decide in them, and what a person writes there so that the script trains.
LEFT = {
    "by_hand.py": {
        15: "does not accept a tf.Variable",
        17: "lr in these arguments is learning_rate",
        20: "XLA cannot compile",
        25: "no tensorflow.train.StopAtStepHook",
        31: "hvd.DistributedOptimizer(optimizer)",
    },
    "name_filter.py": {29: "use v.path"},
    "rank_0_callbacks.py": {31: "NAME.weights.h5"},
}
BY_HAND = {
    "learning_rate=rate": "learning_rate=0.005",
    "'lr'": "'learning_rate'",
    "(jit_compile=True)": "",
    "steps = tf.train.StopAtStepHook(last_step=100)": "",
    "optimizer=optimizer": "optimizer=hvd.DistributedOptimizer(optimizer)",
    "'batch_normalization' not in v.name": "'batch_normalization' not in v.path",
    "'digits-06.h5'": "'digits-06.weights.h5'",
}
OLD = "import tensorflow as tf\nmodel = tf.keras.Sequential()\nmodel.predict_classes(x)\n"


def command(*arguments, cwd):
    return run_command("hvtrain", "migrate", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The results of each rank, for the scripts as they were and migrated, in one start."""
    folder = tmp_path_factory.mktemp("scripts")
    migrated = [shutil.copy(script, folder) for script in (*SCRIPTS, *THIRD_PARTY)]
    code, output, _ = command("--write", ".", cwd=folder)
    assert code == 1, output
    for name in LEFT:
        text = (folder / name).read_text()
        for old, new in BY_HAND.items():
            text = text.replace(old, new)
        (folder / name).write_text(text)
    arguments = [
        str(WORKERS / "scripts.py"),
        str(folder / "results.json"),
        *migrated,
        *map(str, SCRIPTS),
    ]
    code, output = run("mpirun", 2, "python", *arguments, cwd=folder, timeout=550)
    assert code == 0, output
    return folder, json.loads((folder / "results.json").read_text())


@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.parametrize("script", [*SCRIPTS, *THIRD_PARTY], ids=lambda script: script.stem)
def test_a_migrated_script_trains_with_equal_weights(trained, script):
    folder, ranks = trained
    for results in ranks:
        migrated = results[str(folder / script.name)]
        assert migrated.get("error") is None
        assert migrated["gap"] == 0
        assert migrated["accuracy"] > 0.85
        if script in SCRIPTS:
            assert "error" in results[str(script)], "as it was it does not run on Keras 3"


def test_ten_scripts_of_each_kind():
    assert len(SCRIPTS) == len(THIRD_PARTY) == 10
    assert {script.name for script in THIRD_PARTY} > LEFT.keys()


@pytest.mark.parametrize("script", THIRD_PARTY, ids=lambda script: script.stem)
def test_what_is_left_to_decide_is_reported_with_its_line(script):
    reported = dict(migrate(script.read_text()).undecided)
    expected = LEFT.get(script.name, {})
    assert reported.keys() == expected.keys()
    assert all(part in reported[line] for line, part in expected.items())


def test_a_file_of_a_folder_that_is_not_python_3_leaves_the_others_their_migration(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/old.py").write_text("print 'Python 2'\n")
    (tmp_path / "src/train.py").write_text("import tensorflow as tf\ntf.keras.Sequential()\n")
    code, output, _ = command("src", "--write", cwd=tmp_path)
    assert code == 1
    assert output.splitlines()[0] == "src/train.py: written"
    assert output.splitlines()[1].startswith("src/old.py is not Python: SyntaxError: ")
    assert "import keras" in (tmp_path / "src/train.py").read_text()


def test_all_files_are_written_or_none(tmp_path):
    """A folder in the place of a temporary file lets the second one fail, as a full disk does."""
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(OLD)
    (tmp_path / ".tmp-b.py/full").mkdir(parents=True)
    code, output, errors = command("a.py", "b.py", "--write", cwd=tmp_path)
    assert (
        (code, output) == (2, "") and "b.py was not written: " in errors and errors.count("\n") == 1
    )
    assert [(tmp_path / name).read_text() for name in ("a.py", "b.py")] == [OLD, OLD]
    assert sorted(file.name for file in tmp_path.iterdir()) == [".tmp-b.py", "a.py", "b.py"]


def test_a_diff_is_shown_and_nothing_is_written(tmp_path):
    (tmp_path / "a.py").write_text(OLD)
    line = [sys.executable, "-m", "hvtrain", "migrate", "a.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert (
        "-model = tf.keras.Sequential()\n+import keras\n+model = keras.Sequential()\n"
        in done.stdout
    )
    assert done.stdout.endswith(
        "a.py: line 3: predict_classes was removed; use np.argmax(model.predict(x), axis=-1)\n"
    )
    assert (tmp_path / "a.py").read_text() == OLD


def test_write_changes_the_files_of_a_folder_once(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.py").write_bytes(OLD.replace("\n", "\r\n").encode())
    (tmp_path / "b.py").write_text("x = 1\n")
    code, output, _ = command("in", "b.py", "--write", cwd=tmp_path)
    assert code == 1
    assert output.splitlines()[0] == "in/a.py: written" and output.endswith(
        "b.py: nothing to change\n"
    )
    text = (tmp_path / "in/a.py").read_bytes().decode()
    assert text == "import keras\r\nmodel = keras.Sequential()\r\nmodel.predict_classes(x)\r\n"
    assert command("in", "--write", cwd=tmp_path)[1].startswith("in/a.py: nothing to change\n")
    assert sorted(file.name for file in tmp_path.rglob("*.*")) == ["a.py", "b.py"]


def test_what_tools_keep_in_a_project_is_left_alone_and_modes_and_links_stay(tmp_path):
    others = [".git/hooks/a.py", ".venv/lib/a.py", "env/lib/python3/a.py", "lib/site-packages/a.py"]
    for name in [*others, "src/train.py"]:
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text(OLD)
    (tmp_path / "project/env/pyvenv.cfg").touch()
    (tmp_path / "shared.py").write_text(OLD)
    (tmp_path / "shared.py").chmod(0o750)
    (tmp_path / "project/link.py").symlink_to(tmp_path / "shared.py")
    _, output, _ = command("project", "--write", cwd=tmp_path)
    written = [line.partition(":")[0] for line in output.splitlines() if line.endswith(": written")]
    assert written == ["project/link.py", "project/src/train.py"]
    assert all((tmp_path / "project" / name).read_text() == OLD for name in others)
    assert (tmp_path / "project/link.py").is_symlink() and "keras.Sequential" in (
        tmp_path / "shared.py"
    ).read_text()
    assert (tmp_path / "shared.py").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (b"", ["missing.py"], "missing.py does not exist; name a Python file or a folder of them"),
        (b"", ["."], ". holds no Python file; name a folder of scripts"),
        (
            b"a = (\n",
            ["a"],
            "a is not Python: SyntaxError: '(' was never closed (a, line 1); fix it first",
        ),
        (b"\xff\xfe", ["a"], "a cannot be read as UTF-8 text"),
        (
            b"",
            [],
            "the following arguments are required: FILE|FOLDER; see python -m hvtrain migrate --help",
        ),
    ],
    ids=["missing", "empty folder", "syntax", "bytes", "nothing"],
)
def test_bad_input_is_one_line_and_writes_nothing(content, arguments, message, tmp_path):
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "good").write_text(OLD)
    good = ["good"] if arguments not in ([], ["."]) else []
    code, output, errors = command("--write", *good, *arguments, cwd=tmp_path)
    assert (code, output) == (2, "")
    assert errors.startswith(f"hvtrain: {message}") and errors.count("\n") == 1
    assert (tmp_path / "good").read_text() == OLD


def test_without_libcst_it_says_what_to_install(tmp_path):
    block = (
        "import sys, runpy; sys.modules['libcst'] = None; sys.argv = ['hvtrain', 'migrate', 'a.py']"
    )
    code = f"{block}; runpy.run_module('hvtrain', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        "hvtrain: this command needs libcst, which is not installed; run pip install libcst\n"
    )
