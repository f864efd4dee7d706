"""Ratios over rounds, verdicts on goals, and workloads that the runner accepts."""

import importlib.util
import json
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.contenders import CONTENDERS, WORKLOADS, named
from benchmarks.goals import GOALS, of_allreduce, of_steps, verdict
from benchmarks.processes import CLOCK
from benchmarks.steps import Steps
from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.errors import RankError
from hvtrain.plan.allreduce import WORKER
from hvtrain.report.ratios import Ratio, ratio


@pytest.mark.parametrize(
    ("number", "low", "high"), [(5, 0, 4), (6, 0, 5), (7, 0, 6), (9, 1, 7), (20, 5, 14)]
)
def test_the_interval_is_that_of_order_statistics(number, low, high):
    """Ranks as in the usual tables for the median at 95 percent (20: the 6th and the 15th)."""
    interval = ratio([float(i) for i in range(number)], [1.0] * number)
    assert (interval.low, interval.high) == (low, high)
    assert (interval.coverage >= 0.95) is (number > 5)


def test_the_interval_holds_the_true_median_as_often_as_it_says():
    random = np.random.default_rng(0)
    # Skewed, as times are; the median of exp(z) is 1.
    intervals = [ratio(np.exp(random.standard_normal(7)).tolist(), [1.0] * 7) for _ in range(4000)]
    held = np.mean([interval.low <= 1 <= interval.high for interval in intervals])
    assert held == pytest.approx(intervals[0].coverage, abs=0.01)


@pytest.mark.parametrize(
    ("measured", "smaller", "text"),
    [
        (Ratio(0.9, 0.85, 0.95, 0.98), True, "holds"),
        (Ratio(0.9, 0.85, 0.96, 0.98), True, "holds by its median"),
        (Ratio(0.96, 0.90, 0.97, 0.98), True, "fails by its median"),
        (Ratio(1.0, 0.96, 1.1, 0.98), True, "fails"),
        (Ratio(1.0, 0.95, 1.1, 0.98), False, "holds"),
        (Ratio(1.0, 0.90, 1.1, 0.98), False, "holds by its median"),
        (Ratio(0.9, 0.80, 0.94, 0.98), False, "fails"),
    ],
)
def test_verdicts(measured, smaller, text):
    assert verdict(measured, 0.95, smaller) == text


def test_rounds_are_compared_with_themselves():
    """A machine that becomes ten times slower between rounds changes no ratio."""
    half = ratio([1, 10, 1, 10, 1, 10, 1], [2, 20, 2, 20, 2, 20, 2])
    assert (half.median, half.low, half.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("data", ["synthetic", "fashion_mnist"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_words_of_the_runner(name, data, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench"])
    work = WORKLOADS[name]
    config = from_dict(compose(work.overrides(data, 2)))
    assert config.train.steps == work.warmup_steps + work.steps
    assert config.train.batch_size == work.batch_size
    if data == "synthetic":
        assert config.dataset["num_train"] == config.train.steps * work.batch_size * 2, "one epoch"
        third = -(-(work.warmup_steps + 2) // 3) * work.batch_size * 2
        assert f"dataset.num_train={third}" in work.overrides(data, 2, steps=2, epochs=3)


def test_modules_of_contenders_exist():
    """They are started by name, so a module that moves breaks no import."""
    modules = {
        WORKER,
        CLOCK.rpartition(".")[0],
        *(contender.module for contender in CONTENDERS.values()),
    }
    assert all(importlib.util.find_spec(module) for module in modules)
    assert not importlib.util.find_spec("benchmarks.by_hand.none")


def test_goals_name_contenders():
    assert {named(name).about for goal in GOALS for name in (goal.ours, goal.other)}, (
        "named refuses others"
    )
    figures = [figure for figure, _, _ in Steps.columns.values()]
    assert all(goal.figure in figures and set(goal.limits) <= set(WORKLOADS) for goal in GOALS)


def session(tmp_path, losses=(1.0, 1.0), slower=1.0):
    names = ("hvtrain-mpi", "loop-mpi")
    steps = Steps(
        tmp_path, 1, WORKLOADS["cnn"], "synthetic", 2, [CONTENDERS[name] for name in names], 10
    )
    for number, scale in enumerate((1, 2, 1, 2, 1, 2, 1), start=1):
        for name, seconds, loss in (
            (names[0], 0.9, losses[0]),
            (names[1], 1.0, losses[1]),
            (steps.again, 0.9 * slower, losses[0]),
        ):
            speed = {"step_seconds": seconds * scale, "examples_per_second": 128 / seconds}
            others = {"first_step_seconds": 9.0, "peak_bytes": 10**9, "loss": loss}
            steps.rows.append({"contender": name, "round": number, **speed, **others})

    return steps


def test_a_session_says_what_it_found(tmp_path):
    steps = session(tmp_path)
    lines = steps.table()
    assert any(line.startswith("loop-mpi") and "1.111 [1.111, 1.111]" in line for line in lines)
    assert "typically 0.0% off" in "\n".join(lines) and "quieter" not in "\n".join(lines)
    steps.write()
    steps.plot()
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"
    judged = of_steps(json.loads((tmp_path / "bench.json").read_text()))
    assert "step_seconds of hvtrain-mpi / loop-mpi <= 0.95: 0.900 [0.900, 0.900], holds" in judged
    rows = (tmp_path / "bench.csv").read_text().splitlines()
    assert len(rows) == 1 + 3 * 7 and all(a.count(",") == b.count(",") for a, b in pairwise(rows))


def test_a_noisy_session_says_so(tmp_path):
    assert "more than 2%: use it with care" in "\n".join(session(tmp_path, slower=1.03).table())


def test_times_of_another_work_do_not_count(tmp_path):
    with pytest.raises(RankError, match=r"losses differ.*hvtrain-mpi 1\.00000, loop-mpi 1\.00200"):
        session(tmp_path, losses=(1.0, 1.002)).check_round()
    session(tmp_path, losses=(1.0, 1.0005)).check_round()


def test_goals_of_the_reduction():
    times = {"4096": [2e-4] * 7, str(4 << 20): [1e-3] * 7, "small": [2e-3] * 7, "whole": [1e-3] * 7}
    judged = of_allreduce(
        {"seconds": {"hvtrain": times, "mpi4py": {"4096": [1e-5] * 7, str(4 << 20): [9e-4] * 7}}}
    )
    assert [line.rpartition(", ")[2] for line in judged] == ["fails", "fails", "holds", "fails"]
    assert judged[0].startswith("bus bandwidth at 4 MiB / mpi4py's >= 0.95: 0.900 [0.900, 0.900]")
