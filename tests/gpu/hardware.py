"""What GPUs this machine has, asked without TensorFlow, and what a rank's device is to be called then."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

ON_CPU = os.environ.get("HVTRAIN_GPU_SUITE_ON_CPU") == "1"


def gpu_lines() -> list[str]:
    """Each GPU's line of nvidia-smi -L: number, name and UUID; none where there is no driver."""
    program = shutil.which("nvidia-smi")
    if not program:
        return []
    listed = subprocess.run(
        [program, "-L"], capture_output=True, text=True, check=False
    ).stdout.splitlines()
    return [line for line in listed if re.match(r"GPU \d+:", line)]


def num_gpus() -> int:
    """GPUs that a test may use: those of the machine, or as many of them as CUDA_VISIBLE_DEVICES leaves."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(gpu_lines())
    if variable is None:
        return count
    named = [name.strip() for name in variable.split(",")]
    return min(count, len([name for name in named if name and name not in ("-1", "NoDevFiles")]))


def device(host: str, number: int) -> str:
    """How hvtrain calls the number-th visible device of a host in this suite."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = variable.split(",") if variable else None
    return f"{host} CPU" if ON_CPU else f"{host} GPU {names[number].strip() if names else number}"


def sharing(num_ranks: int) -> list[str]:
    """The word that lets so many ranks run where there are fewer GPUs."""
    return [] if ON_CPU or num_gpus() >= num_ranks else ["strategy.share_gpus=true"]
