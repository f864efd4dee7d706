"""Two processes sum 1 and 2 through Horovod: the proof that a build works. Started by scripts/run.

`horovodrun --check-build` lists frameworks that are not there; a sum that comes out right does not lie.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
# Both processes would take the first GPU, which NCCL refuses. The build is what is checked, and the CPU shows it.
tf.config.set_visible_devices([], "GPU")
expected = sum(range(hvd.size() + 1))
total = int(hvd.allreduce(tf.constant([hvd.rank() + 1]), op=hvd.Sum)[0])
if hvd.size() < 2 or total != expected:
    sys.exit(
        f"allreduce over {hvd.size()} process(es) gave {total}, needed {expected} over at least 2"
    )
if hvd.rank() == 0:
    controller = "MPI" if hvd.mpi_enabled() else "Gloo"
    print(f"{controller}: allreduce over {hvd.size()} processes is right (1 + 2 = {total})")
hvd.shutdown()
