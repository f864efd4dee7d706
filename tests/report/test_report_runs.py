"""The report of real runs on two ranks: of each kind of task, resumed, and switched off."""

import csv
import json

import pytest

from hvtrain.report.run_files import read_run
from launching import many_runs

# By default tasks/test_review.py holds what a task shows, and report/test_page.py how the page shows it.
pytestmark = [pytest.mark.distributed, pytest.mark.nightly]

TEXT = "\n\n".join(f"{i}: " + " ".join(f"{i * j % 17:04b}" for j in range(40)) for i in range(24))
REPORTED = ["run.report=true", "train.epochs=2"]
SHAPES = [
    "dataset=shapes",
    "dataset.image_shape=[32,32,3]",
    "dataset.num_train=16",
    "dataset.num_test=6",
]
RUNS = {
    "digits": ["dataset=digits", "model=mlp", "train.batch_size=64", "train.steps=14", *REPORTED],
    "digits/again": [
        "dataset=digits",
        "model=mlp",
        "train.batch_size=64",
        "train.steps=22",
        "run.report=true",
    ],
    "table": ["task=regression", "dataset=table", "model=mlp", *REPORTED],
    "off": ["train.epochs=1"],
    "shapes": [
        *(
            "task=segmentation",
            *SHAPES,
            "dataset.num_validation=4",
            "train.batch_size=4",
            *REPORTED,
        ),
        *(
            "model._target_=kinds.model",
            "++model.kind=segmentation",
        ),  # It sees one pixel at a time.
    ],
    "text": [
        *(
            "task=language",
            "dataset=text",
            "dataset.file=text.txt",
            "dataset.vocabulary_size=280",
            "dataset.length=16",
        ),
        *("model=transformer", "model.blocks=1", "model.width=16", *REPORTED),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    (folder / "text.txt").write_text(TEXT)
    results, output = many_runs("mpirun", 2, RUNS, folder, timeout=560)
    for name in RUNS:
        assert all("record" in rank[name] for rank in results), (name, results[0][name])
    assert "report.html is not written" not in output and "will show no predictions" not in output
    return folder


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("digits", ["matrix", "pictures"]),
        ("table", ["scatter", "scatter", "table"]),
        ("shapes", ["table", "pictures"]),
        ("text", ["texts"]),
    ],
)
def test_a_run_ends_with_a_page_of_what_its_task_shows(folder, name, kinds):
    run = read_run(folder / name)
    text = (folder / name / "report.html").read_text()
    assert [figure["kind"] for figure in run.review] == kinds
    assert (folder / name / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert 'class="state finished"' in text and "Weights equal on 2/2 ranks" in text
    assert all(figure["title"] in text for figure in run.review)
    assert ">rank 0<" in text and ">rank 1<" in text


def test_the_confusion_matrix_counts_the_whole_test_data_exactly(folder):
    run = read_run(folder / "digits")
    counts = run.review[0]["counts"]
    right = sum(counts[label][label] for label in range(10))
    assert sum(map(sum, counts)) == 360
    assert right / 360 == pytest.approx(run.result["metrics"]["test_accuracy"], abs=1e-6)


def test_ranks_csv_has_the_work_of_each_rank_in_each_epoch(folder):
    with (folder / "digits" / "ranks.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    with (folder / "digits" / "history.csv").open() as stream:
        epochs = [row["epoch"] for row in csv.DictReader(stream)]
    assert [row["epoch"] for row in rows] == epochs == ["1", "2"]
    assert all(0 < float(row[f"rank_{rank}"]) < 60 for row in rows for rank in (0, 1))


def test_each_start_is_noted(folder):
    starts = json.loads((folder / "digits" / "starts.json").read_text())
    assert [(start["first_step"], start["num_steps"]) for start in starts] == [(0, 14), (14, 22)]
    assert starts[0]["num_ranks"] == 2 and sum(starts[0]["hosts"].values()) == 2
    assert starts[0]["best"] == "val_accuracy" and starts[0]["described"]["dataset"].startswith(
        "digits: "
    )
    text = (folder / "digits" / "report.html").read_text()
    assert "<td>2</td><td>14</td><td>22</td>" in text and "train.steps" in text, (
        "the restart and what it changed"
    )


def test_a_run_may_leave_out_the_report(folder):
    names = {path.name for path in (folder / "off").iterdir()}
    assert names >= {"starts.json", "result.json"}
    assert not names & {"report.html", "curves.png", "review.json"}
