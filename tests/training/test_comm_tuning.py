"""comm.tune=true tries settings before a run, keeps what it found, and changes no result."""

import json

import pytest

from hvtrain.config.compose import compose
from hvtrain.config.schema import from_dict
from hvtrain.errors import ConfigError
from hvtrain.strategies.elastic import ElasticStrategy
from hvtrain.training import comm_tuning
from launching import train

WORDS = ["model=mlp", "train.epochs=2", "train.deterministic=true"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "launcher", [pytest.param("mpi", marks=pytest.mark.nightly), pytest.param("gloo", marks=pytest.mark.release)]
)
def test_settings_are_tried_kept_and_used_again(launcher, tmp_path):
    plain, tuned = tmp_path / "plain", tmp_path / "tuned"
    assert train(launcher, 2, *WORDS, f"run.dir={plain}", cwd=tmp_path)[0] == 0
    code, output = train(launcher, 2, *WORDS, f"run.dir={tuned}", "comm.tune=true", cwd=tmp_path)
    assert code == 0 and "comm.tune: cycle " in output, output
    kept = json.loads((tuned / "comm.json").read_text())
    cycles = {found["cycle_ms"] for found in kept["tried"]}
    assert {1.0, 0.1} <= cycles and kept["comm"]["cycle_ms"] in cycles
    losses = [json.loads((run / "result.json").read_text())["test_loss"] for run in (plain, tuned)]
    assert losses[0] == losses[1], "the same bits, with seeds and weights as if nothing had been tried"
    words = [*WORDS, "train.epochs=3", f"run.dir={tuned}", "comm.tune=true"]
    code, output = train(launcher, 2, *words, cwd=tmp_path)
    assert code == 0 and f"from {tuned}/comm.json" in output, output


def test_what_it_does_not_go_with(monkeypatch):
    with pytest.raises(ConfigError, match=r"comm\.tune=true and strategy=elastic exclude each other"):
        ElasticStrategy().expect_restart()
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "4194304")
    with pytest.raises(ConfigError, match=r"comm\.tune=true and HOROVOD_FUSION_THRESHOLD exclude each other"):
        comm_tuning.default_settings(from_dict(compose(["comm.tune=true"])[0]))
