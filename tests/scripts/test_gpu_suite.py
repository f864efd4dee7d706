"""scripts/gpu-suite and what it writes, on a machine without a GPU: the suite itself is in tests/gpu."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("HVTRAIN_", "PYTEST_"))
}


def run(*arguments, **extra):
    done = subprocess.run(
        arguments, cwd=ROOT, env={**WITHOUT, **extra}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_a_machine_without_a_gpu_is_one_line(tmp_path):
    for name in ("bash", "env", "dirname", "readlink", "head"):
        (tmp_path / name).symlink_to(shutil.which(name))
    suite = str(ROOT / "scripts" / "gpu-suite")
    missing = (
        "hvtrain: no nvidia-smi here; run this on a machine with an NVIDIA GPU and its driver\n"
    )
    assert run(suite, PATH=str(tmp_path)) == (1, "", missing)
    (tmp_path / "nvidia-smi").write_text(
        "#!/usr/bin/env bash\necho 'No devices were found'; exit 6\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    code, output, errors = run(suite, PATH=str(tmp_path))
    assert (code, output) == (1, "") and "lists no GPU (it says: No devices were found)" in errors
    assert errors.count("\n") == 1


@pytest.mark.nightly
def test_every_test_of_the_suite_is_in_its_table_with_the_reason_if_it_did_not_run(tmp_path):
    if shutil.which("nvidia-smi"):
        pytest.skip("there may be a GPU: scripts/gpu-suite runs the suite")
    file = tmp_path / "gpu-suite.json"
    arguments = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    code, output, _ = run(*arguments, HVTRAIN_GPU_SUITE_JSON=str(file))
    assert code == 0, output
    result = json.loads(file.read_text())
    assert {"date", "commit", "devices", "driver", "python", "packages", "nccl"} <= result[
        "about"
    ].keys()
    assert any(package.startswith("horovod ") for package in result["about"]["packages"])
    assert len(result["tests"]) > 20
    assert {(row["outcome"], row["why"]) for row in result["tests"]} == {
        ("skipped", "Skipped: no GPU: nvidia-smi lists none")
    }
    code, table, _ = run(sys.executable, "tests/gpu/report.py", str(file))
    assert code == 0 and table.splitlines()[-1] == f"{len(result['tests'])} skipped in 0 s"
    assert table.count("| Skipped: no GPU: nvidia-smi lists none |") == len(result["tests"])
