"""A Slurm of the tests' own: munged, slurmctld and three slurmd on this machine, all files in one folder."""

import os
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvtrain.launching import slurm

NODE = "NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
CONFIGURATION = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait=5
ReturnToService=2
{nodes}
PartitionName=two Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=one Nodes=localhost MaxTime=INFINITE State=UP
"""


@dataclass
class Cluster:
    """Slurm's commands against the tests' daemons."""

    folder: Path

    @property
    def environment(self):
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "HOROVOD_"))
        }
        return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *words, check=True):
        ran = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0 or not check, f"{words}: {ran.stdout}{ran.stderr}"
        return ran.stdout + ran.stderr

    def submit(self, name, job, settings):
        (self.folder / name).mkdir()
        (text,) = slurm.files(job, settings).values()
        (self.folder / name / slurm.FILE).write_text(text)
        (line,) = slurm.commands(job, settings, str(self.folder / name))
        assert "to start at" in self.ask(line[0], "--test-only", *line[1:])
        return self.ask(*line).split()[-1]

    def field(self, job_id, name):
        shown = self.ask("scontrol", "--oneliner", "show", "job", job_id)
        return next(word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}="))

    def wait(self, job_id, what, seconds=180):
        """Waits until what() is true; a failure shows what the job printed."""
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"{self.field(job_id, 'JobState')}:\n{self.printed(job_id)}"
            time.sleep(0.3)

    def start_again_soon(self, job_id):
        """In place of Slurm's wait of some minutes; in the second in which a job ended, a host refuses its number."""
        self.wait(job_id, lambda: self.field(job_id, "JobState") == "PENDING")
        self.wait(
            job_id, lambda: self.ask("scontrol", "update", f"JobId={job_id}", "StartTime=now+10", check=False) == ""
        )

    def printed(self, job_id):
        path = self.folder / f"out-{job_id}.txt"
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
    if missing:
        pytest.skip(f"no {missing[0]} here (apt-get install slurmctld slurmd slurm-client munge)")
    if os.geteuid():
        pytest.skip("Slurm's daemons need root")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    folder = cluster.folder
    ports = [free_port() for _ in range(4)]
    nodes = [NODE.format(name=name, port=port) for name, port in zip(("n1", "n2", "localhost"), ports[1:])]
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, port=ports[0], nodes="\n".join(nodes)))
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    munge = [f"--{name}={folder}/munge.{file}" for name, file in MUNGE_FILES.items()]
    daemons = [["munged", "--force", "--foreground", *munge], ["slurmctld", "-D"]]
    daemons += [["slurmd", "-D", "-N", name] for name in ("n1", "n2", "localhost")]
    started = []
    try:
        for line in daemons:
            log = (folder / f"{line[0]}.out").open("ab")
            started.append(
                subprocess.Popen(line, env=cluster.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
            time.sleep(0.5)
        deadline = time.monotonic() + 60
        while cluster.ask("sinfo", "-h", "-N", "-o", "%T", check=False).split() != ["idle"] * 3:
            logs = "\n".join(path.read_text() for path in sorted(folder.glob("*.out")))
            assert time.monotonic() < deadline, f"Slurm's daemons did not come up: {logs[-3000:]}"
            time.sleep(0.5)
        yield cluster
    finally:
        cluster.ask("scancel", "--user=root", check=False)
        time.sleep(1)
        for process in reversed(started):
            process.terminate()
            process.wait(30)


MUNGE_FILES = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
