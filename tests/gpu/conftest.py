"""Runs the suite where there is a GPU and the GPU environment, and says elsewhere why not.

HVTRAIN_GPU_SUITE_ON_CPU=1 checks the suite itself on a machine without one: the same tests, CPUs in place of GPUs.
HVTRAIN_GPU_SUITE_JSON=FILE keeps what was found: outcomes, seconds, and the figures that tests record.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hardware import ON_CPU, gpu_lines, num_gpus

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
JSON = os.environ.get("HVTRAIN_GPU_SUITE_JSON")
PACKAGES = ("hvtrain", "horovod", "tensorflow", "tensorflow-cpu", "keras")
# What only a loaded TensorFlow and Horovod can say, asked of another process.
LIBRARIES = """
import json, os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import horovod.tensorflow as hvd
import tensorflow as tf
build, nccl = tf.sysconfig.get_build_info(), int(hvd.nccl_built())
print(json.dumps({
    "cuda": build.get("cuda_version", "not built in"),
    "cudnn": build.get("cudnn_version", "not built in"),
    "nccl": f"{nccl // 10000}.{nccl // 100 % 100}.{nccl % 100}" if nccl else "not built in",
}))
"""
rows: list[dict[str, Any]] = []


def why_not() -> str | None:
    """What keeps the suite from running; None: nothing. TensorFlow is not imported for it."""
    if ON_CPU:
        return None
    if not num_gpus():
        return "no GPU: nvidia-smi lists none"
    installed = {distribution.name.lower() for distribution in metadata.distributions()}
    if "tensorflow" not in installed:
        return "this is the CPU environment; scripts/gpu-suite makes the one for GPUs"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items:
        if HERE not in item.path.parents:
            continue
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif "two_gpus" in getattr(item, "fixturenames", ()) and not ON_CPU and num_gpus() < 2:
            item.add_marker(pytest.mark.skip(reason="one GPU: NCCL between two needs two"))


def output_of(*command: str) -> str:
    """The last line that a command prints; empty if it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip().rpartition("\n")[2] if done.returncode == 0 else ""


def about() -> dict[str, Any]:
    """This machine and the versions on it."""
    installed = {
        result.name.lower().replace("_", "-"): result.version for result in metadata.distributions()
    }
    driver = (
        output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if gpu_lines()
        else "none"
    )
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": output_of("git", "describe", "--always", "--dirty") or "unknown",
        "devices": "CPUs in place of GPUs"
        if ON_CPU
        else [line.partition(" (UUID")[0] for line in gpu_lines()],
        "driver": driver or "unknown",
        "python": platform.python_version(),
        "packages": [f"{name} {installed[name]}" for name in PACKAGES if name in installed],
        **json.loads(output_of(sys.executable, "-c", LIBRARIES) or '{"libraries": "do not load"}'),
    }


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test is one row; what its fixtures took counts as its time, and their failure as its own."""
    if not report.nodeid.startswith("tests/gpu/test_"):
        return
    name = report.nodeid.removeprefix("tests/gpu/")
    if not rows or rows[-1]["test"] != name:
        rows.append({"test": name, "outcome": "passed", "seconds": 0.0, "figures": {}})
    row = rows[-1]
    row["seconds"] = round(row["seconds"] + report.duration, 2)
    row["figures"] |= dict(report.user_properties)
    if report.outcome != "passed":
        row["outcome"] = report.outcome
        crash = getattr(report.longrepr, "reprcrash", None)
        message = (
            report.longrepr[2]
            if isinstance(report.longrepr, tuple)
            else getattr(crash, "message", "no reason given")
        )
        row["why"] = message.partition("\n")[0][:200]


def pytest_sessionfinish() -> None:
    if JSON and rows:
        Path(JSON).write_text(json.dumps({"about": about(), "tests": rows}, indent=1) + "\n")
