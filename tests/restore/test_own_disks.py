"""Resumes where each host has a disk of its own, which two ranks on one machine have here in mount namespaces."""

import hashlib
import json
import os
import shutil

import pytest

from launching import WORKERS, run

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(os.geteuid() != 0, reason="a mount needs root"),
]

WORDS = ["model=mlp", "train.deterministic=true", "dataset.shift_pixels=1", "schedule=cosine", "train.steps=40",
         "checkpoint.every_steps=8", "checkpoint.keep=9", "checkpoint.best=loss"]  # fmt: skip


def train(folder, hosts, *words):
    """Exit code and output of a run in folder/run with a rank on each of the hosts, whose disks are in folder/disks."""
    (folder / "run").mkdir(exist_ok=True)
    for host in hosts:
        (folder / "disks" / host).mkdir(parents=True, exist_ok=True)
    command = [str(WORKERS / "own_disk"), "python", "-m", "hvtrain", *WORDS, *words, f"run.dir={folder / 'run'}"]
    variables = {"DISKS": str(folder / "disks"), "RUN": str(folder / "run"), "HOSTS": ",".join(hosts)}
    return run("mpirun", len(hosts), *command, cwd=folder, **variables)


def checkpoints(folder, host):
    return sorted(path.name for path in (folder / "disks" / host / "checkpoints").glob("step-*"))


def checksum(folder, host, name):
    arrays = folder / "disks" / host / "checkpoints" / name / "state.safetensors"
    return hashlib.sha256(arrays.read_bytes()).hexdigest()


def give_run_id(path, run_id):
    """Makes a checkpoint one of another run."""
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "run_id": run_id}))
    names = ("state.safetensors", "meta.json")
    lines = [f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (path / "SHA256SUMS").write_text("".join(lines))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on s1 and s2 that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    code, output = train(folder, ["s1", "s2"])
    assert code == 0, output
    return folder


@pytest.fixture
def cut(whole, tmp_path):
    """The same as if it had been killed after step 32: its checkpoints are on s1, its note on s2."""
    shutil.copytree(whole / "disks", tmp_path / "disks")
    for path in (tmp_path / "disks" / "s1").iterdir():
        if path.name in ("result.json", "model.keras"):
            path.unlink()
    shutil.rmtree(tmp_path / "disks" / "s1" / "checkpoints" / "step-00000040")
    return tmp_path


def test_the_newest_checkpoint_is_on_the_host_that_was_first_before(cut, whole):
    """And a stale one of the same run on the host that is first now. It ends with the bits of the undisturbed run."""
    disks = cut / "disks"
    shutil.copytree(disks / "s1" / "checkpoints" / "step-00000008", disks / "s2" / "checkpoints" / "step-00000008")
    code, output = train(cut, ["s2", "s1"])
    assert code == 0, output
    assert "step-00000032 on s1: 32 of 40 steps were done" in output
    assert checkpoints(cut, "s2") == ["step-00000008", "step-00000040"]
    assert checksum(cut, "s2", "step-00000040") == checksum(whole, "s1", "step-00000040")
    rows = [(folder / "disks" / host / "history.csv").read_text().splitlines()
            for folder, host in ((cut, "s2"), (whole, "s1"))]  # fmt: skip
    assert [row.split(",")[:3] for row in rows[0]] == [row.split(",")[:3] for row in rows[1]]
    metas = [json.loads((disks / host / "checkpoints" / name / "meta.json").read_text())
             for host, name in (("s1", "step-00000032"), ("s2", "step-00000040"))]  # fmt: skip
    assert metas[0]["run_id"] == metas[1]["run_id"]


def test_the_host_with_the_checkpoints_is_not_there(cut):
    """The run would begin anew at step 0, or lose steps; it does on demand alone."""
    code, output = train(cut, ["s2"])
    assert code == 2, output
    assert "checkpoint step-00000040 of this run is on host s1, which has no rank now" in output
    assert not checkpoints(cut, "s2")
    code, output = train(cut, ["s2"], "resume=available", "train.steps=2")
    assert code == 0, output
    assert checkpoints(cut, "s2") == ["step-00000002"]


def test_another_run_has_left_a_checkpoint_on_the_first_host(cut):
    disks = cut / "disks"
    other = disks / "s2" / "checkpoints" / "step-00000008"
    shutil.copytree(disks / "s1" / "checkpoints" / "step-00000008", other)
    give_run_id(other, "0123456789ab")
    code, output = train(cut, ["s2", "s1"])
    assert code == 2, output
    lines = [line for line in output.splitlines() if "different runs" in line]
    assert len(lines) == 1 and "step-00000008 of run 0123456789ab on s2, step-00000032 of run " in lines[0], output
    assert checkpoints(cut, "s2") == ["step-00000008"]
