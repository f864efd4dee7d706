"""The arithmetic of benchmarks.plan_here; what it measures takes an hour, and a quiet machine."""

import pytest

from benchmarks.plan_here import RULES, predict
from hvtrain.plan.step_cost import Gradient, slowdown


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_prediction_is_one_ranks_step_and_the_reduction_as_measured(num_ranks):
    def seconds(size):
        return 1e-3 + 2 * (num_ranks - 1) / num_ranks * size / 2e9

    measured = {str(size): [seconds(size)] * 3 for size in (4, 1 << 20, 1 << 24)}
    messages = [Gradient(3_000_000, 1.0), Gradient(1_000_000, 1.0)]
    reducing = seconds(3_000_000) + seconds(1_000_000)
    cost = predict({**measured, "small": [1.0]}, num_ranks, messages, one_rank=0.1)
    assert cost.communication_seconds == pytest.approx(reducing)
    assert cost.step_seconds == pytest.approx(0.1 * slowdown(num_ranks, RULES.deviation) + reducing)


def test_a_prediction_goes_by_the_speed_of_each_size():
    """As measured between two hosts: 4 and 16 MiB are slower, for their bytes, than 1 and 64."""
    measured = {
        str(size << 20): [size / speed] for size, speed in ((1, 115), (4, 82), (16, 82), (64, 112))
    }
    messages = [Gradient(16 << 20, 1.0), Gradient(64 << 20, 1.0)]
    cost = predict(measured, 2, messages, one_rank=0.1)
    assert cost.communication_seconds == pytest.approx(16 / 82 + 64 / 112, rel=1e-5)
