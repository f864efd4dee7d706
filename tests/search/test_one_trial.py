"""A trial as a small process in place of a run: when it is pruned, and how it fails."""

import json
import sys

import pytest

from hvtrain.errors import LostRankError
from hvtrain.search.search_space import Goal
from hvtrain.search.sweep import train_trial

RUN = """
import json, sys, time
from pathlib import Path
from hvtrain.system.run_files import EpochRecord, history_table
folder, num_steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
folder.mkdir()
(folder / "starts.json").write_text(json.dumps([{"best": "val_accuracy", "sign": 1, "num_steps": num_steps}]))
history_table(folder).save([EpochRecord(at, at, 0.1, 1.0, 1.0, {"val_accuracy": at / 10}) for at in (1, 2)])
time.sleep(seconds)
(folder / "result.json").write_text("{}")
sys.exit("hvtrain: no memory" if num_steps == 1 else 0)
"""


def trained(folder, num_steps, seconds, answer, metric="val_accuracy"):
    reported = []

    def should_prune(epoch, value):
        reported.append((epoch, value))
        return answer

    command = [sys.executable, "-c", RUN, str(folder / "run"), str(num_steps), str(seconds)]
    return train_trial(command, folder / "run", Goal(metric, "max"), should_prune), reported


def test_the_value_is_the_best_of_all_epochs(tmp_path):
    assert trained(tmp_path, 9, 0, False) == (0.2, [(1, 0.1), (2, 0.2)])


def test_a_hopeless_run_is_ended(tmp_path):
    assert trained(tmp_path, 9, 100, True) == (None, [(1, 0.1), (2, 0.2)])
    assert not (tmp_path / "run/result.json").exists()


def test_a_run_that_has_trained_to_its_end_is_not_pruned(tmp_path):
    assert trained(tmp_path, 2, 2, True)[0] == 0.2
    assert json.loads((tmp_path / "run/result.json").read_text()) == {}


def test_a_run_that_fails_says_why(tmp_path):
    with pytest.raises(LostRankError, match=r"^no memory \(exit code 1\)$"):
        trained(tmp_path, 1, 0, False)
