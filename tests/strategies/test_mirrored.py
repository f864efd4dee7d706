"""strategy=mirrored with two replicas on the CPU: exact, the same as Horovod's ranks, and resumed."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf

from hvtrain.errors import ConfigError, RankError
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.mirrored import MirroredStrategy, mirrored_over
from hvtrain.strategies.replica_step import ReplicaReducer
from launching import many_runs, without_hvtrain
from replica_cases import JOINT, SAME, SAVED, TEXT, arrays, largest_gap, runs_of

pytestmark = pytest.mark.timeout(600)

OURS = ["strategy=mirrored", "strategy.num_replicas=2"]
RANKS = {
    **{f"horovod {name}": [*own, *SAVED, "train.steps=6"] for name, own in SAME.items()},
    "from horovod": [*SAME["norm"], *SAVED, "train.steps=5"],
}
LOADED = """
import keras
model = keras.models.load_model("digits/model.keras")
print(type(model).__module__.split(".")[0])
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Ranks of Horovod first: a run of theirs goes on here."""
    folder = tmp_path_factory.mktemp("replicas")
    (folder / "text.txt").write_text(TEXT)
    ranks = many_runs("mpirun", 2, RANKS, folder, timeout=560)[0][0]
    runs = runs_of(OURS, "ForgetfulReplicas")
    runs["from horovod/again"] = runs["norm"]
    runs["to horovod"] = [*runs["norm"], "train.steps=5"]
    runs["unlike"] = [*SAME["norm"], "train.batch_size=[8,24]", "train.steps=6", *OURS]
    runs["nan"] = ["model.nan_on_rank=0", "checkpoint.every_steps=2", *OURS]
    runs["pads"] = ["data.uneven=pad", *OURS]
    runs["synced"] = ["model.norm=true", "train.sync_batch_norm=true", *OURS]
    return {**ranks, **many_runs(None, 1, runs, folder, timeout=560)[0][0]}, folder


def record(found, name):
    return found[0][name].get("record") or pytest.fail(found[0][name]["error"])


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [*JOINT, "one number"])
def test_twenty_steps_equal_one_process_on_the_joint_batches(found, kind):
    """With weights, masks, clipping, rows of an Embedding, inputs by name and losses that layers add."""
    result = found[0][f"joint {kind}"]
    assert result["sizes"] == [[16] * 20]
    assert result["exact"] < 1e-5
    if kind in ("language", "custom"):
        assert result["uncorrected"] > 1e-4, "the replicas' masks and labels differ"


@pytest.mark.distributed
def test_without_the_reduction_they_do_not(found):
    assert found[0]["joint forgetful"]["exact"] > 1e-3


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["norm", "parts"])
def test_two_replicas_give_what_two_ranks_give(found, name):
    """With batch normalization, parts at other rates and averages."""
    ours, theirs = record(found, name), record(found, f"horovod {name}")
    assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-3)
    assert ours["global_batch"] == theirs["global_batch"] and ours["reductions"] == theirs["reductions"]
    assert largest_gap(arrays(found[1] / f"horovod {name}"), arrays(found[1] / name)) < 1e-3


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["text", "half", "mixed targets"])
def test_what_is_drawn_by_chance_or_rounded_differs_by_little(found, name):
    ours, theirs = record(found, name), record(found, f"horovod {name}")
    assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=0.2)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["text", "norm"])
def test_it_goes_on_in_the_middle_of_an_epoch_with_the_same_bits(found, name):
    assert record(found, f"{name} in two/again")["first_step"] == 5
    whole, resumed = arrays(found[1] / name), arrays(found[1] / f"{name} in two")
    assert whole.keys() == resumed.keys()
    assert all(np.array_equal(whole[key], resumed[key], equal_nan=True) for key in whole)


@pytest.mark.distributed
def test_it_goes_on_where_ranks_of_horovod_stopped(found):
    assert record(found, "from horovod/again")["first_step"] == 5
    assert largest_gap(arrays(found[1] / "horovod norm"), arrays(found[1] / "from horovod")) < 1e-4


@pytest.mark.distributed
@pytest.mark.nightly
def test_ranks_of_horovod_go_on_where_it_stopped(found):
    again = many_runs("mpirun", 2, {"to horovod/again": RANKS["horovod norm"]}, found[1])[0][0]["to horovod/again"]
    assert again["record"]["first_step"] == 5
    assert largest_gap(arrays(found[1] / "horovod norm"), arrays(found[1] / "to horovod")) < 1e-4


@pytest.mark.distributed
def test_the_digits_are_learned_and_plain_keras_loads_the_model(found):
    assert record(found, "digits")["test_accuracy"] > 0.95
    folder = found[1] / "digits"
    result = json.loads((folder / "result.json").read_text())
    assert (result["global_batch"], result["num_ranks"], result["num_replicas"]) == (64, 1, 2)
    assert len((folder / "history.csv").read_text().splitlines()) == 9
    assert without_hvtrain(LOADED, cwd=found[1]).strip() == "keras"


@pytest.mark.distributed
def test_unlike_batches_of_the_plan_are_cut_evenly(found):
    assert record(found, "unlike")["global_batch"] == 32


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nan", r"the gradient of step \d+ is not finite on rank 0; nothing of it reached the weights"),
        ("pads", "strategy=mirrored splits the batch of each step into 2 equal parts, and .* choose data.uneven=trim"),
        ("synced", "train.sync_batch_norm=true normalizes over ranks, and this strategy has 2 replicas in one process"),
        (
            "accumulates",
            "strategy=mirrored and train.accumulate exclude each other, since Keras accumulates in a branch",
        ),
        ("by xla", "strategy=mirrored and train.jit_compile exclude each other; leave one of them out"),
        ("own step", "needs Keras's own train_step and compute_loss, .* and OwnStep has its own train_step; choose"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(found, name, message):
    assert re.search(message, found[0][name]["error"])


def test_settings_are_refused_before_it_starts(monkeypatch):
    with pytest.raises(ConfigError, match=r"strategy.num_replicas=0 is not a whole number of 1 or more, nor null"):
        MirroredStrategy(0)
    with pytest.raises(ConfigError, match=r"comm.tune=true tunes Horovod's reductions, which strategy=mirrored does"):
        MirroredStrategy().expect_restart()
    tf.zeros(1)
    with pytest.raises(RankError, match=r"strategy=mirrored must start before TensorFlow has initialized its devices"):
        mirrored_over.__wrapped__(2)
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [gpu])
    with pytest.raises(ConfigError, match=r"strategy.num_replicas=3 exceeds the 1 visible GPU\(s\); lower it"):
        mirrored_over.__wrapped__(3)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"strategy=mirrored is one process, and the launcher started 2; start it"):
        MirroredStrategy(2).start()
    with pytest.raises(ConfigError, match=r"strategy=single is one process, .* 2; start it with python -m hvtrain, or"):
        Strategy().start_watchdog(0)


def test_what_float8_layers_exchange_is_refused():
    class Scale:
        overwrite_with_gradient = True

    with pytest.raises(ConfigError, match=r"strategy=mirrored sums what float8 layers need the maximum of; choose"):
        ReplicaReducer(strategy="mirrored", num_replicas=2)([tf.ones(1)], [Scale()])
