"""debug=fast, overfit, nan and profile on two ranks, in one start; and what debug= means on a command line."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError
from hvtrain.strategies.mirrored import MirroredStrategy
from hvtrain.training.callbacks.repeated_step import LayerSearch
from hvtrain.training.callbacks.run_context import Goodput, RunContext, RunReport
from launching import many_runs
from run_results import error, record

# By default test_repeated_step.py holds how gradients and losses are searched, test_runs.py what is told of a timeline,
# test_guards.py batches of unlike sizes, and test_cli.py what debug= sets.
RUNS = {
    "not learned": ["debug=overfit", "train.steps=2", "checkpoint.every_steps=1"],
    "not learned/again": ["data.one_batch=true", "train.steps=4"],
    "inputs": ["debug='nan'", "dataset.spoiled_on_rank=1"],
    "fine": ["debug='nan'", "train.steps=4"],
    "fast": [
        "debug=fast",
        "dataset.num_validation=40",
        "train.evaluation_batch_size=8",
        "run.report=true",
    ],
    "learned": [
        "debug=overfit",
        "train.steps=100",
        "optimizer.learning_rate=0.01",
        "augment=random_flip",
        "callbacks=early_stopping",
    ],
    "output": ["debug='nan'", "model.nan_on_rank=1"],
    "uneven": [
        "debug=overfit",
        "train.steps=150",
        "optimizer.learning_rate=0.01",
        "train.batch_size=[24,8]",
    ],
    "gradient": ["debug='nan'", "model.root_on_rank=1"],
    "loss": ["debug='nan'", "model.loss_on_rank=1"],
    "profile": ["debug=profile"],
}
nightly = pytest.mark.nightly


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("debug")


@pytest.fixture(scope="module")
def ranks(folder):
    results, output = many_runs("mpirun", 2, RUNS, folder, HOROVOD_TIMELINE="DYNAMIC")
    (folder / "output.txt").write_text(output)
    return results


def lines(folder, name):
    """What the run of that name printed."""
    return (
        (folder / "output.txt")
        .read_text()
        .partition(f"{folder / name}\n")[2]
        .partition(f"\n{name}: ")[0]
    )


@nightly
@pytest.mark.distributed
def test_fast_goes_through_all_parts_of_a_run(ranks, folder):
    result = record(ranks, "fast")
    assert result["num_steps"] == 2
    assert [path.name for path in (folder / "fast/checkpoints").glob("step-*")] == ["step-00000002"]
    assert (folder / "fast/report.html").exists() and (folder / "fast/model.keras").exists()
    # Two ranks have seen two batches of 8 of the 51 test examples.
    assert (result["metrics"]["test_accuracy"] * 32) % 1 == pytest.approx(0)
    assert len((folder / "fast/history.csv").read_text().splitlines()) == 2
    assert "val_loss" in (folder / "fast/history.csv").read_text()
    assert (
        "the first batches of each rank, at most 2 (train.evaluation_steps)"
        in (folder / "output.txt").read_text()
    )


@nightly
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "size"), [("learned", 64), ("uneven", 32)])
def test_overfit_says_that_one_batch_is_learned(ranks, folder, name, size):
    result = record(ranks, name)
    assert result["config"]["augment"] == result["config"]["callbacks"] == {}
    assert result["proof"]["examples_each_epoch"] == [], "nothing was seen once per epoch"
    line = rf"one batch of {size} examples was memorized: loss \S+ -> \S+, accuracy \S+ -> 1; in training, .*: \S+\n"
    assert re.search(line, lines(folder, name)), lines(folder, name)


@nightly
@pytest.mark.distributed
def test_overfit_fails_if_it_is_not(ranks):
    message = error(ranks, "not learned")
    assert message.startswith(
        "TrainingError: one batch of 64 examples was not memorized in 2 steps: "
    )
    assert message.endswith("learning rate, or raise train.steps") and "\n" not in message


@nightly
@pytest.mark.distributed
def test_a_run_that_resumes_is_not_judged(ranks, folder):
    assert record(ranks, "not learned/again")["first_step"] == 2
    assert (
        "cannot tell whether the batch was memorized, since this run was resumed"
        in (folder / "output.txt").read_text()
    )


@nightly
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "began"),
    [
        ("output", "the gradient of step 6 is not finite on rank 1; it did not reach the weights; non-finite values "
                   "first appear in the output of breaks (BreaksAtStep)"),
        ("gradient", "the gradient of step 1 is not finite on rank 1; it did not reach the weights; non-finite values "
                     "first appear in the gradient that root (Root) passes back"),
        ("inputs", "the gradient of step 3 is not finite on rank 1; it did not reach the weights; non-finite values "
                   "first appear in the inputs of the batch, in example 5 of 32"),
        ("loss", "the loss of step 1 is not finite on rank 1; non-finite values first appear in the loss itself, "
                 "after finite outputs of all layers"),
    ],
)  # fmt: skip
def test_nan_names_the_layer_the_step_and_the_rank(ranks, name, began):
    message = error(ranks, name)
    assert message.startswith(f"TrainingError: {began}, on rank 1; ")
    assert "debug=nan" not in message


@nightly
@pytest.mark.distributed
def test_nan_leaves_a_sound_run_alone(ranks):
    assert record(ranks, "fine")["num_steps"] == record(ranks, "fine")["reductions"] == 4


@nightly
@pytest.mark.distributed
def test_profile_names_its_files(ranks, folder):
    log_lines = lines(folder, "profile")
    assert f"traced 20 steps in {folder / 'profile/profile'}; " in log_lines
    (events,) = re.findall(r"(\S+horovod.json), for ui.perfetto.dev or chrome://tracing", log_lines)
    (planes,) = re.findall(r"(\S+\.xplane\.pb), for tensorboard --logdir", log_lines)
    assert Path(events).stat().st_size > 1000 and Path(planes).stat().st_size > 1000
    assert record(ranks, "profile")["num_steps"] == 40


def test_nan_needs_steps_that_a_rank_can_repeat_by_itself():
    run = SimpleNamespace(strategy=MirroredStrategy(), topology=Topology(), plan=None)
    with pytest.raises(
        ConfigError, match=r"guard.layers=true repeats .* choose strategy=horovod, elastic or"
    ):
        LayerSearch(RunContext(run, None, None, None, RunReport([], {}, Goodput.resume(None, 0.0))))
