"""Commands on GPUs: one rank trains, too many are refused, a rank is lost, verify and bench."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import pytest
from hardware import ON_CPU, device, num_gpus, sharing

from launching import ROOT, finish, kill, run, start, train

pytestmark = pytest.mark.distributed
HOST = socket.gethostname()
QUICK = ["model=mlp", "train.epochs=8"]
# Horovod leaves a host that lost a rank, so each rank is on a host of its own: two names of this machine.
NAMES = ["localhost", "127.0.0.1"]
OWN_GPU = (
    '[[ $HOROVOD_HOSTNAME == localhost ]] && mine=0 || mine=1; CUDA_VISIBLE_DEVICES=$mine exec "$@"'
)


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_one_rank_trains_on_the_gpu(tmp_path):
    code, output = train(None, 1, "train.epochs=4", f"run.dir={tmp_path / 'run'}", cwd=tmp_path)
    assert code == 0, output
    shown = re.search(r"devices +\d+ (.+)", output)
    assert shown and shown[1] == device(HOST, 0)
    assert result(tmp_path / "run")["test_accuracy"] > 0.85


def test_more_ranks_than_gpus_are_refused_in_one_line(tmp_path):
    if ON_CPU:
        pytest.skip("CPUs are shared by any number of ranks")
    ranks = num_gpus() + 1
    code, output = train("gloo", ranks, *QUICK, f"run.dir={tmp_path / 'run'}", cwd=tmp_path)
    assert code == 2
    assert f"has {num_gpus()} visible GPU(s) for {ranks} ranks; start fewer ranks" in output
    assert "Traceback" not in output


def test_verify_passes(tmp_path, record_property):
    """The library's checks, and those of a run of one's own."""
    arguments = ["python", "-m", "hvtrain", "verify", "model=mlp", *sharing(2)]
    code, output = run("gloo", 2, *arguments, cwd=tmp_path)
    assert code == 0, output
    passed = re.search(r"all (\d+) checks passed on 2 rank\(s\)", output)
    assert passed, output
    record_property("checks", int(passed[1]))
    record_property("sparse gradients", re.findall(r"PASS  sparse gradients +(.*?);", output)[0])


def test_training_goes_on_without_a_rank_that_is_killed(tmp_path, record_property):
    """The other rank leaves the reduction that it waits in, and continues alone from its last commit."""
    (tmp_path / "hosts").write_text("".join(f"{name}:1\n" for name in NAMES))
    (tmp_path / "discover.sh").write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    (tmp_path / "discover.sh").chmod(0o755)
    options = [
        "--min-np",
        "1",
        "--max-np",
        "2",
        "--host-discovery-script",
        str(tmp_path / "discover.sh"),
    ]
    options += ["--network-interfaces", "lo"]
    own = ["bash", "-c", OWN_GPU, "bash"] if not ON_CPU and num_gpus() > 1 else []
    fates = f"+callbacks.fates={{_target_: fates.Fates, folder: {tmp_path}, kill_rank: 1, kill_step: 50}}"
    arguments = [
        *QUICK,
        "strategy=elastic",
        "strategy.commit_steps=20",
        *sharing(2),
        fates,
        f"run.dir={tmp_path / 'run'}",
    ]
    path = os.pathsep.join(
        [str(ROOT / "tests/support/own_faults"), os.environ.get("PYTHONPATH", "")]
    )
    process = start(
        "gloo",
        2,
        *options,
        *own,
        "python",
        "-m",
        "hvtrain",
        *arguments,
        cwd=tmp_path,
        PYTHONPATH=path,
    )
    try:
        output = finish(process)
    finally:
        if process.poll() is None:
            kill(process)
    assert process.returncode == 0, output
    assert (tmp_path / "killed").exists()
    sizes = [
        [int(line.split()[1]) for line in path.read_text().splitlines()]
        for path in tmp_path.glob("steps-*")
    ]
    lost, left = sorted(sizes, key=len)
    assert set(lost) == {2} and left[:40] == [2] * 40 and left[-1] == 1
    record_property("steps alone", left.count(1))
    assert result(tmp_path / "run")["test_accuracy"] > 0.85


def test_bench_measures_the_contenders(tmp_path, record_property):
    """Of a tiny network in a few steps: that contenders run on GPUs of their own and do the same work."""
    several = ON_CPU or num_gpus() > 1
    names = (
        ["hvtrain-gloo", "loop-gloo", "multi-worker", "keras"]
        if several
        else ["hvtrain-1", "keras"]
    )
    arguments = [
        "steps",
        "-np",
        "2" if several else "1",
        "--workload",
        "tiny",
        "--steps",
        "30",
        "--rounds",
        "1",
    ]
    arguments += ["--contenders", ",".join(names), "--output", str(tmp_path / "bench")]
    code, output = run(None, 1, "python", "-m", "benchmarks", *arguments, cwd=tmp_path)
    assert code == 0, output
    runs = {
        row["contender"]: row
        for row in json.loads((tmp_path / "bench" / "bench.json").read_text())["runs"]
    }
    assert set(runs) == {*names, f"{names[0]} again"}
    for name in names[1:]:
        record_property(
            f"step of {name} / {names[0]}, 30 steps",
            runs[name]["step_seconds"] / runs[names[0]]["step_seconds"],
        )
    same = names[:3] if several else names
    assert max(runs[name]["loss"] for name in same) == pytest.approx(
        min(runs[name]["loss"] for name in same), rel=1e-3
    )
