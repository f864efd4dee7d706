"""Runs on each rank: where it is, over which interface and as whom it came, and that it sums with the others."""

import os
import socket
import sys

import fast_keras  # noqa: F401
import numpy as np

import hvtrain.keras as hvd

hvd.init()
total = int(hvd.allreduce(np.array([hvd.rank()], np.float32), op=hvd.Sum)[0])
line = f"rank {hvd.rank()} sum {total} local {hvd.local_rank()} host {socket.gethostname()}"
line += f" over {os.environ.get('HOROVOD_GLOO_IFACE')} user {os.environ.get('USER')}"
# One write, so that the lines of several ranks do not mix.
sys.stdout.write(f"{line}\n")
hvd.shutdown()
