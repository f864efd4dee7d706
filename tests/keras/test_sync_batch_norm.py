"""Promises of SyncBatchNormalization, each seen on real ranks against Keras's layer on the joint batch."""

import json

import pytest

from hvtrain.keras.over_ranks import SyncBatchNormalization
from launching import WORKERS, finish, start

pytestmark = pytest.mark.distributed

CASES = [
    "dense", "eager", "image", "channels_first", "one_channel", "volume", "volume_axis_2", "no_scale",
    "uneven", "empty", "twice",
    "mask", "mask_uneven", "mask_axis_1", "mask_all_of_one_rank",
    "float64", "mixed_bfloat16", "mixed_float16",
]  # fmt: skip
# Half precision rounds the gradients of each rank's batch before their mean; the moments are float32 there too.
GRADIENTS = {"float64": 1e-13, "mixed_bfloat16": 2e-2, "mixed_float16": 4e-3}
OUTPUTS = {"float64": 1e-13, "mixed_bfloat16": 3e-2, "mixed_float16": 4e-3}


def results_on(launcher, num_ranks, folder):
    script = str(WORKERS / "sync_batch_norm.py")
    process = start(launcher, num_ranks, "python", script, str(folder / "found.json"), cwd=folder)
    output = finish(process, timeout=560)
    assert process.returncode == 0, output
    ranks = json.loads((folder / "found.json").read_text())
    assert len(ranks) == num_ranks
    assert sorted(ranks[0]["cases"]) == sorted(CASES)
    return ranks


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("gloo", 2), marks=pytest.mark.release, id="gloo-2"),
        pytest.param(("mpirun", 3), marks=pytest.mark.nightly, id="mpi-3"),
    ],
)
def ranks(request, tmp_path_factory):
    launcher, num_ranks = request.param
    return results_on(launcher, num_ranks, tmp_path_factory.mktemp(launcher))


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process_on_the_joint_batch(ranks, case):
    for results in (rank["cases"][case] for rank in ranks):
        assert results["outputs"] < OUTPUTS.get(case, 1e-5)
        assert results["input_gradient"] < GRADIENTS.get(case, 1e-5)
        assert results["gradients"] < GRADIENTS.get(case, 1e-5)
        assert results["moving"] < (1e-13 if case == "float64" else 1e-5)
        assert results["ranks_differ"] == 0
        assert (
            results["dtype"][0] == results["dtype"][1] == case.removeprefix("mixed_")
            if "float" in case
            else "float32"
        )
        if case not in ("empty", "mask_all_of_one_rank"):
            assert results["alone"] > 0.01, (
                "Keras's layer on each rank's own batch gives something else"
            )
            assert results["alone_moving"] > 0.01


def test_training_equals_one_process_on_the_joint_batch(ranks):
    for results in (rank["training"] for rank in ranks):
        assert results["error"] < 1e-5
        assert results["error_of_plain"] > 0.01
        assert results["ranks_differ"] == 0
        assert results["xla"] is False
    assert len({rank["training"]["name"] for rank in ranks}) == len(ranks), (
        "Keras's names differ; nothing hangs"
    )


def test_a_large_mean_keeps_the_variance(ranks):
    for results in (rank["large_mean"] for rank in ranks):
        assert results["variance"] < 1e-3
        # A mean of 10000 is rounded to 0.001 in float32, in Keras's layer too.
        assert results["outputs"] < max(3e-3, 1.5 * results["outputs_of_plain"])
        assert results["variance_from_squares"] > 0.5


def test_saved_and_loaded(ranks):
    for results in (rank["training"]["saved"] for rank in ranks):
        assert results["same"] == [True, True], "class and configuration"
        assert results["inference"] == results["training"] == 0


def test_inference_is_that_of_keras(ranks):
    assert all(rank["training"]["saved"]["inference_of_plain"] == 0 for rank in ranks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fused": True}, "fused=True"),
        ({"fused": None}, "fused=None"),
        ({"synchronized": True}, "always synchronizes through Horovod"),
    ],
)
def test_what_it_cannot_do_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SyncBatchNormalization(**arguments)


def test_functions_called_twice_in_one_graph(ranks):
    for results in (rank["functions"] for rank in ranks):
        assert results["error"] < 1e-5
        assert results["sums"] == 10 * 4 * 2, "4 calls, forward and backward"


def test_second_derivative(ranks):
    assert all(rank["second_derivative"] < 1e-5 for rank in ranks)


def test_a_rank_that_joined_counts_nothing(ranks):
    assert all(rank["joined"] < 1e-5 for rank in ranks)


@pytest.mark.nightly
def test_one_rank_is_keras(tmp_path):
    [results] = results_on(None, 1, tmp_path)
    for case in ("eager", "mask_uneven"):
        differences = {
            key: results["cases"][case][key]
            for key in ("outputs", "input_gradient", "gradients", "moving")
        }
        assert differences == dict.fromkeys(differences, 0), case
    assert all(case["outputs"] < 3e-2 for case in results["cases"].values())
    assert results["training"]["error"] < 1e-6
    assert results["functions"]["sums"] == 0
