"""What bf16, int8 and PowerSGD on the wire do to gradients, each seen on real ranks."""

import json
import shutil
import subprocess

import pytest

from launching import WORKERS, run, run_worker

pytestmark = pytest.mark.distributed


@pytest.fixture(
    scope="module",
    # Three ranks have pieces of their own, and a second rounding.
    params=[
        pytest.param(("gloo", 3), id="gloo-3"),
        # Two ranks over Gloo swap their bytes by an all-reduce.
        pytest.param(("gloo", 2), marks=pytest.mark.nightly, id="gloo-2"),
        pytest.param(("mpirun", 2), marks=pytest.mark.release, id="mpi-2"),
    ],
)
def ranks(request, tmp_path_factory):
    launcher, num_ranks = request.param
    results = run_worker(launcher, num_ranks, "compression.py", tmp_path_factory.mktemp(launcher))
    assert [rank["size"] for rank in results] == [num_ranks] * num_ranks
    return results


@pytest.mark.parametrize("compression", ["int8", "powersgd"])
def test_what_was_applied_and_what_waits_is_the_sum_of_the_true_means(ranks, compression):
    """Error feedback loses nothing, over 10 steps in float64; without it the sum is another."""
    for rank in ranks:
        assert rank["telescopes"][compression]["telescopes"] < 1e-12
        assert rank["telescopes"]["int8 without errors"]["telescopes"] > 1e-3


def test_all_ranks_get_the_same_bits(ranks):
    for rank in ranks:
        for results in rank["telescopes"].values():
            assert results["ranks_differ"] == 0
            assert results["reductions"] == 10


def test_bf16_is_a_cast_by_hand(ranks):
    assert [rank["bf16 differs"] for rank in ranks] == [0] * len(ranks)


def test_sparse_gradients_may_be_bfloat16(ranks):
    expected = ["bfloat16", len(ranks) * (len(ranks) + 1) / 2]
    assert [rank["rows of bfloat16"] for rank in ranks] == [expected] * len(ranks)


def test_int8_rounds_to_the_nearest_level(ranks):
    for rank in ranks:
        assert 0.4 < rank["half a step"] <= 0.5 + 1e-6


def test_powersgd_passes_a_mean_of_its_rank_unchanged(ranks):
    for rank in ranks:
        assert rank["low rank"] < 1e-5


def test_an_overflow_of_one_rank_is_seen_by_all_and_kept_by_none(ranks):
    assert [rank["overflow"] for rank in ranks] == [{"seen": True, "kept": True}] * len(ranks)


def test_comm_tune_times_powersgd_and_not_its_first_steps(ranks):
    assert all(rank["error after a trial"] > 0 for rank in ranks)


def test_what_averages_by_itself_refuses_other_reductions(ranks):
    for rank in ranks:
        assert "gradient_predivide_factor; leave these out, or choose" in rank["refused"][1]


def test_the_noise_scale_of_a_linear_regression_is_the_known_one(ranks):
    """2 D + 1 examples for D inputs; the mean of batches of 512 and their joint batch tell it."""
    for rank in ranks:
        noise = rank["noise scale"]
        assert noise["estimate"] == pytest.approx(noise["known"], rel=0.1)
        assert noise["estimate"] == ranks[0]["noise scale"]["estimate"]
        assert noise["before"] is None
        assert "needs ranks that average whole gradients in each step" in noise["refused"]


@pytest.mark.nightly
def test_the_interface_carries_as_many_bytes_as_are_computed(tmp_path):
    """Of a network of its own; against float32: 0.51, 0.27 and, for PowerSGD of rank 4, 0.01."""
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "--net", "true"], check=False).returncode
    ):
        pytest.skip("a network of its own needs root and unshare")
    command = f"horovodrun --gloo -np 2 python {WORKERS / 'wire_bytes.py'} {tmp_path}/bytes.json"
    # Ranks that wait exchange a few bytes in each cycle. Cycles of 20 ms in place of 1 ms keep that small beside the
    # reductions even where a step takes long.
    script = f"ip link set lo up && HOROVOD_CYCLE_TIME=20 exec {command}"
    code, output = run(None, 1, "unshare", "--net", "bash", "-c", script, cwd=tmp_path, cold=True)
    assert code == 0, output
    results = json.loads((tmp_path / "bytes.json").read_text())
    for name, (computed, counted) in results.items():
        assert counted == pytest.approx(computed, rel=0.05, abs=40_000), name
    whole = results["none"][1]
    assert results["bf16"][1] < 0.51 * whole
    assert results["int8"][1] < 0.27 * whole
    assert results["powersgd"][1] < 0.01 * whole + 40_000
