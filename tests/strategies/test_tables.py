"""model.shard_embeddings: whole runs on real ranks, against the same runs without it."""

import hashlib
import json
import re
import shutil

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file

from launching import ROOT, many_runs, train

SUPPORT = ROOT / "tests" / "support"
pytestmark = pytest.mark.distributed

PLAIN = [
    *(
        "dataset=clicks",
        "dataset.num_train=600",
        "dataset.num_test=101",
        "dataset.category_sizes=[50,7]",
    ),
    *(
        "model=mlp",
        "~model.hidden",
        "~model.activation",
        "~model.dropout",
        "model._target_=tables.model",
    ),
    *(
        "task=binary",
        "optimizer=rowwise_adagrad",
        "optimizer.learning_rate=0.1",
        "train.batch_size=32",
    ),
    # 51 and 50 test examples: the ranks have different numbers of batches.
    *(
        "train.epochs=2",
        "train.evaluation_batch_size=50",
        "checkpoint.every_steps=4",
        "checkpoint.keep=9",
    ),
]
SHARDED = [*PLAIN, "model.shard_embeddings=[user*]"]
# At this rate weights stay what they begin as.
TAKEN = ["train.epochs=1", "optimizer.learning_rate=1e-30"]
# Rank 1 kills itself between two checkpoints.
KILLED = [
    f"+callbacks.strike.{setting}"
    for setting in ("_target_=strike.Strike", "rank=1", "step=7", "done=struck")
]
# Drawn as before, and example 401, of rank 1, is the only one with ids out of range.
SPOILED = ["dataset._target_=tables.clicks", "+dataset.bad_example=401"]
# A table of 320 kB.
CROWDED = [
    "dataset.category_sizes=[20000,7]",
    "train.epochs=1",
    "checkpoint.on_error=warn",
    "+callbacks.limit._target_=tables.NoRoom",
]
RUNS = {
    "plain": PLAIN,
    "sharded": SHARDED,
    # By the number of rows.
    "again": [*PLAIN, "model.shard_embeddings=50", "run.dir={folder}/again"],
    "taken": [*SHARDED, *TAKEN, "model.weights={folder}/sharded"],
    "no room": [*SHARDED, *CROWDED],
    "no such layer": [*PLAIN, "model.shard_embeddings=[item*]"],
    "whole weights": [*SHARDED, "optimizer=lamb"],
    "averages": [*SHARDED, "train.ema=0.9"],
    "best rows": [*SHARDED, "callbacks=early_stopping", "++callbacks.early_stopping.monitor=loss"],
}
REFUSED = {"no such layer", "whole weights", "averages", "best rows"}
STEPS = 18
"""Of two epochs: 600 examples in batches of 2 x 32."""
TABLE = "user_table/embeddings"


def run_all(num_ranks, runs, folder):
    settings = {
        name: [word.replace("{folder}", str(folder)) for word in words]
        for name, words in runs.items()
    }
    ranks, output = many_runs("gloo", num_ranks, settings, folder)
    for results in ranks:
        errors = {name: result["error"] for name, result in results.items() if "error" in result}
        assert errors.keys() == {*runs} & REFUSED, errors
    return ranks, output


def state(folder, step=STEPS):
    """All arrays of a checkpoint but those of one rank, by name without number."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    arrays = load_file(path / "state.safetensors")
    arrays = {name: array for name, array in arrays.items() if not name.startswith("rank/")}
    for name, by_rank in shards(path).items():
        arrays[name] = np.empty((sum(map(len, by_rank)), *by_rank[0].shape[1:]), by_rank[0].dtype)
        for rank, rows in enumerate(by_rank):
            arrays[name][rank :: len(by_rank)] = rows
    return arrays


def shards(checkpoint):
    """The rows of each rank, by the table's name."""
    found = {}
    if (checkpoint / "tables.safetensors").exists():
        for name, rows in sorted(load_file(checkpoint / "tables.safetensors").items()):
            found.setdefault(name.split("/", 2)[2], []).append(rows)
    return found


def gap(first, second):
    assert first.keys() == second.keys()
    return max(
        float(np.max(np.abs(array - second[name]), initial=0)) for name, array in first.items()
    )


def train_alone(folder, *settings):
    """Exit code and output of one training, in a start of its own because it takes the ranks down."""
    path = f"{ROOT}:{SUPPORT / 'own'}:{SUPPORT / 'launched'}"
    return train("gloo", 2, *SHARDED, *settings, cwd=folder, PYTHONPATH=path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, what each rank saw of RUNS, output)."""
    folder = tmp_path_factory.mktemp("tables")
    code, output = train_alone(folder, *KILLED, "run.dir=again")
    assert code == 75 and "FIRST FAILURE rank 1 host" in output, output
    assert "killed by SIGKILL" in output and (folder / "struck").exists()
    return folder, *run_all(2, RUNS, folder)


def test_a_run_with_sharded_tables_ends_as_one_without(runs):
    folder, *_ = runs
    plain = state(folder / "plain")
    sharded = state(folder / "sharded")
    assert any(TABLE in name for name in plain)
    assert sharded["model/0000/" + TABLE].shape == (57, 4)
    assert np.abs(sharded["model/0000/" + TABLE]).max() > 0.1, "it has learned"
    assert gap(plain, sharded) < 1e-5
    results = [
        json.loads((folder / name / "result.json").read_text()) for name in ("plain", "sharded")
    ]
    assert results[0]["metrics"] == pytest.approx(results[1]["metrics"], abs=1e-5)


def test_a_checkpoint_has_a_shard_of_each_table_and_slot_for_each_rank(runs):
    folder, *_ = runs
    tables = shards(folder / "sharded" / "checkpoints" / f"step-{STEPS:08d}")
    assert [name.split("/")[0] for name in tables] == ["model", "optimizer"]
    assert all([len(rows) for rows in by_rank] == [29, 28] for by_rank in tables.values())
    # Receipts have the digest of the rows in order, whatever the number of ranks.
    receipt = json.loads((folder / "sharded" / "receipts.jsonl").read_text().splitlines()[-1])
    for name in tables:
        digest = hashlib.sha256(state(folder / "sharded")[name].tobytes()).hexdigest()
        assert receipt["step"] == STEPS and receipt["digests"][name] == digest[:16]


def test_a_run_of_which_a_rank_was_killed_goes_on_to_the_same_bits(runs):
    folder, _, output = runs
    assert "step-00000004: 4 of 18 steps were done" in output
    assert gap(state(folder / "sharded"), state(folder / "again")) == 0


def test_a_run_begins_with_the_tables_of_another(runs):
    folder, *_ = runs
    weights = {
        name: array
        for name, array in state(folder / "sharded").items()
        if name.startswith("model/")
    }
    taken = {
        name: array
        for name, array in state(folder / "taken", STEPS // 2).items()
        if name.startswith("model/")
    }
    assert gap(weights, taken) == 0


def test_a_run_goes_on_without_checkpoints_where_a_table_finds_no_room(runs):
    folder, _, output = runs
    lines = " ".join(output.split())
    assert "a whole table of shape (20007, 4) cannot be written in" in lines
    assert "training continues (checkpoint.on_error=warn), and the next save tries again" in lines
    assert "the last state is not saved: a whole table of shape (20007, 4)" in lines
    assert not list((folder / "no room").glob("checkpoints/step-*"))
    assert (folder / "no room" / "model.keras").exists()


def test_the_summary_names_the_tables(runs):
    *_, output = runs
    assert "user_table 57 x 4, row r on rank r mod 2" in " ".join(output.split())


def test_the_saved_model_is_plain_and_has_the_rows_of_all_ranks(runs):
    folder, *_ = runs
    expected = state(folder / "sharded")["model/0000/" + TABLE]
    model = keras.models.load_model(folder / "sharded" / "model.keras")
    (layer,) = [layer for layer in model._flatten_layers() if layer.name == "user_table"]
    assert type(layer) is keras.layers.Embedding
    np.testing.assert_array_equal(layer.get_weights()[0], expected)


@pytest.mark.parametrize(
    ("case", "line"),
    [
        (
            "no such layer",
            "model.shard_embeddings=item* matches no embedding layer; the model has user_table (57 rows)",
        ),
        ("averages", "train.ema averages whole tables in each step"),
        ("whole weights", "table user_table is sharded over the ranks: Lamb needs whole weights"),
        (
            "best rows",
            "callbacks.early_stopping.restore_best_weights=true and model.shard_embeddings exclude",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(runs, case, line):
    _, ranks, _ = runs
    for results in ranks:
        assert line in results[case]["error"]


def test_an_id_out_of_range_on_one_rank_ends_all_with_one_line(tmp_path):
    code, output = train_alone(tmp_path, *SPOILED, "run.dir=spoiled")
    assert code == 2 and "Traceback" not in output, output
    line = "table user_table has rows 0 to 56, but got ids from -1 to 99; add rows to the table, or check the data"
    assert re.search(rf"hvtrain: rank 1 on \S+: {line}", output), output
    assert re.search(
        rf"hvtrain: (rank 0: )?stopped because rank 1 on \S+ failed: {line}", output
    ), output


@pytest.mark.nightly
def test_a_run_goes_on_on_other_numbers_of_ranks(tmp_path):
    """4 ranks, then 3, then 1 from the middle of an epoch, each against the run without sharding."""

    def train_both(epochs, num_ranks, folder):
        more = [f"train.epochs={epochs}", "train.batch_size=12"]
        run_all(num_ranks, {"plain": [*PLAIN, *more], "sharded": [*SHARDED, *more]}, folder)

    train_both(1, 4, tmp_path)
    train_both(2, 3, tmp_path)
    alone = tmp_path / "alone"
    for name in ("plain", "sharded"):
        *_, middle, _ = sorted((tmp_path / name / "checkpoints").glob("step-*"))
        shutil.copytree(middle, alone / name / "checkpoints" / middle.name)
    train_both(3, 1, alone)
    last = int(max((alone / "plain" / "checkpoints").glob("step-*")).name.removeprefix("step-"))
    assert gap(state(alone / "plain", last), state(alone / "sharded", last)) < 1e-5
