"""A callback that strikes its own rank down once, at a step: what a run goes through that is started again."""

import os
import signal
import socket
import time
from pathlib import Path

import keras

import hvtrain.keras as hvd
from hvtrain.training.callbacks import epochs


class Strike(keras.callbacks.Callback):
    """Ends rank `rank` by the signal after `step` steps of this start, unless the file `done` is there already."""

    def __init__(self, done, rank, step, name="SIGKILL"):
        super().__init__()
        self.done, self.rank, self.step, self.signal = Path(done), rank, step, getattr(signal, name)
        self.steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if hvd.rank() == self.rank and self.steps == self.step and not self.done.exists():
            self.done.touch()
            os.kill(os.getpid(), self.signal)


class StrikeAtHistory(keras.callbacks.Callback):
    """Ends its rank as it is about to write an epoch's row, a second later, when what is written meanwhile is there."""

    def __init__(self, done, epoch):
        super().__init__()
        write, done = epochs.Recording._write, Path(done)

        def strike(self):
            if len(self.report.records) == epoch and not done.exists():
                done.touch()
                time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)
            write(self)

        epochs.Recording._write = strike


class StrikeHost(keras.callbacks.Callback):
    """Ends the ranks on a host after `step` steps of each start."""

    def __init__(self, host, step):
        super().__init__()
        self.is_here, self.step, self.steps = socket.gethostname() == host, step, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.is_here and self.steps == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
