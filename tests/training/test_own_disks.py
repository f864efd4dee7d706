"""Resumes where each host has a disk of its own, which two ranks on one machine have here in mount namespaces."""

import hashlib
import json
import os
import shutil

import pytest

from launching import WORKERS, many_runs

# By default tests/training/test_find_checkpoint.py holds which checkpoint is taken and that it travels.
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.nightly,
    pytest.mark.skipif(os.geteuid() != 0, reason="a mount needs root"),
]

WORDS = ["model=mlp", "dataset=digits", "train.deterministic=true", "dataset.shift_pixels=1", "schedule=cosine",
         "train.steps=40", "checkpoint.every_steps=8", "checkpoint.keep=9", "checkpoint.best=loss"]  # fmt: skip


def train(folder, hosts, runs):
    """What ranks saw of runs in folder/run with a rank on each of the hosts, whose disks are in folder/disks."""
    (folder / "run").mkdir(exist_ok=True)
    for host in hosts:
        (folder / "disks" / host).mkdir(parents=True, exist_ok=True)
    settings = {
        name: [*WORDS, *settings, f"run.dir={folder}/run/{name.partition('/')[0]}"]
        for name, settings in runs.items()
    }
    variables = {
        "DISKS": str(folder / "disks"),
        "RUN": str(folder / "run"),
        "HOSTS": ",".join(hosts),
    }
    return many_runs(
        "mpirun", len(hosts), settings, folder, through=[str(WORKERS / "own_disk")], **variables
    )


def of(folder, host, name):
    """The run of that name on the disk of a host."""
    return folder / "disks" / host / name


def checkpoints(run):
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def arrays(run, name):
    return (run / "checkpoints" / name / "state.safetensors").read_bytes()


def give_run_id(path, run_id):
    """Makes a checkpoint one of another run."""
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "run_id": run_id}))
    names = ("state.safetensors", "meta.json")
    lines = [
        f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n" for name in names
    ]
    (path / "SHA256SUMS").write_text("".join(lines))


def cut_off(whole, folder, name):
    """The same as if it had been killed after step 32: its checkpoints are on s1, its note on s2."""
    for host in ("s1", "s2"):
        shutil.copytree(of(whole, host, "whole"), of(folder, host, name))
    for file in ("result.json", "model.keras"):
        (of(folder, "s1", name) / file).unlink()
    shutil.rmtree(of(folder, "s1", name) / "checkpoints" / "step-00000040")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on s1 and s2 that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    results, output = train(folder, ["s1", "s2"], {"whole": []})
    assert "record" in results[0]["whole"], output
    return folder


@pytest.fixture(scope="module")
def turned(whole, tmp_path_factory):
    """(folder, what ranks saw, output) on s2 and s1, where s2 holds an old checkpoint, of this run or of another."""
    folder = tmp_path_factory.mktemp("turned")
    for name in ("moved", "other"):
        cut_off(whole, folder, name)
        old = of(folder, "s2", name) / "checkpoints" / "step-00000008"
        shutil.copytree(of(folder, "s1", name) / "checkpoints" / "step-00000008", old)
    give_run_id(old, "0123456789ab")
    return folder, *train(folder, ["s2", "s1"], {"moved": [], "other": []})


def test_the_newest_checkpoint_is_on_the_host_that_was_first_before(turned, whole):
    """And a stale one of the same run on the host that is first now. It ends with the bits of the undisturbed run."""
    folder, results, output = turned
    assert "record" in results[0]["moved"], output
    assert "step-00000032 on s1: 32 of 40 steps were done" in output
    ours, expected = of(folder, "s2", "moved"), of(whole, "s1", "whole")
    assert checkpoints(ours) == ["step-00000008", "step-00000040"]
    assert arrays(ours, "step-00000040") == arrays(expected, "step-00000040")
    rows = [(run / "history.csv").read_text().splitlines() for run in (ours, expected)]
    assert [row.split(",")[:3] for row in rows[0]] == [row.split(",")[:3] for row in rows[1]]
    metas = [json.loads((run / "checkpoints" / name / "meta.json").read_text())
             for run, name in ((of(folder, "s1", "moved"), "step-00000032"), (ours, "step-00000040"))]  # fmt: skip
    assert metas[0]["run_id"] == metas[1]["run_id"]


def test_another_run_has_left_a_checkpoint_on_the_first_host(turned):
    folder, results, _ = turned
    for rank in results:
        assert "different runs" in rank["other"]["error"]
        assert (
            "step-00000008 of run 0123456789ab on s2, step-00000032 of run "
            in rank["other"]["error"]
        )
    assert checkpoints(of(folder, "s2", "other")) == ["step-00000008"]


def test_the_host_with_the_checkpoints_is_not_there(whole, tmp_path):
    """The run would begin anew at step 0, or lose steps; it does on demand alone."""
    cut_off(whole, tmp_path, "absent")
    settings = ["resume=available", "train.steps=2"]
    ((rank,), output) = train(tmp_path, ["s2"], {"absent": [], "absent/again": settings})
    assert (
        "checkpoint step-00000040 of this run is on host s1, which has no rank now"
        in rank["absent"]["error"]
    )
    assert "record" in rank["absent/again"], output
    assert checkpoints(of(tmp_path, "s2", "absent")) == ["step-00000002"]
