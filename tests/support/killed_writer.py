"""Writes and rotates checkpoints, killed by SIGKILL at every file-system call in turn: python killed_writer.py FOLDER.

Each turn is a process of its own, forked from this one, which looks at what the killed one left as the next start
of a run would. Prints a line of JSON: how many points there were, at how many of them sweep was killed too, and
what was found wrong.
"""

import io
import itertools
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np

from hvtrain.checkpoint import store, writer
from hvtrain.config.schema import CheckpointConfig

# Steps and metrics; one checkpoint is the best, one is written a second time, and one is kept besides the best.
WRITES = [(10, 0.5), (20, 0.9), (30, 0.6), (30, 0.6), (40, 0.7)]
BEST = 20
CALLS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "open", "scandir")


class Countdown:
    """Kills this process at its n-th call."""

    def __init__(self, left):
        self.left = left

    def __call__(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, call):
        def counted(*args, **kwargs):
            self()
            return call(*args, **kwargs)

        return counted

    def install(self):
        for name in CALLS:
            setattr(os, name, self.before(getattr(os, name)))
        countdown = self

        class InHalves(io.FileIO):
            """A kill finds half of what was to be written in the file."""

            def write(self, data):
                data = memoryview(data).cast("B")
                first = super().write(data[: len(data) // 2])
                countdown()
                return first + super().write(data[first:])

        real = io.open

        def opened(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None):
            if mode not in ("w", "xb"):
                return real(file, mode, buffering, encoding, errors, newline)
            countdown()
            stream = io.BufferedWriter(InHalves(file, mode.rstrip("b")))
            return stream if mode == "xb" else io.TextIOWrapper(stream, encoding)

        io.open = opened


def arrays(step):
    return {
        "model/0000/kernel": np.full((40, 25), step, np.float32),
        "optimizer/0000/step": np.array(step),
    }


def write_all(folder, done):
    writer.sweep(folder)
    with writer.Writer(folder, CheckpointConfig(keep=1)) as writing:
        for step, accuracy in WRITES:
            writing.submit(step, arrays(step), {"metrics": {"val_accuracy": accuracy}})
            error = writing.outcome()
            if error:
                raise error
            os.write(done, b"x")


def killed(work, point):
    """Runs the work in a process of its own, killed at this point; False when it ended before."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            Countdown(point).install()
            work()
            status = 0
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return False
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    return True


def wrong(folder, num_done):
    """What is not as promised in a folder that the next start has swept."""
    least = WRITES[num_done - 1][0] if num_done else 0
    paths = store.list_checkpoints(folder)
    newest = store.read(paths[-1]) if paths else None
    if (newest.step if newest else 0) < least:
        yield f"the newest is {newest and newest.step}, though {least} was complete"
    if newest and not np.array_equal(
        newest.arrays["model/0000/kernel"], arrays(newest.step)["model/0000/kernel"]
    ):
        yield f"step {newest.step} holds something else"
    names = {path.name for path in paths}
    stray = {path.name for path in folder.iterdir()} - names - {"best.json"}
    if stray:
        yield f"stray: {stray}"
    for name in names:
        store.read(folder / name)
    best = writer.read_best(folder)
    if least >= BEST and (best is None or best["step"] != BEST):
        yield f"the best is {best}, though {BEST} was marked"


def main(root):
    points = sweeps = 0
    faults = []
    for point in itertools.count(1):
        folder = root / f"{point:03d}"
        folder.mkdir()
        read_end, write_end = os.pipe()
        was_killed = killed(partial(write_all, folder, write_end), point)
        os.close(write_end)
        num_done = len(os.read(read_end, 100))
        os.close(read_end)
        if not was_killed:
            assert num_done == len(WRITES)
            break
        points += 1
        for again in itertools.count(1):
            if not killed(partial(writer.sweep, folder), again):
                break
            sweeps += 1
        faults += [f"point {point}: {text}" for text in wrong(folder, num_done)]
    print(json.dumps({"points": points, "sweeps": sweeps, "found": faults}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
