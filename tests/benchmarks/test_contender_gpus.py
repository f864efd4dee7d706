"""Each hand-written contender takes a GPU of its own before TensorFlow starts a device. No GPU is needed.

The contenders run as they are, in one process, up to their first look at the data; the GPUs are only said to be there.
"""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import processes
from benchmarks.contenders import CONTENDERS, RUNNER
from benchmarks.measure import JOB

pytestmark = pytest.mark.nightly

# As TensorFlow does, the fakes refuse once its devices run. A contender that asks for its data has pinned by then.
PROGRAM = """
import json, os, runpy, sys
import tensorflow as tf
from tensorflow.python.eager import context

gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(2)]
calls = []

def tell(*what):
    assert context.context()._context_handle is None, "TensorFlow has started its devices"
    calls.append(what)

class Asked(BaseException):
    pass

def ask(*_, **__):
    raise Asked

tf.config.list_physical_devices = lambda kind=None: list(gpus)
tf.config.set_visible_devices = lambda devices, kind: tell("visible", [gpus.index(gpu) for gpu in devices])
tf.config.experimental.set_memory_growth = lambda gpu, on: tell("grows", gpus.index(gpu), on)
tf.distribute.Server = tf.distribute.MultiWorkerMirroredStrategy = ask

import horovod.tensorflow as hvd
hvd.init, hvd.rank, hvd.size, hvd.local_rank, hvd.local_size = lambda: None, lambda: 3, lambda: 4, lambda: 1, lambda: 2

import benchmarks.by_hand.common as common
common.make_setup = ask
from hvtrain.system import resources
resources.pin_to_cores = lambda *_: tell("cores")

calls_of = {}
for name, (module, task) in json.loads(sys.argv[1]).items():
    calls.clear()
    os.environ["TF_CONFIG"] = json.dumps(task)
    try:
        runpy.run_module(module, run_name="__main__")
    except Asked:
        calls_of[name] = list(calls)
print(json.dumps(calls_of))
"""
BY_HAND = "benchmarks.by_hand"
MODULES = sorted(
    {contender.module for contender in CONTENDERS.values() if contender.module != RUNNER}
)
CLUSTER = {
    "chief": ["127.0.0.1:1"],
    "ps": ["127.0.0.1:2"],
    "worker": ["127.0.0.1:3", "127.0.0.1:4"],
}


def task(role, index):
    return {"cluster": CLUSTER, "task": {"type": role, "index": index}}


@pytest.fixture(scope="module")
def calls():
    """What each contender's second process tells TensorFlow, and the coordinator and the server of one of them."""
    runs = {module: (module, task("worker", 1)) for module in MODULES}
    runs |= {role: (f"{BY_HAND}.parameter_server", task(role, 0)) for role in ("chief", "ps")}
    report = {JOB: "1 of 2", processes.WARMUP: "1", processes.BEGAN: "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(runs)],
        env={**os.environ, **report, processes.REPORT: "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("module", MODULES)
def test_the_second_process_of_a_host_takes_its_second_gpu(calls, module):
    """And the cores are left to TensorFlow there, as by the runner."""
    assert calls[module] == [["visible", [1]], ["grows", 1, True]]


@pytest.mark.parametrize("role", ["chief", "ps"])
def test_coordinator_and_parameter_server_take_no_gpu(calls, role):
    """Or each would hold memory of the workers' GPUs."""
    assert calls[role] == [["visible", []]]
