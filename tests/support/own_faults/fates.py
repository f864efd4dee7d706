"""What happens to ranks of an elastic run, as Keras callbacks that its command line names."""

import os
import signal
import time
from pathlib import Path

import keras
import numpy as np

import hvtrain.keras as hvd


class Fates(keras.callbacks.Callback):
    """Kills a rank at a step of the run; has a host join where few enough ranks are left; keeps the last weights.

    Each once in all, by files in the folder. Steps are counted by the optimizer.
    enough: as soon as a rank was killed and there are so many ranks again, the training stops.
    """

    def __init__(self, folder, kill_rank=-1, kill_step=0, host="", alone=1, enough=None):
        super().__init__()
        self.folder, self.host, self.alone, self.enough = Path(folder), host, alone, enough
        self.kill = (kill_rank, kill_step)

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations)
        with (self.folder / f"steps-{os.getpid()}").open("a") as file:
            file.write(f"{step} {hvd.size()}\n")
        if (hvd.rank(), step) == self.kill and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if hvd.size() == self.enough and (self.folder / "killed").exists():
            self.model.stop_training = True
        if self.host and hvd.size() <= self.alone:
            time.sleep(0.2)  # The launcher looks for hosts once a second.
            hosts = (self.folder / "hosts").read_text()
            if self.host not in hosts:
                (self.folder / "hosts").write_text(f"{hosts}{self.host}:1\n")

    def on_train_end(self, logs=None):
        step = int(self.model.optimizer.iterations)
        np.savez(self.folder / f"weights-{step}-{os.getpid()}.npz", *self.model.get_weights())
