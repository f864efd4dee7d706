"""python -m hvtrain info: a block about this host and others that holds no secret and fails on no host."""

import os
import re
import subprocess
import sys

from hvtrain.system.host_facts import commit_of


def info(*arguments, **variables):
    done = subprocess.run(
        [sys.executable, "-m", "hvtrain", "info", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_block_has_versions_build_and_devices_and_no_secret():
    code, output, _ = info(
        NCCL_DEBUG="INFO", HOROVOD_TOKEN="hunter2", TF_PLACE="http://me:hunter2@host/"
    )
    assert code == 0
    first, *lines, last = output.splitlines()
    assert (first, last) == ("```text", "```")
    shown = dict(line.split(maxsplit=1) for line in lines)
    assert shown["python"] == sys.version.split()[0]
    assert "keras " in shown["packages"]
    assert "horovod 0.28.1" in shown["packages"]
    assert {"system", "machine", "gpus", "interfaces"} <= shown.keys()
    assert re.search(r"^horovod built with +MPI, Gloo$", output, re.MULTILINE)
    assert shown["NCCL_DEBUG"] == "INFO"
    assert "hunter2" not in output


def test_a_host_that_does_not_answer_is_a_line_and_not_the_end():
    code, output, _ = info("-H", "localhost:2,no.such.host:2")
    assert code == 0
    assert "localhost: python " in output
    assert "no.such.host: ssh " in output


def test_bad_input_is_one_line():
    assert info("--foo") == (
        2,
        "",
        "hvtrain: unrecognized arguments: --foo; see python -m hvtrain info --help\n",
    )


def test_a_checkout_is_named_by_its_commit_and_changes(tmp_path):
    package = tmp_path / "hvtrain"
    package.mkdir()
    (package / "a.py").write_text("1")
    assert commit_of(package) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    head = subprocess.run(
        [*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True
    ).stdout
    assert commit_of(package) == f" ({head.strip()})"
    (package / "a.py").write_text("2")
    assert commit_of(package) == f" ({head.strip()}, 1 changed)"
