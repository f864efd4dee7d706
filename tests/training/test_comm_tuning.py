"""comm.tune=true tries settings before a run, keeps what it found, and changes no result."""

import json
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from hvtrain.core.step_plan import Share, StepPlan
from hvtrain.errors import ConfigError
from hvtrain.strategies.comm import Comm
from hvtrain.strategies.horovod import ElasticStrategy
from hvtrain.training import comm_tuning
from launching import train

WORDS = ["model=mlp", "train.epochs=2", "train.deterministic=true"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("mpi", marks=pytest.mark.nightly),
        pytest.param("gloo", marks=pytest.mark.release),
    ],
)
def test_settings_are_tried_kept_and_used_again(launcher, tmp_path):
    plain, tuned = tmp_path / "plain", tmp_path / "tuned"
    assert train(launcher, 2, *WORDS, f"run.dir={plain}", cwd=tmp_path)[0] == 0
    code, output = train(launcher, 2, *WORDS, f"run.dir={tuned}", "comm.tune=true", cwd=tmp_path)
    assert code == 0 and "comm.tune: cycle " in output, output
    kept = json.loads((tuned / "comm.json").read_text())
    cycles = {trial["cycle_ms"] for trial in kept["tried"]}
    assert {1.0, 0.1} <= cycles and kept["comm"]["cycle_ms"] in cycles
    losses = [json.loads((run / "result.json").read_text())["test_loss"] for run in (plain, tuned)]
    assert losses[0] == losses[1], (
        "the same bits, with seeds and weights as if nothing had been tried"
    )
    arguments = [*WORDS, "train.epochs=3", f"run.dir={tuned}", "comm.tune=true"]
    code, output = train(launcher, 2, *arguments, cwd=tmp_path)
    assert code == 0 and f"from {tuned}/comm.json" in output, output


def network(width):
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(width), keras.layers.Dense(2)])


def run_in(folder, restart):
    """A run that goes on with another plan, after train.resize=scale; its batches are where they begin."""
    plan = StepPlan((Share(4, 4),), 8, 0.1, 1.0, shift=10)
    return SimpleNamespace(
        config=SimpleNamespace(strategy={}),
        strategy=SimpleNamespace(comm=Comm(), restart=restart),
        folder=folder,
        plan=plan,
        batches_from=plan.position,
    )


def test_what_was_found_for_another_model_or_device_is_not_taken(tmp_path, monkeypatch):
    fastest, searched = comm_tuning.CommSettings(0.2, 4.0), []

    def search(strategy, batches, build, default, mib):
        searched.append(mib)
        return fastest, {default: 0.2, fastest: 0.1}

    monkeypatch.setattr(comm_tuning, "_search", search)
    applied = []
    run = run_in(tmp_path, lambda cycle_ms, mib: applied.append((cycle_ms, mib)))

    def searches(width):
        before = len(searched)
        comm_tuning.tune(run, lambda: network(width))
        assert applied.pop() == (0.2, 4.0)
        return len(searched) - before

    assert [searches(3), searches(3)] == [1, 0], "kept"
    assert [searches(5), searches(5), searches(3)] == [1, 0, 1], "a model of other sizes"
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [gpu])
    for name in ("NVIDIA A100", "NVIDIA H100"):
        details = {"device_name": name}
        monkeypatch.setattr(
            tf.config.experimental, "get_device_details", lambda gpu, details=details: details
        )
        assert [searches(3), searches(3)] == [1, 0], "another device"
    kept = json.loads((tmp_path / "comm.json").read_text())
    assert kept["devices"] == ["NVIDIA H100"] and kept["gradient_bytes"] == [48, 12, 24, 8]
    (tmp_path / "comm.json").write_text(
        json.dumps({name: kept[name] for name in ("comm", "hosts")})
    )
    assert searches(3) == 1, "a file without its devices"


def test_steps_of_the_first_epoch_are_timed(tmp_path, monkeypatch):
    opened = []

    def search(strategy, batches, build, default, mib):
        opened.append(batches)
        return default, {default: 0.1}

    monkeypatch.setattr(comm_tuning, "_search", search)
    comm_tuning.tune(run_in(tmp_path, lambda variables, mib: None), lambda: network(3))
    assert opened == [(0, 0)]


def test_what_it_does_not_go_with(monkeypatch):
    with pytest.raises(
        ConfigError, match=r"strategy=elastic and comm\.tune=true exclude each other"
    ):
        ElasticStrategy().expect_restart()
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "4194304")
    with pytest.raises(ConfigError, match=r"HOROVOD_FUSION_THRESHOLD=4194304 exclude each other"):
        comm_tuning.default_settings(25.0)


def test_a_cycle_time_that_is_no_number(monkeypatch):
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "fast")
    with pytest.raises(ConfigError, match="HOROVOD_CYCLE_TIME=fast is not a number; set it to"):
        comm_tuning.default_settings(25.0)


def test_all_trials_reduce_equally_often(monkeypatch):
    """With train.accumulate=4 only every fourth step reduces."""
    calls = []
    monkeypatch.setattr(comm_tuning, "make_steps", lambda *_: calls.append)
    optimizer = SimpleNamespace(rank_variables={}, gradient_accumulation_steps=4)
    trial = comm_tuning._trial(
        SimpleNamespace(optimizer=optimizer),
        SimpleNamespace(comm=Comm(), marks=None),
        tf.data.Dataset.from_tensors(0),
    )
    trial()
    assert len(calls) == 4 and not any(num_steps % 4 for num_steps in calls), calls
