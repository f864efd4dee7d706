"""Runs on each rank, in a network of its own: bytes of a reduction, computed and counted by the interface.

argv[1]: where rank 0 writes JSON.
"""

import json
import sys
from pathlib import Path

import fast_keras  # noqa: F401
import tensorflow as tf

import hvtrain.keras as hvd
from hvtrain.keras.reduction import Reducer

STEPS = 5
Compression = hvd.Compression
FORMATS = {
    "none": Compression.none,
    "fp16": Compression.fp16,
    "bf16": Compression.bf16,
    "int8": Compression.int8,
    "powersgd": Compression.powersgd(4, whole_steps=0),
}

hvd.init()


def sent():
    """Bytes that all processes of this network have sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(fields[8])


results = {}
for name, compression in FORMATS.items():
    variables = [tf.Variable(tf.zeros((2048, 2048)))]
    reducer = Reducer(compression=compression, message_name=name)
    step = tf.function(lambda gradient: reducer([gradient], variables))  # noqa: B023
    gradient = tf.random.normal((2048, 2048))
    step(gradient)
    hvd.allreduce(tf.zeros(1), name=f"{name}_begins")
    before = sent()
    for _ in range(STEPS):
        step(gradient)
    hvd.allreduce(tf.zeros(1), name=f"{name}_ends")
    results[name] = (reducer.sent_bytes, (sent() - before) / STEPS / hvd.size())
if hvd.rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(results))
hvd.shutdown()
