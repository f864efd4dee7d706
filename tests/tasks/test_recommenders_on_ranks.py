"""Recommenders on real ranks: exact, learned to what is known to be reachable, and used when they are finished."""

import json

import keras
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

import launching
from finished_runs import on_two_ranks
from hvtrain.data.sources.interactions import LOYALTY, clicks

pytestmark = [pytest.mark.distributed]
SMALL = [
    "train.batch_size=16",
    "dataset.num_train=301",
    "dataset.num_test=101",
    "train.epochs=2",
    "data.uneven=pad",
]
# Adam would magnify the rounding of gradients near 0.
MOMENTUM = ["optimizer=momentum", "optimizer.learning_rate=0.05"]
PURCHASES = [
    "model=two_tower",
    "dataset=purchases",
    "task=retrieval",
    "dataset.num_users=60",
    "dataset.num_items=40",
]
CLICKS = ["model=dlrm", "dataset=clicks", "task=binary", "dataset.category_sizes=[30,20,5]"]
JOINT = {
    "joint purchases": [*PURCHASES, *SMALL, *MOMENTUM],
    "joint clicks": [*CLICKS, *SMALL, *MOMENTUM],
}
SIZES = "[100,50,20,5]"
ROWS = [
    "dataset=table",
    "dataset.file=log.parquet",
    "dataset.target=click",
    "dataset.log_numbers=true",
]
IDS = ["dataset.category_ids=true", "dataset.missing=indicator", "dataset.hash_buckets=64"]
SHARDED = ["model.shard_embeddings=[*_table]", "dataset.num_train=3000", "train.epochs=1", "dataset.num_test=129",
           "train.evaluation_batch_size=64"]  # fmt: skip
TASKS = [
    [*["clicks", "train", "experiment=dlrm", "run.dir=clicks", "run.report=false"],
     *["dataset.num_train=60000", f"dataset.category_sizes={SIZES}"]],
    ["clicks alone", "alone:evaluate", "run=clicks", "--output", "clicks.json"],
    ["purchases", "train", "experiment=two_tower", "run.dir=purchases", "run.report=false", "dataset.num_test=1001"],
    ["purchases alone", "alone:evaluate", "run=purchases", "--output", "purchases.json"],
    ["scores", "predict", "run=purchases", "--output", "scores.parquet"],
    ["table", "train", *ROWS, *IDS, "model=dlrm", "task=binary", "train.epochs=20", "optimizer=lazy_adam",
     "optimizer.learning_rate=0.01", "run.dir=table", "run.report=false", "model.shard_embeddings=[*_table]"],
    ["new rows", "predict", "run=table", "input=new.csv", "--output", "new_out.csv"],
    # Rank 0 has two batches to evaluate, rank 1 one. A rank that looks up less than the others would end in a hang.
    *([f"sharded_{run}", "train", f"experiment={experiment}", "run.report=false", f"run.dir=sharded_{run}", *SHARDED]
      for run, experiment in (("clicks", "dlrm"), ("purchases", "two_tower"))),
    ["sharded evaluated", "evaluate", "run=sharded_purchases", "--output", "two_ranks.json"],
    ["sharded scores", "predict", "run=sharded_purchases", "--output", "two_ranks.parquet"],
    ["no ids", "train", "dataset=table", "dataset.file=wine", "model=dlrm", "run.dir=wrong"],
    ["no catalogue", "train", "dataset=digits", "model=two_tower", "task=retrieval", "run.dir=wrong"],
    ["no vectors", "train", "dataset=purchases", "model._target_=one_score.model", "task=retrieval", "run.dir=wrong"],
    ["cold", "train", "experiment=two_tower", "task.loss.temperature=0", "run.dir=wrong"],
]  # fmt: skip
ONE_SCORE = """
import keras

def model(input_spec, **_):
    inputs = {name: keras.Input((1,), dtype="int32", name=name) for name in input_spec}
    return keras.Model(inputs, keras.layers.Embedding(2000, 1)(inputs["query"])[:, 0])
"""


def log_of_clicks(number=2000):
    """A table whose clicks depend on the city alone, with a name in nearly every second row, and gaps."""
    random = np.random.default_rng(0)
    cities = random.choice(["Bonn", "Köln", "Ulm", None], number)
    columns = {
        "click": np.isin(cities, ["Bonn", None]).astype(int),
        "visits": random.poisson(3, number),
        "city": cities.tolist(),
        "user": [f"u{user:05}" for user in random.integers(number, size=number)],
    }
    return pa.table(columns)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of the runs, and what each task printed."""
    folder = tmp_path_factory.mktemp("recommenders")
    (folder / "one_score.py").write_text(ONE_SCORE)
    parquet.write_table(log_of_clicks(), folder / "log.parquet", row_group_size=300)
    new = {
        "visits": [1, 2, 3, 4],
        "city": ["Bonn", "Ulm", None, "Rome"],
        "user": ["u00001", "new", None, "u00002"],
    }
    csv.write_csv(pa.table(new), folder / "new.csv")
    return folder, on_two_ranks(folder, *TASKS)


def metrics(finished, run):
    return json.loads((finished[0] / run / "result.json").read_text())["metrics"]


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.release), 3])
def test_ranks_equal_one_process_on_the_joint_batch(num_ranks, tmp_path):
    """Also in the last step, whose batches are unlike. Without joint_batch and the joint loss they do not."""
    # Three of MPI's ranks would poll two cores; Gloo's sleep while they wait.
    ranks, _ = launching.many_runs("gloo", num_ranks, JOINT, tmp_path)
    for rank in ranks:
        for name in JOINT:
            assert rank[name]["exact"] < 1e-6, rank[name]
            assert rank[name]["uncorrected"] > 1e-2
            measured = {**rank[name]["metrics"], **rank[name]["tested"]}
            for metric, (ours, expected) in measured.items():
                assert ours == pytest.approx(expected, rel=1e-5), metric
    # 301 examples are no multiple of 2 x 16 or 3 x 16.
    assert len({size for sizes in ranks[0]["joint purchases"]["sizes"] for size in sizes}) > 1


def test_clicks_are_predicted_nearly_as_well_as_they_can_be(finished):
    """AUC 0.84 of 0.85. Without the product of ids, or with numbers alone, no model comes close."""
    assert not finished[1]["clicks"]["error"]
    source = clicks(60_000, category_sizes=(100, 50, 20, 5))
    best_auc = source.facts()["best_auc"]
    assert best_auc - 0.02 < metrics(finished, "clicks")["test_auc"] < best_auc + 0.005


def test_items_are_found_nearly_as_often_as_they_can_be(finished):
    assert not finished[1]["purchases"]["error"]
    best_recall = LOYALTY + (1 - LOYALTY) / 20
    assert metrics(finished, "purchases")["test_recall_at_10"] == pytest.approx(
        best_recall, abs=0.04
    )


@pytest.mark.parametrize("run", ["clicks", "purchases"])
def test_an_evaluation_by_one_process_gives_the_same(finished, run):
    alone = json.loads((finished[0] / f"{run}.json").read_text())["metrics"]
    for name, value in alone.items():
        assert value == pytest.approx(metrics(finished, run)[f"test_{name}"], rel=1e-5), name


def alone(folder, *words):
    """A command in a process without the other ranks; "alone:" would look for them where tables are sharded."""
    code, output = launching.run(None, 1, "python", "-m", "hvtrain", *words, cwd=folder)
    assert code == 0, output


def test_so_does_one_of_tables_that_were_sharded(finished):
    folder, results = finished
    assert not results["sharded_clicks"]["error"]
    alone(folder, "evaluate", "run=sharded_clicks", "--output", "sharded_clicks.json")
    for name, value in json.loads((folder / "sharded_clicks.json").read_text())["metrics"].items():
        assert value == pytest.approx(metrics(finished, "sharded_clicks")[f"test_{name}"], rel=1e-5)


def test_two_ranks_evaluate_and_predict_with_sharded_tables_as_one_process(finished):
    """65 and 64 examples: the ranks have different numbers of batches."""
    folder, results = finished
    assert not results["sharded evaluated"]["error"] and not results["sharded scores"]["error"]
    for name, value in json.loads((folder / "two_ranks.json").read_text())["metrics"].items():
        trained = metrics(finished, "sharded_purchases")[f"test_{name}"]
        assert value == pytest.approx(trained, rel=1e-5), name
    alone(folder, "predict", "run=sharded_purchases", "--output", "one_rank.parquet")
    ours = parquet.read_table(folder / "two_ranks.parquet")
    expected = parquet.read_table(folder / "one_rank.parquet")
    assert ours.num_rows == 129 and ours.column_names == expected.column_names
    np.testing.assert_allclose(ours["score"], expected["score"], rtol=0, atol=1e-6)


def test_the_saved_towers_find_items(finished):
    """As docs/recommenders.md does, with Keras alone; and predict gives the score of each pair."""
    model = keras.models.load_model(finished[0] / "purchases" / "model.keras", compile=False)
    users = np.arange(200, dtype=np.int32)[:, None]
    vectors = model.predict({"query": users, "item": users}, verbose=0)
    best = np.argsort(-vectors[:, 0] @ vectors[:, 1].T, axis=1)[:, :10]
    assert np.mean(best % 20 == users % 20) > 0.95
    scores = parquet.read_table(finished[0] / "scores.parquet")["score"].to_numpy()
    assert len(scores) == 1001 and np.abs(scores).max() < 1.001


def test_a_table_of_names_is_learned_and_new_rows_are_predicted(finished):
    assert metrics(finished, "table")["test_accuracy"] > 0.95
    predicted = csv.read_csv(finished[0] / "new_out.csv").to_pydict()
    # A gap is a category, which training had; Rome it did not have.
    assert predicted["class"][:3] == [1, 0, 1]
    assert "names that training did not have: city 25%" in finished[1]["new rows"]["printed"]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("no ids", "category_sizes"),
        ("no catalogue", "task=retrieval needs catalogue, which the data set digits does not give"),
        (
            "no vectors",
            "gives (None, 1), and task=retrieval needs (None, 2, width); use model=two_tower",
        ),
        ("cold", "task.loss.temperature=0 is out of range; it must be above 0"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(finished, task, message):
    error = finished[1][task]["error"]
    assert message in error and "\n" not in error
