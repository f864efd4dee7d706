"""LocalSGD and DiLoCo against one process that plays all ranks in turn, on real ranks."""

import pytest

from launching import run_worker

pytestmark = pytest.mark.distributed

CASES = {
    "every=1 and SGD": 12,
    "local, adam, 4": 3,
    "local, momentum, 5": 2,
    "local, adam, 3, warm": 4 + 3,
    "diloco, adam, 4": 3,
    "diloco, sgd, 5": 2,
    "diloco as local": 3,
    "within hosts": 3,
    "within, warm": 4 + 3,
    "diloco, buckets": 3,
}
"""Reductions that are due in 12 steps, by case."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("mpirun", 2), id="mpi-2"),
        pytest.param(("gloo", 3), marks=pytest.mark.release, id="gloo-3"),
    ],
)
def ranks(request, tmp_path_factory):
    launcher, num_ranks = request.param
    results = run_worker(launcher, num_ranks, "local_steps.py", tmp_path_factory.mktemp(launcher))
    assert [rank["size"] for rank in results] == [num_ranks] * num_ranks
    return results


@pytest.mark.parametrize("case", CASES)
def test_ranks_equal_one_process_that_plays_them_in_turn(ranks, case):
    for rank in ranks:
        results = rank["cases"][case]
        assert results["error"] < 1e-6
        assert results["apart"] == 0, "the same bits on all ranks after a synchronization"
        assert results["reductions"] == CASES[case], "counted in the graph"


def test_without_a_synchronization_the_ranks_differ(ranks):
    for rank in ranks:
        assert rank["apart without"] > 0.1
        assert rank["error without"] > 0.01


def test_fit_with_callbacks_ends_with_equal_weights_even_if_the_first_step_builds_the_model(ranks):
    """Weights are compared where they are equal, every 4 or 5 steps, though a comparison is due after each of 12.

    DiLoCo, which is told of the broadcast after the first step, compares them there too.
    """
    expected = [{"apart": 0, "weight checks": 4}, {"apart": 0, "weight checks": 3}]
    assert [rank["fitted"] for rank in ranks] == [expected] * len(ranks)


def test_weights_broadcast_after_the_first_step_are_the_anchors_of_diloco(ranks):
    assert [rank["broadcast late"] for rank in ranks] == [0] * len(ranks)


def test_weights_that_all_ranks_load_after_synchronizing_are_no_change_of_a_round(ranks):
    assert [rank["loaded"] for rank in ranks] == [0] * len(ranks)


def test_constraints_hold_after_a_synchronization(ranks):
    assert all(max(rank["constrained"]) < 1e-5 for rank in ranks)


def test_join_which_would_average_zeros_into_the_weights_is_refused(ranks):
    assert all("leave out shard=True and LocalSGD" in rank["join"] for rank in ranks)


def test_compressed_changes_end_near_the_whole_ones(ranks):
    for rank in ranks:
        assert 0 < rank["int8, warm"]["error"] < 0.001
        assert 0 < rank["int8"]["error"] < 0.01
        assert rank["int8"]["apart"] == 0
