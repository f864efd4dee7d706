"""Training that goes on when ranks are killed or join: what it ends with, seen in the weights."""

import json
import os
import signal
import subprocess
import time

import pytest

from launching import WORKERS, finish, kill, start

pytestmark = pytest.mark.distributed


def left(folder):
    """Processes that were started for this folder and still run."""
    listed = subprocess.run(
        ["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(maxsplit=1) for line in listed.splitlines()]
    return [int(pid) for pid, args in rows if str(folder) in args and "elastic.py" in args]


def ended(folder, scenario, launcher, num_ranks, *options):
    """What each rank that reached the end wrote, by its last rank number."""
    command = [*options, "python", str(WORKERS / "elastic.py"), str(folder), scenario]
    process = start(launcher, num_ranks, *command, cwd=folder)
    try:
        output = finish(process)
        assert process.returncode == 0, output
        return [json.loads(path.read_text()) for path in sorted(folder.glob("end-*.json"))]
    finally:
        if process.poll() is None:
            kill(process)
        # The launcher ends its ranks itself; what it forgot must not go on into the next tests.
        deadline = time.monotonic() + 5
        while left(folder) and time.monotonic() < deadline:
            time.sleep(0.1)
        forgotten = left(folder)
        for pid in forgotten:
            os.kill(pid, signal.SIGKILL)
        assert not forgotten


def elastic(folder, scenario):
    """From 2 ranks on; other names of this machine are other hosts to Horovod, which leaves one that lost a rank."""
    (folder / "hosts").write_text("localhost:1\n127.0.0.1:1\n")
    script = folder / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    script.chmod(0o755)
    options = ["--min-np", "1", "--max-np", "2", "--host-discovery-script", str(script)]
    return ended(folder, scenario, "gloo", 2, *options)


def test_rank_0_is_killed(tmp_path):
    """In the middle of an epoch; the other becomes rank 0 and goes on from the commit, alone, to the end."""
    (heir,) = elastic(tmp_path, "heir")
    assert heir["size"] == 1
    assert heir["begun"] == [[0, 2], [14, 1]]
    assert heir["sizes"] == [2] * 14 + [1] * 16
    assert heir["done"] == [3, 0]
    assert heir["error"] < 1e-5, "against one process that saw the same joint batches"
    assert heir["error_otherwise"] > 1e-3


@pytest.mark.nightly
def test_rank_1_is_killed_and_another_joins(tmp_path):
    old, new = elastic(tmp_path, "exchange")
    assert (old["size"], new["size"]) == (2, 2)
    joined = new["begun"][0][0]
    assert joined > 7
    assert old["begun"] == [[0, 2], [4, 1], [joined, 2]]
    assert new["begun"] == [[joined, 2]]
    assert old["sizes"] == new["sizes"] == [2] * 4 + [1] * (joined - 4) + [2] * 9
    assert old["weights"] == new["weights"]
    assert old["error"] < 1e-5
    assert old["error_otherwise"] > 1e-3


@pytest.mark.nightly
def test_the_state_on_two_ranks(tmp_path):
    result = ended(tmp_path, "static", "gloo", 2)
    assert [rank["size"] for rank in result] == [2, 2]
    assert max(rank["start_differs"] for rank in result) > 0.1
    for rank in result:
        assert rank["synced_to_root"] and rank["equal_on_all"]
        assert rank["attributes"] == [[0, 3, [0]]] * 2
        assert rank["rate"] == pytest.approx(0.02)
        assert rank["moved"] > 0.01
        assert rank["restored"], "to the bit"
        assert rank["restored_attributes"] == [0, 3, [0]], "a list that grew since is cut back"
        assert rank["kept"]
        assert rank["kept_attributes"] == [1, ["kept"]]
        assert rank["raised"] == [[True, 1]] * 4


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    (result,) = ended(tmp_path_factory.mktemp("alone"), "alone", None, 1)
    return result


def test_resets_of_a_rank_alone(alone):
    """Two in one epoch, one back to a commit in the middle, one in the last epoch: no batch twice, none left out."""
    assert alone["size"] == 1
    assert alone["begun"] == [[0, 1], [3, 1], [7, 1], [14, 1], [28, 1]]
    assert alone["sizes"] == [1] * 30
    assert alone["done"] == [3, 0]
    assert alone["error"] < 1e-5


def test_errors_of_others_are_raised_as_they_are(alone):
    assert alone["raised"] == [[True, 1]] * 4, "and the function was called once"


def test_errors_of_lost_ranks_lead_back_to_the_commit(alone):
    assert alone["broken"] == ["done", [0, 0, 0, 0]]


def test_a_stop_in_the_shortened_epoch_ends_the_training(alone):
    assert alone["early_stop"] == [[1, 6], [1, 6]]


def test_epochs_are_counted_without_initial_epoch_too(alone):
    assert alone["all_but_initial_epoch"] == 5


def test_what_cannot_be_kept_is_told(alone):
    assert alone["messages"] == [
        "unbuilt is not built and has no weights to keep; call model.build(input_shape)",
        "Keras does not know the number of steps in an epoch, so an epoch could not resume after a reset; "
        "pass steps_per_epoch to fit",
    ]
