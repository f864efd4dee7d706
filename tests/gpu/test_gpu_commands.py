"""Runs of `python -m hvtrain` on GPUs: one rank, and two in each precision, through the runner's own records."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from hardware import ON_CPU, device, num_gpus, sharing

from launching import train

pytestmark = pytest.mark.distributed
HOST = socket.gethostname()
QUICK = ["model=mlp", "train.epochs=8"]


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_one_rank_trains_on_the_gpu(tmp_path):
    code, output = train(None, 1, "train.epochs=4", f"run.dir={tmp_path / 'run'}", cwd=tmp_path)
    assert code == 0, output
    shown = re.search(r"devices +\d+ (.+)", output)
    assert shown and shown[1] == device(HOST, 0)
    assert result(tmp_path / "run")["test_accuracy"] > 0.85


@pytest.mark.parametrize("precision", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_two_ranks_train_in_each_precision(tmp_path, precision):
    words = [*QUICK, f"train.precision={precision}", *sharing(2), f"run.dir={tmp_path / 'run'}"]
    code, output = train("gloo", 2, *words, cwd=tmp_path)
    assert code == 0, output
    found = result(tmp_path / "run")
    assert found["num_ranks"] == 2
    assert found["test_accuracy"] > 0.85
    assert precision in output
    assert found["reductions"] == found["num_steps"], "every step was reduced, and once"
    assert "weights equal on 2/2 ranks" in output
    if not ON_CPU:
        assert re.search(r"devices .*GPU", output)


def test_more_ranks_than_gpus_are_refused_in_one_line(tmp_path):
    if ON_CPU:
        pytest.skip("CPUs are shared by any number of ranks")
    ranks = num_gpus() + 1
    code, output = train("gloo", ranks, *QUICK, f"run.dir={tmp_path / 'run'}", cwd=tmp_path)
    assert code == 2
    assert f"has {num_gpus()} visible GPU(s) for {ranks} ranks; start fewer ranks" in output
    assert "Traceback" not in output
