"""python fate.py FOLDER FATE RANK [mpi]: each rank says in FOLDER that it is there; then RANK alone meets FATE."""

import os
import signal
import sys
import time
from pathlib import Path

folder, fate, chosen, *more = sys.argv[1:]
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"])
if "mpi" in more:
    from mpi4py import MPI

    MPI.COMM_WORLD.barrier()


def come_to(end):
    if end == "raise":
        raise ValueError("a bad thing")
    if end.startswith("exit"):
        os._exit(int(end[4:]))
    if end.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, end))


signal.signal(signal.SIGUSR1, signal.SIG_IGN if fate == "deaf" else lambda *_: os._exit(75))
first_time = not Path(folder, f"rank-{rank}").exists()
Path(folder, f"rank-{rank}").write_text(" ".join(sorted(os.environ)))
while sum(1 for _ in Path(folder).glob("rank-*")) < 2:
    time.sleep(0.05)
print("rank", rank, "first" if first_time else "again", flush=True)
time.sleep(0.5)  # So that what is said before arrives before.
if str(rank) == chosen and (first_time or not fate.endswith("-once")):
    come_to(fate.removesuffix("-once"))
if fate.endswith("-once") and not first_time:
    sys.exit()
time.sleep(150)
