"""GPUs by the driver and by TensorFlow. Libraries compiled here stand for the driver's and for CUDA's."""

import ctypes
import logging
import subprocess
from pathlib import Path

import pynvml
import pytest
import tensorflow as tf

from hvtrain.errors import RankError
from hvtrain.system import resources

# In place of the driver's library: it shows two GPUs.
NVML = """
#include <string.h>
struct utilization { unsigned gpu, memory; };
static int is_begun, first, second;
int nvmlInitWithFlags(unsigned flags) { is_begun = 1; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  *device = strcmp(uuid, "GPU-b") ? &first : &second;
  return !is_begun || (strcmp(uuid, "GPU-a") && strcmp(uuid, "GPU-b"));
}
int nvmlDeviceGetUtilizationRates(void *device, struct utilization *rates) {
  rates->gpu = device == &second ? 73 : 5;
  rates->memory = 11;
  return 0;
}
"""

# The driver: it shows two GPUs.
DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return index > 1; }
int cuDeviceGetUuid_v2(void *uuid, int device) { memset(uuid, 0xa0 + device, 16); return 0; }
"""


def compile_library(source: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-o", path, "-"], input=source.encode(), check=True
    )
    return path


@pytest.fixture
def driver(tmp_path, monkeypatch):
    library = compile_library(DRIVER, tmp_path / "libcuda.so.1")
    load = ctypes.CDLL
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name: load(str(library) if name == "libcuda.so.1" else name)
    )
    resources._explain_unused.cache_clear()


def test_the_driver_is_asked_for_uuids(driver):
    first, second = (
        "GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0",
        "GPU-a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1",
    )
    assert resources.gpu_uuids(0) == () and resources.gpu_uuids(2) == (first, second)
    assert resources.gpu_uuids(3) == (), "TensorFlow counts more than the driver: names have to do"


def test_gpus_that_tensorflow_cannot_use_are_refused(driver, monkeypatch):
    """It would train on CPUs, with exit code 0."""
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: True)
    with pytest.raises(
        RankError,
        match=r"has 2 GPU\(s\), and TensorFlow .* can use none of them: .*CUDA_VISIBLE_DEVICES=-1",
    ):
        resources.physical_gpus()


def test_a_tensorflow_for_cpus_warns_once_of_unused_gpus(driver, monkeypatch, caplog):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: False)
    with caplog.at_level(logging.WARNING):
        assert resources.physical_gpus() == [] == resources.physical_gpus()
    assert [record.getMessage().partition(" has ")[2][:30] for record in caplog.records] == [
        "2 GPU(s), which are not used: "
    ]


def test_no_driver_no_warning(monkeypatch, caplog):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    with caplog.at_level(logging.WARNING):
        assert resources.physical_gpus() == [] and caplog.records == []


def test_cusolver_is_loaded_where_its_package_has_it(tmp_path):
    """TensorFlow then opens it by its name, although no path leads there."""
    name = "libcusolver.so.11"
    path = tmp_path / "nvidia/cusolver/lib" / name
    path.parent.mkdir(parents=True)
    source = "int hvtrain_loaded(void) { return 7; }"
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-x", "c", "-o", path, "-"],
        input=source.encode(),
        check=True,
    )
    with pytest.raises(OSError, match="cannot open shared object file"):
        ctypes.CDLL(name)
    resources._load_cusolver(tmp_path)
    assert ctypes.CDLL(name).hvtrain_loaded() == 7


@pytest.fixture
def fresh_nvml(monkeypatch):
    """pynvml as it is before its first use, here and again afterwards."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    resources._gpu_handle.cache_clear()
    yield
    resources._gpu_handle.cache_clear()


def test_a_gpu_is_known_by_its_uuid(fresh_nvml, tmp_path, monkeypatch):
    """A library in place of the driver's, compiled here."""
    path = compile_library(NVML, tmp_path / "libnvidia-ml.so.1")
    monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(str(path)))
    assert [resources.busy_percent(uuid) for uuid in ("GPU-a", "GPU-b", "GPU-c", None)] == [
        5,
        73,
        None,
        None,
    ]


def test_without_a_driver_nothing_is_said(fresh_nvml, monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(pynvml, "CDLL", absent)
    assert resources.busy_percent("GPU-a") is None


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H100 NVL", 835e12), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None)]
)
def test_a_slice_of_a_gpu_has_no_known_peak(name, peak, monkeypatch):
    details = {"device_name": name}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: details)
    assert resources.peak_flops("mixed_bfloat16") == peak
