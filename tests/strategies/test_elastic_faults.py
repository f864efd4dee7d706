"""A run whose ranks are lost and join while it goes on ends with the weights of one that had two all along."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from launching import WORKERS, finish, kill, start, train

pytestmark = pytest.mark.distributed

OWN = Path(__file__).parents[1] / "support" / "own_faults"
# 22 steps an epoch on two ranks.
WORDS = [
    "model=mlp",
    "dataset.shift_pixels=1",
    "train.epochs=3",
    "schedule=cosine",
    "data.uneven=trim",
    "run.report=false",
]
# Other names of this machine are other hosts to Horovod, which leaves a host that lost a rank.
NAMES = ["localhost", "127.0.0.1", "Localhost"]


def path_with_own():
    return os.pathsep.join([str(OWN), *filter(None, [os.environ.get("PYTHONPATH")])])


def elastic(folder, num_ranks, fates, *settings, gloo_seconds=None, disks=None, options=()):
    """Exit code and output of an elastic run, with what `fates.Fates` does to its ranks.

    Ranks wait gloo_seconds (None: the default) for one that joins, and of three or more one may wait so long for one
    that was killed.
    disks: where each host has a disk of its own, by its name; None: they share one.
    """
    (folder / "hosts").write_text("".join(f"{name}:1\n" for name in NAMES[:num_ranks]))
    script = folder / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    script.chmod(0o755)
    fate_options = ", ".join(
        f"{name}: {value}" for name, value in {"folder": folder, **fates}.items()
    )
    command = [*options, "--min-np", "1", "--max-np", "3", "--host-discovery-script", str(script)]
    command += ["--gloo-timeout-seconds", str(gloo_seconds)] if gloo_seconds else []
    command += [*([str(WORKERS / "own_disk")] if disks else [])]
    command += ["python", "-m", "hvtrain", "strategy=elastic"]
    command += [*WORDS, *settings]
    command += [
        f"+callbacks.fates={{_target_: fates.Fates, {fate_options}}}",
        f"run.dir={folder / 'run'}",
    ]
    own = (
        {"DISKS": str(disks), "RUN": str(folder / "run"), "HVTRAIN_ENV": "DISKS,RUN"}
        if disks
        else {}
    )
    # Horovod takes new hosts in the order of a set: with one seed rank 0's is the same in each job.
    own |= {"PYTHONHASHSEED": "0"} if disks else {}
    process = start("gloo", num_ranks, *command, cwd=folder, PYTHONPATH=path_with_own(), **own)
    try:
        output = finish(process)
        return process.returncode, output
    finally:
        if process.poll() is None:
            kill(process)


def steps(folder):
    """Of each process the steps that it took, and among how many ranks, in the order of their first and last ones."""
    files = [path.read_text().splitlines() for path in folder.glob("steps-*")]
    taken_steps = [[tuple(map(int, line.split())) for line in lines] for lines in files]
    return sorted(taken_steps, key=lambda taken: (taken[0], taken[-1]))


def arrays(run):
    path = max((run / "checkpoints").glob("step-*"), key=lambda path: path.name)
    return load_file(path / "state.safetensors")


def distance(ours, expected):
    names = [name for name in expected if name.startswith(("model/", "optimizer/"))]
    return max(
        np.max(np.abs(ours[n] - expected[n].astype("float64"))) / (np.max(np.abs(expected[n])) or 1)
        for n in names
    )


SPEEDS = ("seconds", "examples_per_second", "flops_per_second")


def history(run):
    lines = (run / "history.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), map(float, line.split(",")))) for line in lines[1:]]
    return [{name: row[name] for name in row if name not in SPEEDS} for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    code, output = train("mpirun", 2, *WORDS, f"run.dir={folder / 'run'}", cwd=folder)
    assert code == 0, output
    return folder / "run"


def assert_same_end(folder, uninterrupted, num_left):
    """The run's end: one model on all ranks that are left, that of the uninterrupted run; the epochs' metrics too."""
    left = [np.load(path) for path in folder.glob("weights-66-*.npz")]
    assert len(left) == num_left
    assert all(np.array_equal(rank[name], left[0][name]) for rank in left for name in rank.files)
    assert distance(arrays(folder / "run"), arrays(uninterrupted)) < 1e-5
    for ours, expected in zip(history(folder / "run"), history(uninterrupted), strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)
    record = json.loads((folder / "run" / "result.json").read_text())
    assert (record["num_ranks"], record["num_steps"], record["global_batch"]) == (num_left, 66, 64)


@pytest.mark.nightly
def test_rank_0_is_killed_and_another_joins(uninterrupted, tmp_path):
    """Two ranks; one, from the last commit; two again, with one that holds nothing.

    The new rank 0 knows the best value of a callback that only the old one had.
    """
    fates = {"kill_rank": 0, "kill_step": 28, "host": NAMES[2]}
    # Keeps the epoch with the highest loss, which is the first: no later one is better.
    keep = {
        "_target_": "keras.callbacks.ModelCheckpoint",
        "filepath": f"'{tmp_path}/{{epoch:d}}.weights.h5'",
        "save_weights_only": "true",
        "save_best_only": "true",
        "monitor": "loss",
        "mode": "max",
    }
    settings = [f"+callbacks.keep.{name}={value}" for name, value in keep.items()]
    code, output = elastic(tmp_path, 2, fates, "strategy.commit_steps=5", *settings)
    assert code == 0, output
    assert [path.name for path in tmp_path.glob("*.weights.h5")] == ["1.weights.h5"]
    dead, survivor, joined = steps(tmp_path)
    assert dead == [(step, 2) for step in range(1, 29)]
    at = joined[0][0]
    assert survivor == dead + [(step, 1) for step in range(26, at)] + [
        (step, 2) for step in range(at, 67)
    ]
    assert joined == survivor[-len(joined) :]
    before = (
        "step-00000025 in memory: 25 of 66 steps were done, on 2 ranks; "
        "on 1 now: global batch 64 and learning rate"
    )
    assert before in output
    assert (
        f"in memory: {at - 1} of 66 steps were done, on 1 rank; on 2 now: global batch 64 and"
        in output
    )
    assert_same_end(tmp_path, uninterrupted, 2)


@pytest.mark.release
def test_a_third_rank_joins_and_the_first_of_three_is_killed(uninterrupted, tmp_path):
    fates = {"kill_rank": 0, "kill_step": 58, "host": NAMES[2], "alone": 2}
    code, output = elastic(tmp_path, 2, fates, "strategy.commit_steps=4", gloo_seconds=45)
    assert code == 0, output
    assert (
        "on 2 ranks; on 3 now: global batch 64 and learning rate as before (22 + 21 + 21)" in output
    )
    assert (
        "step-00000056 in memory: 56 of 66 steps were done, on 3 ranks; on 2 now: global batch 64"
        in output
    )
    assert_same_end(tmp_path, uninterrupted, 2)


@pytest.mark.nightly
def test_a_host_that_was_left_out_comes_back(tmp_path):
    """Three hosts; one loses its rank, is left out for some seconds, and then has a rank again.

    Of three ranks a survivor waits for Gloo's whole limit, here half a minute.
    """
    options = ["--blacklist-cooldown-range", "2", "3"]
    fates = {"kill_rank": 2, "kill_step": 20, "host": NAMES[2], "alone": 2, "enough": 3}
    settings = ["strategy.commit_steps=5", "train.epochs=150"]
    code, output = elastic(tmp_path, 3, fates, *settings, options=options, gloo_seconds=30)
    assert code == 0, output
    dead, *others = steps(tmp_path)
    assert dead[-1] == (20, 3)
    assert len(others) == 3 and {ranks[-1][1] for ranks in others} == {3}
    assert len({ranks[-1] for ranks in others}) == 1, "all stop after the same step"
    assert any(size == 2 for _, size in others[0]), "they went on without it"


@pytest.mark.nightly
def test_scaled_to_the_ranks_that_are_left_from_the_next_epoch_on(uninterrupted, tmp_path):
    fates = {"kill_rank": 1, "kill_step": 28}
    code, output = elastic(tmp_path, 2, fates, "strategy.commit_steps=5", "train.resize=scale")
    assert code == 0, output
    assert (
        "global batch 64 and learning rate as before up to step 44, then train.resize=scale"
        in output
    )
    assert (
        "on 1 now: global batch 32 and learning rate 0.001 from epoch 3 on (train.resize=scale)"
        in output
    )
    ours, expected = history(tmp_path / "run"), history(uninterrupted)
    assert ours[1] == pytest.approx(expected[1], rel=1e-5), "the epoch begun goes on as it was"
    assert (ours[2]["epoch"], ours[2]["step"], ours[2]["learning_rate"]) == (3, 44 + 44, 0)
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (record["num_ranks"], record["global_batch"], record["num_steps"]) == (1, 32, 88)


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="a mount needs root")
def test_another_rank_0_on_a_disk_of_its_own(tmp_path):
    """It goes on from what all ranks hold; a later job from the newest checkpoint, not from the first host's. And
    where the rank that had it is killed before the first commit: from what all ranks were given at the start."""
    for name in ("run", *(f"disks/{name}" for name in NAMES)):
        (tmp_path / name).mkdir(parents=True)
    disks = tmp_path / "disks"

    def newest():
        return {path.name: max(step.name for step in path.glob("checkpoints/step-*"))
                for path in disks.iterdir() if list(path.glob("checkpoints/step-*"))}  # fmt: skip

    fates = {"kill_rank": 0, "kill_step": 28}
    code, output = elastic(tmp_path, 2, fates, "strategy.commit_steps=5", disks=disks)
    assert code == 0, output
    assert "step-00000025 in memory: 25 of 66 steps were done, on 2 ranks; on 1 now" in output
    stale, second = sorted(newest(), key=newest().get)
    assert newest() == {stale: "step-00000022", second: "step-00000066"}
    (tmp_path / "killed").unlink()
    settings = ["strategy.commit_steps=1000", "train.epochs=4"]
    code, output = elastic(tmp_path, 2, {"kill_rank": 1, "kill_step": 70}, *settings, disks=disks)
    assert code == 0, output
    assert re.search(
        r"step-00000066 on \S+: 66 of 88 steps were done, on 1 rank; on 2 now", output
    ), output
    assert "step-00000066 in memory: 66 of 88 steps were done\n" in output
    assert newest() == {stale: "step-00000088", second: "step-00000066"}


@pytest.mark.release
def test_the_last_rank_goes_on_alone(tmp_path):
    """The watch of two ranks knows that rank 0 is gone, and must not end rank 1, which trains on, some time later."""
    settings = ["strategy.commit_steps=5", "train.epochs=300", "watchdog.abort_seconds=4"]
    code, output = elastic(tmp_path, 2, {"kill_rank": 0, "kill_step": 28}, *settings)
    assert code == 0, output
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (record["num_ranks"], record["num_steps"]) == (1, 6600)
    assert record["step_seconds"] * 6570 > 5, "long enough for that watch to act"
