"""What each rank finds in the checkpoint that a run goes on from."""

import signal
from types import SimpleNamespace

import keras
import numpy as np

from hvtrain.checkpoint.model_state import snapshot
from hvtrain.checkpoint.store import Checkpoint
from hvtrain.core.step_plan import Share, StepPlan
from hvtrain.core.topology import Topology
from hvtrain.strategies.base import Strategy
from hvtrain.strategies.comm import Comm
from hvtrain.system import console
from hvtrain.training.callbacks.checkpointing import CallbackState, Interruption
from hvtrain.training.callbacks.run_context import Position
from hvtrain.training.resume import redistribute_states, resume
from hvtrain.training.run import ResumePoint, RunState, Start


def rank_state(rank):
    return {
        "seed/0000": np.array([7, rank]),
        "metric/0000": np.float32(rank + 1),
        "metric/0001": np.full(3, 10.0**rank),
        "rate/factor": np.float32(0.1),
    }


def test_each_rank_keeps_its_own_state_and_the_chief_takes_the_sums_of_those_that_are_gone():
    states = [rank_state(rank) for rank in range(4)]
    chief, other = redistribute_states(2, states)
    assert other is states[1]
    assert chief["metric/0000"] == 1 + 3 + 4
    assert chief["metric/0001"].tolist() == [1 + 100 + 1000] * 3
    assert chief["seed/0000"].tolist() == [7, 0]
    assert chief["metric/0000"].dtype == np.float32


def test_a_new_rank_has_counted_nothing_and_has_the_learning_rate_of_the_others():
    before = [rank_state(0), rank_state(1)]
    *kept, new = redistribute_states(3, before)
    assert [ours is expected for ours, expected in zip(kept, before, strict=True)] == [True, True]
    assert new == {"rate/factor": np.float32(0.1)}


def test_errors_of_compression_that_one_rank_cannot_use_are_told(caplog):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    meta = {"world_size": 2, "num_ranks": 2}

    def told(state):
        caplog.clear()
        checkpoint = Checkpoint(4, meta, snapshot(model, [state, state], {}, {}))
        resume(model, ResumePoint("step-00000004", 4, meta, checkpoint), Comm())
        return caplog.messages

    assert told({}) == []
    (line,) = told({"memory/sum/error/0000": np.ones((1, 1), "float32")})
    assert "such as compression errors, is left out" in line


def test_a_callback_that_monitors_another_metric_starts_anew(caplog):
    """The best value of a loss would never be improved by an accuracy."""
    run = SimpleNamespace(strategy=Strategy(), plan=None, topology=Topology())
    position = SimpleNamespace(in_epoch=False)
    context = SimpleNamespace(run=run, position=position, weights=None, report=None)
    saved = {"stop": {"best": 0.25, "best_epoch": 3.0, "monitor": "val_loss"}}
    for monitor, best in (("val_loss", 0.25), ("val_accuracy", None)):
        stop = keras.callbacks.EarlyStopping(monitor)
        stop.on_train_begin()
        state = CallbackState(context, {"stop": stop}, Start(callbacks=saved))
        state.on_train_begin({})
        assert stop.best == best
    assert "callbacks.stop starts anew: it monitored val_loss, not val_accuracy" in caplog.text


def test_a_single_rank_stops_after_an_update_only(monkeypatch):
    """Gradients accumulated so far would count once per rank after a resume on several."""
    monkeypatch.setattr(console, "take_signals", lambda *_: None)
    plan = StepPlan((Share(8, 12),), 12, 0.1, 1.0, accumulate=4)
    run = SimpleNamespace(
        strategy=Strategy(),
        plan=plan,
        topology=Topology(),
        config=SimpleNamespace(train=SimpleNamespace(max_time=None)),
        state=RunState(0.0, signals=[signal.SIGTERM]),
    )
    position = Position(plan, 5)
    interruption = Interruption(
        SimpleNamespace(run=run, position=position, weights=None, report=None)
    )
    interruption.set_model(SimpleNamespace(stop_training=False))
    stops = []
    for batch in range(5, 8):
        position.on_train_batch_end(batch, {})
        interruption.on_train_batch_end(batch, {})
        stops.append(interruption.model.stop_training)
    assert stops == [False, False, True]
