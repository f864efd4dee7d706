"""A signal to one rank: all ranks save the same step and end with 75; resumed, the run ends with the same bits."""

import os
import signal
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from launching import finish, start, train
from ranks import MARK, rank_processes, send, wait_until_gone

pytestmark = pytest.mark.distributed

# 22 steps an epoch.
WORDS = [
    "train.epochs=10",
    "train.deterministic=true",
    "dataset.shift_pixels=1",
    "schedule=cosine",
    "data.uneven=trim",
]


def arrays(run):
    folder = max((run / "checkpoints").glob("step-*"), key=lambda path: path.name)
    return load_file(folder / "state.safetensors")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    # Not mpirun, which binds each rank to one core: with another number of threads TensorFlow sums in another order.
    code, output = train("mpi", 2, *WORDS, f"run.dir={folder / 'run'}", cwd=folder)
    assert code == 0, output
    return folder / "run"


def wait_for(process, condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None, finish(process, 5)
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("launcher", "rank", "number"),
    [
        pytest.param("mpi", 1, signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param("gloo", 0, signal.SIGTERM, marks=pytest.mark.release),
    ],
)
def test_a_signal_to_one_rank_saves_all(launcher, rank, number, uninterrupted, tmp_path):
    run, mark = tmp_path / "run", f"preemption-{os.getpid()}-{launcher}"
    line = ["python", "-m", "hvtrain", *WORDS, f"run.dir={run}"]
    process = start(launcher, 2, *line, cwd=tmp_path, **{MARK: mark})
    wait_for(process, lambda: (run / "checkpoints" / "step-00000044").exists())
    assert send(rank_processes(mark)[rank], number)
    output = finish(process)
    assert process.returncode == 75, output
    assert f"stopped by {number.name} to rank {rank} on" in output
    assert not wait_until_gone(mark, 30)
    assert not (run / "result.json").exists()
    code, output = train(launcher, 2, *WORDS, f"run.dir={run}", cwd=tmp_path)
    assert code == 0, output
    ours, whole = arrays(run), arrays(uninterrupted)
    assert [key for key in ours if not np.array_equal(ours[key], whole[key])] == []
    assert len(ours) == len(whole)
