"""An attempt that ends so that another one can continue from its last checkpoint, which was not written."""

from types import SimpleNamespace

import pytest

from hvtrain.checkpoint.writer import Writer
from hvtrain.config.schema import CheckpointConfig
from hvtrain.core.topology import Topology
from hvtrain.errors import CheckpointError
from hvtrain.strategies.comm import Comm
from hvtrain.training.callbacks.checkpointing import Checkpointing
from hvtrain.training.callbacks.run_context import Goodput, RunReport


def end_of_attempt(monkeypatch, folder, commit_steps=0, **reported):
    """Ends an attempt after step 20 of a run of 40 steps; the newest complete checkpoint is of step 0."""
    membership = SimpleNamespace(commit_steps=commit_steps)
    run = SimpleNamespace(
        config=SimpleNamespace(checkpoint=CheckpointConfig(on_error="warn")),
        strategy=SimpleNamespace(comm=Comm(), membership=membership),
        topology=Topology(),
        plan=SimpleNamespace(ends_early=True),
        state=SimpleNamespace(note_keeper=SimpleNamespace(note=lambda step: None)),
    )
    position = SimpleNamespace(
        step=20, is_last=True, in_epoch=False, is_multiple_of=lambda steps: False
    )
    context = SimpleNamespace(
        run=run,
        position=position,
        weights=None,
        report=RunReport([], {}, Goodput.resume(None, 0.0), **reported),
    )
    interruption = SimpleNamespace(agree_on_reason=lambda: None)
    callback = Checkpointing(context, None, None, interruption, Writer(folder, CheckpointConfig()))
    callback.set_model(SimpleNamespace(stop_training=False))
    callback.validation = SimpleNamespace(latest_step=-1)
    monkeypatch.setattr(callback, "_save", lambda metrics: None)
    callback.on_epoch_end(0, {})


def test_the_run_fails_once_instead_of_repeating_the_attempt_endlessly(monkeypatch, tmp_path):
    with pytest.raises(CheckpointError, match="needs the checkpoint of step 20, which was not wri"):
        end_of_attempt(monkeypatch, tmp_path)
    # An elastic job continues from memory, and an interrupted run does not continue here.
    end_of_attempt(monkeypatch, tmp_path, commit_steps=100)
    end_of_attempt(monkeypatch, tmp_path, stopped_by="SIGTERM")
