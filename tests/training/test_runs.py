"""The same command under each launcher and under none: what it trains, prints and writes."""

import csv
import json
import re
import zipfile

import keras
import numpy as np
import pytest

from hvtrain.data.sources import built_in
from launching import ROOT, train, without_hvtrain
from more_metrics import MORE_METRICS

pytestmark = pytest.mark.distributed

# Notes every file that Python opens for writing inside the run folder, by rank.
WATCH = """
import os, sys
folder, rank = os.environ.get("WATCHED"), os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", "0"))
if folder:
    notes = os.open(f"{folder}.rank{rank}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    def hook(event, args):
        if event == "open" and isinstance(args[0], (str, bytes)) and str(args[0]).startswith(folder + "/"):
            if args[2] & (os.O_WRONLY | os.O_RDWR):
                os.write(notes, (str(args[0]) + chr(10)).encode())
        elif event in ("os.mkdir", "os.rename", "os.remove") and str(args[0]).startswith(folder + "/"):
            os.write(notes, (str(args[0]) + chr(10)).encode())
    sys.addaudithook(hook)
"""


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """The README's first command: the defaults on two ranks."""
    folder = tmp_path_factory.mktemp("default")
    (folder / "sitecustomize.py").write_text(WATCH)
    run = folder / "run"
    arguments = [
        f"run.dir={run}",
        "profile.timeline=true",
        # Within an interval of calls (20 steps), which ends after the epoch (22 steps) does.
        "profile.first_step=24",
        "profile.noise_scale_every=2",
        "run.report=true",
    ]
    code, output = train(
        "mpi", 2, *arguments, cwd=folder, cold=True, WATCHED=str(run), PYTHONPATH=str(folder)
    )
    assert code == 0, output
    return run, output


def test_defaults_reach_97_percent(default_run):
    result = json.loads((default_run[0] / "result.json").read_text())
    assert result["test_accuracy"] >= 0.97
    assert result["num_ranks"] == 2
    assert result["global_batch"] == 64
    assert result["num_parameters"] == 53_002
    assert result["num_steps"] == 12 * (718 // 32)
    assert result["reductions"] == result["num_steps"], "one for each step, counted in the graph"
    assert result["examples_per_second"] == pytest.approx(64 / result["step_seconds"])
    assert result["test_loss"] > 0


def test_history_has_a_row_for_each_epoch(default_run):
    with (default_run[0] / "history.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["epoch"]) for row in rows] == list(range(1, 13))
    assert [int(row["step"]) for row in rows] == [22 * epoch for epoch in range(1, 13)]
    assert float(rows[-1]["accuracy"]) > float(rows[0]["accuracy"])
    assert float(rows[-1]["learning_rate"]) == pytest.approx(0.002)


def test_the_gradient_noise_scale_is_in_history_report_and_the_last_lines(default_run):
    folder, output = default_run
    with (folder / "history.csv").open() as stream:
        scales = [float(row["noise_scale"] or "nan") for row in csv.DictReader(stream)]
    assert 0 < scales[-1] < 1e6
    # 64 examples of the joint batch, 32 of a rank's.
    share = (scales[-1] + 32) / (scales[-1] + 64)
    said = f"gradient noise scale: {scales[-1]:,.0f} examples; an example in the joint batch of 64 makes {share:.0%} of"
    assert said in output, output
    assert (
        f"{scales[-1]:,.0f}"
        in (folder / "report.html").read_text().partition("gradient noise scale")[2]
    )


def test_rank_0_alone_speaks_and_says_all_that_matters(default_run):
    output = default_run[1]
    for expected in [
        r"ranks +2 \(Horovod on MPI\)",
        r"devices +0-1 \S+ CPU",
        r"53,002 parameters",
        r"digits: 1,437 train, 360 test",
        r"classes +10, 10% each\n",
        r"2 x 32 = 64",
        r"0.001 x 2 = 0.002 \(base x linear scale\)",
        r"264 \(22 per epoch\)",
        r"left out +29 of 1,437 examples \(2%\), different ones in each epoch",
        r"Epoch 3/12: 22/22 steps, .*; 25% of the run, \d+ s left\n",
        r"Epoch 12/12: 22/22 steps, [\d.]+ ms/step, accuracy 0\.9\S+ loss 0\.\S+ noise_scale \S+ [\d,]+ examples/s; ",
        r"test: test_loss 0\.\d+, test_accuracy 0\.9\d+",
        r"results in ",
    ]:
        assert re.search(expected, output), expected
    assert "[1,1]<stdout>" not in output
    assert not re.search("oneDNN|cuda|WARNING|Traceback", output, re.IGNORECASE)


def test_a_run_says_where_its_time_goes(default_run):
    run, output = default_run
    split = json.loads((run / "result.json").read_text())["split"]
    parts = [split[f"{name}_seconds"] for name in ("data", "compute", "communication")]
    assert all(seconds > 0 for seconds in parts)
    own = (split["data_seconds"] + split["compute_seconds"]) / sum(parts)
    assert split["efficiency"] == pytest.approx(own, abs=1e-3)
    assert split["slowest_rank"] in (0, 1) and split["slowest_seconds"] >= split["median_seconds"]
    assert re.search(
        r"a step: [\d.]+ ms = data [\d.]+, compute [\d.]+, communication [\d.]+ \(efficiency \d+%\)",
        output,
    )


@pytest.mark.nightly
def test_work_of_a_single_thread_is_not_taken_for_a_wait_for_data(tmp_path):
    """It may do what a batch is for before it reads the clock, were it not held back."""
    arguments = [
        "model=cnn",
        "dataset=synthetic",
        "dataset.image_shape=[28,28,1]",
        "train.steps=60",
        "train.batch_size=16",
    ]
    threads = {"TF_NUM_INTEROP_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
    code, output = train(
        "mpirun", 2, *arguments, f"run.dir={tmp_path / 'run'}", cwd=tmp_path, **threads
    )
    assert code == 0, output
    split = json.loads((tmp_path / "run/result.json").read_text())["split"]
    assert split["data_seconds"] < split["compute_seconds"] / 2


def test_the_timeline_is_told_in_words(default_run):
    run, output = default_run
    steps = re.search(r"traced (\d+) steps in \S+/profile;", output)
    assert steps and 20 <= int(steps[1]) < 40, "profile.steps, or a few more"
    for activity in (
        r"waiting until all ranks have their gradients",
        r"transfer and sum",
        r"Conv2DBackpropFilter",
    ):
        assert re.search(rf"[\d.]+ ms +{activity}", output), activity
    assert (run / "profile/horovod.json").stat().st_size > 1000
    assert list((run / "profile").rglob("*.xplane.pb"))


def test_rank_0_alone_writes(default_run):
    run, _ = default_run
    written = [sorted(set(run.with_name(f"run.rank{rank}").read_text().split())) for rank in (0, 1)]
    own = {str(run / "logs"), str(run / "logs" / "rank-0001.log")}
    assert set(written[1]) <= own, "rank 1 writes its own log and nothing else"
    assert str(run / "history.csv") in " ".join(written[0]).replace(
        ".tmp-history.csv", "history.csv"
    )
    assert any("checkpoints" in path for path in written[0])
    assert (run / "logs" / "rank-0000.log").exists()


COUNT_CORRECT = """
import keras, numpy as np
data = np.load("digits.npz")
logits = keras.models.load_model("model.keras").predict(data["x"], verbose=0)
print((logits.argmax(axis=1) == data["y"]).sum())
"""


def test_the_trained_model_loads_in_plain_keras(default_run):
    images, labels = built_in.read_digits()
    is_test = built_in.stratified_mask(labels, 360)
    np.savez(default_run[0] / "digits.npz", x=images[is_test], y=labels[is_test])
    correct = int(without_hvtrain(COUNT_CORRECT, cwd=default_run[0]))
    result = json.loads((default_run[0] / "result.json").read_text())
    assert correct == pytest.approx(result["test_accuracy"] * 360, abs=1e-3), "to the last example"
    description = json.loads((default_run[0] / "model.json").read_text())
    assert description["class_names"] == list("0123456789") and description["input"]["range"] == [
        0,
        16,
    ]
    with zipfile.ZipFile(default_run[0] / "model.keras") as archive:
        assert b"hvtrain" not in archive.read("config.json")
        assert b"adam" not in archive.read("model.weights.h5")


OWN = ["--config-dir", str(ROOT / "tests/support/own/conf"), "model=tiny", "dataset=leaves"]
OWN_PATH = str(ROOT / "tests/support/own")


def record_of(two_ranks, name):
    """Rank 0's record of one of the shared runs."""
    _, ranks, output = two_ranks
    assert "record" in ranks[0][name], f"{ranks[0][name]}\n{output}"
    return ranks[0][name]["record"]


def rows_of(run):
    with (run / "history.csv").open() as stream:
        return list(csv.DictReader(stream))


def weights_of(run):
    return np.concatenate(
        [array.ravel() for array in keras.models.load_model(run / "model.keras").get_weights()]
    )


@pytest.mark.nightly
def test_uneven_shards_give_the_single_process_metrics(two_ranks, tmp_path):
    """A user's own model and data set; 51 test and 51 validation examples over 2 ranks and over 1."""
    arguments = [
        *OWN,
        "train.steps=1",
        "optimizer.learning_rate=1e-12",
        "dataset.num_validation=51",
        *MORE_METRICS,
    ]
    code, output = train(None, 1, *arguments, "run.dir=run", cwd=tmp_path, PYTHONPATH=OWN_PATH)
    assert code == 0, output
    alone = json.loads((tmp_path / "run" / "result.json").read_text())
    together = record_of(two_ranks, "uneven")
    assert together["metrics"] == pytest.approx(alone["metrics"], rel=1e-6)
    assert {"test_top2", "test_iou"} <= together["metrics"].keys()
    for ours, expected in (
        (together, alone),
        (rows_of(two_ranks[0] / "uneven")[0], rows_of(tmp_path / "run")[0]),
    ):
        for name in (
            "test_loss",
            "test_accuracy",
            "val_loss",
            "val_accuracy",
            "val_top2",
            "val_iou",
        ):
            assert name not in expected or float(ours[name]) == pytest.approx(
                float(expected[name]), rel=1e-6
            )


@pytest.mark.nightly
def test_accumulated_batches_are_one_batch(two_ranks):
    """2 ranks x 2 batches of 16 are 2 ranks x 32: half as many reductions as batches, the same weights."""
    for name, times in (("one batch", 1), ("two batches", 2)):
        record = record_of(two_ranks, name)
        assert (record["reductions"], record["num_steps"]) == (44, 44 * times), (
            "of those that change weights"
        )
    ours, expected = (weights_of(two_ranks[0] / name) for name in ("two batches", "one batch"))
    assert ours == pytest.approx(expected, abs=1e-5)


@pytest.mark.nightly
def test_xla_compiles_all_but_the_reduction(two_ranks):
    """The same training on two ranks with XLA and without, to rounding, with all reductions and the loss scale."""
    folder, _, output = two_ranks
    assert (
        record_of(two_ranks, "plain")["reductions"]
        == record_of(two_ranks, "xla")["reductions"]
        == 44
    )
    assert "Compiled cluster using XLA" in output
    assert weights_of(folder / "xla") == pytest.approx(weights_of(folder / "plain"), abs=5e-3)


@pytest.mark.nightly
def test_ranks_agree_on_one_run_folder(two_ranks):
    """Without run.dir each rank's clock would give another name."""
    folder, _, output = two_ranks
    (run,) = (folder / "runs").iterdir()
    assert {path.name for path in (run / "logs").iterdir()} == {"rank-0000.log", "rank-0001.log"}
    assert re.search(r"step 3: val_loss", output) and re.search(r"step 6: val_loss", output)
    assert json.loads((run / "result.json").read_text())["num_steps"] == 7


@pytest.mark.nightly
def test_checkpoints_by_the_clock_and_the_best(two_ranks):
    """By the chief's clock, on all ranks at the same steps; the best by a metric stays when newer ones come."""
    record_of(two_ranks, "clock")
    run = two_ranks[0] / "clock"
    losses = {int(row["step"]): float(row["val_loss"]) for row in rows_of(run)}
    best = json.loads((run / "checkpoints" / "best.json").read_text())
    assert best["value"] == min(losses.values()) == losses[best["step"]]
    kept = {path.name for path in (run / "checkpoints").glob("step-*")}
    assert kept == {f"step-{best['step']:08d}", f"step-{max(losses):08d}"}
