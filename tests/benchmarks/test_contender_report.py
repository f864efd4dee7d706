"""What a contender's stopwatch counts, however many steps a call of the graph takes."""

import itertools
import json
import time

import pytest

from benchmarks import processes
from benchmarks.clock import Stopwatch


@pytest.mark.parametrize(
    ("calls", "step_seconds"),
    [([1] * 12, 1), ([1, 9, 2], 1), ([1, 8, 3], 5 / 3), ([1, 11], 29 / 11)],
    ids=[
        "single steps",
        "a call that ends with the warm-up",
        "a call that runs past it",
        "the warm-up within a call",
    ],
)
def test_a_call_that_runs_past_the_warm_up_is_timed_whole(
    calls, step_seconds, tmp_path, monkeypatch
):
    monkeypatch.setenv(processes.REPORT, str(tmp_path / "report"))
    monkeypatch.setenv(processes.BEGAN, str(time.time()))
    monkeypatch.setenv(processes.WARMUP, "10")
    # Three seconds for a step of the warm-up, one for each step after.
    seconds = [3 * min(steps, 10) + max(steps - 10, 0) for steps in itertools.accumulate(calls)]
    monkeypatch.setattr(time, "perf_counter", iter(seconds).__next__)
    stopwatch = Stopwatch()
    for steps in calls:
        stopwatch.step_ended(steps)
    stopwatch.report(rank=0, loss=0.5)
    assert json.loads((tmp_path / "report.0").read_text())["step_seconds"] == step_seconds
