"""A Slurm of the tests' own on two hosts of a lab: slurmctld on s1, slurmd on both, all files in one folder."""

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvtrain.launch.cluster_files import submission, write
from lab import SCRIPT, Lab, needs_lab

CONFIGURATION = """
ClusterName=tests
SlurmctldHost=s1(10.213.0.1)
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
NodeName=s1 NodeAddr=10.213.0.1 CPUs=4 State=UNKNOWN
NodeName=s2 NodeAddr=10.213.0.2 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=s1,s2 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class SlurmCluster:
    """Slurm's commands against the tests' daemons."""

    folder: Path
    lab: Lab

    def line(self, host, *command):
        """The words on a host of the lab, with what a login has there."""
        return [SCRIPT, "exec", host, "env", f"SLURM_CONF={self.folder}/slurm.conf", *command]

    @property
    def environment(self):
        return {**os.environ, "HVTRAIN_LAB": self.lab.name}

    def ask(self, *command, check=True):
        line = self.line("s1", *command)
        ran = subprocess.run(
            line, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0 or not check, f"{command}: {ran.stdout}{ran.stderr}"
        return ran.stdout + ran.stderr

    def submit(self, name, job, settings, change=("", "")):
        """Returns the number of the job. change: a text of the batch file, and its replacement."""
        (path,) = write(settings, job, self.folder / name)
        text = path.read_text()
        assert change[0] in text
        path.write_text(text.replace(*change) if change[0] else text)
        line = submission(settings, self.folder / name)
        assert "to start at" in self.ask(line[0], "--test-only", *line[1:])
        return self.ask(*line).split()[-1]

    def field(self, job_id, name):
        shown = self.ask("scontrol", "--oneliner", "show", "job", job_id)
        return next(
            entry.partition("=")[2] for entry in shown.split() if entry.startswith(f"{name}=")
        )

    def wait(self, job_id, what, seconds=400):
        """Waits until what() is true; a failure shows what the job printed."""
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, (
                f"{self.field(job_id, 'JobState')}:\n{self.printed(job_id)}"
            )
            time.sleep(0.3)

    def start_again_soon(self, job_id):
        """In place of Slurm's wait of some minutes; in the second in which a job ended, a host refuses its number."""
        self.wait(job_id, lambda: self.field(job_id, "JobState") == "PENDING")
        self.wait(
            job_id,
            lambda: (
                self.ask("scontrol", "update", f"JobId={job_id}", "StartTime=now+10", check=False)
                == ""
            ),
        )

    def printed(self, job_id):
        path = self.folder / f"out-{job_id}.txt"
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    missing = [
        name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)
    ]
    if missing:
        pytest.skip(f"no {missing[0]} here (apt-get install slurmctld slurmd slurm-client munge)")
    if needs_lab.args[0]:
        pytest.skip(needs_lab.kwargs["reason"])
    with Lab(2) as lab:
        cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), lab)
        folder = cluster.folder
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        munge = [f"--{name}={folder}/munge.{file}" for name, file in MUNGE_FILES.items()]
        start(cluster, "s1", "munged", "--force", "--foreground", *munge)
        start(cluster, "s1", "slurmctld", "-D")
        for host in ("s1", "s2"):
            start(cluster, host, "slurmd", "-D")
        deadline = time.monotonic() + 200
        while cluster.ask("sinfo", "-h", "-N", "-o", "%T", check=False).split() != ["idle"] * 2:
            logs = "\n".join(path.read_text() for path in sorted(folder.glob("*.out")))
            assert time.monotonic() < deadline, f"Slurm's daemons did not come up: {logs[-3000:]}"
            time.sleep(0.5)
        # The daemons and all that they started end with their hosts.
        yield cluster


MUNGE_FILES = {
    "key-file": "key",
    "socket": "socket",
    "pid-file": "pid",
    "log-file": "log",
    "seed-file": "seed",
}


def start(cluster, host, *command):
    with (cluster.folder / f"{command[0]}-{host}.out").open("ab") as log:
        subprocess.Popen(
            cluster.line(host, *command),
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    time.sleep(0.5)
