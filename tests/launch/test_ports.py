"""Garbage and forged pickles to the ports that a run opens: nothing is executed, and the run ends well."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lab import PYTHON, SCRIPT, Lab, needs_lab
from launcher_lab import last_line, line, started
from launching import finish, start

pytestmark = pytest.mark.distributed

ATTACKER = Path(__file__).parents[1] / "support" / "launched" / "attacker.py"
WAITING = """
import os, pathlib, time
folder = pathlib.Path({folder!r})
where = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] + ":" + os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
begun = folder / ("begun-" + os.environ["HOROVOD_RANK"])
begun.write_text(where)
begun.rename(folder / ("rank-" + os.environ["HOROVOD_RANK"]))
deadline = time.monotonic() + 250
while not (folder / "attacked").exists() and time.monotonic() < deadline:
    time.sleep(0.1)
"""


@needs_lab
def test_the_rendezvous_of_a_static_launch(tmp_path):
    """It listens on the address that leads to the hosts and on no other, and takes whatever comes."""
    with Lab(3) as lab:
        worker = WAITING.format(folder=str(tmp_path))
        launched = started(lab, line("horovodrun-gloo", "s1:1,s2:1", "python", "-c", worker))
        while not (tmp_path / "rank-1").exists():
            assert launched.poll() is None, launched.communicate()[0]
        address = (tmp_path / "rank-1").read_text()
        _, listening = lab.run("s1", "ss", "-ltnH")
        assert address.startswith("10.213.0.1:")
        assert [
            text.split()[3]
            for text in listening.splitlines()
            if not text.split()[3].endswith(":22")
        ] == [address]
        code, output = lab.run(
            "s3", PYTHON, str(ATTACKER), str(tmp_path / "executed"), "0", address
        )
        assert code == 0 and address in output
        (tmp_path / "attacked").touch()
        output = finish(launched)
    assert launched.returncode == 0, output
    assert not (tmp_path / "executed").exists()
    assert "Traceback" not in output
    assert output.count("hvtrain: dropped a request from 10.213.0.3 to this launch's port") == 1


@pytest.mark.nightly
def test_the_rendezvous_of_an_elastic_job(tmp_path):
    """Horovod's own unpickles what anybody puts there as a worker's address (CVE-2024-10190)."""
    script = tmp_path / "hosts.sh"
    # A host is there after some seconds.
    late = f"test -e {tmp_path}/asked && echo localhost:2; touch {tmp_path}/asked"
    script.write_text(f"#!/bin/sh\n{late}\necho 'x;touch executed:1'\necho -oProxyCommand=x:1\n")
    script.chmod(0o755)
    launched = start(
        None, 1, "horovodrun", "--gloo", "-np", "2", "--min-np", "2", "--host-discovery-script", str(script),
        "python", "-c", WAITING.format(folder=str(tmp_path)), cwd=tmp_path,
    )  # fmt: skip
    while not (tmp_path / "rank-1").exists():
        assert launched.poll() is None, launched.communicate()[0]
    address = (tmp_path / "rank-1").read_text()
    assert address.startswith("127.0.0.1:")
    attack = [sys.executable, ATTACKER, str(tmp_path / "executed"), "0", address]
    subprocess.run(attack, check=True, capture_output=True)
    (tmp_path / "attacked").touch()
    output = finish(launched)
    assert launched.returncode == 0, output
    assert not (tmp_path / "executed").exists()
    for name in ("x;touch executed", "-oProxyCommand=x"):
        message = f"hvtrain: ignored {name!r}, printed by the host discovery script: it is not a valid host name"
        assert output.count(message) == 1, output


@needs_lab
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("launch-gloo", marks=pytest.mark.nightly),
        pytest.param("launch-mpi", marks=pytest.mark.release),
    ],
)
def test_a_training_under_attack(tmp_path, how):
    """Each port that it opens on either host, from its start on, is sent the same; nothing of it is executed.

    Over MPI it ends as if nothing had come. Gloo takes connections while its ranks find each other, a second or so,
    and aborts when one that begins with a rank's number closes (an uncaught gloo::IoException): the run ends with a
    code that says that a restart helps.
    """
    with Lab(2) as lab:
        environment = {**os.environ, "HVTRAIN_LAB": lab.name}
        attackers = [
            subprocess.Popen([SCRIPT, "exec", host, PYTHON, ATTACKER, tmp_path / "executed", "280"], env=environment,
                             stdout=subprocess.PIPE, text=True)
            for host in ("s1", "s2")
        ]  # fmt: skip
        settings = ["model=mlp", "train.epochs=5", f"run.dir={tmp_path}/run"]
        code, output = lab.run("s1", *line(how, "s1:1,s2:1", *settings))
        (tmp_path / "executed.end").touch()
        outputs = [attacker.communicate(timeout=200)[0] for attacker in attackers]
    if how == "launch-gloo" and code:
        assert code == 75 and "killed by SIGABRT" in last_line(output), output
    else:
        assert code == 0 and "weights equal on 2/2 ranks" in output, output
    # Where the attack on one host ends the run at once, the other may have had nothing to attack.
    attacked = [bool(re.search(r"attacked .*\d+\.\d+:\d+", text)) for text in outputs]
    assert (any if code else all)(attacked), outputs
    assert not (tmp_path / "executed").exists()
    assert "Traceback" not in output
