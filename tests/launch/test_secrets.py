"""Secrets in the launcher's environment: on no command line, in no log, record or report, and on no other host."""

import json
import subprocess

import pytest

from lab import PYTHON, Lab, needs_lab
from launcher_lab import line

pytestmark = [pytest.mark.distributed, needs_lab]

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "hunter1",
    "HF_TOKEN": "hunter2",
    "MY_PASSWORD": "hunter3",
    "DATABASE_URL": "postgres://me:hunter4@db/training",
    "TF_STORE": "redis://:hunter5@store:6379/0",
    "TF_API_TOKEN": "hunter8",
}
SET = ["env", *(f"{name}={value}" for name, value in SECRETS.items())]
# What this rank's host shows to everybody, and the names of the secrets that the rank itself has.
LOOK = """
import json, os, socket, subprocess, time
time.sleep(1)
shown = subprocess.check_output(["ps", "axwwo", "args"], text=True)
mine = sorted(name for name, value in os.environ.items() if "hunt" + "er" in value)
seen = [text for text in shown.splitlines() if "hunt" + "er" in text]
print("look", json.dumps([socket.gethostname(), os.environ["TF_NUM_INTRAOP_THREADS"], seen, mine]))
"""


@pytest.fixture(scope="module")
def lab():
    with Lab(2) as made:
        yield made


@pytest.mark.parametrize(
    "how",
    [
        "launch-gloo",
        pytest.param("horovodrun-gloo", marks=pytest.mark.nightly),
        pytest.param("horovodrun-mpi", marks=pytest.mark.release),
    ],
)
def test_no_secret_is_on_a_command_line_or_travels(lab, how):
    """Ranks of horovodrun's own host inherit what it has, those of launch the allowed ones; and what is asked for, and
    the addresses of notices."""
    asked = ("--env", "WANDB_API_KEY") if how.startswith("launch") else ()
    command = line(how, "s1:1,s2:1", "python", "-c", LOOK, options=asked)
    variables = [
        "WANDB_API_KEY=hunter6",
        "HVTRAIN_ENV=WANDB_API_KEY",
        "HVTRAIN_NOTIFY=json://me:hunter7@host",
        "TF_NUM_INTRAOP_THREADS=1",
    ]
    code, output = lab.run("s1", *SET, *variables, *command)
    assert code == 0, output
    shown = [
        json.loads(text.partition("look ")[2]) for text in output.splitlines() if "look [" in text
    ]
    travelling = ["HVTRAIN_NOTIFY", "WANDB_API_KEY"]
    assert sorted(shown) == [
        [
            "s1",
            "1",
            [],
            travelling if how.startswith("launch") else sorted([*SECRETS, *travelling]),
        ],
        ["s2", "1", [], travelling],
    ]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("launch-gloo", marks=pytest.mark.nightly),
        pytest.param("horovodrun-mpi", marks=pytest.mark.release),
    ],
)
def test_no_secret_is_in_what_a_run_or_the_doctor_writes(lab, tmp_path, how):
    command = line(how, "s1:1,s2:1", *([] if how.startswith("launch") else ["python", "-m", "hvtrain"]),
                 "model=mlp", "train.epochs=2", f"run.dir={tmp_path}/run")  # fmt: skip
    code, output = lab.run("s1", *SET, *command)
    assert code == 0 and "hunter" not in output, output
    code, output = lab.run(
        "s1", *SET, PYTHON, "-m", "hvtrain", "doctor", "-H", "s1,s2", "--no-links", "--json"
    )
    assert code in (0, 1) and "hunter" not in output, output
    dry = [
        PYTHON,
        "-m",
        "hvtrain",
        "launch",
        "-np",
        "2",
        "-H",
        "s1,s2",
        "--dry-run",
    ]
    code, output = lab.run("s1", *SET, *dry, "--", "model=mlp")
    assert code == 0 and "hunter" not in output, output
    leaks = subprocess.run(
        ["grep", "-rl", "hunter", tmp_path, lab.state], capture_output=True, text=True, check=False
    )
    assert leaks.stdout == "" and (tmp_path / "run" / "result.json").exists()
