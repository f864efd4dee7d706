"""strategy=multi_worker_mirrored on two real workers: exact, the same as Horovod, resumed, and ended in time."""

import json
import re
import signal
import time

import numpy as np
import pytest

import replica_cases
from hvtrain.errors import ConfigError
from hvtrain.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy, join_cluster
from lab import Lab, needs_lab
from launching import finish, many_runs, run, start, train, without_hvtrain
from ranks import MARK, rank_processes, send
from replica_cases import JOINT, SAME, SAVED, TEXT, arrays, largest_gap, runs_of

pytestmark = pytest.mark.timeout(600)  # Some forty runs in one start.

OURS = ["strategy=multi_worker_mirrored"]
LOADED = """
import json, keras
model = keras.models.load_model("digits/model.keras")
print(type(model).__module__.split(".")[0], model.optimizer)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    (folder / "text.txt").write_text(TEXT)
    runs = runs_of(OURS, "ForgetfulWorkers", "data.uneven=pad")
    runs |= {f"horovod {name}": [*own, *SAVED, "train.steps=6"] for name, own in SAME.items()}
    runs["horovod digits"] = replica_cases.DIGITS
    runs |= {"to horovod": [*runs["norm"], "train.steps=5"], "to horovod/again": runs["horovod norm"]}
    runs |= {"from horovod": [*runs["horovod norm"], "train.steps=5"], "from horovod/again": runs["norm"]}
    runs["nan"] = ["model.nan_on_rank=1", "checkpoint.every_steps=2", *OURS]
    runs["stops"] = ["train.epochs=3", "+callbacks.s={_target_: leaves.Stops, rank: 1, batch: 2}", *OURS]
    return many_runs("mpirun", 2, runs, folder, timeout=560)[0], folder


def record(found, name):
    return found[0][0][name].get("record") or pytest.fail(found[0][0][name]["error"])


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [*JOINT, "one number"])
def test_twenty_steps_equal_one_process_on_the_joint_batches(found, kind):
    """With batches that differ in size, weights, masks, clipping, rows of an Embedding and inputs by name."""
    for rank in found[0]:
        assert rank[f"joint {kind}"]["exact"] < 1e-5
        if kind in ("regression", "language", "custom"):
            assert rank[f"joint {kind}"]["uncorrected"] > 1e-4
    assert len(found[0][0][f"joint {kind}"]["sizes"][0]) == 20


@pytest.mark.distributed
def test_without_the_reduction_they_do_not(found):
    assert found[0][0]["joint forgetful"]["exact"] > 1e-3


@pytest.mark.distributed
@pytest.mark.parametrize("name", [*SAME, "digits"])
def test_a_run_gives_what_horovod_gives(found, name):
    """With dropout, batch normalization, parts at other rates, averages, half precision and mixed targets."""
    ours, theirs = record(found, name), record(found, f"horovod {name}")
    loose = name in ("half", "digits")
    assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=0.2 if loose else 1e-3)
    assert {**ours["proof"], "weight_checks": 0} == {**theirs["proof"], "weight_checks": 0}
    if not loose:
        assert largest_gap(arrays(found[1] / f"horovod {name}"), arrays(found[1] / name)) < 1e-3


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["text", "norm"])
def test_it_goes_on_in_the_middle_of_an_epoch_with_the_same_bits(found, name):
    assert record(found, f"{name} in two/again")["first_step"] == 5
    whole, resumed = arrays(found[1] / name), arrays(found[1] / f"{name} in two")
    assert whole.keys() == resumed.keys()
    assert all(np.array_equal(whole[key], resumed[key], equal_nan=True) for key in whole)


@pytest.mark.distributed
def test_it_goes_on_where_horovod_stopped_and_the_other_way_round(found):
    whole = arrays(found[1] / "horovod norm")
    for name in ("to horovod", "from horovod"):
        assert record(found, f"{name}/again")["first_step"] == 5
        assert largest_gap(whole, arrays(found[1] / name)) < 1e-4


@pytest.mark.distributed
def test_the_digits_are_learned_and_the_run_leaves_what_every_run_leaves(found):
    ours, theirs = (found[1] / name for name in ("digits", "horovod digits"))
    assert record(found, "digits")["test_accuracy"] > 0.95
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    assert (
        json.loads((ours / "result.json").read_text()).keys() == json.loads((theirs / "result.json").read_text()).keys()
    )
    assert (ours / "history.csv").read_text().splitlines()[0] == (theirs / "history.csv").read_text().splitlines()[0]
    assert without_hvtrain(LOADED, cwd=found[1]).split()[0] == "keras"


@pytest.mark.distributed
def test_a_gradient_that_is_not_finite_is_named_and_one_rank_stops_all(found):
    for rank in found[0]:
        assert "is not finite on rank 1; nothing of it reached the weights" in rank["nan"]["error"]
    assert [rank["stops"]["record"]["num_steps"] for rank in found[0]] == [4, 4]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("accumulates", "strategy=multi_worker_mirrored and train.accumulate exclude each other"),
        ("by xla", "strategy=multi_worker_mirrored and train.jit_compile exclude each other; leave one of them out"),
        ("own step", "needs Keras's own train_step and compute_loss, .* and OwnStep has its own train_step; choose"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(found, name, message):
    for rank in found[0]:
        assert re.search(message, rank[name]["error"])


def test_settings_are_refused_before_it_starts(monkeypatch):
    with pytest.raises(ConfigError, match=r"strategy.communication=mpi is not one of auto, ring, nccl"):
        MultiWorkerMirroredStrategy(communication="mpi")
    with pytest.raises(ConfigError, match=r"comm.tune=true tunes Horovod's reductions, which strategy=multi_worker"):
        MultiWorkerMirroredStrategy().expect_restart()
    monkeypatch.setenv("TF_CONFIG", "{}")
    with pytest.raises(ConfigError, match=r"TF_CONFIG is set, and .* builds its cluster from the launcher's ranks"):
        join_cluster.__wrapped__(0, 2, "auto")


LATE = """
import tensorflow as tf
import hvtrain.keras as hvd
from hvtrain.errors import RankError
from hvtrain.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
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
    assert output.count("strategy=multi_worker_mirrored must start before TensorFlow has initialized its devices") == 2


@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_is_killed_and_the_run_goes_on_from_its_checkpoint(tmp_path, victim):
    """Rank 0 also holds the service that TensorFlow's workers register with."""
    line = [f"run.dir={tmp_path / 'run'}", "model=mlp", "checkpoint.every_steps=10", *OURS]
    mark = f"{tmp_path}"
    process = start("gloo", 2, "python", "-m", "hvtrain", "train.epochs=9000", *line, cwd=tmp_path, **{MARK: mark})
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
@pytest.mark.nightly
@needs_lab
@pytest.mark.parametrize("how", ["--gloo", "--mpi"])
def test_workers_on_two_hosts_find_each_other(how):
    with Lab(2) as lab:
        line = ["-np", "2", "-H", "s1,s2", how, "--", "model=mlp", "train.epochs=1", f"run.dir={lab.home}/run", *OURS]
        code, output = lab.launch(*line)
    assert code == 0, output
    assert re.search(r"^devices +0 s1 CPU, 1 s2 CPU$", output, re.MULTILINE)
    assert "reductions 22 of 22 steps; weights equal on 2/2 ranks" in output
