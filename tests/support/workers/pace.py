"""One rank: what it has chosen for MPI and Horovod, its cores, and the pages it takes anew in steps that repeat."""

import json
import os
import resource
import sys
from pathlib import Path
from statistics import median

import fast_keras  # noqa: F401
import tensorflow as tf

import hvtrain.keras as hvd

hvd.init()
hvd.pin_gpu()


@tf.function
def step(tensor: tf.Tensor) -> tf.Tensor:
    return hvd.allreduce(tensor, name="large")


def pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


large = tf.ones([16 << 20])  # 64 MiB: 16,384 pages.
taken = []
for _ in range(9):
    before = pages()
    step(large)
    taken.append(pages() - before)
NAMES = ("HOROVOD_CYCLE_TIME", "OMPI_MCA_mpi_yield_when_idle", "HOROVOD_DISABLE_GROUP_FUSION")
chosen = {name: os.environ.get(name) for name in NAMES}
threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
cores = sorted(set.union(*map(os.sched_getaffinity, threads)))
give_way = sum(
    os.getpriority(os.PRIO_PROCESS, thread) > os.getpriority(os.PRIO_PROCESS, 0)
    for thread in threads
)
Path(f"{sys.argv[1]}.{hvd.rank()}").write_text(json.dumps([chosen, median(taken), cores, give_way]))
hvd.shutdown()
