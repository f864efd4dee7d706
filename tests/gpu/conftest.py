"""Runs the suite where there is a GPU and the GPU environment, and says elsewhere why not.

HVTRAIN_GPU_SUITE_ON_CPU=1 checks the suite itself on a machine without one: the same tests, CPUs in place of GPUs.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from hardware import ON_CPU, num_gpus

HERE = Path(__file__).parent


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
