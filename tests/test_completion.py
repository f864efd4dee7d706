"""python -m hvtrain completion in a real bash: called as bash calls it, and by the Tab key of a terminal."""

import os
import pty
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvtrain.config.compose import compose
from hvtrain.core.commands import COMMANDS
from hvtrain.finished.arguments import CHECKPOINTS, SPLITS
from hvtrain.finished.commands import SUFFIXES
from hvtrain.launch import options
from launching import BIN, ROOT

# As bash does it for a line with the cursor at its end; compopt works inside readline alone.
ASK = """
compopt() { :; }
COMP_LINE=$1 COMP_POINT=${#1}
_hvtrain
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """What the command prints, in a file; the command imports no TensorFlow."""
    code = "import sys, hvtrain.launch.completion as c; c.main(); sys.exit({'tensorflow'} & {*sys.modules} or 0)"
    line = [sys.executable, "-c", code, "bash"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    path = tmp_path_factory.mktemp("completion") / "hvtrain.bash"
    path.write_text(done.stdout)
    return path


@pytest.fixture(scope="module")
def asked(script):
    def ask(line, cwd=ROOT, breaks="=:"):
        arguments = [
            "bash",
            "--norc",
            "-c",
            f"source {script}; COMP_WORDBREAKS={breaks}; {ASK}",
            "bash",
            line,
        ]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=cwd)
        assert done.stderr == ""
        return done.stdout.split()

    return ask


def stems(group):
    return sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))


@pytest.mark.parametrize("command", ["hvtrain", "python -m hvtrain", "horovodrun -np 2 python -m hvtrain",
                                     "./scripts/run mpirun -np 2 python -m hvtrain find_lr"])  # fmt: skip
def test_a_group_has_its_choices(asked, command):
    assert asked(f"{command} model=") == stems("model")
    assert asked(f"{command} seed=3 dataset=t") == [
        stem for stem in stems("dataset") if stem.startswith("t")
    ]


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ("sche", ["schedule.", "schedule="]),
        ("train.rem", ["train.remat="]),
        ("callbacks.e", ["callbacks.early_stopping."]),
        ("+callbacks.early_stopping.p", ["+callbacks.early_stopping.patience="]),
        ("train.resize=", ["keep", "scale"]),
        ("guard.data=t", ["true"]),
        ("augment=[random_flip,mix", ["[random_flip,mix_up"]),
        ("experiment=te", ["text_transformer"]),
        ("clu", []),
        ("--c", ["--config-dir"]),
        ("--config-dir ", []),
        ("run.dir=", []),
        ("dataset=digits dataset.n", ["dataset.num_test=", "dataset.num_validation="]),
        ("dataset=text dataset.target", []),
        ("dataset.target", []),
        ("dataset=table dataset.target", ["dataset.target=", "dataset.target_is="]),
        ("dataset.shi", ["dataset.shift_pixels="]),
        ("evaluate runs/a dataset.target_", ["dataset.target_is="]),
        ("experiment=houses dataset=digits dataset.target_", ["dataset.target_is="]),
        ("export runs/a format=s", ["savedmodel"]),
        ("export for", ["format="]),
        ("predict runs/a split=v", ["validation"]),
        ("find_lr spl", []),
        ("evaluate confi", []),
        ("evaluate ./tests/ben", ["./tests/benchmarks/"]),
    ],
)
def test_names_and_values(asked, arguments, result):
    assert asked(f"python -m hvtrain {arguments}") == result


def test_arguments_of_commands_have_the_values_that_these_take(asked):
    for name, values in {"split": SPLITS, "checkpoint": CHECKPOINTS, "format": SUFFIXES}.items():
        assert asked(f"hvtrain evaluate runs/a {name}=") == [*values]


def test_every_group_and_setting_is_offered(asked):
    """What is offered, taken apart at each dot, comes to what Hydra composes."""

    def names(argument=""):
        for result in asked(f"hvtrain {argument}"):
            yield from names(result) if result.endswith(".") else [result.rstrip("=")]

    def flat(tree, prefix=""):
        for name, value in tree.items():
            if isinstance(value, dict) and value:
                yield from flat(value, f"{prefix}{name}.")
            elif not name.startswith("_"):
                yield prefix + name

    tree = compose(["callbacks=[early_stopping,reduce_lr_on_plateau]", "augment=[mix_up]"])
    offered = {*names()}
    assert {"model", "strategy", "experiment", "tracker"} <= offered
    assert {name for name in flat(tree) if name not in ("tracker",)} - offered == set()


def test_other_commands_are_left_alone(asked):
    for line in (
        "python train.py model=",
        "python -m hvtrain runs model=",
        "mpirun -np 2 ./a.out mod",
    ):
        assert asked(line) == []
    assert asked("python -m hvtrain find_l") == ["find_lr"]
    assert asked("python -m h") == ["hvtrain"]
    assert {"evaluate", "runs", "model="} <= {*asked("hvtrain ")}
    assert asked("hvtrain evaluate ev") == asked("hvtrain model=cnn ev") == []
    assert asked("python -m hvtrain launch -np 2 cluster=s") == ["ssh", "slurm", "spark"]
    assert "cluster.partition=" in asked("python -m hvtrain launch cluster.p")


def test_own_choices(asked, tmp_path):
    (tmp_path / "own/model").mkdir(parents=True)
    (tmp_path / "own/model/leafnet.yaml").write_text("_target_: leaves.model\n")
    for option in ("--config-dir own", "--config-dir=own", "-cd own"):
        assert asked(f"python -m hvtrain {option} model=l", tmp_path) == ["leafnet"]


def test_where_the_equals_sign_breaks_no_word(asked):
    assert asked("hvtrain model=c", breaks=":") == ["model=cnn"]


def test_shellcheck_finds_nothing(script):
    line = [BIN / "shellcheck", "--shell=bash", script]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


def test_the_tab_key(script, tmp_path):
    """An interactive bash in a terminal: the one choice is written out, and a space after it."""
    child, terminal = pty.fork()
    if not child:
        os.chdir(tmp_path)
        os.execvpe(
            "bash",
            ["bash", "--norc", "--noprofile", "-i"],
            {**os.environ, "PS1": "> ", "TERM": "dumb"},
        )
    os.write(
        terminal,
        f"source {shlex.quote(str(script))}; hvtrain() {{ printf 'got %s\\n' \"$*\"; }}\n".encode(),
    )
    os.write(terminal, b"hvtrain mod\t\x15hvtrain model=ml\ttrain.resi\tsc\t-\n")
    shown, deadline = b"", time.monotonic() + 20
    while b"got " not in shown.replace(b"'got ", b"") and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 4096)
    os.write(terminal, b"exit\n")
    os.close(terminal)
    os.waitpid(child, 0)
    assert b"got model=mlp train.resize=scale -" in shown, shown


def test_bad_input_is_one_line():
    line = [sys.executable, "-m", "hvtrain", "completion", "fish"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert "invalid choice: 'fish'" in done.stderr and done.stderr.count("\n") == 1


def test_the_commands_that_take_settings():
    """The table says which do; so does their code, by what their help or their parser takes from elsewhere."""
    signs = (
        "RUN_SETTINGS}",
        "parse_with_overrides(",
        "run_settings(",
        "-- GROUP=",
        "parse_known_args()",
        "parse_command(",
    )
    for name, command in COMMANDS.items():
        module = sys.modules[command.load().__module__]
        files = [Path(module.__file__), *([Path(options.__file__)] if name == "launch" else [])]
        assert (
            any(sign in file.read_text() for file in files for sign in signs)
            == command.takes_settings
        ), name
