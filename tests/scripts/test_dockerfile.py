"""The Dockerfile and the entry point, read and run without an engine; test_image_steps.py replays the steps."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dockerfile
from hvtrain.core.commands import COMMANDS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
STAGES = dockerfile.stages(TEXT)
RULES = (ROOT / ".dockerignore").read_text().splitlines()
ENTRY = ROOT / "scripts" / "docker-entrypoint"


def pyproject():
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no tomllib")
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_gpu_is_the_default_target_and_cpu_is_there():
    assert list(STAGES)[-1] == "gpu"
    assert {"gpu", "cpu"} <= set(STAGES)


def test_images_run_as_an_ordinary_user_through_the_entry_point():
    for name in ("cpu", "gpu"):
        users = STAGES[name].all("USER")
        assert users and users[-1] not in ("root", "0")
        assert STAGES[name].all("ENTRYPOINT") == ['["/opt/hvtrain/scripts/docker-entrypoint"]']


def test_a_site_can_choose_the_digest_of_each_base_image():
    bases = {stage.base for stage in STAGES.values()} - set(STAGES)
    assert bases == {"debian:bookworm-slim", "nvidia/cuda:12.9.1-devel-ubuntu24.04", "ubuntu:24.04"}
    pinned = dockerfile.stages(re.sub(r"^(ARG \w+=.+)$", r"\1@sha256:0", TEXT, flags=re.MULTILINE))
    assert {stage.base for stage in pinned.values()} - set(STAGES) == {
        f"{base}@sha256:0" for base in bases
    }


def test_compilers_stay_in_the_build_stages():
    for name in ("cpu", "gpu"):
        stage = STAGES[name]
        base = STAGES.get(stage.base, dockerfile.Stage(stage.base))
        text = " ".join(base.all("RUN") + stage.all("RUN"))
        assert "g++" not in text
        assert "devel" not in base.base


def test_two_processes_sum_with_compilers_and_once_more_without():
    for name in ("build-cpu", "build-gpu"):
        runs = STAGES[name].all("RUN")
        assert any("./scripts/run true" in rest for rest in runs), (
            "its last act is an allreduce of two processes"
        )
        assert "horovodrun -np 2 python -m hvtrain" in runs[-1], "after all that was taken out"
    assert "prove-allreduce" in (ROOT / "scripts" / "make-environment").read_text()
    for name in ("cpu", "gpu"):
        arguments = [
            argument
            for argument, rest in STAGES[name].instructions
            if argument == "USER" or "prove-allreduce" in rest
        ]
        assert arguments == ["USER", "RUN"], "as the image's own user"
        assert {"gloo", "mpi"} <= set(STAGES[name].all("RUN")[-1].split())


def imported(path):
    """The files of hvtrain that a file imports, and those that these import."""
    result = set()
    waiting = [path]
    while waiting:
        for node in ast.walk(ast.parse(waiting.pop().read_text())):
            names = (
                [node.module, *(f"{node.module}.{x.name}" for x in node.names)]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in filter(None, names):
                here = ROOT / Path(*name.split("."))
                new = {
                    file
                    for file in (here.with_suffix(".py"), here / "__init__.py")
                    if file.exists()
                } - result
                result |= new
                waiting += new
    return result


def test_the_launcher_is_whole_where_the_environment_proves_itself():
    """horovodrun is hvtrain's own front, and of hvtrain only some files are there at that step."""
    needed = {
        str(file.relative_to(ROOT))
        for file in imported(ROOT / "hvtrain/launch/horovod_launcher.py")
    }
    assert "hvtrain/errors.py" in needed and "hvtrain/launch/remote_hosts.py" in needed
    for name in ("build-cpu", "build-gpu"):
        instructions = STAGES[name].instructions
        proof = next(
            at for at, (argument, rest) in enumerate(instructions) if "./scripts/run true" in rest
        )
        copied = {
            path
            for argument, rest in instructions[:proof]
            if argument == "COPY"
            for path in rest.split()[:-1]
        }
        absent = {path for path in needed if not copied & {path, *map(str, Path(path).parents)}}
        assert absent == set(), "COPY them before ./scripts/run true"


def test_no_key_is_baked_in():
    copied = [rest for stage in STAGES.values() for rest in stage.all("COPY") + stage.all("ADD")]
    assert not [rest for rest in copied if re.search(r"\.ssh|id_|key|\.pem", rest)]
    assert "ssh-keygen" not in TEXT, "host keys are made when a container starts"


def test_host_keys_of_the_package_leave_in_the_layer_that_made_them():
    installs = [
        rest for stage in STAGES.values() for rest in stage.all("RUN") if "openssh-server" in rest
    ]
    assert len(installs) == 2, "one in each image"
    for rest in installs:
        assert re.search(r"rm -rf [^&]*/etc/ssh/ssh_host_\*", rest), rest


def test_the_environment_of_each_image_is_the_one_that_was_made():
    for name, variant in (("cpu", None), ("gpu", "gpu")):
        text = " ".join(STAGES[name].all("ENV"))
        chosen = re.search(r"HVTRAIN_VARIANT=(\w+)", text)
        assert (chosen and chosen[1]) == variant, (
            "or scripts/run would make another one in the container"
        )
        assert "OPAL_PREFIX=/opt/hvtrain/.venv" in text, "or MPI does not start on a second host"


def test_only_what_is_named_goes_into_the_image():
    assert RULES[0] == "*"
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    sent = {path.split("/")[0] for path in listed if dockerfile.is_sent(path, RULES)}
    assert sent == {"conf", "hvtrain", "scripts", "LICENSE", "README.md", "pyproject.toml"}
    assert not dockerfile.is_sent("hvtrain/keras/__pycache__/tape.cpython-311.pyc", RULES)


def test_tools_of_developers_and_of_the_build_leave_the_image():
    """All of pyproject.toml's groups; what these tools brought with them is named too, and `uv pip check` agrees."""
    groups = pyproject()["dependency-groups"]
    needless = {
        re.split("[<>=]", requirement)[0]
        for name in ("build", "dev")
        for requirement in groups[name]
    }
    lists = []
    for name in ("build-cpu", "build-gpu"):
        (slim,) = [rest for rest in STAGES[name].all("RUN") if "pip uninstall" in rest]
        assert "uv pip check" in slim
        lists.append(slim)
        assert needless <= set(slim.split()), needless - set(slim.split())
    assert lists[0] == lists[1]


def test_the_entry_point_runs_what_it_is_given():
    assert entry("bash", "-c", "exit 5")[0] == 5
    code, output, _ = entry("python", "-c", "import sys; print(sys.argv[1:])", "a b", "*")
    assert (code, output) == (0, "['a b', '*']\n")
    code, output, _ = entry("horovodrun", "--version")
    assert code == 0 and re.match(r"\d+\.\d+", output)
    code, output, _ = entry("mpirun", "--version")
    assert code == 0 and "Open MPI" in output


@pytest.mark.parametrize("argument", ["verify", "doctor", "launch"])
def test_a_short_word_is_the_module_of_its_name(argument):
    code, output, errors = entry(argument, "--help")
    assert code == 0, errors
    assert f"python -m hvtrain {argument} " in output


def test_every_command_has_a_short_word():
    arguments = re.search(
        r"^  (verify \|[^)]*)\)$", (ROOT / "scripts/docker-entrypoint").read_text(), re.MULTILINE
    )[1]
    assert set(re.findall(r"\w+", arguments)) == {*COMMANDS} - {"spark", "completion"}


@pytest.mark.parametrize("arguments", [(), ("help",), ("--help",)])
def test_without_a_command_it_explains_itself(arguments):
    code, output, _ = entry(*arguments)
    assert code == 0
    assert output.startswith("The image takes, after its name:\n")
    assert "worker [PORT [ADDRESS]]" in output and "train.epochs" in output, (
        "and then what a run takes"
    )


def test_an_unknown_word_is_one_line():
    code, output, errors = entry("train.epochs=2")
    assert (code, output) == (127, "")
    assert errors.startswith(
        "hvtrain: 'train.epochs=2' is not a command of this image; give horovodrun, mpirun,"
    )
    assert errors.endswith("settings go after python -m hvtrain\n") and errors.count("\n") == 1


@pytest.mark.parametrize("port", ["ssh", "0", "70000"])
def test_a_port_that_is_none_is_one_line(port):
    expected = f"hvtrain: worker {port}: a port from 1 to 65535 was needed; leave it out for 2222\n"
    assert entry("worker", port) == (2, "", expected)


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="ssh-keygen is not installed")
def test_a_worker_makes_no_key_for_anyone_but_its_own_host(tmp_path):
    code, _, errors = entry("worker", HOME=str(tmp_path))
    assert code == 1 and errors.endswith("mount the folder that holds it\n")
    assert list(tmp_path.iterdir()) == []


def entry(*arguments, **extra):
    """Exit code, output and errors of the entry point, in this environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [ENTRY, *arguments],
        env={**os.environ, **root, "PATH": path, **extra},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr
