"""What is proved in every run, how uneven work is shared, and what is decided together: each is broken, and seen.

Many runs share one start of the ranks, see workers/runs.py; each rank reports what it saw.
"""

import json
import re

import keras
import numpy as np
import pytest

import hvtrain
from hvtrain.core.topology import Topology
from launching import ROOT, many_runs
from run_results import different, error, history, record, state, steps

pytestmark = pytest.mark.distributed

DISAGREES = "+callbacks.a={_target_: leaves.Disagrees}"
# Keras alone would not know that my_loss is better if it is lower.
EARLY = "{_target_: keras.callbacks.EarlyStopping, monitor: my_loss, patience: 2, restore_best_weights: true}"
PLATEAU = "{_target_: keras.callbacks.ReduceLROnPlateau, monitor: mine, mode: min, patience: 1, factor: 0.5}"
SCHEDULER = "{_target_: keras.callbacks.LearningRateScheduler, schedule: {_target_: leaves.halved, _partial_: true}}"
# With moving statistics, of which each rank has its own between checkpoints.
RATES = ["train.epochs=4", "model.norm=true", "checkpoint.every_steps=14", DISAGREES,
         f"+callbacks.scheduler={SCHEDULER}", f"+callbacks.plateau={PLATEAU}"]  # fmt: skip
STOPS_EARLY = ["train.epochs=8", DISAGREES, f"+callbacks.stop={EARLY}", "checkpoint.best=loss", "checkpoint.keep=3",
               "+tracker.own._target_=leaves.Notes"]  # fmt: skip
CASES = {
    "plain": ["train.epochs=2", "guard.every=5"],
    "plain/batch": ["train.epochs=3", "train.batch_size=16"],
    "plain/model": ["train.epochs=3", "model.units=9"],
    "plain/seed": ["train.epochs=2", "seed=9"],
    "plain/fewer": ["train.epochs=1", "optimizer.learning_rate=0.5"],
    "few": ["dataset.num_examples=1"],
    "blind": ["callbacks=early_stopping"],
    # 6 steps an epoch.
    "weight": ["train.epochs=3", "guard.every=5", "checkpoint.every_steps=3",
               "+callbacks.p={_target_: leaves.Perturbs, rank: 1, batch: 3}"],
    "slot": ["optimizer=momentum", "checkpoint.every_steps=4",
             "+callbacks.p={_target_: leaves.Perturbs, rank: 0, batch: 5, where: slot}"],
    "nan": ["model.nan_on_rank=1", "checkpoint.every_steps=2"],
    "nan16": ["model.nan_on_rank=1", "train.precision=mixed_float16", "train.epochs=20"],
    "loss": ["model.loss_on_rank=1", "train.epochs=2"],
    "same": ["dataset.same_data=by_mistake"],
    "meant": ["dataset.same_data=meant", "train.accumulate=3", "train.epochs=2"],
    "error": ["data.uneven=error"],
    "unlike": ["train.batch_size=[24,8]", "train.epochs=1", "data.uneven=auto",
               "guard.every=0", "guard.finite=false", "guard.batches=false",
               "+callbacks.log={_target_: keras.callbacks.CSVLogger, filename: '${run.dir}/log.csv'}"],
    "numbers": ["train.batch_size=[24,8,4]"],
    "joint pad": ["data.uneven=pad", "train.epochs=2", "dataset.num_examples=201"],
    "joint unlike": ["train.batch_size=[24,8]", "train.epochs=1", "data.uneven=pad", "dataset.num_examples=201"],
    "stops": ["train.epochs=3", "+callbacks.s={_target_: leaves.Stops, rank: 1, batch: 2}",
              "+callbacks.log={_target_: keras.callbacks.CSVLogger, filename: '${run.dir}/log.csv'}"],
    "stops/again": ["train.epochs=3"],
    "early": [*STOPS_EARLY, "+callbacks.fail={_target_: leaves.FailsAtEnd}"],
    "early/again": STOPS_EARLY,
    "plateau": [*RATES, "checkpoint.best=my_loss"],
    "misspelt": ["checkpoint.best=val_acc"],
    # In the third epoch: after step 14, on which the ranks agree.
    "parts": [*RATES, "+callbacks.end={_target_: leaves.Terminates, rank: 1, epoch: 2, batch: 0}"],
    "parts/again": RATES,
    "longer": ["train.epochs=1"],
    "longer/again": ["train.epochs=2"],
    "soon": ["train.max_time=0.001s"],
    "time": ["train.epochs=4000", "train.max_time=0.7s"],
    "time/again": ["train.epochs=3"],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ranks(folder):
    results, output = many_runs("mpirun", 2, CASES, folder)
    (folder / "output.txt").write_text(output)
    return results


def same_record(ranks, name):
    """The record of a run; but for the times it is the same on all ranks."""
    records = [record([rank], name) for rank in ranks]
    timeless = [
        {key: each[key] for key in ("num_steps", "reductions", "proof", "metrics")}
        for each in records
    ]
    assert timeless == [timeless[0]] * len(ranks)
    return records[0]


def test_a_run_says_what_was_proved(ranks, folder):
    proof = same_record(ranks, "plain")["proof"]
    assert proof["reductions"] == proof["steps"] == 12
    # At the start, after steps 5 and 10, and before two checkpoints.
    assert proof["weight_checks"] == 5
    assert proof["examples_each_epoch"] == [384, 384]
    line = "reductions 12 of 12 steps; weights equal on 2/2 ranks (5 checks); 384 of 400 samples seen once per epoch"
    assert f"proof: {line}" in (folder / "output.txt").read_text()
    assert json.loads((folder / "plain" / "result.json").read_text())["proof"] == proof


def test_a_resume_with_other_numbers_or_another_model_is_refused_and_nothing_is_lost(ranks, folder):
    assert "was made with batch_sizes [32, 32], now [16, 16]; steps_per_epoch 6, now 12;" in error(
        ranks, "plain/batch"
    )
    assert "belongs to another model or optimizer: it holds model/0000/" in error(
        ranks, "plain/model"
    )
    assert steps(folder / "plain") == [6, 12]


def test_more_ranks_than_examples(ranks):
    assert (
        "2 ranks are more than the 1 training example of leaves can feed; use at most 1 rank"
        in error(ranks, "few")
    )


def test_guards_can_be_turned_off(ranks):
    assert same_record(ranks, "unlike")["proof"]["weight_checks"] == 0


def test_a_weight_that_changes_on_one_rank_stops_all(ranks, folder):
    """Changed after step 4; compared after step 5. The checkpoint of step 3 stays, and is the last."""
    message = error(ranks, "weight")
    assert message.startswith("RankError: weights differ after step 5: rank 1 on ")
    assert "first in hidden/kernel by up to 0.001" in message
    assert steps(folder / "weight") == [3]


def test_a_slot_that_changes_on_one_rank_is_found_before_the_checkpoint(ranks, folder):
    message = error(ranks, "slot")
    assert message.startswith(
        "RankError: weights differ before the checkpoint of step 6: rank 1 on "
    )
    assert "momentum by up to 0.001" in message
    assert steps(folder / "slot") == [4]


def test_a_gradient_that_is_not_finite_reaches_no_weight(ranks, folder):
    """NaN on rank 1 from its sixth batch on."""
    message = error(ranks, "nan")
    assert message.startswith(
        "TrainingError: the gradient of step 6 is not finite on rank 1; it did not reach"
    )
    assert message.endswith("; the same command with debug=nan names the layer")
    assert steps(folder / "nan") == [2, 4]
    assert all(np.isfinite(array).all() for array in state(folder / "nan", 4).values())


def test_under_a_loss_scale_it_is_told_when_halving_does_not_help(ranks):
    """The scale falls from 2**15 to under 1 in 16 steps."""
    assert error(ranks, "nan16").startswith(
        "TrainingError: the gradient of step 22 is not finite on rank 1;"
    )


def test_a_loss_that_is_not_finite_ends_the_epoch(ranks, folder):
    assert error(ranks, "loss").startswith(
        "TrainingError: the loss of epoch 1 is not finite (step 6) on rank 1;"
    )
    assert steps(folder / "loss") == []


def test_ranks_that_read_the_same_data_are_stopped(ranks):
    assert error(ranks, "same").startswith(
        "DataError: ranks 0 and 1 read the same first batch of leaves;"
    )


def test_unless_it_is_meant_and_accumulated_steps_are_reduced_once(ranks):
    proof = same_record(ranks, "meant")["proof"]
    assert (proof["reductions"], proof["steps"]) == (4, 4)


def test_uneven_data_can_be_refused(ranks):
    assert "data.uneven=error and 16 of 400 training examples of leaves fill no batch" in error(
        ranks, "error"
    )


def test_unlike_ranks_share_the_data_by_their_batches_and_padded_epochs_see_every_sample_once(
    ranks,
):
    unlike = same_record(ranks, "unlike")
    assert (unlike["global_batch"], unlike["num_steps"]) == (32, 13)
    assert unlike["proof"]["examples_each_epoch"] == [400]


def test_a_callback_that_only_rank_0_has_does_not_make_it_wait_for_the_others(ranks, folder):
    assert same_record(ranks, "unlike")["num_steps"] == 13
    assert len((folder / "unlike" / "log.csv").read_text().splitlines()) == 2


def test_batch_sizes_for_other_ranks_are_refused(ranks):
    assert "train.batch_size=[24, 8, 4] has 3 numbers for 2 ranks on 1 host;" in error(
        ranks, "numbers"
    )


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("joint pad", [[32, 32, 32, 5] * 2, [32, 32, 32, 4] * 2]),
        ("joint unlike", [[24] * 6 + [7], [8] * 6 + [2]]),
    ],
)
def test_uneven_batches_equal_one_process_on_the_joint_batches(ranks, name, sizes):
    """To 1e-5 in all weights; without the weights of the ranks they do not. Metrics count examples."""
    for rank in ranks:
        differences = rank[name]
        assert differences["sizes"] == sizes
        assert differences["exact"] < 1e-5
        assert differences["uncorrected"] > 1e-4
        for ours, expected in differences["metrics"].values():
            assert ours == pytest.approx(expected, rel=1e-4)


def test_a_wish_of_one_rank_stops_all_after_the_same_step(ranks, folder):
    """Wished by rank 1 after step 3; it travels with step 4. A resume does not train on."""
    assert same_record(ranks, "stops")["num_steps"] == 4
    assert steps(folder / "stops") == [4]
    rows = (folder / "stops" / "log.csv").read_text().splitlines()
    assert len(rows) == 2, "no other start ends the epoch for the callbacks"
    assert same_record(ranks, "stops/again")["num_steps"] == 4
    assert same_record(ranks, "stops/again")["reductions"] == 0


def test_a_callback_that_watches_what_is_not_there_is_refused(ranks):
    message = error(ranks, "blind")
    assert (
        "callbacks.early_stopping.monitor=val_loss needs validation data and there is none"
        in message
    )
    assert "callbacks.early_stopping.monitor=loss" in message


def test_early_stopping_is_decided_on_one_ranks_values(ranks, folder):
    """The number gets worse on rank 0 alone: epoch 1 is its best, and two later ones are not better."""
    assert same_record(ranks, "early/again")["num_steps"] == 3 * 6
    assert len(history(folder / "early")) == 3


def test_the_best_weights_are_restored_though_the_run_failed_before_its_results(
    ranks, folder, monkeypatch
):
    """They are of epoch 1, by rank 0's number; the best checkpoint, by the loss, is of epoch 3."""
    assert "the last leaf fell off" in error(ranks, "early")
    assert same_record(ranks, "early/again")["best"]["step"] == 18
    for name, step in (("model.keras", 6), ("best.keras", 18)):
        weights = keras.models.load_model(folder / "early" / name).get_weights()
        arrays = sorted(state(folder / "early", step).items())
        expected = [array for key, array in arrays if key.startswith("model/")]
        assert all(map(np.array_equal, weights, expected)), name

    monkeypatch.syspath_prepend(ROOT / "tests/support/own")
    for words, name in ((["checkpoint=last"], "model.keras"), ([], "best.keras")):
        used = hvtrain.load(folder / "early", words, trust=True).model.get_weights()
        saved = keras.models.load_model(folder / "early" / name).get_weights()
        assert all(map(np.array_equal, used, saved)), "what predict and export take"


def test_a_tracker_gets_the_end_of_a_run_that_failed_before_its_results(ranks, folder):
    lines = (folder / "early" / "notes.txt").read_text().splitlines()
    assert lines == [
        "start None", "step 6", "step 12", "step 18", "failed",
        "start leaf", "step 18", "finished",
    ]  # fmt: skip


def test_the_learning_rate_is_reduced_on_all_ranks_or_none(ranks, folder):
    """Halved before each epoch, and after epochs 2 and 3 by rank 0's numbers; rank 1 alone would not.

    The weights stayed equal.
    """
    assert same_record(ranks, "plateau")["proof"]["weight_checks"] == 6
    rates = [float(row["learning_rate"]) for row in history(folder / "plateau")]
    assert rates == pytest.approx([rates[0], rates[0] / 2, rates[0] / 8, rates[0] / 32])


def test_the_best_checkpoint_is_tested_and_saved_too(ranks, folder, monkeypatch):
    """By rank 0's number the first epoch was the best. Plain Keras finds the same figures."""
    monkeypatch.syspath_prepend(ROOT / "tests/support/own")
    from leaves import leaves

    plateau = same_record(ranks, "plateau")
    best = plateau["best"]
    assert (best["step"], best["metric"], best["value"], plateau["num_steps"]) == (
        6,
        "my_loss",
        0.0,
        24,
    )
    assert best["metrics"]["test_loss"] > plateau["test_loss"]
    assert all(rank["plateau"]["record"]["best"] == best for rank in ranks)
    source = leaves()
    images = np.stack(source.raw_examples("test", Topology(), 51))
    labels = np.concatenate(
        [y for _, y in source.evaluation("test", Topology(), 51).as_numpy_iterator()]
    )
    for name, expected in (("best.keras", best["metrics"]), ("model.keras", plateau["metrics"])):
        metrics = keras.models.load_model(folder / "plateau" / name).evaluate(
            images, labels, verbose=0, return_dict=True
        )
        assert {
            f"test_{key}": pytest.approx(value, abs=1e-6) for key, value in metrics.items()
        } == expected
    assert json.loads((folder / "plateau" / "result.json").read_text())["best"] == best
    assert same_record(ranks, "plain")["best"] is None


def test_a_best_metric_that_the_run_lacks_is_refused(ranks):
    assert (
        "checkpoint.best=val_acc is not a metric of this run; did you mean 'val_accuracy'?"
        in error(ranks, "misspelt")
    )


def test_what_callbacks_and_moving_statistics_know_survives_a_resume(ranks, folder):
    """Stopped within an epoch, which is neither begun nor ended twice.

    Each rank's BatchNormalization follows its own batches; before checkpoints they get one value.
    """
    assert [rank["parts"] for rank in ranks] == [{"stopped": 75}] * 2
    assert same_record(ranks, "parts/again")["first_step"] == 14
    rates = [
        [row["learning_rate"] for row in history(folder / name)] for name in ("parts", "plateau")
    ]
    assert rates[0] == rates[1]
    ours, uninterrupted = state(folder / "parts", 24), state(folder / "plateau", 24)
    assert any("moving_variance" in key for key in uninterrupted)
    assert different(ours, uninterrupted) == []


def test_settings_that_a_resume_changes_are_said_and_recorded(ranks, folder):
    output = (folder / "output.txt").read_text()
    assert same_record(ranks, "longer/again")["changes"] == [
        {"step": 6, "changed": {"train.epochs": [1, 2]}}
    ]
    assert re.search(r"changed +train\.epochs 1 -> 2\n", output)
    assert "seed=9, but the run in this folder began with 1, which cannot change" in error(
        ranks, "plain/seed"
    )


def test_a_finished_run_is_not_trained_again(ranks, folder):
    output = (folder / "output.txt").read_text()
    assert same_record(ranks, "plain/fewer")["reductions"] == 0
    assert "step-00000012: 12 of 12 steps were done; nothing is left to train\n" in output
    assert "optimizer.learning_rate 0.001 -> 0.5; train.epochs 2 -> 1\n" in output
    assert (
        f"had already finished and has been tested again; its results in {folder / 'plain'} stay as they are"
        in output
    )


def test_time_that_is_over_at_once_saves_at_the_first_chance(ranks, folder):
    """In the middle of the first epoch, and it is no failure."""
    stopped = same_record(ranks, "soon")["num_steps"]
    assert 0 < stopped < 6 and steps(folder / "soon") == [stopped]


def test_time_that_is_over_saves_and_goes_on_later(ranks, folder):
    stopped = same_record(ranks, "time")["num_steps"]
    assert 0 < stopped < 4000 * 6
    assert (
        f"stopped by train.max_time=0.7s after step {stopped:,} of 24,000"
        in (folder / "output.txt").read_text()
    )
    again = ranks[0]["time/again"]
    if stopped < 18:
        assert same_record(ranks, "time/again")["num_steps"] == 18
        assert [row["epoch"] for row in history(folder / "time")] == ["1", "2", "3"]
    else:
        assert again["record"]["reductions"] == 0
