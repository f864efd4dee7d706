"""One rank of a run without TensorFlow: real watchdogs over real processes that pretend to train.

argv: rank, number of ranks, folder, watchdog's seconds, and a JSON list of what happens: [rank, step, what].
Each step needs all ranks, which meet through files in the folder.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from hvtrain import watchdog
from hvtrain.system import console
from hvtrain.watchdog import member, progress
from hvtrain.watchdog.progress import CHECKPOINT, EXCHANGE, VALIDATION

# How long the watchdog waits for the launcher, for another rank to say why, and for the main thread.
member.SECONDS_FOR_THE_LAUNCHER = member.SECONDS_FOR_ANOTHER_RANK = 2.0
member.SECONDS_FOR_THE_MAIN_THREAD = progress.SECONDS_FOR_THE_MAIN_THREAD = 1.0

RANK, SIZE, FOLDER, LIMIT = (
    int(sys.argv[1]),
    int(sys.argv[2]),
    Path(sys.argv[3]),
    float(sys.argv[4]),
)
EVENTS = {step: what for rank, step, what in json.loads(sys.argv[5]) if rank in (RANK, -1)}
HOST = f"h{RANK}"
FOREVER = 10_000
counts = [0, 0, 0, 0]
meetings = iter(range(1_000_000))


def gather(value):
    number = next(meetings)
    own = FOLDER / f"meeting-{number}-{RANK}"
    own.with_suffix(".new").write_text(json.dumps(value))
    own.with_suffix(".new").rename(own)
    return [found(FOLDER / f"meeting-{number}-{rank}") for rank in range(SIZE)]


def found(path):
    while not path.exists():
        time.sleep(0.003)
    return json.loads(path.read_text())


def step(watched, number):
    watched.progress.begin_step(number)
    act(watched, "data", number)
    counts[0] += 1
    act(watched, "forward", number)
    counts[1] += 1
    if "serves" not in sys.argv:
        gather(number)
    counts[2] += 1
    counts[3] += 1
    watched.progress.end_step(number + 1)
    act(watched, "", number)


def act(watched, where, number):
    """What happens at this step; "data: hang" does so there."""
    event_place, _, what = EVENTS.get(number, "").rpartition(": ")
    if event_place != where or not what:
        return
    print(f"acts {what}", flush=True)
    action, _, seconds = what.partition(" ")
    seconds = float(seconds or FOREVER)
    if action == "hang":
        time.sleep(seconds)
    elif action == "grip":
        ctypes.PyDLL(None).usleep(int(seconds * 1e6) % 2**31)  # Holds Python's lock.
    elif action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "raise":
        raise RuntimeError("a leaf fell off\nsecond line")
    elif action == "memory":
        raise MemoryError("no room for a leaf")
    elif action == "ask":
        verdict = watched.cause()
        print(f"cause: {verdict.text if verdict else None}", flush=True)
        time.sleep(1)
        sys.exit(verdict.code if verdict else 9)
    elif action == "write":
        with watched.phase(CHECKPOINT):
            work(seconds, lambda: (FOLDER / "large").write_bytes(os.urandom(1 << 20)))
    elif action == "validate":
        with watched.phase(VALIDATION):
            work(seconds, watched.progress.beat)
    elif action == "exchange":
        with watched.phase(EXCHANGE):
            time.sleep(seconds)


def work(seconds, something):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        something()
        time.sleep(0.1)


def main():
    console.start_log(RANK == 0)
    watched = watchdog.start(
        RANK,
        SIZE,
        HOST,
        LIMIT,
        gather,
        lambda: tuple(counts),
        survives_loss="survives" in sys.argv,
    )
    watched.folder = FOLDER
    (FOLDER / f"pid-{RANK}").write_text(str(os.getpid()))
    if "serves" in sys.argv and RANK:
        watched.progress.end_step(0)
        with watched.phase(EXCHANGE):
            if "interrupts" in sys.argv:
                while not (
                    FOLDER / "begun"
                ).exists():  # Before that, rank 0 would not tell others of its end.
                    time.sleep(0.01)
                watched.signal_rank_0(signal.SIGINT)
            print(f"served: {watched.wait()}", flush=True)
        return
    try:
        if RANK == 0:
            (FOLDER / "begun").touch()
        for number in range(int(sys.argv[6])):
            step(watched, number)
            time.sleep(0.01)
    except BaseException as error:
        watched.fail(error)
        print(f"failed: {error}", flush=True)
        watched.stop()
        raise
    watched.stop()
    left = [thread.name for thread in threading.enumerate() if "watch" in thread.name]
    print(f"done {number + 1}, threads left: {left}", flush=True)


main()
