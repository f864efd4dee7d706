"""python -m hvtrain find_lr: on two ranks, to where the loss diverges; and what it refuses."""

import csv
import math
import re
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from hvtrain.core.topology import Topology
from hvtrain.errors import ConfigError
from hvtrain.search.commands import find_lr
from hvtrain.search.range_test import Recorder, has_diverged, suggest, write
from hvtrain.strategies.base import Strategy
from tests.support import launching


@pytest.mark.distributed
@pytest.mark.nightly  # By default the tests below hold the search on given losses.
def test_two_ranks_find_a_rate_and_stop_where_the_loss_diverges(tmp_path):
    code, output = launching.run(
        *(
            "mpi",
            2,
            "python",
            "-m",
            "hvtrain",
            "find_lr",
            "model=mlp",
            "optimizer=adam",
            "optimizer.learning_rate=0.5",
        ),
        *("--steps", "60", "--highest", "1e6", "run.dir=test"),
        cwd=tmp_path,
    )
    assert code == 0, output
    base, rate = map(
        float,
        re.search(r"learning_rate=(\S+) \(x 2 = (\S+) for all ranks together\)", output).groups(),
    )
    assert base * 2 == pytest.approx(rate, rel=0.1)
    rows = [
        list(map(float, row)) for row in list(csv.reader((tmp_path / "test/range.csv").open()))[1:]
    ]
    rates = [row[0] for row in rows]
    assert len(rows) < 60, "stopped before the end"
    assert rates[0] == pytest.approx(1e-5)
    # Equal factors, whatever the optimizer's own rate: 60 steps from 1e-5 to 1e6.
    assert rates[1] / rates[0] == pytest.approx(10 ** (11 / 60), rel=1e-3)
    assert rates[0] < rate < rates[-1]
    assert (tmp_path / "test/range.png").stat().st_size > 5000
    assert not list((tmp_path / "test/checkpoints").iterdir())


def test_no_suggestion_where_the_loss_never_falls():
    rates = [10.0 ** (step - 9) for step in range(9)]
    assert suggest(rates, [1.0 + step for step in range(9)]) is None
    assert suggest(rates[:4], [3.0, 2.0, 1.0, math.nan]) is None, "too few"


def test_it_diverges_at_a_loss_that_is_not_finite_or_has_grown():
    assert not has_diverged([])
    assert has_diverged([1.0, math.inf])
    assert not has_diverged([1.0] * 10)
    assert has_diverged([1.0] * 10 + [100.0])
    assert not has_diverged([-1.0] * 10)
    assert has_diverged([-1.0] * 10 + [100.0])


def test_a_step_that_overflows_under_a_loss_scale_is_no_point_of_the_curve():
    """The next step has the same rate, and the slope between the two would be infinite."""
    rates = keras.optimizers.schedules.ExponentialDecay(1e-3, decay_steps=1, decay_rate=1.1)
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(rates), initial_scale=2.0**127
    )
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    model.set_weights([np.array([[3.0]]), np.zeros(1)])
    run = SimpleNamespace(strategy=Strategy(), plan=None, topology=Topology())
    recorder = Recorder(SimpleNamespace(run=run, position=None, weights=None, report=None))
    x = np.ones((16, 1))
    model.fit(x, x, batch_size=1, verbose=0, callbacks=[recorder])
    assert 0 < len(recorder.rates) == int(optimizer.iterations) < 16
    assert len(recorder.losses) == len(set(recorder.rates)) == len(recorder.rates)


@pytest.mark.parametrize("losses", [[], [2.0], [math.nan], [-1.0, -2.0, -math.inf]])
def test_a_test_that_ends_at_once_has_a_picture(losses, tmp_path):
    write(tmp_path, [0.1] * len(losses), losses, None)
    assert (tmp_path / "range.png").stat().st_size
    assert len((tmp_path / "range.csv").read_text().splitlines()) == 1 + len(losses)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--lowest", "1", "--highest", "1"],
            "--lowest 1 is not below --highest 1; widen the range",
        ),
        (
            ["--steps", "5"],
            "argument --steps: 5 is not a whole number of at least 10",
        ),
        (["modle=cnn"], "unknown setting 'modle'; did you mean 'model'?"),
        (["--foo"], "unknown option --foo"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["find_lr", *arguments])
    with pytest.raises(ConfigError) as caught:
        find_lr()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
