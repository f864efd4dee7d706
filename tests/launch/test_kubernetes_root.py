"""A worker's pod as its manifest describes it, without Kubernetes: its user, no capabilities, a read-only root file
system, and tmpfs in place of each emptyDir. The key pair lies where the operators mount it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hvtrain.launch.cluster_files import texts
from hvtrain.launch.job import Job
from hvtrain.launch.kubernetes import MpiJob

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
HOME = "/home/hvtrain"
pytestmark = pytest.mark.distributed

# PLACES: what can be written. PARTS: this checkout and its environment, which stay visible where a tmpfs hides them.
MAKE_POD = """
set -e
mount -t tmpfs none /media
number=0
for part in $PARTS; do mkdir /media/$((++number)); mount --rbind "$part" /media/$number; done
{ cat /etc/passwd; echo 'hvtrain:x:10001:10001::/home/hvtrain:/bin/bash'; } >/media/passwd
mount --bind /media/passwd /etc/passwd
for hidden in /root /home; do mount -t tmpfs -o mode=755 none $hidden; done
mkdir /home/hvtrain
for place in /tmp /home/hvtrain /dev/shm; do mount -t tmpfs -o mode=2777,gid=10001 none $place; done
mkdir /home/hvtrain/.ssh
mount -t tmpfs -o mode=750,gid=10001 none /home/hvtrain/.ssh
ssh-keygen -q -t ed25519 -N '' -f /home/hvtrain/.ssh/id_ed25519
cp /home/hvtrain/.ssh/id_ed25519.pub /home/hvtrain/.ssh/authorized_keys
chown -R 10001:10001 /home/hvtrain/.ssh
number=0
for part in $PARTS; do
  mkdir -p "$part"
  mount --rbind /media/$((++number)) "$part"
  mount -o remount,bind,ro "$part"
done
for place in / /root /home /media /home/hvtrain/.ssh /tmp /home/hvtrain /dev/shm; do
  [[ " $PLACES " == *" $place "* ]] || mount -o remount,bind,ro $place
done
cd /home/hvtrain
exec setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \\
  env -i HOME=/home/hvtrain PATH="$PATH" bash -c "$1"
"""
# The training comes by ssh, as a launcher's does; `touch` says that the root cannot be written.
WORK = """
{root}/scripts/docker-entrypoint worker 2299 & worker=$!
trap 'kill $worker' EXIT
ssh=(ssh -p 2299 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR localhost)
for _ in {{1..50}}; do "${{ssh[@]}}" true 2>/dev/null && break; kill -0 $worker || exit 9; sleep 0.2; done
"${{ssh[@]}}" 'touch /etc/x {root}/x /home/x /opt/x'
"${{ssh[@]}}" "OPAL_PREFIX={prefix} PYTHONPATH={root} TF_CPP_MIN_LOG_LEVEL=3 $COMMAND"
"""


# Once there is a checkpoint the pod is drained, by the command that Kubernetes calls before it ends a worker.
DRAINED = """
{{ until ls runs/*/checkpoints/step-* >/dev/null 2>&1; do sleep 0.2; done; {drain}; echo drained; }} &
horovodrun --mpi -np 2 python -m hvtrain model=mlp train.epochs=100000
code=$?
wait
exit $code
"""


def worker_pod() -> dict:
    job = Job(("python", "-m", "hvtrain"), 2)
    (text,) = texts(MpiJob(image="hvtrain:cpu", gpus_per_rank=0), job).values()
    return yaml.safe_load(text)["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]


def places() -> list[str]:
    """Where the worker of the manifest can write."""
    worker = worker_pod()
    (container,) = worker["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounts = {
        mount["name"]: mount["mountPath"]
        for mount in container["volumeMounts"]
        if not mount.get("readOnly")
    }
    assert all("emptyDir" in volume for volume in worker["volumes"] if volume["name"] in mounts)
    assert set(mounts.values()) == {"/tmp", "/dev/shm", HOME}, "those that MAKE_POD makes"
    return list(mounts.values())


def in_pod(command: str, writable: list[str]) -> tuple[int, str]:
    """Exit code and output of a worker to which the command came by ssh."""
    missing = [
        name for name in ("unshare", "setpriv", "ssh", "sshd") if not shutil.which(name, path=PATH)
    ]
    if os.geteuid() or missing:
        pytest.skip(
            f"a pod of its own needs root and unshare, setpriv, ssh, sshd (missing: {missing})"
        )
    hidden = [Path(folder) for folder in ("/root", "/home", "/tmp")]
    parts = dict.fromkeys(map(Path, (ROOT, sys.prefix, sys.base_prefix)))
    parts = [str(part) for part in parts if any(folder in part.parents for folder in hidden)]
    enter = [
        "unshare",
        "--mount",
        "--pid",
        "--ipc",
        "--fork",
        "--kill-child",
        "--propagation",
        "private",
    ]
    work = f"COMMAND={shlex.quote(command)}\n{WORK.format(root=ROOT, prefix=sys.prefix)}"
    done = subprocess.run(
        [*enter, "--mount-proc", "bash", "-c", MAKE_POD, "pod", work],
        env={"PATH": PATH, "PLACES": " ".join(writable), "PARTS": " ".join(parts)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


PATH = f"{BIN}:{os.environ['PATH']}:/usr/sbin"


@pytest.mark.release
def test_a_worker_trains_on_a_read_only_root():
    code, output = in_pod("python -m hvtrain model=mlp train.steps=2", places())
    assert code == 0, output
    assert output.count("Read-only file system") == 4, output
    assert "results in /home/hvtrain/runs/" in output


@pytest.mark.nightly
def test_a_drained_worker_has_trained_and_saves_before_it_goes():
    (container,) = worker_pod()["containers"]
    drain = shlex.join(container["lifecycle"]["preStop"]["exec"]["command"])
    code, output = in_pod(f"bash -c {shlex.quote(DRAINED.format(drain=drain))}", places())
    assert code == 75, output
    assert output.count("Read-only file system") == 4, output
    assert "stopped by SIGUSR1" in output and "\ndrained\n" in output, output


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("folder", "message"), [("/tmp", "mktemp: failed"), (HOME, "cannot be written: Read-only file")]
)
def test_each_place_is_needed(folder, message):
    """The test above can fail: without the host key's folder no worker starts, and without a home no run."""
    writable = [other for other in places() if other != folder]
    assert len(writable) == len(places()) - 1
    code, output = in_pod("python -m hvtrain model=mlp train.steps=2", writable)
    assert code != 0
    assert message in output, output
