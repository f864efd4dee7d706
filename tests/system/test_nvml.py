"""How busy a GPU is, as the driver's management library says it."""

import ctypes
import subprocess

import pytest

from hvtrain.system import nvml

LIBRARY = """
#include <string.h>
struct utilization { unsigned gpu, memory; };
static int is_begun, first, second;
int nvmlInit_v2(void) { is_begun = 1; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  *device = strcmp(uuid, "GPU-b") ? &first : &second;
  return !is_begun || (strcmp(uuid, "GPU-a") && strcmp(uuid, "GPU-b"));
}
int nvmlDeviceGetUtilizationRates(void *device, struct utilization *found) {
  found->gpu = device == &second ? 73 : 5;
  found->memory = 11;
  return 0;
}
"""


@pytest.fixture(autouse=True)
def forgotten():
    nvml._open.cache_clear()
    yield
    nvml._open.cache_clear()


def test_a_gpu_is_found_by_its_uuid(tmp_path, monkeypatch):
    """A library in place of the driver's, compiled here: it shows two GPUs."""
    (tmp_path / "nvml.c").write_text(LIBRARY)
    path = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, tmp_path / "nvml.c"], check=True)
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(str(path)))
    assert [nvml.busy_percent(uuid) for uuid in ("GPU-a", "GPU-b", "GPU-c", None)] == [5, 73, None, None]


def test_without_a_driver_nothing_is_said(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert nvml.busy_percent("GPU-a") is None
