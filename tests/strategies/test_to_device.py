"""Batches are on the device before the step that takes them. Two devices of the CPU; the model is on the second."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, time
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from hvtrain.step_timing import StepMarks
from hvtrain.strategies.loop import make_steps, to_device

pulled = []
found = {}
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


def batch(number):
    pulled.append(int(number))
    return np.float32(np.random.default_rng(int(number)).normal(size=(8, 17)))


def trained(ahead, gates=False):
    numbers = tf.data.Dataset.range(100)
    rows = numbers.map(lambda n: tf.ensure_shape(tf.numpy_function(batch, [n], tf.float32), [8, 17]))
    batches = rows.map(lambda row: (row[:, :16], row[:, 16:]))
    keras.utils.set_random_seed(1)
    with tf.device("/CPU:1"):
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        pulled.clear()
        marks = StepMarks()
        marks.gates = gates
        steps = make_steps(model, iter(to_device(batches, "/CPU:1") if ahead else batches), marks)
        context.enable_run_metadata()
        steps(5)
        partitions = [part for run in context.export_run_metadata().function_graphs for part in run.partition_graphs]
    received = [node for part in partitions for node in part.node if node.op == "_Recv" and "CPU:1" in node.device]
    crossing, clocks = (
        sum(word in node.attr["tensor_name"].s for node in received) for word in (b"IteratorGetNext", b"Timestamp")
    )
    time.sleep(0.5)  # Time to run ahead.
    weights = [weight.tolist() for weight in model.get_weights()]
    return {"pulled": max(pulled) + 1, "crossing": crossing, "clocks": clocks, "weights": weights}


print(json.dumps({"ahead": trained(True), "gated": trained(True, gates=True), "plain": trained(False)}))
"""


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_step_copies_no_batch(found):
    assert found["plain"]["crossing"] == 2, "images and labels"
    assert found["ahead"]["crossing"] == 0


def test_the_forward_pass_does_not_wait_for_the_hosts_clock(found):
    """What is left: the clock is read before the step asks for its batch."""
    assert (found["gated"]["clocks"], found["ahead"]["clocks"]) == (2, 1)


def test_the_next_batches_are_copied_meanwhile(found):
    assert found["ahead"]["pulled"] >= found["plain"]["pulled"] + 2


def test_the_weights_are_the_same(found):
    assert found["ahead"]["weights"] == found["plain"]["weights"]
