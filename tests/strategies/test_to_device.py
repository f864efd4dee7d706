"""A device waits neither for its batch nor for the host. Two devices of the CPU; the model is on the second."""

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

from hvtrain.step.step_timing import StepMarks
from hvtrain.strategies.loop import make_steps, to_device

pulled = []
found = {}
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


def batch(number):
    pulled.append(int(number))
    return np.float32(np.random.default_rng(int(number)).normal(size=(8, 17)))


def before(node, nodes, seen):
    # The nodes that a node waits for within an iteration.
    for name in (name.lstrip("^").partition(":")[0] for name in node.input):
        if name not in seen and nodes[name].op != "NextIteration":
            seen[name] = nodes[name].op
            before(nodes[name], nodes, seen)
    return seen


def trained(ahead, host_only=False):
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
        marks.host_only = host_only
        steps = make_steps(model, iter(to_device(batches, "/CPU:1") if ahead else batches), marks)
        context.enable_run_metadata()
        steps(5)
        partitions = [part for run in context.export_run_metadata().function_graphs for part in run.partition_graphs]
    received = [node for part in partitions for node in part.node if node.op == "_Recv" and "CPU:1" in node.device]
    crossing, clocks = (
        sum(word in node.attr["tensor_name"].s for node in received) for word in (b"IteratorGetNext", b"Timestamp")
    )
    waiting = 0
    for part in partitions:
        nodes = {node.name: node for node in part.node}
        sends = [node for node in part.node if node.op == "_Send" and "CPU:1" in node.device]
        waiting += sum(any(op.startswith("AssignSub") for op in before(node, nodes, {}).values()) for node in sends)
    time.sleep(0.5)  # Time to run ahead.
    weights = [weight.tolist() for weight in model.get_weights()]
    counts = {"crossing": crossing, "clocks": clocks, "waiting": waiting}
    return {"pulled": max(pulled) + 1, **counts, "weights": weights, "times": marks.times()}


print(json.dumps({"ahead": trained(True), "loop": trained(True, host_only=True), "plain": trained(False)}))
"""


# By default test_loop.py holds what a step gives, and that its parts are timed.
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def results():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_step_copies_no_batch(results):
    assert results["plain"]["crossing"] == 2, "images and labels"
    assert results["ahead"]["crossing"] == 0


def test_a_step_does_not_wait_for_the_hosts_clock(results):
    assert (results["loop"]["clocks"], results["ahead"]["clocks"]) == (1, 0)


def test_the_host_does_not_wait_for_the_update(results):
    """So it has the next step ready. TensorFlow's loop in a graph waits after each iteration."""
    assert results["loop"]["waiting"] > 0
    assert results["ahead"]["waiting"] == 0


def test_all_steps_are_timed(results):
    for way in results.values():
        steps, data, compute, communication = way["times"]
        assert steps == 5 and data > 0 and compute > 0 and communication == 0


def test_the_next_batches_are_copied_meanwhile(results):
    assert results["ahead"]["pulled"] >= results["plain"]["pulled"] + 2


def test_the_weights_are_the_same(results):
    assert results["ahead"]["weights"] == results["plain"]["weights"]
