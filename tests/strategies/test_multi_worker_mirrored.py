"""strategy=multi_worker_mirrored: what is refused, workers that are killed, two hosts. Runs: test_tf_distribute.py."""

import re
import signal
import time

import pytest

from hvtrain.errors import ConfigError
from hvtrain.strategies.mirrored import MultiWorkerMirroredStrategy, join_cluster
from lab import Lab, needs_lab
from launching import finish, run, start, train
from ranks import MARK, rank_processes, send

OURS = ["strategy=multi_worker_mirrored"]


def test_settings_are_refused_before_it_starts(monkeypatch):
    with pytest.raises(
        ConfigError, match=r"strategy.communication=mpi is not one of auto, ring, nccl"
    ):
        MultiWorkerMirroredStrategy(communication="mpi")
    with pytest.raises(
        ConfigError, match=r"strategy=multi_worker_mirrored and comm.tune=true exclude each other"
    ):
        MultiWorkerMirroredStrategy().expect_restart()
    monkeypatch.setenv("TF_CONFIG", "{}")
    with pytest.raises(
        ConfigError, match=r"TF_CONFIG is set, but .* builds its cluster from the launcher's ranks"
    ):
        join_cluster.__wrapped__(0, 2, "auto")


LATE = """
import tensorflow as tf
import hvtrain.keras as hvd
from hvtrain.errors import RankError
from hvtrain.strategies.mirrored import MultiWorkerMirroredStrategy
hvd.init()
tf.zeros(1)
try:
    MultiWorkerMirroredStrategy().start()
except RankError as error:
    print(error)
hvd.shutdown()
"""


@pytest.mark.distributed
@pytest.mark.nightly
def test_it_must_start_before_tensorflow_has_devices(tmp_path):
    output = run("mpirun", 2, "python", "-c", LATE, cwd=tmp_path)[1]
    assert (
        output.count(
            "strategy=multi_worker_mirrored must start before TensorFlow has initialized its devices"
        )
        == 2
    )


@pytest.mark.distributed
@pytest.mark.parametrize(
    "victim",
    [pytest.param(0, marks=pytest.mark.nightly), pytest.param(1, marks=pytest.mark.release)],
)
def test_a_worker_is_killed_and_the_run_goes_on_from_its_checkpoint(tmp_path, victim):
    """Rank 0 also holds the service that TensorFlow's workers register with."""
    line = [f"run.dir={tmp_path / 'run'}", "model=mlp", "checkpoint.every_steps=10", *OURS]
    mark = f"{tmp_path}"
    process = start(
        "gloo",
        2,
        "python",
        "-m",
        "hvtrain",
        "train.epochs=9000",
        *line,
        cwd=tmp_path,
        **{MARK: mark},
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "run/checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert send(rank_processes(mark)[victim], signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 75
    assert re.search(rf"hvtrain: FIRST FAILURE rank {victim} host \S+: killed by SIGKILL", output)
    assert not rank_processes(mark)
    step = max(int(path.name[5:]) for path in (tmp_path / "run/checkpoints").glob("step-*"))
    code, output = train("gloo", 2, f"train.steps={step + 5}", *line, cwd=tmp_path)
    assert code == 0 and f"{step:,} of {step + 5:,} steps were done" in output


@pytest.mark.distributed
@needs_lab
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("--gloo", marks=pytest.mark.nightly),
        pytest.param("--mpi", marks=pytest.mark.release),
    ],
)
def test_workers_on_two_hosts_find_each_other(how):
    with Lab(2) as lab:
        line = [
            "-np",
            "2",
            "-H",
            "s1,s2",
            how,
            "--",
            "model=mlp",
            "train.epochs=1",
            f"run.dir={lab.home}/run",
            *OURS,
        ]
        code, output = lab.launch(*line)
    assert code == 0, output
    assert re.search(r"^devices +0 s1 CPU, 1 s2 CPU$", output, re.MULTILINE)
    assert "reductions 22 of 22 steps; weights equal on 2/2 ranks" in output
