"""The GPU environment, made where there is a CUDA toolkit: no GPU is needed to build, to load, or to sum over hosts.

The first time takes some seven minutes and gigabytes of wheels; uv's cache makes the next times quicker.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import dockerfile

ROOT = Path(__file__).parents[2]
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
PARTS = ("conf", "hvtrain", "scripts", "LICENSE", "README.md", "pyproject.toml")
GIGABYTES = 12
pytestmark = [pytest.mark.release, pytest.mark.distributed, pytest.mark.timeout(1500)]

LOOK = """
import json, os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
from importlib.metadata import distributions
from pathlib import Path
import horovod.tensorflow as hvd
import tensorflow as tf
maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
(library,) = (Path(hvd.__file__).parent).glob("mpi_lib*.so")
code = library.read_bytes()
print(json.dumps({
    "built": {name: int(getattr(hvd, name + "_built")()) for name in ("nccl", "cuda", "mpi", "gloo", "rocm")},
    "nccl_wheels": [found.version for found in distributions() if found.name.startswith("nvidia-nccl")],
    "nccl_loaded": [path for path in maps if "libnccl.so" in path],
    "kernels": b".nv_fatbin" in code and b"ncclAllReduce" in code,
    "tensorflow": bool(tf.sysconfig.get_build_info()["is_cuda_build"]),
    "gpus": len(tf.config.list_physical_devices("GPU")),
}))
"""


@pytest.fixture(scope="module")
def checkout() -> Iterator[Path]:
    """A copy of this checkout with a GPU environment of its own."""
    if not (CUDA / "bin" / "nvcc").exists():
        pytest.skip(f"no CUDA toolkit: {CUDA}/bin/nvcc is not there")
    with tempfile.TemporaryDirectory(prefix="hvtrain-gpu-") as name:
        folder = Path(name)
        if shutil.disk_usage(folder).free < GIGABYTES * 10**9:
            pytest.skip(f"less than {GIGABYTES} GB free in {folder.parent}")
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / part)
        code, output = run(folder, "true")
        assert code == 0, output
        assert "Gloo: allreduce over 2 processes is right" in output
        assert "MPI: allreduce over 2 processes is right" in output
        yield folder


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of scripts/run with these words, in the GPU environment."""
    left = ("VIRTUAL_ENV", "OPAL_PREFIX", "HVTRAIN_PYTHON")
    environment = {name: value for name, value in os.environ.items() if name not in left}
    path = os.pathsep.join(
        part for part in os.environ["PATH"].split(os.pathsep) if not part.startswith(str(ROOT))
    )
    done = subprocess.run(
        [folder / "scripts" / "run", *arguments],
        cwd=folder,
        env={**environment, "PATH": path, "HVTRAIN_VARIANT": "gpu", "CUDA_HOME": str(CUDA)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def found(checkout: Path) -> dict:
    code, output = run(checkout, "python", "-c", LOOK)
    assert code == 0, output
    return json.loads(output.splitlines()[-1])


def test_horovod_has_nccl_and_cuda_and_both_controllers(found):
    built = found["built"]
    assert built["cuda"] and built["mpi"] and built["gloo"] and not built["rocm"]
    assert found["kernels"], "what nvcc compiled is in the library"


def test_nccl_is_the_one_that_tensorflow_brings(checkout, found):
    (version,) = found["nccl_wheels"]
    major, minor, patch = map(int, version.split("."))
    assert found["built"]["nccl"] == major * 10000 + minor * 100 + patch, "compiled against it"
    assert len(found["nccl_loaded"]) == 1, "and no second one is loaded"
    assert found["nccl_loaded"][0].startswith(f"{checkout}/.venv/lib/")


def test_tensorflow_is_the_one_for_gpus(found):
    assert found["tensorflow"]


def test_the_gpu_suite_says_why_it_does_not_run(checkout, found):
    if found["gpus"]:
        pytest.skip("there is a GPU: scripts/gpu-suite runs the suite")
    suite = str(ROOT / "tests" / "gpu")
    code, output = run(
        checkout,
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "-c",
        str(ROOT / "pyproject.toml"),
        suite,
    )
    assert code == 0, output
    assert "no GPU: nvidia-smi lists none" in output and " passed" not in output


def test_two_ranks_train_after_the_image_has_taken_out_what_it_does_not_need(checkout):
    """The last steps of the Dockerfile's build-gpu, as they stand there; on CPUs where there is no GPU."""
    steps = dockerfile.stages((ROOT / "Dockerfile").read_text())["build-gpu"].all("RUN")[-2:]
    for step in steps:
        arguments = step.replace("train.epochs=1", "train.epochs=1 strategy.share_gpus=true")
        code, output = run(
            checkout, "bash", "-c", arguments.replace("/tmp/first", str(checkout / "first"))
        )
        assert code == 0, output
    assert "weights equal on 2/2 ranks" in output
    assert not list(checkout.glob(".venv/lib/python3*/site-packages/tensorflow/include"))
