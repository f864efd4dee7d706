"""The arithmetic of tests.costs.here; what it measures takes an hour, and a quiet machine."""

import pytest
from here import RULES, predict

from hvtrain.costs.step import Gradient
from hvtrain.costs.stragglers import slowdown


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_prediction_is_one_ranks_step_and_the_reduction_as_measured(num_ranks):
    def seconds(size):
        return 1e-3 + 2 * (num_ranks - 1) / num_ranks * size / 2e9

    measured = {str(size): [seconds(size)] * 3 for size in (4, 1 << 20, 1 << 24)}
    gradients = [Gradient(3_000_000, 1.0), Gradient(1_000_000, 1.0)]
    cost = predict({**measured, "small": [1.0]}, num_ranks, gradients, one_rank=0.1)
    assert cost.communication_seconds == pytest.approx(seconds(4_000_000))
    assert cost.step_seconds == pytest.approx(0.1 * slowdown(num_ranks, RULES.deviation) + seconds(4_000_000))
