"""Runs the commands and examples of README.md with two ranks, from a clean clone, or in an environment of one's own."""

import ast
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest

from launching import ROOT, environment, run, without_hvtrain
from pages import PAGES, commands, files

pytestmark = pytest.mark.distributed

README = PAGES["README"]
FIRST, *_ = COMMANDS = commands(README)
FILES = files(README)


def command(part: str) -> str:
    """The README's only command with this in it."""
    (line,) = [line for line in COMMANDS if part in line]
    return line


@pytest.fixture
def user(tmp_path):
    """A user's folder with the files of README.md and docs/results.md."""
    for name, text in {**FILES, **files(PAGES["results"])}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    rng = np.random.default_rng(0)
    kinds, arrays = rng.integers(60, 196, (3, 5, 5, 1)), {}
    for end, count in (("", 200), ("_test", 41)):
        labels = arrays[f"y{end}"] = rng.integers(0, 3, count)
        arrays[f"x{end}"] = np.clip(
            kinds[labels] + rng.normal(0, 90, (count, 5, 5, 1)), 0, 255
        ).astype("uint8")
    np.savez(tmp_path / "leaves.npz", **arrays)
    return tmp_path


@pytest.mark.nightly
def test_own_model_and_data_set(user):
    code, output = run(None, 1, "bash", "-c", command("--config-dir conf"), cwd=user)
    assert code == 0, output
    (result,) = (user / "runs").glob("*/result.json")
    results = json.loads(result.read_text())
    assert results["num_ranks"] == 2
    assert results["num_parameters"] == 25 * 16 + 16 + 16 * 3 + 3, "model.units=16 was taken"
    assert "leaves: 180 train, 20 validation, 41 test" in output
    printed = ast.literal_eval(without_hvtrain((user / "predict.py").read_text(), cwd=user))
    assert printed["accuracy"] * 41 == pytest.approx(results["test_accuracy"] * 41, abs=1e-3), (
        "to the last example"
    )
    assert printed["loss"] == pytest.approx(results["test_loss"], rel=1e-5)
    messages = json.loads((user / "runs/leaves/model.json").read_text())
    assert (
        messages["input"]["shape"] == [5, 5, 1]
        and messages["input"]["range"] == [0, 255]
        and messages["num_classes"] == 3
    )


def test_own_example_is_short():
    lines = [
        line for name, text in FILES.items() if name != "script.py" for line in text.splitlines()
    ]
    code = [
        line for line in lines if line.strip() and not line.startswith(("import", "from", "# "))
    ]
    assert len(code) <= 10, code


def test_the_library_alone(user):
    code, output = run("gloo", 2, "python", "script.py", cwd=user)
    assert code == 0, output
    assert re.search(r"16/16 .* loss", output), output
    assert "]<stdout>" not in output, "rank 0 alone prints, and without a prefix"


# It makes the environment as a reader does, which takes minutes.
@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_first_command_from_a_clean_clone(tmp_path):
    """The README's first command; only Horovod's library may come from uv's cache."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    kept = {key: value for key, value in environment().items() if key != "VIRTUAL_ENV"}
    kept["PATH"] = ":".join(
        part for part in kept["PATH"].split(":") if not part.startswith(str(ROOT))
    )
    first = f"./scripts/run {FIRST}"
    assert first in README
    line = ["bash", "-c", first]
    options = {
        "cwd": clone,
        "capture_output": True,
        "text": True,
        "check": False,
        "stdin": subprocess.DEVNULL,
    }
    # Offline, uv takes the library that it has built already; where its cache holds none, it is built here.
    done = subprocess.run(line, env={**kept, "UV_OFFLINE": "1"}, **options)
    if done.returncode:
        done = subprocess.run(line, env=kept, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hvtrain: Gloo: allreduce over 2 processes is right" in done.stderr
    assert "hvtrain: MPI: allreduce over 2 processes is right" in done.stderr
    (result,) = (clone / "runs").glob("*/result.json")
    results = json.loads(result.read_text())
    assert results["num_ranks"] == 2 and results["test_accuracy"] >= 0.97
    again = subprocess.run(
        ["./scripts/run", "true"], cwd=clone, env=kept, capture_output=True, check=False
    )
    assert (again.returncode, again.stderr) == (0, b""), "a second call makes nothing"
    shutil.rmtree(clone)


# It resolves, downloads and builds an environment, Horovod in it.
@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_packages_install_into_an_environment_of_ones_own(tmp_path):
    own = tmp_path / "own"
    install = command("CXXFLAGS=").replace("YOUR_ENVIRONMENT", str(own))
    line = f"git clone -q {ROOT} clone && cd clone && uv venv -q {own} && {install}"
    code, output = run(None, 1, "bash", "-ec", line, cwd=tmp_path, timeout=850)
    assert code == 0, output
    line = f"env -u OPAL_PREFIX -u PYTHONPATH {own}/bin/python -m hvtrain launch -np 2 -- model=mlp train.steps=2"
    code, output = run(None, 1, *line.split(), cwd=tmp_path, PATH="/usr/bin:/bin")
    assert code == 0, output
    assert "reductions 2 of 2 steps; weights equal on 2/2 ranks" in output


def test_the_wheel_carries_the_configs(tmp_path):
    """conf/ is at the top of the repository, and inside the package in the wheel."""
    line = [
        "uv",
        "build",
        "--wheel",
        "--no-build-isolation",
        "--offline",
        "--out-dir",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(
        line, check=True, capture_output=True, env={**os.environ, "PATH": environment()["PATH"]}
    )
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "unpacked"
    subprocess.run(
        ["python", "-m", "zipfile", "-e", str(wheel), str(target)], check=True, env=environment()
    )
    assert (target / "hvtrain/conf/config.yaml").read_text() == (
        ROOT / "conf/config.yaml"
    ).read_text()
    shown = subprocess.run(
        ["python", "-m", "hvtrain", "--cfg", "job"],
        cwd=target, env=environment(PYTHONPATH=str(target)), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "_target_: hvtrain.models.cnn" in shown.stdout
