"""scripts/run and its neighbours: what they say when something is missing, and when they do nothing."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = ["cpu", "gpu"]


@pytest.fixture
def clone(tmp_path):
    """The scripts in a folder of their own, and a PATH with the plain tools of a Linux machine alone."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in "bash env cat cksum flock dirname readlink rm awk sort head cut grep sed".split():  # noqa: SIM905
        (tools / name).symlink_to(shutil.which(name))
    return tmp_path


def run(clone, *arguments, **extra):
    done = subprocess.run(
        [clone / "scripts" / "run", *arguments],
        env={"PATH": str(clone / "bin"), "HOME": str(clone), **extra},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def tool(clone, name, body):
    path = clone / "bin" / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def test_each_thing_that_is_missing_is_one_line_with_the_package(clone):
    expected = (
        "hvtrain: no Python 3.10-3.13 on PATH; "
        "install one (Debian, Ubuntu: apt-get install python3 python3-venv)\n"
    )
    assert run(clone, "true") == (1, "", expected)
    tool(clone, "python3", "exit 0")
    compiler = "no C++ compiler, needed to build Horovod; install one (Debian, Ubuntu: apt-get install g++ make)"
    assert run(clone, "true") == (1, "", f"hvtrain: {compiler}\n")
    tool(clone, "g++", "exit 0")
    make = "no make, needed to build Horovod; install it (Debian, Ubuntu: apt-get install make)"
    assert run(clone, "true") == (1, "", f"hvtrain: {make}\n")
    tool(clone, "make", "exit 0")
    code, _, errors = run(clone, "true", HVTRAIN_VARIANT="gpu", CUDA_HOME="/nowhere")
    assert code == 1 and "no /nowhere/bin/nvcc, needed" in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("toolkit", "is_refused"), [("13.0", True), ("12.9", False), ("11.8", False)]
)
def test_a_toolkit_newer_than_the_driver_is_refused_before_the_build(clone, toolkit, is_refused):
    for name in ("g++", "make"):
        tool(clone, name, "exit 0")
    tool(clone, "python3", '[[ "$2" != *ensurepip* ]]')  # What is asked for next, and is missing.
    tool(
        clone,
        "nvidia-smi",
        "echo '| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |'",
    )
    (clone / "cuda" / "bin").mkdir(parents=True)
    tool(clone, "nvcc", f"echo 'Cuda compilation tools, release {toolkit}, V{toolkit}.48'")
    (clone / "bin" / "nvcc").rename(clone / "cuda" / "bin" / "nvcc")
    code, _, errors = run(clone, "true", HVTRAIN_VARIANT="gpu", CUDA_HOME=str(clone / "cuda"))
    refused = f"CUDA 13.0 in {clone}/cuda is newer than this machine's driver, which runs CUDA 12.4; update the driver"
    assert (
        code == 1
        and (refused in errors) == is_refused
        and ("install its venv" in errors) != is_refused
    ), errors
    assert errors.count("\n") == 1


def test_a_python_without_venv_is_named(clone):
    for name in ("g++", "make"):
        tool(clone, name, "exit 0")
    tool(clone, "python3", '[[ "$2" != *ensurepip* ]]')
    code, _, errors = run(clone, "true")
    assert code == 1
    assert errors.endswith("install its venv (Debian, Ubuntu: apt-get install python3-venv)\n")
    assert errors.count("\n") == 1
    assert not (clone / ".venv" / ".ready").exists()


def test_an_active_environment_does_not_make_its_own_successor(clone):
    """Its uv and its python go before they are used: as if they were not on PATH."""
    active = clone / ".venv" / "bin"
    active.mkdir(parents=True)
    for name in ("uv", "python3"):
        (active / name).write_text("#!/usr/bin/env bash\nexit 0\n")
        (active / name).chmod(0o755)
    code, _, errors = run(clone, "true", PATH=f"{active}:{clone / 'bin'}")
    assert code == 1 and "no Python 3.10-3.13 on PATH" in errors, errors


def test_wrong_choices_are_named(clone):
    assert (
        run(clone, "true", HVTRAIN_VARIANT="tpu")[2]
        == "hvtrain: HVTRAIN_VARIANT=tpu is neither cpu nor gpu\n"
    )
    tool(clone, "python3.6", "exit 1")
    code, _, errors = run(clone, "true", HVTRAIN_PYTHON="python3.6")
    assert (code, errors) == (1, "hvtrain: HVTRAIN_PYTHON=python3.6 is not a Python 3.10-3.13\n")


def stub_build(clone, body):
    script = clone / "scripts" / "make-environment"
    script.write_text(f"#!/usr/bin/env bash\necho built >>{clone}/builds\n{body}\n")


MAKES_AN_ENVIRONMENT = 'venv="$(dirname "$0")/../.venv"; rm -rf "$venv"; /bin/mkdir -p "$venv/bin"'


def test_a_ready_environment_runs_the_command_and_nothing_else(clone):
    stub_build(clone, MAKES_AN_ENVIRONMENT)
    code, output, _ = run(clone, "bash", "-c", 'echo "$1 $VIRTUAL_ENV $PATH"', "_", "a b")
    assert code == 0
    assert output == f"a b {clone}/.venv {clone}/.venv/bin:{clone}/bin\n"
    (clone / "bin" / "flock").unlink()
    assert run(clone, "bash", "-c", "exit 7")[0] == 7, (
        "no lock is taken, and the exit code is the command's"
    )
    assert (clone / "builds").read_text() == "built\n"


def test_a_build_that_failed_is_made_anew(clone):
    stub_build(clone, f"{MAKES_AN_ENVIRONMENT}; exit 3")
    assert run(clone, "true")[0] == 3
    assert not (clone / ".venv" / ".ready").exists()
    stub_build(clone, MAKES_AN_ENVIRONMENT)
    assert run(clone, "bash", "-c", "exit 0")[0] == 0
    assert (clone / "builds").read_text() == "built\nbuilt\n"


def test_pytest_alone_adds_what_the_tests_need_and_only_once(clone):
    stub_build(clone, MAKES_AN_ENVIRONMENT)
    tool(clone, "pytest", "echo tested")
    (clone / "scripts" / "make-test-environment").write_text(
        f"#!/bin/bash\necho added >>{clone}/additions\n"
    )
    assert run(clone, "bash", "-c", ":")[0] == 0
    assert not (clone / "additions").exists(), "whoever trains does not wait for it"
    for _ in range(2):
        assert run(clone, "pytest") == (0, "tested\n", "")
    assert (clone / "additions").read_text() == "added\n"
    with (clone / "scripts" / "lock" / "sweep.txt").open("a") as stream:
        stream.write("# changed\n")
    assert run(clone, "pytest")[0] == 0
    assert (clone / "additions").read_text() == "added\nadded\n"


def test_without_what_the_tests_need_they_do_not_start(clone):
    stub_build(clone, MAKES_AN_ENVIRONMENT)
    tool(clone, "pytest", "echo tested")
    (clone / "scripts" / "make-test-environment").write_text("#!/bin/bash\nexit 3\n")
    assert run(clone, "pytest")[:2] == (3, "")
    assert not (clone / ".venv" / ".ready-for-tests").exists()


def test_a_changed_lock_makes_the_environment_anew(clone):
    stub_build(clone, MAKES_AN_ENVIRONMENT)
    assert run(clone, "bash", "-c", ":")[0] == 0
    with (clone / "scripts" / "lock" / "cpu.txt").open("a") as stream:
        stream.write("# changed\n")
    assert run(clone, "bash", "-c", ":")[0] == 0
    assert (clone / "builds").read_text() == "built\nbuilt\n"


def test_a_moved_checkout_gets_an_environment_of_its_own(clone):
    """The programs of the old one hold its path."""
    stub_build(clone, MAKES_AN_ENVIRONMENT)
    assert run(clone, "bash", "-c", ":")[0] == 0
    moved = clone.rename(clone.with_name("moved"))
    stub_build(moved, MAKES_AN_ENVIRONMENT)
    assert run(moved, "bash", "-c", ":")[0] == 0
    assert (moved / "builds").read_text() == "built\nbuilt\n"


def test_the_environment_that_is_there_is_the_default(clone):
    stub_build(
        clone, f'echo "$1 $HVTRAIN_PYTHON" >>"$(dirname "$0")/../builds"; {MAKES_AN_ENVIRONMENT}'
    )
    gpu = {"HVTRAIN_VARIANT": "gpu", "HVTRAIN_PYTHON": "python3.12"}
    assert run(clone, "bash", "-c", ":", **gpu)[0] == 0
    assert run(clone, "bash", "-c", ":")[0] == 0, "another shell, which says nothing of GPUs"
    assert (clone / "builds").read_text() == "built\ngpu python3.12\n"
    with (clone / "scripts" / "lock" / "gpu.txt").open("a") as stream:
        stream.write("# changed\n")
    assert run(clone, "bash", "-c", ":")[0] == 0
    assert run(clone, "bash", "-c", ":", HVTRAIN_VARIANT="cpu", HVTRAIN_PYTHON="")[0] == 0
    assert (clone / "builds").read_text() == "built\ngpu python3.12\n" * 2 + "built\ncpu \n"


def test_an_environment_in_use_is_not_replaced(clone):
    stub_build(clone, MAKES_AN_ENVIRONMENT)
    assert run(clone, "bash", "-c", ":")[0] == 0
    library = clone / ".venv" / "library.so"
    library.write_bytes(b"x")
    maps_it = (
        "import mmap, sys; f = open(sys.argv[1]); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)"
    )
    arguments = [sys.executable, "-c", f"{maps_it}; print(1, flush=True); input()", str(library)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as training:
        training.stdout.readline()
        code, _, errors = run(clone, "bash", "-c", ":", HVTRAIN_VARIANT="gpu")
        assert code == 1 and errors == (
            "hvtrain: the environment in .venv (cpu) has to be made anew (gpu), "
            f"and process {training.pid} uses it; end that first\n"
        )
        assert library.exists() and run(clone, "bash", "-c", ":")[0] == 0
        training.communicate(b"\n")
    assert run(clone, "bash", "-c", ":", HVTRAIN_VARIANT="gpu")[0] == 0
    assert not library.exists()


def pinned(name):
    """Package, version and marker of each requirement in a lock, with its block of hashes."""
    text = (ROOT / "scripts" / "lock" / f"{name}.txt").read_text()
    blocks = re.split(r"\n(?=[A-Za-z])", "\n" + text)[1:]
    return {block.partition(" \\")[0].strip(): block for block in blocks}


@pytest.mark.parametrize("name", LOCKS)
def test_locks_hold_names_versions_and_hashes_and_no_address(name):
    text = (ROOT / "scripts" / "lock" / f"{name}.txt").read_text()
    assert "://" not in text
    for requirement, block in pinned(name).items():
        assert "==" in requirement
        assert "--hash=sha256:" in block, requirement


def test_locks_agree_on_what_they_share():
    versions = [{line.partition("==")[0]: set() for line in pinned(name)} for name in LOCKS]
    for result, name in zip(versions, LOCKS, strict=True):
        for line in pinned(name):
            result[line.partition("==")[0]].add(line)
    shared = versions[0].keys() & versions[1].keys()
    assert len(shared) > 50
    assert {package: versions[0][package] for package in shared} == {
        package: versions[1][package] for package in shared
    }


def test_the_entry_point_runs_what_it_is_given():
    entry = ROOT / "scripts" / "docker-entrypoint"
    done = subprocess.run([entry, "bash", "-c", "exit 5"], check=False)
    assert done.returncode == 5


def test_a_worker_without_keys_says_so(tmp_path):
    if not shutil.which("ssh-keygen"):
        pytest.skip("ssh-keygen is not installed")
    done = subprocess.run(
        [ROOT / "scripts" / "docker-entrypoint", "worker"],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert (
        done.stderr
        == f"no {tmp_path}/.ssh/authorized_keys, so nobody can log in; mount the folder that holds it\n"
    )


def test_the_proof_of_a_build_runs_on_the_cpu(tmp_path):
    """Where there are GPUs, its unpinned processes would both sum on the first one, which NCCL refuses."""
    program = f"""
import os, runpy
os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")  # Starts alone, without a launcher.
import horovod.tensorflow as hvd
import tensorflow as tf
shown = ["GPU:0"]  # What TensorFlow would place on, as on a host with a GPU.
tf.config.set_visible_devices = lambda devices, kind: kind == "GPU" and shown.__setitem__(slice(None), devices)
hvd.allreduce = lambda value, op: print("sums with", shown) or value
runpy.run_path({str(ROOT / "scripts/allreduce_check.py")!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "sums with []" in done.stdout, done.stdout + done.stderr


def test_each_fault_of_find_faults_stands_in_the_code(monkeypatch):
    """Or find_faults would stop at it; the code moves on."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    faults = importlib.import_module("faults").FAULTS
    counts = {
        fault.name: (ROOT / "hvtrain" / fault.file).read_text().count(fault.old) for fault in faults
    }
    assert counts == dict.fromkeys(counts, 1)
