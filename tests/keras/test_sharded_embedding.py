"""Embedding tables on all ranks against a plain Embedding in one process, on real ranks."""

import numpy as np
import pytest
import tensorflow as tf

from hvtrain.keras.sharded_embedding import ShardedEmbedding, wrong_ids
from hvtrain.keras.table_rows import Rows, check_size, make_rows
from hvtrain.system import resources
from launching import run_worker

pytestmark = pytest.mark.distributed

ROWS, WIDTH = 23, 3
EQUAL = [
    *(
        "sgd",
        "momentum",
        "adagrad",
        "adam",
        "lazy adam",
        "lazy adam in NumPy",
        "rowwise adagrad",
        "averages",
        "accumulation",
    ),
    *(
        "loss scale",
        "shared by two inputs",
        "all on one rank",
        "nothing on one rank",
        "clipnorm",
        "global_clipnorm",
    ),
]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("gloo", 3), id="gloo-3"),
        pytest.param(("gloo", 4), marks=pytest.mark.nightly, id="gloo-4"),
        pytest.param(("mpirun", 2), marks=pytest.mark.release, id="mpi-2"),
    ],
)
def ranks(request, tmp_path_factory):
    launcher, num_ranks = request.param
    results = run_worker(launcher, num_ranks, "tables.py", tmp_path_factory.mktemp(launcher))
    assert [rank["size"] for rank in results] == [num_ranks] * num_ranks
    return results


@pytest.mark.parametrize("case", EQUAL)
def test_training_equals_one_process_on_the_joint_batch(ranks, case):
    assert ranks[0]["equal"][case] < 1e-6


def test_without_the_mean_over_ranks_it_would_not(ranks):
    assert ranks[0]["unwrapped"] > 1e-2


def test_compression_changes_dense_gradients_alone(ranks):
    # A step of bf16 is 1/256 of a value.
    assert 1e-6 < ranks[0]["bf16"] < 1e-2


def test_first_rows_are_those_of_one_rank_and_each_is_on_one_rank(ranks):
    size = len(ranks)
    whole = make_rows(Rows("t", ROWS, rank=0, num_ranks=1), WIDTH, "normal", seed=1).numpy()
    other_seed = make_rows(Rows("t", ROWS, rank=0, num_ranks=1), WIDTH, "normal", seed=2).numpy()
    for number, rank in enumerate(ranks):
        np.testing.assert_array_equal(np.float32(rank["first rows"]), whole[number::size])
        assert not np.isin(whole[number::size], other_seed).any()


def test_first_rows_are_distributed_as_the_initializer_says():
    rows = Rows("t", 20_000, rank=1, num_ranks=2)
    normal = make_rows(rows, 8, "normal", seed=0).numpy()
    uniform = make_rows(rows, 8, "uniform", seed=0).numpy()
    assert normal.mean() == pytest.approx(0, abs=5e-4)
    assert normal.std() == pytest.approx(0.05, rel=0.01)
    assert uniform.min() == pytest.approx(-0.05, rel=1e-3)
    assert np.histogram(uniform, 4, (-0.05, 0.05))[0] == pytest.approx([20_000] * 4, rel=0.03)
    assert abs(np.corrcoef(normal.T) - np.eye(8)).max() < 0.05


def test_a_table_must_fit_into_the_memory_of_its_container(monkeypatch):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda _: [])
    monkeypatch.setattr(resources, "free_bytes", lambda: 100)
    check_size(Rows("t", 20, rank=0, num_ranks=2), row_bytes=10)
    with pytest.raises(ValueError, match="use more hosts, or fewer rows"):
        check_size(Rows("t", 21, rank=0, num_ranks=2), row_bytes=10)


def test_a_rank_may_look_up_nothing(ranks):
    assert all(rank["empty batch"] for rank in ranks)


def test_a_local_gradient_becomes_dense_where_sparse_ones_do(ranks):
    for rank in ranks:
        assert rank["local and dense"] == pytest.approx(2 * WIDTH / len(ranks))


@pytest.mark.parametrize("case", ["constant ids", "two tables"])
def test_ids_may_be_constants_of_a_graph_and_of_several_tables(ranks, case):
    assert all(rank[case] for rank in ranks)


@pytest.mark.parametrize("combiner", ["sum", "mean without padding"])
def test_rows_of_an_example_are_combined(ranks, combiner):
    assert all(rank[combiner] for rank in ranks)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_weights_of_ids_equal_numpys_forward_and_in_gradients(ranks, combiner):
    for rank in ranks:
        assert max(rank[f"weighted {combiner}"].values()) < 1e-6


@pytest.mark.parametrize("case", ["fitted", "fitted in mixed precision"])
def test_fit_with_the_usual_callbacks_learns_and_keeps_shared_weights_equal(ranks, case):
    for rank in ranks:
        assert rank[case]["apart"] == 0
        assert rank[case]["loss"][-1] < rank[case]["loss"][0]


def test_compression_keeps_errors_of_dense_weights_alone(ranks):
    assert all(
        rank["kept errors"] == ["same/steps", "sum/error/0001", "sum/error/0002"] for rank in ranks
    )


def test_a_gradient_of_one_rank_that_is_not_finite_fails_the_step_on_all(ranks):
    for rank in ranks:
        assert "the gradient is not finite" in rank["not finite"]["message"]
        assert "the gradient is not finite" in rank["not finite, tables alone"]
        assert rank["not finite"]["moved"] == 0


def test_the_saved_model_is_a_plain_one_with_the_rows_of_all_ranks(ranks):
    assert ranks[0]["saved"]["gap"] == 0
    assert "save the model inside hvd.whole_tables(model)" in ranks[0]["saved"]["alone"]
    assert (
        "table users takes 0.0 GiB, and a .keras file is written in memory"
        in ranks[0]["saved"]["too large"]
    )
    assert "an .h5 file would get only one rank's rows; save" in ranks[0]["saved"]["as h5"]
    assert [rank["saved"]["reloaded"] for rank in ranks] == [0.0] * len(ranks)


def test_evaluate_and_predict_equal_one_process(ranks):
    assert ranks[0]["saved"]["evaluated"] < 1e-6


def test_a_saved_table_of_another_width_is_refused_with_both_shapes():
    layer = ShardedEmbedding(5, 2, name="t")
    layer.build()
    message = r"has shape \(5, 2\), but the file's table has \(5, 3\); build the layer with"
    with pytest.raises(ValueError, match=message):
        layer.load_own_variables({"0": np.zeros((5, 3))})


def test_an_error_about_ids_becomes_one_line():
    layer = ShardedEmbedding(5, 2, name="t")
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        tf.function(layer)(tf.constant([3, 7]))
    line = (
        "table t has rows 0 to 4, but got ids from 3 to 7; add rows to the table, or check the data"
    )
    assert wrong_ids(caught.value) == line


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("out of range", "has rows 0 to 22, and the smallest and largest id are"),
        ("out of the second", "table t[1] has rows 0 to 2, and the smallest and largest id are"),
        (
            "three tables",
            "got ids of shape (1, 2), and holds 3 tables; give an id for each along the last axis",
        ),
        ("negative", "has rows 0 to 22, and the smallest and largest id are"),
        ("floats", "got ids of type float64; it needs int32 or int64"),
        ("regularizer", "table t has embeddings_regularizer, which needs the whole table"),
        ("tied", "no other layer can use its weights"),
        ("initializer", "a sharded table cannot be initialized with Orthogonal; choose uniform,"),
        ("too large", "GiB are free here; use more hosts, or fewer rows"),
        ("tape", "table t is sharded over the ranks, which a plain optimizer cannot handle; wrap"),
        ("lamb", "Lamb needs whole weights; choose SGD, Adam"),
        ("shard", "shard=True would shard it again"),
        ("local in every step", "LocalSGD and DiLoCo average weights"),
        ("local", "LocalSGD and DiLoCo average weights"),
    ],
)
def test_what_cannot_be_is_refused(ranks, case, line):
    for rank in ranks:
        assert line in rank["refused"][case]
