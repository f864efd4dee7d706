"""The checkpoint that a run continues from, as one process finds it."""

import logging

from hvtrain.strategies.comm import Comm
from hvtrain.training.find_checkpoint import find_checkpoint
from hvtrain.training.run import RunState

# What a checkpoint must say of its run.
META = {
    "num_ranks": 1,
    "batch_size": 8,
    "batch_sizes": [8],
    "world_size": 1,
    "epoch": 0,
    "step_in_epoch": 0,
    "run_id": "0123456789ab",
}


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def newest(checkpoints):
    """The newest complete one of a run folder's `checkpoints`, or None, and a line for each damaged one."""
    assert checkpoints.name == "checkpoints"
    log = logging.getLogger("hvtrain.training.find_checkpoint")
    lines = Lines()
    log.addHandler(lines)
    try:
        checkpoint = find_checkpoint(checkpoints.parent, Comm(), RunState(0.0))
    finally:
        log.removeHandler(lines)
    return checkpoint and checkpoint.checkpoint, lines.lines
