"""DistributedOptimizer(shard=True) against the same without it, on real ranks."""

import pytest

from launching import run_worker

pytestmark = pytest.mark.distributed

SAME_BITS = [
    *(
        "sgd",
        "momentum",
        "adam",
        "adamw",
        "lion",
        "clipnorm",
        "global_clipnorm",
        "loss scale",
        "accumulation",
    ),
    *("averages", "bf16 on the wire", "a part without gradients", "variables in another order"),
    *("no variables given", "lamb", "adafactor", "muon", "rowwise adagrad"),
]
BY_VARIABLES = ("lamb", "adafactor", "muon", "rowwise adagrad")
# TensorFlow sums Muon's products of matrices in another order in another graph.
TOLERANCE = {"muon": 1e-5}


@pytest.fixture(
    scope="module",
    # Between three ranks no border of a part is one of a variable.
    params=[
        pytest.param(("gloo", 3), id="gloo-3"),
        pytest.param(("mpirun", 2), marks=pytest.mark.release, id="mpi-2"),
    ],
)
def ranks(request, tmp_path_factory):
    launcher, num_ranks = request.param
    results = run_worker(launcher, num_ranks, "sharded.py", tmp_path_factory.mktemp(launcher))
    assert [rank["size"] for rank in results] == [num_ranks] * num_ranks
    return results


@pytest.mark.parametrize("case", SAME_BITS)
def test_weights_and_gathered_slots_have_the_bits_of_the_optimizer_that_is_not_sharded(ranks, case):
    for rank in ranks:
        assert rank["same bits"][case]["weights"] <= TOLERANCE.get(case, 0)
        assert rank["same bits"][case]["apart"] == 0
        assert rank["same bits"][case]["reductions"] == (3 if case == "accumulation" else 6)
    assert ranks[0]["same bits"][case]["slots"] <= TOLERANCE.get(case, 0)
    assert ranks[0]["same bits"][case]["same names"]


def test_a_norm_of_a_part_would_be_another(ranks):
    for rank in ranks:
        assert rank["lamb, cut"]["weights"] > 1e-3


@pytest.mark.parametrize("case", SAME_BITS)
def test_each_rank_keeps_a_part_of_the_slots(ranks, case):
    own = [rank["same bits"][case]["own elements"] for rank in ranks]
    whole = ranks[0]["same bits"][case]["all elements"]
    assert sum(own) == whole
    if case not in BY_VARIABLES:
        assert max(own) - min(own) <= 2, "an element of two slots"


def test_slots_move_to_another_number_of_ranks(ranks):
    assert [rank["resumed on two"] for rank in ranks[:2]] == [0.0, 0.0]


def test_slots_in_bfloat16_move_too(ranks):
    assert ranks[0]["bfloat16"] == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]


def test_the_noise_scale_is_that_of_the_ranks_that_exchange_gradients(ranks):
    assert [rank["noise of a pair"] for rank in ranks] == [2.5, 2.5, None][: len(ranks)]


def test_fit_with_callbacks_ends_with_equal_weights_even_if_the_first_step_builds_the_model(ranks):
    assert [rank["fitted"] for rank in ranks] == [0.0] * len(ranks)


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("own step", "shard=True divides Keras's own step, but OwnStep overrides apply"),
        (
            "built",
            "shard=True needs an optimizer that is not built yet, but this Adam has whole slots",
        ),
        ("schedule free", "slots of ScheduleFreeAdamW are copies of the weights"),
        ("local variable", "shard needs gradients that all ranks share"),
        (
            "elastic",
            "KerasState cannot keep sharded slots, since a lost rank takes its part with it",
        ),
        ("join", "or its part of the weights, which the others will gather"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(ranks, case, line):
    for rank in ranks:
        assert line in rank["refused"][case]
        assert "\n" not in rank["refused"][case]
