"""What the command line takes, says and refuses; nothing here reaches TensorFlow."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from hvtrain.config.compose import compose
from hvtrain.core.commands import COMMANDS as TABLE
from in_process import run_command
from launching import ROOT


def hvtrain(*arguments, cwd):
    return run_command("hvtrain", *arguments, cwd=cwd)


def process(*arguments, cwd):
    line = [sys.executable, "-m", "hvtrain", *arguments]
    done = subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


# Fails as told, and gets the launcher's signal while it lets another rank report first.
SECOND_TO_FAIL = """
import os, signal, sys, threading, time
from hvtrain import errors
from hvtrain.system import command

def end():
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)

def fail():
    threading.Thread(target=end, daemon=True).start()
    raise {error}

command.enter(fail)
"""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("errors.StorageError('the disk is full')", 2, ""),
        (
            "errors.FailedRankError('stopped because rank 0 failed')",
            1,
            "hvtrain: rank 1: stopped because rank 0 failed\n",
        ),
        ("KeyboardInterrupt", 130, ""),
    ],
    ids=["what rank 0 says too", "what this rank alone says", "Ctrl-C"],
)
def test_a_launcher_that_ends_the_ranks_ends_their_wait_for_each_other(
    error, code, said, monkeypatch
):
    monkeypatch.setenv("HOROVOD_RANK", "1")
    program = [sys.executable, "-c", SECOND_TO_FAIL.format(error=error)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said)


HANGS_AT_EXIT = """
import atexit, os, signal, time
from hvtrain.system import command
command.SECONDS_TO_EXIT_AFTER_SUCCESS = 0.1
atexit.register(time.sleep, 1000)
atexit.register(os.kill, os.getpid(), signal.SIGUSR1)
command.enter(lambda: 0)
print("done", flush=True)
"""


def test_a_process_that_has_done_its_work_and_hangs_at_its_exit_is_ended():
    """With the exit code of a success, whatever signal arrives then."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS_AT_EXIT],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


CRASHES_AS_PYTHON_ENDS = """
import atexit, os
from hvtrain import errors
from hvtrain.system import command

class Crash:
    def __del__(self, abort=os.abort):
        abort()

def fail():
    raise errors.ConfigError("bad")

crash = Crash()
crash.itself = crash
atexit.register(print, "exit functions are called")
command.enter(fail)
"""


def test_a_failure_keeps_its_exit_code_whatever_python_meets_as_it_ends():
    """Such as a thread of TensorFlow's that still reads data."""
    done = subprocess.run(
        [sys.executable, "-c", CRASHES_AS_PYTHON_ENDS], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "exit functions are called\n",
        "hvtrain: bad\n",
    )


@pytest.mark.parametrize(
    ("start", "argument"),
    [(process, "train.epoch=3"), (hvtrain, "train.epochs=0"), (hvtrain, "model=resnext")],
)
def test_a_refusal_is_one_line_on_the_error_output_and_exit_code_2(start, argument, tmp_path):
    code, output, errors = start(argument, cwd=tmp_path)
    assert code == 2
    assert output == ""
    assert errors.startswith("hvtrain: ") and errors.count("\n") == 1


def test_an_argument_that_is_not_utf_8_is_refused_in_one_line(tmp_path):
    code, output, errors = hvtrain(os.fsdecode(b"run.dir=r\xff"), cwd=tmp_path)
    assert (code, output) == (
        2,
        "",
    ) and errors == "hvtrain: b'run.dir=r\\xff' is not UTF-8; rename the file that it names\n"


def test_tracebacks_are_shown_where_asked(tmp_path):
    code, _, errors = hvtrain("train.epoch=3", "tracebacks=true", cwd=tmp_path)
    assert code == 2
    assert "Traceback" in errors and errors.endswith("did you mean 'train.epochs'?\n")


def test_a_setting_counts_more_than_a_choice_of_debug(tmp_path):
    code, output, _ = hvtrain(
        "--cfg", "job", "debug=fast", "train.steps=7", "experiment=mnist_classic", cwd=tmp_path
    )
    composed = yaml.safe_load(output)
    assert (code, composed["train"]["steps"], composed["train"]["evaluation_steps"]) == (0, 7, 2)
    assert composed["train"]["divide_steps_by_size"] is False, "debug comes after the experiment"


def test_a_file_chooses_debug_in_its_defaults(tmp_path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults: [/debug/fast]\ntrain: {epochs: 3}\n"
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(text)
    code, output, errors = hvtrain(
        "--cfg", "job", "experiment=mine", "--config-dir", "own", cwd=tmp_path
    )
    assert code == 0, errors
    assert (
        yaml.safe_load(output)["train"]["steps"],
        yaml.safe_load(output)["train"]["epochs"],
    ) == (2, 3)


def test_tracebacks_in_a_file_count_too(tmp_path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ntracebacks: true\ntrain: {epochs: 0}\n"
    (tmp_path / "own" / "experiment" / "broken.yaml").write_text(text)
    code, _, errors = hvtrain("experiment=broken", "--config-dir", "own", cwd=tmp_path)
    assert code == 2
    assert "Traceback" in errors and errors.endswith("it must be at least 1\n")


def test_help_lists_groups_choices_and_settings(tmp_path):
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "mine.yaml").write_text("# A model of mine\n_target_: my.model\n")
    code, output, _ = hvtrain("--help", "--config-dir", "own", cwd=tmp_path)
    assert code == 0
    for expected in [
        "--cfg job",
        "* cnn",
        "fashion_mnist",
        "* horovod",
        "fashion_separable",
        "train.epochs=12",
        "A model of mine",
    ]:
        assert expected in output
    assert all(len(line) < 160 for line in output.splitlines())


def test_help_begins_with_ten_settings_and_their_defaults(tmp_path):
    _, output, _ = hvtrain("--help", cwd=tmp_path)
    beginning = output[: output.index("options:")]
    words = re.findall(r"^  (\S+=\S+) ", beginning, re.MULTILINE)
    assert len(words) == 10
    assert compose(words) == compose([]), "the defaults"


def test_help_has_the_settings_of_a_choice_with_their_meaning(tmp_path):
    _, output, _ = hvtrain("dataset=table", "optimizer=adam", "--help", cwd=tmp_path)
    assert "SETTINGS OF dataset=table (as dataset.NAME=VALUE)\n" in output
    assert "  target: target           # the column to predict\n" in output
    assert "  learning_rate: 0.001  # of one rank\n" in output


def test_cfg_job_shows_the_composed_run(tmp_path):
    code, output, _ = hvtrain(
        "--cfg", "job", "experiment=mnist_classic", "train.steps=50", cwd=tmp_path
    )
    assert code == 0
    composed = yaml.safe_load(output)
    assert composed["train"]["steps"] == 50
    assert composed["train"]["batch_size"] == 100
    assert (
        composed["optimizer"] | {"_target_": "keras.optimizers.RMSprop", "learning_rate": 0.001}
        == composed["optimizer"]
    )
    assert list(tmp_path.iterdir()) == []


COMMANDS = {
    "allreduce": ["--transport {mpi,gloo}", "--largest MIB"],
    "runs": ["--sort", "--json"],
    "evaluate": ["evaluate RUN [split=SPLIT]", "--output FILE"],
    "inspect": ["dataset=CHOICE", "--limit NUMBER", "--output FILE", "exit code 2"],
    "doctor": ["-H s1:4,s2:4", "--no-links", "64 MiB over all hosts"],
    "launch": ["--max-restarts N", "cluster.time=null", "cluster=trainjob", "-- model=resnet50"],
    "migrate": ["--write", "FILE|FOLDER", "exit codes:", "docs/migration.md"],
    "plan": ["--ranks-per-host N", "default: 25", "--algorithm {", "docs/plan.md"],
    "spark": ["--np N", "--gloo", "* cnn", "train.epochs=12"],
    "verify": ["python -m hvtrain verify", "horovodrun -np 16"],
    "find_lr": ["--output DIR", "as run.dir=DIR"],
    "find_batch": ["--first N", "--memory GIB", "horovodrun -np 4 python -m hvtrain find_batch"],
    "sweep": [
        "sweep=SPACE [trials=N]",
        "--direction {max,min}",
        "choices: [adam, sgd]",
        "docs/sweep.md",
    ],
    "compare": [
        "strategy=A,B,... [OPTION ...]",
        "--single-batch {joint,rank}",
        "NAME@SETTING=VALUE",
    ],
}


# The commands follow each other in one process, so the first with a module in its list is the one that imports it.
ALL_HELP = """
import json, sys
from in_process import run_command

found = {}
for name in sys.argv[1:]:
    ended = run_command("hvtrain", name, "--help", cwd=".")
    found[name] = [*ended, sorted({"tensorflow", "keras"} & set(sys.modules))]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def helps(tmp_path_factory):
    """For each command its exit code, output and error output, and what of TensorFlow and Keras was imported."""
    folder = tmp_path_factory.mktemp("help")
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "tests/support")}
    line = [sys.executable, "-c", ALL_HELP, *COMMANDS]
    done = subprocess.run(
        line, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_comes_without_tensorflow(name, helps):
    code, output, errors, imported = helps[name]
    assert (code, errors, imported) == (0, "", [])
    assert output.startswith(f"usage: python -m hvtrain {name} ")
    assert "examples:" in output or name in ("allreduce", "runs")
    assert [text for text in COMMANDS[name] if text not in output] == []


def test_the_table_of_commands_names_modules_that_have_them(tmp_path):
    """--help of the whole lists them all, in their groups."""
    code, output, _ = hvtrain("--help", cwd=tmp_path)
    assert code == 0
    for name, command in TABLE.items():
        assert f"    {name:<12}{command.about}\n" in output
        assert callable(command.load()), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["evalute", "run=a"],
            "evalute is not a command (did you mean evaluate?); settings have the form SETTING=VALUE",
        ),
        (["model"], "model is not a command (the commands are runs, report, inspect, "),
        (
            ["evaluate", "--nonsense"],
            "unknown option --nonsense; see python -m hvtrain evaluate --help",
        ),
    ],
)
def test_a_misspelt_command_is_one_line(arguments, message, tmp_path):
    code, output, errors = hvtrain(*arguments, cwd=tmp_path)
    assert (
        (code, output) == (2, "")
        and errors.startswith(f"hvtrain: {message}")
        and errors.count("\n") == 1
    )


@pytest.mark.parametrize("name", ["evaluate", "launch"])
def test_the_old_form_of_a_command_names_the_new_one(name, tmp_path):
    line = [sys.executable, "-m", f"hvtrain.{name}", "run=a"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"hvtrain: python -m hvtrain.{name} is now python -m hvtrain {name}\n"


def test_a_package_of_a_users_own_may_have_the_name_of_a_command(tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "__init__.py").write_text("import hvtrain\n")
    (tmp_path / "sweep" / "__main__.py").write_text("print('mine')\n")
    line = [sys.executable, "-m", "sweep"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "mine\n", "")
