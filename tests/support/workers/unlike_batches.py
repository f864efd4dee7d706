"""Runs on each rank: plain fit, in which the last rank has a batch less and ends. With argv[1], it only waits."""

import sys
import time

import fast_keras  # noqa: F401
import keras
import tensorflow as tf

import hvtrain.keras as hvd

hvd.init()
is_last = hvd.rank() == hvd.size() - 1
if is_last and sys.argv[1:]:
    time.sleep(float(sys.argv[1]))
    sys.exit()
batches = tf.data.Dataset.from_tensors((tf.ones([4, 4]), tf.ones([4, 1]))).repeat(
    3 if is_last else 4
)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
model.fit(batches.filter(lambda x, y: True), verbose=0)  # Of unknown length.
