"""python -m hvtrain verify: what it says where ranks train together, and where they do not."""

import re

import pytest

from launching import ROOT, WORKERS, run

pytestmark = pytest.mark.distributed

OWN = ["--config-dir", str(ROOT / "tests/support/own/conf"), "model=tiny", "dataset=leaves"]
OWN_PATH = str(ROOT / "tests/support/own")
LIBRARY = [
    "versions", "controller", "devices", "broadcast", "sgd", "momentum", "rmsprop", "adam", "adamw", "lamb", "lion",
    "a step of its own", "sparse gradients", "accumulation", "mixed_bfloat16", "mixed_float16", "overflow",
    "different models", "shards", "metrics", "checkpoint",
    "ignored labels", "masked tokens", "weighted mean", "two losses",
]  # fmt: skip


def outcomes(output):
    """{name of the check: PASS or FAIL}, and the text after it."""
    lines = re.findall(r"(PASS|FAIL)  (.{22}) (.*)", output)
    return {name.strip(): outcome for outcome, name, _ in lines}, {
        name.strip(): text for _, name, text in lines
    }


@pytest.mark.nightly
def test_three_ranks_and_a_run_of_ones_own(tmp_path):
    overrides = [*OWN, "model.norm=true", "train.batch_size=[32,16,16]", "data.uneven=pad"]
    code, output = run(
        "gloo",
        3,
        "python",
        "-m",
        "hvtrain",
        "verify",
        *overrides,
        cwd=tmp_path,
        PYTHONPATH=OWN_PATH,
    )
    assert code == 0, output
    results, texts = outcomes(output)
    assert results == dict.fromkeys(
        [*LIBRARY, "data: leaves", "step of your model", "weights", "your checkpoint"], "PASS"
    )
    assert re.search(r"3 x 16 equal 1 x 48 to \de-07; without reduction \d", texts["sgd"])
    assert "; TF32 off" in texts["devices"], "or GPUs from Ampere on would fail"
    assert "8 reductions" in texts["adam"] and "2 reductions" in texts["accumulation"]
    assert "all 29 checks passed on 3 rank(s)" in output


@pytest.mark.nightly
def test_each_check_can_fail(tmp_path):
    """A worker breaks what each check is about, one after the other, on real ranks; the user's own run too."""
    code, output = run(
        "mpirun", 2, "python", str(WORKERS / "broken.py"), *OWN, cwd=tmp_path, PYTHONPATH=OWN_PATH
    )
    assert code == 1, output
    results, texts = outcomes(output)
    assert results == dict.fromkeys(
        [
            "versions", "devices", "broadcast", "not reduced", "own step", "not shared", "summed", "ignored labels",
            "different models", "shards", "metrics", "checkpoint", "data: leaves", "step of your model", "weights",
        ],
        "FAIL",
    ), output  # fmt: skip
    assert "0 checks passed, 15 failed on 2 rank(s)" in output
    assert (
        "samples looked at are read by more than one rank; give each rank its own part"
        in texts["data: leaves"]
    )
    assert "the step reduced no gradient" in texts["step of your model"]
    assert "weights differ after one step of your model: rank 1 on " in texts["weights"]
    assert "have different programs: version of keras is 3.0 and 3.1" in texts["versions"]
    assert "ranks share a GPU: 0-1 s1 GPU 0" in texts["devices"]
    assert "variables differ between ranks after a broadcast" in texts["broadcast"]
    assert "0 reductions in the graph for 8 steps" in texts["not reduced"]
    assert "0 reductions in the graph for 8 steps" in texts["own step"]
    assert "gradients of different shapes were summed" in texts["different models"]
    assert "2 ranks differ from one process on the joint batch by" in texts["not shared"]
    assert "2 ranks differ from one process on the joint batch by" in texts["summed"]
    assert re.search(r"the ranks read \d+ samples, .* each of the 81 once", texts["shards"])
    assert "they are not weighted by examples" in texts["metrics"]
    assert "variables differ after a checkpoint was written and restored" in texts["checkpoint"]


def test_wrong_words_get_one_line(tmp_path):
    code, output = run(None, 1, "python", "-m", "hvtrain", "verify", "nodel=3", cwd=tmp_path)
    assert code == 2
    assert "hvtrain: unknown setting 'nodel'; did you mean 'model'?" in output
    assert "Traceback" not in output


def test_help(tmp_path):
    code, output = run(None, 1, "python", "-m", "hvtrain", "verify", "--help", cwd=tmp_path)
    assert code == 0
    assert "horovodrun -np 2 python -m hvtrain verify" in output
