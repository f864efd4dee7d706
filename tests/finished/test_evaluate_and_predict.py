"""Two ranks give of a finished run what one gives: metrics, and each example's prediction once and in order."""

import csv
import json
import re
import sys

import numpy as np
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from finished_runs import on_two_ranks
from hvtrain.core.topology import Topology
from hvtrain.data.sources.built_in import digits
from hvtrain.data.sources.table import Table
from hvtrain.errors import ConfigError
from hvtrain.finished.commands import evaluate, predict
from hvtrain.finished.outputs import ProgressLines, writer_for
from tiers import with_nightly

pytestmark = pytest.mark.distributed

TRAIN = [
    "dataset=digits",
    "dataset.num_validation=61",
    "dataset.num_test=361",
    "model=mlp",
    "train.epochs=3",
]
SHAPES = [
    "dataset=shapes",
    "dataset.image_shape=[24,24,3]",
    "dataset.num_train=64",
    "dataset.num_validation=0",
]
PIXELS = [*SHAPES, "dataset.num_test=7", "task=segmentation", "model._target_=own_pixels.model"]
TABLE = [
    "dataset=table",
    "dataset.file=diabetes",
    "dataset.target=target",
    "task=regression",
    "model=mlp",
]
LAST = ["run=digits", "checkpoint=last"]
SMALL = ["train.evaluation_batch_size=32"]
PIXEL_MODEL = """
import keras

def model(image_shape, num_outputs, **_):
    layers = [keras.Input(image_shape), keras.layers.Conv2D(8, 3, padding="same", activation="relu")]
    return keras.Sequential([*layers, keras.layers.Conv2D(num_outputs, 1)])
"""
TASKS = [
    ["digits", "train", *TRAIN, "train.ema=0.9", "run.dir=digits"],
    ["second epoch", "mark", "digits", "42"],
    ["best", "evaluate", "run=digits", "split=validation", *SMALL, "--output", "best.json"],
    ["last", "evaluate", *LAST, "--output", "last.json"],
    ["alone", "alone:evaluate", "run=digits", "split=validation", "--output", "alone.json"],
    ["predicted", "predict", *LAST, *SMALL, "--output", "predicted.parquet"],
    ["predicted alone", "alone:predict", *LAST, "--output", "alone.csv"],
    [
        "pictures",
        "predict",
        *LAST,
        "input=pictures",
        "train.evaluation_batch_size=3",
        "--output",
        "p.csv",
    ],
    ["missing", "predict", "run=digits", "input=missing"],
    ["no kind", "predict", "run=digits", "--output", "predictions.txt"],
    ["damaged", "predict", "run=digits", "input=damaged", "--output", "damaged.csv"],
]
# By default the writers below have masks, test_tasks_on_ranks.py a segmentation, and tests/data rows and skips.
NIGHTLY_TASKS = [
    ["other", "evaluate", "run=digits", "dataset=digits", "dataset.num_test=100", "--output", "other.json"],
    ["skipping", "predict", *LAST, *SMALL, "data.on_error=skip", "--output", "skipping.csv"],
    ["array", "predict", *LAST, "input=digits.npy", *SMALL, "--output", "array.csv"],
    ["table", "train", *TABLE, "train.epochs=2", "run.dir=table"],
    ["rows", "predict", "run=table", "input=rows.csv", "train.evaluation_batch_size=3", "--output", "rows_out.csv"],
    ["rows of test", "predict", "run=table", "split=test", "--output", "rows_test.csv"],
    ["other task", "predict", "run=table", "input=pictures", "--output", "other task.csv"],
    ["pixels", "train", *PIXELS, "train.epochs=2", "run.dir=masks_run"],
    ["masks", "predict", "run=masks_run", "--trust", "train.evaluation_batch_size=2", "--output", "masks"],
    ["masks alone", "alone:predict", "run=masks_run", "--trust", "--output", "masks_alone"],
]  # fmt: skip


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    source = digits(361, 61)
    raw = source.parts()["test"].elements[0][:7]
    np.save(folder / "digits.npy", raw[..., 0])
    for kind in ("pictures", "damaged"):
        (folder / kind / "a").mkdir(parents=True)
        for number, pixels in enumerate(raw):
            Image.fromarray(pixels[..., 0].astype("uint8")).save(folder / kind / f"a/{number}.png")
    (folder / "damaged/a/5.png").write_bytes(b"no image")
    (folder / "own_pixels.py").write_text(PIXEL_MODEL)
    rows = Table().raw_examples("test", Topology(), 10)
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({name: value[0] for name, value in row.items()} for row in rows)
    return folder, on_two_ranks(folder, *TASKS, *(NIGHTLY_TASKS if with_nightly(request) else []))


def numbers(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_command_did_its_work(results):
    refused = {"missing", "no kind", "damaged", "other task"} & results[1].keys()
    assert {name for name, result in results[1].items() if result["error"]} == refused


def test_metrics_of_two_ranks_are_those_of_one_and_of_the_run(results):
    folder, printed = results
    best, last, alone = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("best", "last", "alone")
    )
    result = json.loads((folder / "digits/result.json").read_text())
    tested = {f"test_{name}": value for name, value in last["metrics"].items()}
    assert tested == pytest.approx(result["metrics"], rel=1e-5), (
        "with the averages of train.ema, from the checkpoint"
    )
    second = numbers(folder / "digits/history.csv")[1]
    assert second["step"] == "42" and best["checkpoint"] == "step-00000042"
    validated = {name: float(second[f"val_{name}"]) for name in best["metrics"]}
    assert best["metrics"] == pytest.approx(validated, rel=1e-5)
    assert alone["metrics"] == pytest.approx(validated, rel=1e-5), (
        "61 examples, an odd one on the first rank"
    )
    assert last["examples"] == 361 and best["examples"] == alone["examples"] == 61
    assert "361 test examples of digits: loss" in printed["last"]["printed"]


@pytest.mark.nightly
def test_other_data_is_evaluated_with_its_own_size(results):
    assert json.loads((results[0] / "other.json").read_text())["examples"] == 100


def test_predictions_come_once_and_in_order(results):
    folder, printed = results
    table = parquet.read_table(folder / "predicted.parquet").to_pydict()
    targets = digits(361, 61).whole_targets()["test"]
    assert table["example"] == list(range(361)) and table["target"] == targets.tolist()
    right = np.mean(np.array(table["class"]) == targets)
    last = json.loads((folder / "last.json").read_text())["metrics"]
    assert right == pytest.approx(last["accuracy"], abs=1e-6)
    assert table["name"] == [str(number) for number in table["class"]]
    rows = np.array([table[f"p.{digit}"] for digit in range(10)])
    assert (
        rows.sum(axis=0) == pytest.approx(1, abs=1e-5)
        and rows.max(axis=0).tolist() == table["probability"]
    )
    assert "361 predictions of test of digits" in printed["predicted"]["printed"]


@pytest.mark.parametrize("other", ["alone", pytest.param("skipping", marks=pytest.mark.nightly)])
def test_one_process_and_one_that_skips_predict_the_same(results, other):
    table, same = (
        parquet.read_table(results[0] / "predicted.parquet").to_pydict(),
        numbers(results[0] / f"{other}.csv"),
    )
    assert [int(row["class"]) for row in same] == table["class"]
    assert [float(row["p.3"]) for row in same] == pytest.approx(table["p.3"], abs=1e-5)


@pytest.mark.parametrize("file", ["p.csv", pytest.param("array.csv", marks=pytest.mark.nightly)])
def test_files_are_predicted_like_the_examples_of_the_data_set(results, file):
    """Pictures, and an array of them."""
    expected = parquet.read_table(results[0] / "predicted.parquet").to_pydict()["p.3"][:7]
    rows = numbers(results[0] / file)
    assert [float(row["p.3"]) for row in rows] == pytest.approx(expected, abs=1e-5)
    if file == "p.csv":
        assert [row["file"] for row in rows] == [f"a/{number}.png" for number in range(7)]


@pytest.mark.nightly
def test_rows_are_predicted_like_those_of_the_data_set(results):
    folder, _ = results
    rows, same = numbers(folder / "rows_out.csv"), numbers(folder / "rows_test.csv")
    assert (
        len(rows) == 10
        and len(same) == 100
        and float(same[0]["prediction"]) != float(same[1]["prediction"])
    )
    for row, other in zip(rows, same):
        assert float(row["prediction"]) == pytest.approx(float(other["prediction"]), rel=1e-4)


@pytest.mark.nightly
def test_masks_become_images(results):
    folder, _ = results
    masks = [np.asarray(Image.open(path)) for path in sorted((folder / "masks").iterdir())]
    alone = [np.asarray(Image.open(path)) for path in sorted((folder / "masks_alone").iterdir())]
    assert len(masks) == len(alone) and np.array_equal(masks, alone)
    assert masks[0].ndim == 2 and len(np.unique(masks)) > 1


def test_masks_of_images_that_differ_in_their_suffix_alone_are_all_kept(tmp_path):
    files = np.array(["a/x.jpg", "a/x.png", "a/x.png.gif", "y.bmp"], object)
    writer = writer_for(tmp_path / "masks", has_masks=True)
    for at in (0, 2):
        masks = np.full((2, 2, 2), [[[at]], [[at + 1]]])
        writer.add({"example": np.arange(at, at + 2), "file": files[at : at + 2], "mask": masks})
    written = {
        str(path.relative_to(tmp_path / "masks")): path
        for path in (tmp_path / "masks").rglob("*.png")
    }
    assert sorted(written) == ["a/x.png", "a/x.png.gif.png", "a/x.png.png", "y.png"]
    assert np.asarray(Image.open(written["a/x.png.png"])).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "missing",
            "input=missing does not exist; give a folder of images or an image, a .csv or .parquet",
        ),
        (
            "no kind",
            "--output predictions.txt has an unknown suffix; give FILE.csv or FILE.parquet",
        ),
        ("damaged", r"a/5.png cannot be read as an image"),
        pytest.param(
            "other task",
            "has images, and the model does not take images",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_one_line(results, name, message):
    assert message in results[1][name]["error"]
    assert not (results[0] / f"{name}.csv").exists()


@pytest.mark.parametrize("command", [evaluate, predict])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "RUN is missing; name the folder of a run"),
        (
            ["run=nowhere"],
            "run=nowhere is not the folder of a run: it lacks config.yaml or checkpoints/; give",
        ),
        (["{run}", "split=tests"], "split=tests is not one of train, validation, test"),
        (["run={run}", "checkpoint=first"], "checkpoint=first is not one of best, last"),
        (["run={run}", "more"], "are two runs; give one of them"),
        (["run={run}", "--format", "x"], "unknown option --format"),
        (
            ["run={run}", "trian.epochs=2"],
            "unknown setting 'trian.epochs'; did you mean 'train.epochs'",
        ),
    ],
)
def test_wrong_words_are_refused_in_one_line(results, monkeypatch, command, arguments, message):
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "command",
            *(argument.replace("{run}", str(results[0] / "digits")) for argument in arguments),
        ],
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        command()


def test_a_place_for_metrics_is_looked_at_before_the_evaluation(results, monkeypatch):
    words = [str(results[0] / "digits"), "--output", str(results[0] / "nowhere/metrics.json")]
    monkeypatch.setattr(sys, "argv", ["hvtrain evaluate", *words])
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere; make it, or choose"):
        evaluate()


def test_waiting_users_see_progress(capsys):
    now = iter([0.0, 5.0, 20.0, 21.0, 40.0])
    progress = ProgressLines("predicted", 1000, is_chief=True, clock=lambda: next(now))
    for number in (100, 400, 420, 800):
        progress.update(number)
    assert capsys.readouterr().out.splitlines() == [
        "predicted 400 of 1,000 examples, 30 s left",
        "predicted 800 of 1,000 examples, 10 s left",
    ]
