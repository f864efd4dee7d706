"""Hosts that cannot take part: one line with the fix, before any rank starts, from either launcher."""

import os
import re
import time

import pytest

from lab import PYTHON, Lab, needs_lab
from launcher_lab import SOON, fate, line
from launching import BIN

pytestmark = [pytest.mark.distributed, needs_lab]


@pytest.fixture(scope="module")
def lab():
    with Lab(3) as made:
        yield made


def refused(lab, tmp_path, how, hosts="s1:1,s2:1"):
    """The one line that a launch ends with; prints how long it took."""
    began = time.monotonic()
    code, output = lab.run("s1", "env", SOON, *line(how, hosts, *fate(tmp_path, "wait", "0")))
    print(f"{how} refused in {time.monotonic() - began:.1f} s")
    assert code == 2 and output.count("\n") == 1, output
    assert not list(tmp_path.glob("rank-*"))
    return output


def on(lab, host, command):
    lab("exec", host, "bash", "-c", command)


@pytest.mark.parametrize(
    "how", ["launch-gloo", pytest.param("launch-mpirun", marks=pytest.mark.release)]
)
def test_another_version_of_python_or_of_a_package(lab, tmp_path, how):
    """s2 has another Python, then another Keras, at the same path: a start file of Python that is read there alone."""
    for change, version in (
        ("import platform; platform.python_version = lambda: '3.10.1'", r"python 3\.10\.1"),
        ("from importlib import metadata as m; real = m.version; "
         "m.version = lambda name: '3.4.0' if name == 'keras' else real(name)", r"keras 3\.4\.0"),
    ):  # fmt: skip
        (tmp_path / "sitecustomize.py").write_text(change)
        start_file = lab.of("s2") / ".bashrc"
        start_file.write_text(f"export PYTHONPATH={tmp_path}:$PYTHONPATH\n")
        output = refused(lab, tmp_path, how)
        start_file.unlink()
        assert re.search(
            rf"host s2 has {version} in \S+ and host s1 has \S+; recreate the environment on s2",
            output,
        )


def test_a_python_that_does_not_run(lab, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'Illegal instruction' >&2\nexit 132\n")
    broken.chmod(0o755)
    real = os.path.realpath(PYTHON)
    on(lab, "s2", f"mount --bind {broken} {real}")
    try:
        assert (
            "host s2" in (output := refused(lab, tmp_path, "horovodrun-gloo"))
            and "Illegal instruction" in output
        )
    finally:
        on(lab, "s2", f"umount {real}")


@pytest.mark.release
@pytest.mark.parametrize("how", ["launch-gloo", "horovodrun-mpi", "launch-mpirun"])
def test_hosts_that_are_not_to_be_reached(tmp_path, how):
    """ssh refused, key refused, power off, no environment."""
    with Lab(3) as lab:
        on(lab, "s2", "touch /run/no-sshd; kill $(cat /run/sshd.pid)")
        assert "nothing answers ssh on host s2, port 22" in refused(lab, tmp_path, how)
        (lab.of("s3") / ".ssh" / "authorized_keys").unlink()
        assert "host s3 does not let you in without a password" in refused(
            lab, tmp_path, how, "s1:1,s3:1"
        )
        lab("stop", "s2")
        assert "host s2 cannot be reached" in refused(lab, tmp_path, how)
    with Lab(2) as lab:
        on(lab, "s2", f"mount -t tmpfs tmpfs {BIN}")
        assert f"host s2 has no {PYTHON}; put hvtrain there" in refused(lab, tmp_path, how)
